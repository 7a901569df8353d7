"""Forks of a process that has run the first part of a program: its imports take most of a short life."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TextIO


@dataclass
class Fork:
    """A running fork, its output, and its errors."""

    pid: int
    out: TextIO
    err: TextIO
    control: socket.socket

    def end(self) -> tuple[int, str, str]:
        """Wait for its end. Return its exit code, -N if signal N ended it, and the rest of both outputs."""
        with self.out, self.err:
            return int(self.control.recv(64)), self.out.read(), self.err.read()


class Forks:
    """Start forks, one at a time."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control

    def start(self, *argv: object) -> Fork:
        """Run the second part of the program with these arguments."""
        (out, to_out), (err, to_err) = os.pipe(), os.pipe()
        socket.send_fds(self.control, [json.dumps([str(word) for word in argv]).encode()], [to_out, to_err])
        os.close(to_out)
        os.close(to_err)
        return Fork(int(self.control.recv(64)), open(out), open(err), self.control)


@contextmanager
def forks_of(first: str, then: str) -> Iterator[Forks]:
    """Run the first part of a program, whose forks run the second part."""
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    argv = [sys.executable, __file__, str(theirs.fileno()), first, then]
    with subprocess.Popen(argv, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL), control:
        theirs.close()
        yield Forks(control)


def serve(control: socket.socket, first: str, then: str) -> None:
    """Fork for each request, answer the id of the fork, wait for it, and answer its exit code."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(first, names)
    code = compile(then, "<fork>", "exec")
    while True:
        text, fds, _, _ = socket.recv_fds(control, 1 << 16, 2)
        if not text:
            return
        child = os.fork()
        if not child:
            control.close()
            run(code, names, json.loads(text), fds)
        for fd in fds:
            os.close(fd)
        control.send(str(child).encode())
        control.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())


def run(code: Any, names: dict[str, Any], argv: list[str], fds: list[int]) -> NoReturn:
    """Run the second part of the program in this fork."""
    for fd, target in zip(fds, (1, 2), strict=True):
        os.dup2(fd, target)
        os.close(fd)
    sys.argv[1:] = argv
    status = 1
    try:
        exec(code, names)
        sys.stdout.flush()
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), *sys.argv[2:])
