"""The first program in a sandbox: read the job's environment from a pipe, run its command, and report the outcome.

    python -I -S first.py MODE GRACE ENVIRONMENT_FD REPORT_FD COMMAND...

Standard library only. This file is in the job's run folder, but the job can't write to it. The program that creates the
sandbox never gets the job's environment, because a library in a job's `LD_PRELOAD` would then run outside the sandbox.
The environment is not passed in an argument list either.

| MODE | meaning |
|---|---|
| `init` | run as process 1 of a PID namespace: reap orphans, and report how the command ended |
| `plain` | the process is already in the sandbox: replace it with the command |
| a JSON object | apply these Landlock rules (see `restrict`), then replace this process with the command |
"""

from __future__ import annotations

import errno
import os
import signal
import struct
import sys
import time
from typing import NoReturn

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
READ, WRITE = 0b1101, 0xFFFF  # execute, read files, read folders; all rights up to device ioctls
ON_FILES = 0xC007  # the rights that apply to a file: execute, write, read, truncate, ioctl
TCP = 0b11  # bind, connect
SCOPED = 0b11  # abstract Unix sockets, signals

PR_SET_SECCOMP, FILTER_MODE = 22, 2
SYSTEM_CALLS = {"x86_64": (0xC000003E, 41, 248, 249, 250), "aarch64": (0xC00000B7, 198, 217, 218, 219)}
"""For each machine type, the numbers of the ABI and of the calls `socket`, `add_key`, `request_key` and `keyctl`."""
IO_URING_SETUP, OTHER_ABI, AF_VSOCK = 425, 0x40000000, 40
LOAD, IF_EQUAL, IF_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06  # the opcodes of filter instructions
AT_CALL, AT_ABI, AT_FIRST_ARGUMENT = 0, 4, 16  # offsets in `struct seccomp_data`
ALLOW, REFUSE = 0x7FFF0000, 0x00050000


def main(argv: list[str]) -> NoReturn:
    """Set up the sandbox, start the command, and exit with its exit code."""
    mode, grace, env_fd, report_fd, *command = argv
    report = int(report_fd)
    os.set_inheritable(report, False)
    env = environment(int(env_fd))
    try:
        if mode == "init":
            sys.exit(serve(command, env, report, float(grace)))
        if mode != "plain":
            import json  # importing it takes as long as all other imports together

            restrict(json.loads(mode))
        become(command, env)
    except (OSError, ValueError) as error:
        report_line(report, f"error {error}")
        sys.exit(127)


def environment(fd: int) -> dict[str, str]:
    """Read the job's environment from the pipe: NUL-terminated `NAME=VALUE` entries."""
    with os.fdopen(fd, "rb") as pipe:
        rows = pipe.read().split(b"\0")[:-1]
    return dict(os.fsdecode(row).split("=", 1) for row in rows)


def become(command: list[str], env: dict[str, str]) -> NoReturn:
    """Block the system calls in `forbid`, reset the signal handlers, and replace this process with the command."""
    if sys.platform == "linux":
        forbid(os.uname().machine)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.execvpe(command[0], command, env)


def serve(command: list[str], env: dict[str, str], report: int, grace: float) -> int:
    """Run as process 1: start the command, wait for it and for orphans, and then stop the remaining processes."""
    libc_call("prctl", PR_SET_DUMPABLE, 0)  # the job must not attach to this process
    libc_call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)  # end the namespace when the process that created it exits
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = os.fork()
    if not child:
        try:
            become(command, env)
        except BaseException as error:  # after any error, the child must exit
            report_line(report, f"error {error}")
        os._exit(127)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            report_line(report, f"status {status}")
            sweep(grace)
            return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def sweep(grace: float) -> None:
    """Send SIGTERM to all other processes and wait up to `grace` seconds.

    The kernel kills the remaining processes when process 1 exits.
    """
    end = time.monotonic() + grace
    for number in (signal.SIGTERM, signal.SIGCONT):
        try:
            os.kill(-1, number)
        except OSError:
            return
    while time.monotonic() < end:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.01)
        except ChildProcessError:
            return


def report_line(report: int, line: str) -> None:
    """Report to the supervisor, which may have exited. The supervisor uses only the first line."""
    try:
        os.write(report, line.encode("utf-8", "replace").replace(b"\n", b" ") + b"\n")
    except OSError:
        pass


# ------------------------------------------------------------------------------------------------------------ seccomp


def forbid(machine: str) -> None:
    """Block system calls that bypass the namespaces: those for the kernel's key rings, which may contain login tickets;
    for sockets to the hypervisor or another virtual machine; and for io_uring, which can also open sockets.

    Nothing is blocked if the kernel does not support seccomp filters or the machine type is unknown.
    """
    import ctypes

    if machine not in SYSTEM_CALLS:
        return
    abi, open_socket, *refused = SYSTEM_CALLS[machine]
    refused.append(IO_URING_SETUP)
    away = len(refused) + 8  # index of the refusal; jumps are relative to the next instruction
    rows = [(LOAD, 0, 0, AT_ABI), (IF_EQUAL, 0, away - 2, abi), (LOAD, 0, 0, AT_CALL)]
    rows.append((IF_AT_LEAST, away - 4, 0, OTHER_ABI))
    rows += [(IF_EQUAL, away - 5 - i, 0, number) for i, number in enumerate(refused)]
    rows += [(IF_EQUAL, 0, 2, open_socket), (LOAD, 0, 0, AT_FIRST_ARGUMENT), (IF_EQUAL, 1, 0, AF_VSOCK)]
    rows += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE | errno.ENOSYS)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *row) for row in rows))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(rows), ctypes.addressof(code)))
    try:
        libc_call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        libc_call("prctl", PR_SET_SECCOMP, FILTER_MODE, ctypes.byref(program), 0, 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


# ----------------------------------------------------------------------------------------------------------- Landlock


def restrict(rules: dict[str, list[str]]) -> None:
    """Restrict this process to files under `read` and `write`.

    TCP is blocked unless `network` is set. Signals to processes outside the sandbox are always blocked.

    Raises OSError if the kernel's Landlock is older than ABI 6, the first that covers signals and abstract sockets.
    """
    import ctypes

    abi = libc_call("syscall", CREATE_RULESET, None, 0, 1)
    if abi < 6:
        raise OSError("this kernel's Landlock is older than ABI 6")
    tcp = 0 if rules.get("network") else TCP
    asked = (ctypes.c_uint64 * 3)(WRITE, tcp, SCOPED)
    ruleset = libc_call("syscall", CREATE_RULESET, ctypes.byref(asked), ctypes.sizeof(asked), 0)
    for rights, paths in ((READ, rules["read"]), (WRITE, rules["write"])):
        for path in paths:
            allow(ruleset, path, rights)
    libc_call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc_call("syscall", RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def allow(ruleset: int, path: str, rights: int) -> None:
    """Add a rule for one path. A missing path is skipped."""
    import ctypes

    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    if not os.path.isdir(path):
        rights &= ON_FILES
    # `struct landlock_path_beneath_attr` is packed: 8 bytes for the rights, 4 for the descriptor.
    rule = rights.to_bytes(8, sys.byteorder) + fd.to_bytes(4, sys.byteorder)
    try:
        libc_call("syscall", ADD_RULE, ruleset, 1, ctypes.create_string_buffer(rule, 12), 0)
    finally:
        os.close(fd)


def libc_call(name: str, *args: object) -> int:
    """Call a C library function. Raises OSError if it returns -1."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    found: int = getattr(libc, name)(*words)
    if found < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
