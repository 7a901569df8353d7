"""Start gpuwarden's loading processes as forks of a process that has imported torch.

An import of torch takes seconds of processor time, and hundreds of tests verify a file. A forked child gets the same
task, environment, working folder and limits as one that `subprocess` starts, and dies alone. Processes that tests start
by gpuwarden's command line are not changed: they start their children as for a user.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from typing import Any

WARM = (
    "gpuwarden.checkpoints.load_child",
    "gpuwarden.checkpoints.build_child",
    "gpuwarden.static_analysis.estimate.trace_child",
)
# transformers reads variables that the children set before they import it.
IMPORTED = ("torch", "safetensors.torch", "numpy")
_SAME = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")


class Children:
    """Replace the module `subprocess` in `gpuwarden.checkpoints.load`."""

    PIPE, DEVNULL, SubprocessError, run = (
        subprocess.PIPE,
        subprocess.DEVNULL,
        subprocess.SubprocessError,
        subprocess.run,
    )

    def __init__(self, control: socket.socket | None = None) -> None:
        """Use the forking process of another `Children` if its socket is given."""
        self._lock = threading.Lock()
        self._control = control
        self._parent: subprocess.Popen[bytes] | None = None
        self._env = {name: os.environ[name] for name in _SAME if name in os.environ}

    def Popen(self, command: list[str], *, env: dict[str, str], cwd: str, **pipes: Any) -> Any:  # noqa: N802
        """Start a child as `subprocess.Popen` does: by a fork if it is a loading process with the usual module path."""
        if command[:-1] != [sys.executable, "-P", "-m"] or command[-1] not in WARM:
            return subprocess.Popen(command, env=env, cwd=cwd, **pipes)
        control = self.control(env)
        if any(env.get(name) != self._env.get(name) for name in _SAME):
            return subprocess.Popen(command, env=env, cwd=cwd, **pipes)
        return Child(control, {"module": command[-1], "env": env, "cwd": cwd})

    def control(self, env: dict[str, str]) -> socket.socket:
        """Return the socket for requests, and start the forking process before the first."""
        with self._lock:
            if self._control is None:
                self._env = env
                self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                start = [sys.executable, "-P", __file__, str(theirs.fileno())]
                self._parent = subprocess.Popen(
                    start, env=env, cwd=tempfile.gettempdir(), pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
                )
                theirs.close()
            return self._control

    def close(self) -> None:
        """End the forking process by closing its requests."""
        if self._control and self._parent:
            self._control.close()
            self._parent.wait()


class Child:
    """The part of a `subprocess.Popen` that `run_child` uses."""

    returncode: int | None = None

    def __init__(self, control: socket.socket, order: dict[str, Any]) -> None:
        self._input, self._output = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self._order, self._control = order, control
        self._answers, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid, self._killed = 0, False

    def communicate(self, task: bytes) -> tuple[bytes, None]:
        """Send the task, wait for the child's end and return its output."""
        self._input.write(task)
        self._input.seek(0)
        handed = [self._input.fileno(), self._output.fileno(), self._theirs.fileno()]
        socket.send_fds(self._control, [json.dumps(self._order).encode()], handed)
        self._theirs.close()
        self._pid = int(self._answers.recv(64))
        if self._killed:
            self.kill()
        self.returncode = int(self._answers.recv(64) or b"-9")
        self._output.seek(0)
        out = self._output.read()
        for each in (self._input, self._output, self._answers):
            each.close()
        return out, None

    def kill(self) -> None:
        """Kill the child, at once or as soon as it has a process id."""
        self._killed = True
        if self._pid and self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def poll(self) -> int | None:
        """Return the exit code of an ended child."""
        return self.returncode

    def wait(self) -> None:
        """Do nothing: `communicate` waits."""


def serve(control: socket.socket) -> None:
    """Fork a child for each request until the tests are over."""
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    while True:
        text, fds, _, _ = socket.recv_fds(control, 1 << 20, 3)
        if not text:
            return
        order = json.loads(text)
        if os.fork() == 0:
            control.close()
            watch(order, fds[0], fds[1], socket.socket(fileno=fds[2]))
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def watch(order: dict[str, Any], stdin: int, stdout: int, answers: socket.socket) -> None:
    """Run the child in a process below this one, and answer its id and its exit code."""
    pid = os.fork()
    if pid:
        answers.send(str(pid).encode())
        answers.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
        os._exit(0)
    answers.close()
    code = 1
    try:
        os.environ.clear()
        os.environ.update(order["env"])
        os.chdir(order["cwd"])
        for fd, target in ((stdin, 0), (stdout, 1), (os.open(os.devnull, os.O_WRONLY), 2)):
            os.dup2(fd, target)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
        importlib.import_module(order["module"]).main()
        code = 0
    finally:
        os._exit(code)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
