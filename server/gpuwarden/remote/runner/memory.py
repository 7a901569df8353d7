"""Measure memory: usage, limit, and the kernel's out-of-memory kills."""

from __future__ import annotations

from typing import Any, Iterator

from gpuwarden.remote.runner.process import PROC


def number_in(path: str) -> int | None:
    """Return the number in a kernel file; None for "max", an unrealistic limit, or a missing file."""
    try:
        with open(path, encoding="ascii") as file:
            value = int(file.read(64))
    except (OSError, ValueError):
        return None
    return value if 0 <= value < 1 << 60 else None


def memory() -> tuple[int | None, int | None]:
    """Return the memory usage and limit in bytes: the control group's if it has a limit, otherwise the machine's."""
    for used, limit in (("memory.current", "memory.max"), ("memory.usage_in_bytes", "memory.limit_in_bytes")):
        for folder in cgroup_folders():
            allowed = number_in(folder + "/" + limit)
            if allowed is not None:
                return number_in(folder + "/" + used), allowed
    try:
        with open(PROC + "/meminfo", encoding="ascii") as file:
            info = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file if line.startswith("Mem")}
        return info["MemTotal"] - info["MemAvailable"], info["MemTotal"]
    except (OSError, ValueError, KeyError, IndexError):
        return None, None


def cgroup_folders(pid: Any = "self") -> Iterator[str]:
    """Yield the folders that may contain a process's memory limits: its control group, then the root (v2 and v1)."""
    try:
        with open(f"{PROC}/{pid}/cgroup", encoding="utf-8", errors="replace") as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return
    for parts in lines:
        if len(parts) == 3 and parts[1] in ("", "memory"):
            mount = "/sys/fs/cgroup" + ("/memory" if parts[1] else "")
            yield mount + parts[2].rstrip("/")
            yield mount


def oom_kills_in(folder: str) -> int | None:
    """Return the number of out-of-memory kills in a control group; None if the kernel does not count them."""
    for name in ("memory.events", "memory.oom_control"):
        try:
            with open(folder + "/" + name, encoding="ascii") as file:
                counts = dict(line.split(None, 1) for line in file if " " in line)
            return int(counts["oom_kill"])
        except (OSError, ValueError, KeyError):
            continue
    return None


class OomKills:
    """Counts out-of-memory kills in the control groups of the runner and its command since this object was created."""

    def __init__(self) -> None:
        self.first: dict[str, int] = {}
        self.most = 0
        self.look()

    def look(self, pid: Any = "self") -> int | None:
        """Return the number of kills so far: the maximum over all groups, because a group's count includes its
        subgroups.
        """
        for folder in {*cgroup_folders(), *cgroup_folders(pid)} if len(self.first) < 16 else ():
            count = oom_kills_in(folder)
            if count is not None:
                self.first.setdefault(folder, count)
        for folder, first in self.first.items():
            self.most = max(self.most, (oom_kills_in(folder) or 0) - first)  # a group may have been removed
        return self.most if self.first else None
