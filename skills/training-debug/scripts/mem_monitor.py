#!/usr/bin/env python3
# ruff: noqa: D103, PTH123, PTH208, S108 (stands alone, Python 3.8)
"""Record a job's memory use and the memory limit of its container, not of the host.

    python3 mem_monitor.py [--pid PID] [--every 5] [--samples 0] > memory.tsv

Prints one tab-separated line per sample: time, used and allowed bytes of the cgroup (version 2 or 1), number of
processes killed by the kernel, resident bytes and number of processes in the tree of PID, bytes used in /dev/shm. A
value that can't be read is `-`. Needs only Linux and Python 3.8 or newer. Ends when PID ends, after `--samples`, or on
a signal.
"""

import argparse
import os
import sys
import time

COLUMNS = ("time", "used", "allowed", "oom_kills", "tree_rss", "tree_processes", "shm_used")
UNLIMITED = 1 << 60  # cgroup version 1 writes a huge number for "no limit"


def read(path):
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return None


def own_group(controller):
    """Return the path of this process's cgroup below the mount. In version 2, the controller is empty."""
    for line in (read("/proc/self/cgroup") or "").splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            return path
    return "/"


def first(paths):
    return next((text for text in map(read, paths) if text is not None), None)


def cgroup():
    """Return (used, allowed, kills) as text; `allowed` is `max` if there is no limit."""
    two, one = "/sys/fs/cgroup", "/sys/fs/cgroup/memory"
    used = first([two + own_group("") + "/memory.current", two + "/memory.current"])
    if used is not None:
        allowed = first([two + own_group("") + "/memory.max", two + "/memory.max"])
        events = first([two + own_group("") + "/memory.events", two + "/memory.events"])
    else:
        used = first([one + own_group("memory") + "/memory.usage_in_bytes", one + "/memory.usage_in_bytes"])
        allowed = first([one + own_group("memory") + "/memory.limit_in_bytes", one + "/memory.limit_in_bytes"])
        events = first([one + own_group("memory") + "/memory.oom_control", one + "/memory.oom_control"])
        if allowed is not None and int(allowed) >= UNLIMITED:
            allowed = "max"
    kills = next((line.split()[1] for line in (events or "").splitlines() if line.startswith("oom_kill ")), None)
    return used, allowed, kills


def tree(root):
    """Return (resident bytes, number of processes) of `root` and its descendants, or (None, 0) if `root` has ended."""
    parents, resident = {}, {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        stat, statm = read(f"/proc/{name}/stat"), read(f"/proc/{name}/statm")
        if stat and statm:
            state, parent = stat.rpartition(")")[2].split()[:2]
            if state not in "ZX":
                parents[int(name)] = int(parent)
                resident[int(name)] = int(statm.split()[1]) * os.sysconf("SC_PAGE_SIZE")
    members, fresh = set(), {root} & set(parents)
    while fresh:
        members |= fresh
        fresh = {pid for pid, parent in parents.items() if parent in fresh} - members
    return (sum(resident[pid] for pid in members), len(members)) if members else (None, 0)


def shm():
    try:
        info = os.statvfs("/dev/shm")
    except OSError:
        return None
    return (info.f_blocks - info.f_bfree) * info.f_frsize


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pid", type=int, help="the job's first process")
    parser.add_argument("--every", type=float, default=5, help="seconds between samples (default 5)")
    parser.add_argument("--samples", type=int, default=0, help="number of samples; 0: no limit (default 0)")
    asked = parser.parse_args()
    print("\t".join(COLUMNS), flush=True)
    taken = 0
    while True:
        resident, count = tree(asked.pid) if asked.pid else (None, None)
        row = (int(time.time()), *cgroup(), resident, count, shm())
        print("\t".join("-" if value is None else str(value) for value in row), flush=True)
        taken += 1
        if taken == asked.samples or (asked.pid and not count):
            return 0
        time.sleep(asked.every)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(0)
