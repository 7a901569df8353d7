"""Fixtures for the interface tests: a fast rehearsal cloud, a small job, and a user at a terminal."""

from __future__ import annotations

import io
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from gpuwarden.app import open_context
from gpuwarden.lifecycle.context import Context
from gpuwarden.policy_record import RECORD, Record, write_record
from gpuwarden.rehearsal.model import Settings
from waiting import PATIENCE, eventually

PLATFORM = "rehearsal/vastai"
QUICK = Settings(boot_s=0.0, stop_s=0.0, resume_s=0.0, settle_s=0.05, host_life_s=120.0)

# Saves one tensor in the safetensors format, using only the standard library.
TRAIN = """# /// script
# requires-python = ">=3.11"
# dependencies = []
# ///
import json, os, struct, sys
os.makedirs("out", exist_ok=True)
head = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
head += b" " * (-len(head) % 8)
with open("out/model.safetensors", "wb") as file:
    file.write(struct.pack("<Q", len(head)) + head + struct.pack("<4f", 1, 2, 3, 4))
print("step 1 loss 0.5", *sys.argv[1:], flush=True)
"""
JOB = {
    "platform": PLATFORM, "script": TRAIN, "name": "tiny", "outputs": ["out"],
    "timeout_s": 600, "estimate_s": 60, "max_cost_usd": 1.0,
}  # fmt: skip


POLICY = """[approval]
channels = ["terminal", "page", "elicitation"]
[secrets]
allowed = ["HF_TOKEN", "MY_TOKEN", "PLAIN_NAME"]
[local]
unsandboxed = true
"""


def environment(home: Path, **more: str) -> dict[str, str]:
    """Return the environment of a process whose gpuwarden home is `home`."""
    keep = {k: v for k, v in os.environ.items() if not k.startswith("GPUWARDEN_")}
    mine = {"GPUWARDEN_HOME": str(home), "GPUWARDEN_POLICY": str(policy_file(home)), "COLUMNS": "100"}
    accept(home, Path(more.get("GPUWARDEN_POLICY", mine["GPUWARDEN_POLICY"])))
    return {**keep, **mine, **more}


def accept(home: Path, file: Path) -> None:
    """Record a policy file as accepted by the user, so that the ledger of the user running the tests is not used."""
    if not (home / RECORD).exists() and not home.parent.is_file():
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_record(home, Record(path=str(file), digest="", at=0.0))


def policy_file(home: Path) -> Path:
    """Write a policy beside the home, so that the user's is never used. If no sandbox works, jobs run without one."""
    file = home.parent / "policy.toml"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(POLICY)
    return file


def quick_warden(home: Path, platform: str = PLATFORM, **env: str) -> Context:
    """Return a context over a cloud whose machines boot and stop immediately. Other processes see the same cloud."""
    ctx = open_context("test", env=environment(home, **env))
    ctx.provider(platform).cloud.configure(QUICK)  # type: ignore[attr-defined]
    return ctx


def gpuwarden(
    home: Path, *words: str, stdin: str | None = None, timeout: float = 60, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run the command in a separate process, without a terminal."""
    return subprocess.run(
        [sys.executable, "-m", "gpuwarden", *words], env=environment(home, **env), input=stdin, text=True,
        stdin=subprocess.DEVNULL if stdin is None else None, capture_output=True, timeout=timeout * PATIENCE,
        check=False, start_new_session=True,
    )  # fmt: skip


def in_process(home: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command in this process, which is faster, with the same arguments and variables as a separate process."""
    from gpuwarden.interfaces.cli import main

    out, err = io.StringIO(), io.StringIO()
    with patch.dict(os.environ, environment(home, **env), clear=True), redirect_stdout(out), redirect_stderr(err):
        code = main.run(list(words))
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def answer(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the one JSON object that a command printed; fail if stdout has anything else."""
    assert done.stdout.count("\n") == 1, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict) and {"ok", "code"} <= found.keys(), found
    return found


def at_terminal(
    home: Path,
    *words: str,
    says: Mapping[str, str] | Iterable[tuple[str, str]],
    timeout: float = 60.0,
    enough: Callable[[str], bool] = lambda shown: False,
    **env: str,
) -> tuple[int, str]:
    """Run the command on a pseudo-terminal, and type the answer to each prompt in `says`, in order.

    Return the exit code and the complete output. A command that is still running once `enough` accepts its output, or
    at the timeout, is killed; the AssertionError then contains the complete output.
    """
    import pty

    script = list(says.items() if isinstance(says, Mapping) else says)
    pid, fd = pty.fork()
    if pid == 0:
        try:
            os.execve(sys.executable, [sys.executable, "-m", "gpuwarden", *words], environment(home, **env))
        finally:
            os._exit(127)
    shown, fresh, over = "", "", ""

    def turn() -> str:
        """Read once and type an answer; return the reason if the conversation is over."""
        nonlocal shown, fresh
        if enough(shown):
            return "enough"
        if not select.select([fd], [], [], 0.2)[0]:
            return ""
        block = b""
        with suppress(OSError):  # the other end is closed
            block = os.read(fd, 65_536)
        if not block:
            return "ended"
        shown += block.decode("utf-8", "replace")
        fresh += block.decode("utf-8", "replace")
        if script and script[0][0] in fresh:
            os.write(fd, script.pop(0)[1].encode() + b"\n")
            fresh = ""
        return ""

    try:
        with suppress(AssertionError):
            over = eventually(turn, timeout, every=0)
        if over != "ended":
            os.kill(pid, 9)
            raise AssertionError(f"still running; it showed:\n{shown}")
    finally:
        os.close(fd)
        status = os.waitpid(pid, 0)[1]
    return os.waitstatus_to_exitcode(status), shown
