"""Read a machine's run folders: the training step reached, the jobs' processes, and whether the jobs have ended.

A job can write to its run folder, so the content is not trusted. A process is signaled only if the pid *and* the start
ticks match those that the kernel reports.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TAIL = 65_536
FINAL = frozenset({"succeeded", "failed", "canceled", "preempted", "timeout"})


def folders(run_root: Path) -> list[Path]:
    """Return the run folders, which contain a status or metrics. Links are ignored."""
    try:
        found = [p for p in run_root.iterdir() if p.is_dir() and not p.is_symlink()]
    except OSError:
        return []
    return sorted(p for p in found if (p / "status.json").is_file() or (p / "metrics.jsonl").is_file())


def step(run_root: Path, pids: set[int] | None = None) -> int | None:
    """Return the highest step in the runs' metrics or status. If `pids` is given, read only those processes' runs."""
    steps: list[int] = []
    for folder in folders(run_root):
        rows: list[Any] = [status(folder)]
        if pids is not None and rows[0].get("pid") not in pids:
            continue
        for path in (folder / "metrics.jsonl", folder / "work" / "metrics.jsonl"):
            for line in _tail(path, TAIL).splitlines():
                try:
                    rows.append(json.loads(line))
                except ValueError:
                    continue  # the first or last line may be incomplete
        found = [row.get("step", row.get("global_step")) for row in rows if isinstance(row, dict)]
        steps += [step for step in found if type(step) is int]
    return max(steps, default=None)


def all_ended(run_root: Path) -> bool:
    """Return whether at least one job exists and every job has a final status."""
    states = [status(f).get("state") for f in folders(run_root)]
    return bool(states) and all(state in FINAL for state in states)


def status(folder: Path) -> dict[str, Any]:
    """Return a run's status; empty if none can be read."""
    try:
        found = json.loads(_tail(folder / "status.json", 1 << 20))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def processes(run_root: Path) -> Iterator[tuple[int, str, str]]:
    """Yield pid, start ticks and boot id of every process named in a status: the runner's and the job's."""
    for folder in folders(run_root):
        seen = status(folder)
        boot = str(seen.get("boot_id", ""))
        pairs = [
            (seen.get("pid"), seen.get("start_ticks")),
            (seen.get("child_pid"), seen.get("child_ticks")),
        ]
        for pid, ticks in pairs:
            if type(pid) is int and pid > 1 and ticks is not None:
                yield pid, str(ticks), boot


def _tail(path: Path, size: int) -> str:
    """Return the end of a regular file as text; empty for a link, a pipe or a file that can't be read."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        with os.fdopen(os.open(path, flags), "rb") as file:
            end = os.fstat(file.fileno()).st_size
            file.seek(max(0, end - size))
            return file.read(size).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""
