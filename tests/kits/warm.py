"""Run Python programs as forks of processes that have imported their libraries.

Starting the command line takes half a second of CPU time, or two seconds if it loads torch. The fork receives the
arguments, variables, folder, umask and standard streams of the process that `warm` starts. That process passes signals
on and ends like the fork. If it dies, the fork is killed. The fork has its own process id and no terminal.
"""

from __future__ import annotations

import marshal
import os
import sys

# The modules behind `signal` and `socket`, whose own imports would double the time of each start.
from _signal import SIG_BLOCK, SIG_DFL, SIG_UNBLOCK, SIGHUP, SIGINT, SIGKILL, SIGTERM, pthread_sigmask, signal
from _socket import AF_UNIX, SCM_RIGHTS, SOCK_SEQPACKET, SOL_SOCKET, socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

PACKAGE, TORCH = "package", "torch"
"""The kinds of forking processes: with all gpuwarden modules that are not programs, or with torch."""
IMPORTED = ("torch", "safetensors.torch", "safetensors.numpy")
"""Modules of the second kind. Not transformers: it reads variables that the loading processes set first."""
FORKED = {
    "gpuwarden.rehearsal.supervisor": PACKAGE,
    "gpuwarden.checkpoints.load_child": TORCH,
    "gpuwarden.checkpoints.build_child": TORCH,
    "gpuwarden.static_analysis.estimate.trace_child": TORCH,
}
OTHERS = ("._data", ".runner", "_child", ".supervisor", ".trace_", "__main__")
"""Name parts of modules that are programs, run on a machine, or import torch."""
EARLY = ("PYTHON", "LC_", "LANG", "TZ")
"""Prefixes of the environment variables that Python reads at startup."""
PASSED_ON = (SIGTERM, SIGINT, SIGHUP)
_ENV = dict(os.environ)  # without the variables that single tests set
_folders: list[str] = []


def warm(kind: str = PACKAGE) -> list[str]:
    """Return the start of a command line, to use instead of `sys.executable`.

    The command's arguments and variables must take less than 200 kB. If the started process is killed, the fork
    outlives it by milliseconds.
    """
    place = sockets_folder()
    return [sys.executable, "-I", "-S", __file__, "run", f"{place}/{kind}"] if place else [sys.executable]


def sockets_folder() -> str:
    """Start the forking processes once, and return the folder of their sockets; "" if the system is not Linux."""
    if not _folders:
        _folders.append(_start() if sys.platform.startswith("linux") else "")
    return _folders[0]


def start_forks(folder: str = "") -> None:
    """Start the programs in FORKED as forks from now on. `folder` has the sockets of running servers, if any."""
    import subprocess
    from types import SimpleNamespace

    from gpuwarden.checkpoints import load
    from gpuwarden.rehearsal import processes

    def popen(command: list[str], **options: Any) -> subprocess.Popen[Any]:
        own = command[:3] == [sys.executable, "-P", "-m"] and command[3] in FORKED
        return subprocess.Popen([*warm(FORKED[command[3]]), *command[1:]] if own else command, **options)

    _folders.extend([folder] if folder else [])
    load.subprocess = processes.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": popen})  # type: ignore[assignment]


def _start() -> str:
    import atexit
    import shutil
    import subprocess
    import tempfile

    folder = tempfile.mkdtemp(prefix="warm")
    servers = []
    for kind in (PACKAGE, TORCH):
        argv = [sys.executable, "-P", __file__, "serve", f"{folder}/{kind}"]
        server = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder, env=_ENV, start_new_session=True
        )
        assert server.stdin and server.stdout and server.stdout.readline() == b"ready\n"
        servers.append(server)

    def close() -> None:
        for server in servers:
            assert server.stdin
            server.stdin.close()
            server.wait()
        shutil.rmtree(folder)

    atexit.register(close)
    return folder


def run(path: str, *argv: str) -> NoReturn:
    """Have the server fork a child, pass signals on to it, and exit with its code."""
    server = socket(AF_UNIX, SOCK_SEQPACKET)

    def pass_on(number: int, _: object) -> None:
        try:
            server.send(b"%d" % number)
        except OSError:
            pass  # the child has ended

    pthread_sigmask(SIG_BLOCK, PASSED_ON)
    server.connect(path)
    order = marshal.dumps((argv, dict(os.environ), os.getcwd(), os.umask(0)))
    streams = b"".join(fd.to_bytes(4, sys.byteorder) for fd in (0, 1, 2))
    server.sendmsg([order], [(SOL_SOCKET, SCM_RIGHTS, streams)])
    for number in PASSED_ON:
        signal(number, pass_on)
    pthread_sigmask(SIG_UNBLOCK, PASSED_ON)
    code = int(server.recv(64) or b"1")
    if code < 0:
        if -code != SIGKILL:
            signal(-code, SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def serve(path: str) -> None:
    """Import one kind's modules at the first command, and fork a child for every command until the tests are over."""
    import contextlib
    import gc
    import importlib
    import select
    import socket as sockets

    listener = sockets.socket(AF_UNIX, SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(64)
    print("ready", flush=True)
    if 0 in select.select([0, listener], [], [])[0]:
        return
    folder, kind = os.path.split(path)
    for name in IMPORTED if kind == TORCH else _modules():
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if kind == PACKAGE:
        start_forks(folder)
    gc.freeze()
    early = _early(os.environ)
    while 0 not in select.select([0, listener], [], [])[0]:
        client, _ = listener.accept()
        if not os.fork():
            listener.close()
            watch(client, early)
        client.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    os._exit(0)


def _modules() -> list[str]:
    import gpuwarden

    top = os.path.dirname(gpuwarden.__path__[0])
    found = []
    for folder, _, files in os.walk(gpuwarden.__path__[0]):
        inside = os.path.relpath(folder, top).replace("/", ".")
        found += [f"{inside}.{file[:-3]}" for file in files if file.endswith(".py") and file != "__init__.py"]
    return [name for name in found if not any(part in name for part in OTHERS)]


def _early(env: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(EARLY)}


def watch(client: Any, early: dict[str, str]) -> NoReturn:
    """Run the command in a child process, and send its exit code; -N if signal N ended it."""
    import contextlib
    import select
    import socket as sockets

    order, fds, _, _ = sockets.recv_fds(client, 1 << 20, 3)
    if not order:
        os._exit(0)
    child = os.fork()
    if not child:
        client.close()
        become(*marshal.loads(order), fds, early)
    for fd in fds:
        os.close(fd)
    ended = os.pidfd_open(child)
    while ended not in select.select([client, ended], [], [])[0]:
        number = client.recv(64)
        os.kill(child, int(number or SIGKILL))
        if not number:
            break
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(OSError):
        client.send(b"%d" % code)
    os._exit(0)


def become(
    argv: tuple[str, ...], env: dict[str, str], cwd: str, umask: int, fds: list[int], early: dict[str, str]
) -> NoReturn:
    """Adopt the client's arguments, variables and streams, and run the program."""
    os.setsid()
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
    os.closerange(3, max(fds) + 1)
    os.chdir(cwd)
    os.umask(umask)
    if not _early(env).items() <= early.items() or not {"-m", "-c"} & set(argv[:2]):
        os.execve(sys.executable, [sys.executable, *argv], env)
    os.environ.clear()
    os.environ.update(env)
    if argv[0] == "-P":
        argv = argv[1:]
    else:
        sys.path.insert(0, cwd if argv[0] == "-m" else "")
    ended_by(*argv)


def ended_by(how: str, program: str, *words: str) -> NoReturn:
    """Run a module or source text as the main program, and exit as Python does."""
    import atexit
    import contextlib
    import runpy
    import threading

    code: Any = 0
    try:
        if how == "-m":
            sys.argv = [program, *words]
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.argv = ["-c", *words]
            exec(compile(program, "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    except SystemExit as ended:
        code = ended.code
    except KeyboardInterrupt:
        signal(SIGINT, SIG_DFL)
        os.kill(os.getpid(), SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(int(code or 0) & 255)


if __name__ == "__main__":
    {"run": run, "serve": serve}[sys.argv[1]](*sys.argv[2:])
