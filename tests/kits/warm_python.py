"""Run `python -m gpuwarden` and `python -c` as forks of a process that has imported gpuwarden.

A start of the command line costs half a second of processor time, one of the MCP server two. The fork gets the
arguments, variables, folder, umask and standard streams of the process that `warm_python()` starts. That process passes
signals on and ends like the fork. If it dies, the fork is killed. The fork has its own process id and no terminal.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # the process that only passes things on imports little
    from typing import Any, NoReturn

KIND = (socket.AF_UNIX, socket.SOCK_SEQPACKET)
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
EARLY = ("PYTHON", "LC_", "LANG", "TZ")
"""How variables begin that Python reads when it starts."""
OTHERS = ("._data", ".runner", "_child", ".trace_", "__main__")
"""Modules that are programs, belong to a machine or import torch."""
_words: list[str] = []


def warm_python() -> list[str]:
    """Return the words with which a command begins, instead of `sys.executable`. Start the forking process once."""
    if not sys.platform.startswith("linux"):
        return [sys.executable]
    if not _words:
        _words.extend(_started())
    return list(_words)


def _started() -> list[str]:
    import atexit
    import shutil
    import subprocess
    import tempfile

    folder = tempfile.mkdtemp(prefix="warm")
    path = f"{folder}/socket"
    server = subprocess.Popen(
        [sys.executable, "-P", __file__, "serve", path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder
    )
    assert server.stdin and server.stdout and server.stdout.readline() == b"ready\n"

    def close() -> None:
        server.communicate()
        shutil.rmtree(folder)

    atexit.register(close)
    return [sys.executable, "-I", "-S", __file__, "run", path]


def run(path: str, *argv: str) -> NoReturn:
    """Have the server fork a child, pass signals on to it, and end as it does."""
    with socket.socket(*KIND) as server:
        server.connect(path)
        umask = os.umask(0)
        order = {"argv": argv, "env": dict(os.environ), "cwd": os.getcwd(), "umask": umask}
        socket.send_fds(server, [json.dumps(order).encode()], [0, 1, 2])
        for number in PASSED_ON:
            signal.signal(number, lambda number, _: server.send(str(number).encode()) and None)
        code = int(server.recv(64) or b"1")
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def serve(path: str) -> None:
    """Fork a child for each connection until the tests are over."""
    import gc
    import importlib
    import select

    import gpuwarden

    for folder, _, files in os.walk(gpuwarden.__path__[0]):
        inside = os.path.relpath(folder, os.path.dirname(gpuwarden.__path__[0])).replace("/", ".")
        for name in (f"{inside}.{file[:-3]}" for file in files if file.endswith(".py") and file != "__init__.py"):
            if not any(part in name for part in OTHERS):
                importlib.import_module(name)
    gc.freeze()
    listener = socket.socket(*KIND)
    listener.bind(path)
    listener.listen(64)
    print("ready", flush=True)
    early = _early(os.environ)
    while listener.fileno() in select.select([listener.fileno(), 0], [], [])[0]:
        client, _ = listener.accept()
        if not os.fork():
            listener.close()
            watch(client, early)
        client.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _early(env: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(EARLY)}


def watch(client: socket.socket, early: dict[str, str]) -> None:
    """Run the command in a process below this one, and send its exit code; -N if signal N ended it."""
    import select

    text, fds, _, _ = socket.recv_fds(client, 1 << 20, 3)
    if not text:
        os._exit(0)
    child = os.fork()
    if not child:
        client.close()
        become(json.loads(text), fds, early)
    for fd in fds:
        os.close(fd)
    ended = os.pidfd_open(child)
    while ended not in select.select([client.fileno(), ended], [], [])[0]:
        number = client.recv(64)
        os.kill(child, int(number or signal.SIGKILL))
        if not number:
            break
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(OSError):
        client.send(str(code).encode())
    os._exit(0)


def become(order: dict[str, object], fds: list[int], early: dict[str, str]) -> NoReturn:
    """Take over what the order says, as if this process had been started so, and run its program."""
    os.setsid()
    argv, env = list(order["argv"]), dict(order["env"])  # type: ignore[call-overload]
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
    os.closerange(3, max(fds) + 1)
    os.chdir(str(order["cwd"]))
    os.umask(int(order["umask"]))  # type: ignore[call-overload]
    if not _early(env).items() <= early.items() or argv[0] not in {"-m", "-c"}:
        os.execve(sys.executable, [sys.executable, *argv], env)
    os.environ.clear()
    os.environ.update(env)
    # The inherited streams have the encodings of the same variables, and nothing was read or is buffered.
    sys.stdout.reconfigure(line_buffering=False)  # type: ignore[union-attr]
    ended_by(argv)


def ended_by(argv: list[str]) -> NoReturn:
    """Run a module or a text as the main program, and end as Python does after it."""
    import atexit
    import runpy
    import threading

    sys.argv, sys.path[0] = argv[1:], os.getcwd() if argv[0] == "-m" else ""
    code: Any = 0
    try:
        if argv[0] == "-m":
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = ["-c", *argv[2:]]
            exec(compile(argv[1], "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
    except SystemExit as ended:
        code = ended.code
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
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
