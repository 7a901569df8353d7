"""Identify processes by pid, start ticks and boot id, never by the pid alone, and signal only identified processes."""

from __future__ import annotations

import os
import signal
from typing import Any

from gpuwarden.remote.runner.files import read_small

PROC = "/proc"


def has_proc() -> bool:
    """Return whether the system has /proc, which contains the start ticks of processes."""
    return os.path.exists(PROC + "/self/stat")


def boot_id() -> str:
    """Return the kernel's id for this boot; empty if unknown."""
    try:
        return read_small(PROC + "/sys/kernel/random/boot_id", 64).decode("ascii").strip()
    except (OSError, ValueError):
        return ""


def proc_stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat, starting at the state: 0 state, 1 parent, 2 group, 19 start ticks."""
    try:
        raw = read_small(f"{PROC}/{pid}/stat", 8192)
    except OSError:
        return None
    fields = raw[raw.rfind(b")") + 2 :].decode("ascii", "replace").split()
    return fields if len(fields) > 19 else None


def start_mark(pid: int) -> str:
    """Return a process's start ticks, or its start time from `ps` on systems without /proc; empty if unknown."""
    if has_proc():
        fields = proc_stat(pid)
        return fields[19] if fields else ""
    import subprocess

    try:
        ps = ["ps", "-o", "lstart=", "-p", str(pid)]
        done = subprocess.run(ps, capture_output=True, timeout=5, env={"LC_ALL": "C", "PATH": "/bin:/usr/bin"})
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode("ascii", "replace").strip()


def machine_mark() -> str:
    """Return an id that changes whenever the machine or container starts; empty if unknown."""
    first = proc_stat(1) if has_proc() else None
    here = boot_id()
    return f"{here}/{first[19]}" if first and here else ""


def is_alive(pid: Any, mark: Any, boot: Any) -> bool | None:
    """Return whether the identified process is alive; None if unknown. A zombie is considered dead."""
    if not isinstance(pid, int) or pid <= 1:
        return False
    here = boot_id()
    if boot and here and boot != here:
        return False
    if has_proc():
        fields = proc_stat(pid)
        return bool(fields and fields[0] not in ("Z", "X", "x") and fields[19] == str(mark))
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return None
    now = start_mark(pid)
    return now == str(mark) if now and mark else None


def signal_exactly(pid: int, mark: Any, boot: Any, number: int) -> bool:
    """Signal the identified process. Return False, and send no signal, if its identity can't be verified."""
    opener, sender = getattr(os, "pidfd_open", None), getattr(signal, "pidfd_send_signal", None)
    handle = -1
    if opener and sender:
        try:
            handle = opener(pid)
        except ProcessLookupError:
            return False
        except OSError:
            handle = -1  # a kernel without pidfd_open
    try:
        if is_alive(pid, mark, boot) is not True:
            return False
        if handle >= 0 and sender:
            sender(handle, number)
        else:
            os.kill(pid, number)
        return True
    except OSError:
        return False
    finally:
        if handle >= 0:
            os.close(handle)


def group_members(pgid: int) -> list[int] | None:
    """Return the pids of the running members of a process group; None if /proc is missing."""
    if not has_proc():
        return None
    stats = ((pid, proc_stat(pid)) for pid in all_pids())
    return [pid for pid, f in stats if f and f[2] == str(pgid) and f[0] not in ("Z", "X", "x")]


def all_pids() -> list[int]:
    """Return the pids on this machine or in this container; empty if /proc is missing."""
    try:
        return sorted(int(name) for name in os.listdir(PROC) if name.isdigit())
    except OSError:
        return []


def environ_of(pid: int) -> dict[str, str]:
    """Return a process's initial environment; empty if it can't be read."""
    try:
        raw = read_small(f"{PROC}/{pid}/environ", 1 << 20)
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in raw.split(b"\0") if b"=" in item)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def kill_group(pgid: int, number: int) -> None:
    """Signal a process group, then continue stopped processes, which otherwise could not handle the signal."""
    for n in (number, signal.SIGCONT):
        try:
            os.killpg(pgid, n)
        except OSError:
            return


def hide_memory() -> None:
    """Prevent other processes of the same user from reading this process's memory, if the kernel supports that."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    except (ImportError, OSError, AttributeError, TypeError):
        pass
