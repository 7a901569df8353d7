"""Load checkpoint files in a separate process with limits on memory and time.

Only files that have passed every other check are loaded. The child process runs `load_child.py`. It uses torch's safe
loader and the safetensors library if torch is installed, otherwise gpuwarden's own reader, which reads into numpy
arrays. If a file causes a crash, a hang or an out-of-memory error, the error is reported, and a new process continues
with the next file.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuwarden.checkpoints.budget import Budget
from gpuwarden.checkpoints.file_model import short, some
from gpuwarden.checkpoints.findings import Entry, Findings
from gpuwarden.core.evidence import Cause

# Environment variables for the child process: only those that an interpreter needs to start, and no secrets.
_ENV = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "SYSTEMROOT", "TMPDIR", "TEMP", "LANG", "VIRTUAL_ENV")


CHILD = (sys.executable, "-P", "-m", "gpuwarden.checkpoints.load_child")
"""With -P and an empty working folder, the child process can't import a file that is stored next to a checkpoint."""


def child_with_torch(python: str) -> list[str]:
    """Return the command that starts a child process with the first Python that has torch, or else with this Python.

    The candidates are this Python, `python`, and other Pythons on the PATH, if their version is at least 3.8. The child
    process ignores the working folder and Python's environment variables. It imports gpuwarden from the location of
    this module, which may be an archive.
    """
    ask = "import sys, importlib.util as u; raise SystemExit(sys.version_info < (3, 8) or u.find_spec('torch') is None)"
    start = "import sys; sys.path.insert(0, sys.argv[1]); from gpuwarden.checkpoints.load_child import main; main()"
    found = [sys.executable, python, shutil.which("python3") or "", shutil.which("python") or ""]
    chosen = sys.executable
    for candidate in (p for p in dict.fromkeys(found) if os.access(p, os.X_OK)):
        try:
            done = subprocess.run(
                [candidate, "-I", "-c", ask], stdin=subprocess.DEVNULL, capture_output=True, timeout=30
            )
        except (OSError, subprocess.SubprocessError):
            continue
        if done.returncode == 0:
            chosen = candidate
            break
    return [chosen, "-I", "-c", start, str(Path(__file__).parents[2])]


@dataclass(frozen=True)
class LoadLimits:
    """Limits on the child process.

    `memory` limits its address space, in bytes; three times the size of the largest file is added. `start_s` is the
    maximum startup time, in seconds. `bytes_per_s` is the minimum loading speed.
    """

    memory: int = 8 << 30
    start_s: float = 300.0  # importing torch from a network disk is slow while a job uses every core
    bytes_per_s: float = 20e6


def load(
    found: Findings,
    entries: Sequence[Entry],
    limits: LoadLimits | None = None,
    budget: Budget | None = None,
    child: Sequence[str] = CHILD,
) -> None:
    """Load each file and add the result to its entry. `child` is the command that runs `load_child.main`."""
    todo = [e for e in entries if not e.temporary]
    for entry in todo:
        if entry.load == "parsed":
            entry.proved.append("loads: the complete file was parsed")
        elif not entry.load:
            entry.doubt("no loader for this format is available", Cause.NOT_LOADED)
    # If a file has an object that torch's safe loader rejects, gpuwarden's reader loads the tensors, if there are any.
    queue = [e for e in todo if e.load == "tensors" and not (_inert(e) and e.anatomy and not e.anatomy.tensors)]
    limits = limits or LoadLimits()
    while queue:
        if budget and budget.spent:
            for entry in queue:
                entry.doubt(f"was not loaded: {budget.spent}", Cause.LIMIT)
            return
        task = {
            "memory": limits.memory + 3 * max(e.size for e in queue),
            "files": [
                {
                    "path": str(found.place(e.path)),
                    "name": e.path.rsplit("/", 1)[-1],
                    "format": "" if _inert(e) else e.format,
                }
                for e in queue
            ],
        }
        seconds = limits.start_s + sum(e.size for e in queue) / limits.bytes_per_s
        answers, why = run_child(json.dumps(task), min(seconds, budget.left_s) if budget else seconds, child)
        for entry, answer in zip(queue, answers):  # noqa: B905 (also runs on old Python versions)
            _settle(entry, answer)
        queue = queue[len(answers) :]
        if queue:  # the process ended at this file; a new process continues with the next file
            queue.pop(0).doubt(f"could not be loaded: {why}", Cause.LIMIT)


def _inert(entry: Entry) -> bool:
    return bool(entry.anatomy and entry.anatomy.meta.get("inert"))


def run_child(task: str, seconds: float, command: Sequence[str]) -> tuple[list[dict[str, Any]], str]:
    """Run a child process for a task. Return its results, one per file or model, and the reason why it ended."""
    env = {k: os.environ[k] for k in _ENV if k in os.environ}
    with tempfile.TemporaryDirectory(prefix="gpuwarden-load-") as empty:
        child = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env, cwd=empty,
        )  # fmt: skip
        timer = threading.Timer(seconds, child.kill)
        timer.start()
        try:
            out, _ = child.communicate(task.encode())
        finally:
            late = not timer.is_alive()
            timer.cancel()
            if child.poll() is None:
                child.kill()
                child.wait()
    answers = [json.loads(line) for line in out.splitlines() if line.startswith(b"{") and line.endswith(b"}")]
    code = child.returncode
    return answers, f"it took longer than {seconds:.0f} s" if late else f"the loading process ended with code {code}"


def _settle(entry: Entry, answer: dict[str, Any]) -> None:
    """Add the child's result for one file to the file's entry."""
    elements = sum(t.numel for t in entry.anatomy.tensors) if entry.anatomy else 0
    if answer.get("error"):
        entry.refute(f"can't be loaded: {short(answer['error'], 160)}")
    elif answer.get("declined"):
        entry.doubt(f"the library does not support this file: {short(answer['declined'], 160)}", Cause.NOT_LOADED)
    elif answer.get("missing"):
        entry.doubt(f"could not be loaded: {short(answer['missing'], 80)} is not installed", Cause.NOT_LOADED)
    elif answer.get("unread"):
        entry.doubt(f"could not be read: {short(answer['unread'], 160)}", Cause.CHANGING)
    elif answer.get("memory"):
        entry.doubt("could not be loaded within the memory limit", Cause.LIMIT)
    elif answer.get("not_finite"):
        entry.refute(f"not finite: {some(answer['not_finite'])}", Cause.NOT_FINITE)
    elif answer["elements"] != elements and not (entry.anatomy and entry.anatomy.meta.get("incomplete")):
        by, loaded = answer["by"], answer["elements"]
        entry.refute(
            f"{by} loads {loaded:,} elements, but the file's structure lists {elements:,}", Cause.CONTRADICTION
        )
    else:
        loaded = answer["elements"]
        entry.proved.append(f"loads with {answer['by']}: {answer['tensors']:,} tensors, {loaded:,} elements")
