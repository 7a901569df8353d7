"""Run read-only commands that help diagnose a job. No shell is used; time and output are limited."""

from __future__ import annotations

import os
import signal
import time

from gpuwarden.remote.runner.protocol import Json, Problem

MAX_COMMANDS = 16
EACH_S = 8.0
ALL_S = 30.0
MAX_TEXT = 16 << 10
"""The number of bytes kept from the end of each output, which contains the newest lines."""


def command_outputs(folder: str, request: Json) -> Json:
    """Return the outputs of `commands` (name -> argument list). The argument `{folder}` stands for the run folder."""
    commands = request.get("commands")
    if not isinstance(commands, dict) or len(commands) > MAX_COMMANDS:
        raise Problem("bad_request", "`commands` must map a limited number of names to argument lists")
    for argv in commands.values():
        if not isinstance(argv, list) or not argv or not all(isinstance(w, str) and "\0" not in w for w in argv):
            raise Problem("bad_request", "each command must be an argument list without NUL characters")
    end = time.monotonic() + ALL_S
    answers = {}
    for name, argv in commands.items():
        left = min(EACH_S, end - time.monotonic())
        filled = [folder if word == "{folder}" else word for word in argv]
        answers[name] = _printed(filled, left) if left > 0 else {"exit": None, "text": "", "why": "timeout"}
    return {"ok": True, "answers": answers}


def _printed(argv: list[str], seconds: float) -> Json:
    import subprocess  # imported here, so that other verbs start faster

    env = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LC_ALL": "C"}
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return {"exit": None, "text": "", "why": "missing" if isinstance(error, FileNotFoundError) else "refused"}
    try:
        raw, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"exit": None, "text": "", "why": "timeout"}
    return {"exit": process.returncode, "text": raw[-MAX_TEXT:].decode("utf-8", "replace"), "why": ""}
