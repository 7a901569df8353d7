"""The person of a world, at a terminal: `gpuwarden approve` on a pseudo-terminal, where a pipe can't answer."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

PATIENCE_S = 60.0
ASKED = "Type yes to approve:"
_AT_TERMINAL = """
import fcntl, os, sys, termios
terminal = os.open(sys.argv[1], os.O_RDWR)
try:
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
except OSError:
    pass
for fd in (0, 1, 2):
    os.dup2(terminal, fd)
os.execv(sys.executable, [sys.executable, "-m", "gpuwarden", "approve", sys.argv[2]])
"""


def approve(ticket: str, env: dict[str, str], cwd: Path, says: str = "yes") -> bool:
    """Answer the question of a ticket. Whether the command ended well."""
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-c", _AT_TERMINAL, os.ttyname(theirs), ticket]
    try:
        with subprocess.Popen(argv, env=env, cwd=cwd, start_new_session=True) as command:
            while not select.select([ours], [], [], 0.2)[0] and command.poll() is None:
                pass
            os.close(theirs)
            _talk(ours, says)
            return command.wait(PATIENCE_S) == 0
    finally:
        os.close(ours)


def _talk(terminal: int, says: str) -> None:
    shown, until = "", time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        if not select.select([terminal], [], [], 0.2)[0]:
            continue
        try:
            block = os.read(terminal, 65_536)
        except OSError:  # the other end is closed
            return
        if not block:
            return
        shown += block.decode("utf-8", "replace")
        if ASKED in shown:
            os.write(terminal, says.encode() + b"\n")
            shown = ""
