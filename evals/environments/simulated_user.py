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
_AT_TERMINAL = """
import fcntl, os, sys, termios
terminal = os.open(sys.argv[1], os.O_RDWR)
try:
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
except OSError:
    pass
for fd in (0, 1, 2):
    os.dup2(terminal, fd)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def approve(ticket: str, env: dict[str, str], cwd: Path, pin: str) -> bool:
    """Say yes to a ticket at a terminal, and type a PIN. Whether the command ended well."""
    argv = [sys.executable, "-m", "gpuwarden", "approve", ticket]
    return run(argv, env, cwd, {"Type yes to approve:": "yes", "PIN:": pin})[0] == 0


def run(argv: list[str], env: dict[str, str], cwd: Path, typed: dict[str, str] | None) -> tuple[int, str]:
    """Run a command, and return its exit code and what it showed.

    With `typed` it runs on a separate pseudo-terminal, and each prompt is answered; without, its input is a pipe
    that says yes, as `yes |` does.
    """
    if typed is None:
        done = subprocess.run(
            argv, env=env, cwd=cwd, input="yes\n" * 20, text=True, capture_output=True, timeout=PATIENCE_S,
            check=False, start_new_session=True,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", _AT_TERMINAL, os.ttyname(theirs), *argv]
    try:
        with subprocess.Popen(command, env=env, cwd=cwd, start_new_session=True) as process:
            while not select.select([ours], [], [], 0.05)[0] and process.poll() is None:
                pass
            os.close(theirs)
            shown = _talk(ours, typed)
            return process.wait(PATIENCE_S), shown
    finally:
        os.close(ours)


def _talk(terminal: int, typed: dict[str, str]) -> str:
    """Answer prompts until the other end is closed; everything that was shown."""
    shown, fresh, until = "", "", time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        if not select.select([terminal], [], [], 0.2)[0]:
            continue
        try:
            block = os.read(terminal, 65_536).decode("utf-8", "replace")
        except OSError:  # the other end is closed
            break
        if not block:
            break
        shown, fresh = shown + block, fresh + block
        for prompt, answer in typed.items():
            if prompt in fresh:
                os.write(terminal, answer.encode() + b"\n")
                fresh = ""
    return shown
