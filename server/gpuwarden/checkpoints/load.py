"""Really load checkpoint files, in a separate process with limits on memory and time.

Only files that passed every other check get here. The child is `load_child.py`; it loads with torch's safe loader
and the safetensors library where torch is installed, otherwise with gpuwarden's reader into numpy. A file that makes
it crash, hang or run out of memory is reported, and the files after it still get their turn.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpuwarden.checkpoints.budget import Budget
from gpuwarden.checkpoints.file_model import short
from gpuwarden.checkpoints.findings import Entry, Findings

# The child gets no secrets: only what an interpreter needs to start.
_ENV = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "SYSTEMROOT", "TMPDIR", "TEMP", "LANG", "VIRTUAL_ENV")


CHILD = (sys.executable, "-P", "-m", "gpuwarden.checkpoints.load_child")
"""-P and an empty working folder: no file beside a checkpoint can pose as a module."""


@dataclass(frozen=True)
class LoadLimits:
    """Limits on the child: address space beyond twice the largest file, seconds to start, bytes a second at least."""

    memory: int = 8 << 30
    start_s: float = 120.0
    bytes_per_s: float = 20e6


def load(
    found: Findings,
    entries: Sequence[Entry],
    limits: LoadLimits | None = None,
    budget: Budget | None = None,
    child: Sequence[str] = CHILD,
) -> None:
    """Load each file and write the outcome into its entry. `child` is the command that runs `load_child.main`."""
    todo = [e for e in entries if not e.temporary]
    for entry in todo:
        if entry.load == "parsed":
            entry.proved.append("loads: all of it was parsed")
        elif not entry.load:
            entry.doubts.append("nothing here can load it")
    # Where torch's safe loader would refuse an object, our own reader loads the tensors beside it.
    queue = [e for e in todo if e.load == "tensors" and not (_inert(e) and e.anatomy and not e.anatomy.tensors)]
    while queue:
        if budget and budget.spent:
            for entry in queue:
                entry.doubts.append(f"was not loaded: {budget.spent}")
            return
        done = _batch(found, queue, limits or LoadLimits(), budget.left_s if budget else math.inf, child)
        queue = queue[done:]


def _inert(entry: Entry) -> bool:
    return bool(entry.anatomy and entry.anatomy.meta.get("inert"))


def _batch(found: Findings, entries: list[Entry], limits: LoadLimits, left_s: float, child: Sequence[str]) -> int:
    """Run one child over the entries. Return how many are settled: at least one."""
    total = sum(e.size for e in entries)
    memory = limits.memory + 3 * max(e.size for e in entries)
    files = [
        {"path": str(found.place(e.path)), "name": e.path.rsplit("/", 1)[-1], "format": "" if _inert(e) else e.format}
        for e in entries
    ]
    task = {"memory": memory, "files": files}
    answers, why = _run(json.dumps(task), min(limits.start_s + total / limits.bytes_per_s, left_s), child)
    settled = 0
    for entry, answer in zip(entries, answers):  # noqa: B905 (shipped to old Pythons)
        _settle(entry, answer)
        settled += 1
    if settled < len(entries):
        entries[settled].doubts.append(f"could not be loaded: {why}")
        settled += 1
    return settled


def _run(task: str, seconds: float, command: Sequence[str]) -> tuple[list[dict[str, Any]], str]:
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
    if answer.get("error"):
        entry.problems.append(f"does not load: {short(answer['error'], 160)}")
        return
    if answer.get("missing"):
        entry.doubts.append(f"could not be loaded: {short(answer['missing'], 80)} is not installed there")
        return
    if answer.get("memory"):
        entry.doubts.append("could not be loaded within the memory limit")
        return
    anatomy = entry.anatomy
    elements = sum(t.numel for t in anatomy.tensors) if anatomy else 0
    if answer["elements"] != elements:
        entry.problems.append(f"{answer['by']} loads {answer['elements']:,} elements; its structure has {elements:,}")
    else:
        entry.proved.append(f"loads with {answer['by']}: {answer['tensors']:,} tensors, {elements:,} elements")
