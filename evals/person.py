"""The person of a world, at a terminal: `gpuwarden approve` on a pseudo-terminal, where a pipe can't answer."""

from __future__ import annotations

import os
import select
import sys
import time
from pathlib import Path

PATIENCE_S = 60.0
ASKED = "Type yes to approve:"


def approve(ticket: str, env: dict[str, str], cwd: Path, says: str = "yes") -> bool:
    """Answer the question of a ticket. Whether the command ended well."""
    import pty  # POSIX only, as the scripted worlds are

    pid, terminal = pty.fork()
    if pid == 0:
        try:
            os.chdir(cwd)
            os.execve(sys.executable, [sys.executable, "-m", "gpuwarden", "approve", ticket], env)
        finally:
            os._exit(127)
    try:
        _talk(terminal, says)
    finally:
        os.close(terminal)
        status = os.waitpid(pid, 0)[1]
    return os.waitstatus_to_exitcode(status) == 0


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
