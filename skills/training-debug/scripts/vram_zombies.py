#!/usr/bin/env python3
# ruff: noqa: D103, PTH112, PTH115, PTH123, PTH208 (stands alone, Python 3.8)
"""Find idle processes that still occupy a GPU, the usual cause of "out of memory" on an unused GPU.

    python3 vram_zombies.py [--min-age SECONDS] [--watch SECONDS]

Needs only Linux and Python 3.8 or newer, and changes nothing. Inside a container, nvidia-smi lists no processes or
wrong process ids, so this script reads /proc instead. A process counts as idle only if no GPU is in use and the process
used no CPU time during `--watch` and is at least `--min-age` old. Exit code 0: none found; 1: some found; 2: unknown.
"""

import argparse
import os
import subprocess
import sys
import time


def holders():
    """Return the open GPU device files by process id, and the number of processes that could not be examined."""
    found, closed = {}, 0
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            links = [os.readlink(f"/proc/{name}/fd/{fd}") for fd in os.listdir(f"/proc/{name}/fd")]
        except PermissionError:
            closed += 1
            continue
        except OSError:
            continue
        devices = {link for link in links if link.startswith(("/dev/nvidia", "/dev/dri/render"))}
        if devices - {"/dev/nvidiactl"}:
            found[int(name)] = sorted(devices)
    return found, closed


def stat(pid):
    """Return (CPU ticks used, start tick, parent, state), or None if the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[11]) + int(fields[12]), int(fields[19]), int(fields[1]), fields[0]


def age(start):
    with open("/proc/uptime", encoding="ascii") as file:
        return float(file.read().split()[0]) - start / os.sysconf("SC_CLK_TCK")


def words(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            parts = file.read().split(b"\0")
    except OSError:
        return "?"
    return b" ".join(parts[:2]).decode("utf-8", "replace")[:80]  # arguments may contain secrets


def resting():
    """Return whether no GPU is in use, or None if that is unknown."""
    query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=30, check=True)
        return all(int(value) == 0 for value in done.stdout.split())
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--min-age", type=float, default=120, help="minimum age of an idle process in seconds (default 120)"
    )
    parser.add_argument("--watch", type=float, default=3, help="seconds to watch (default 3)")
    asked = parser.parse_args()
    if not os.path.isdir("/proc/self/fd"):
        print("CAN'T TELL: this system has no /proc")
        return 2
    found, closed = holders()
    before = {pid: stat(pid) for pid in found}
    rest = resting()
    time.sleep(asked.watch)
    rest = rest and resting()
    idle = []
    for pid, devices in sorted(found.items()):
        first, now = before[pid], stat(pid)
        if first is None or now is None or first[1] != now[1]:
            continue
        quiet = now[0] == first[0] and age(now[1]) >= asked.min_age
        orphan = " orphan" if now[2] == 1 else ""
        print(
            "{:5} pid {}{} state {} {} holds {}".format(
                "IDLE" if quiet else "BUSY", pid, orphan, now[3], words(pid), " ".join(devices)
            )
        )
        if quiet:
            idle.append(pid)
    if closed:
        print(f"{closed} processes of other users could not be examined; run as root to include them")
    if rest is None:
        print("CAN'T TELL: nvidia-smi does not report whether the GPUs are in use")
        return 2
    if not rest:
        print("A GPU is in use, so no process counts as idle")
        return 0
    if idle:
        print("Check each process before you end it, and end only your own: kill " + " ".join(map(str, idle)))
        return 1
    print("No idle process found" + ("" if not closed else " among those that could be examined"))
    return 2 if closed else 0


if __name__ == "__main__":
    sys.exit(main())
