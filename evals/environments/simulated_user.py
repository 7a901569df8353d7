"""Simulate a scenario's user at a terminal.

`gpuwarden approve` runs on a pseudo-terminal, because it does not accept answers from a pipe.
"""

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
    """Approve a ticket at a terminal, and type a PIN. Return whether the command exited with 0."""
    argv = [sys.executable, "-m", "gpuwarden", "approve", ticket]
    return run(argv, env, cwd, {"Type yes to approve:": "yes", "PIN:": pin})[0] == 0


def run(argv: list[str], env: dict[str, str], cwd: Path, typed: dict[str, str] | None) -> tuple[int, str]:
    """Run a command, and return its exit code and its output.

    With `typed`, the command runs on a separate pseudo-terminal, and each prompt is answered. Otherwise, its input is a
    pipe with `y` lines, as from `yes |`.
    """
    if typed is None:
        done = subprocess.run(
            argv, env=env, cwd=cwd, input="yes\n" * 20, text=True, capture_output=True, timeout=PATIENCE_S,
            check=False, start_new_session=True,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr
    controller, terminal = pty.openpty()
    command = [sys.executable, "-c", _AT_TERMINAL, os.ttyname(terminal), *argv]
    try:
        with subprocess.Popen(command, env=env, cwd=cwd, start_new_session=True) as process:
            while not select.select([controller], [], [], 0.05)[0] and process.poll() is None:
                pass
            os.close(terminal)
            shown = _answer_prompts(controller, typed)
            return process.wait(PATIENCE_S), shown
    finally:
        os.close(controller)


def _answer_prompts(controller: int, typed: dict[str, str]) -> str:
    """Answer prompts until the terminal is closed; return all output."""
    shown, fresh, until = "", "", time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        if not select.select([controller], [], [], 0.2)[0]:
            continue
        try:
            block = os.read(controller, 65_536).decode("utf-8", "replace")
        except OSError:  # Linux reports a closed terminal as an error
            break
        if not block:
            break
        shown, fresh = shown + block, fresh + block
        for prompt, answer in typed.items():
            if prompt in fresh:
                os.write(controller, answer.encode() + b"\n")
                fresh = ""
    return shown
