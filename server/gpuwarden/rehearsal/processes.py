"""Find and signal the processes of rehearsal instances, and never any other process.

A process belongs to an instance if its environment contains the instance's marker (ids are unique across clouds), if
its process id is recorded in a run folder and its start ticks match, or if it is a descendant of such a process. This
includes children that called setsid or ignore SIGTERM. A process can be missed only if it cleared its environment,
was orphaned, *and* is not recorded in any status.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from gpuwarden.rehearsal.model import MARKER

ROUNDS = 20
SETTLE_S = 0.5
FULL_DISK_LIMIT = 16_384
# Other variables are not passed on: with the marker, the supervisor would kill itself, and it needs no secrets.
SUPERVISOR_ENV = ("PATH", "PYTHONPATH", "HOME", "LANG", "SYSTEMROOT", "TEMP", "TMPDIR")


def of(id: str, named: Iterable[tuple[int, str, str]] = ()) -> list[psutil.Process]:  # noqa: A002
    """Return an instance's running processes. `named` lists the processes recorded in run folders: pid, start ticks and
    boot id.
    """
    found = {p.pid: p for p in psutil.process_iter() if _marker(p) == id}
    for pid, ticks, boot in named:
        if pid not in found and _proven(pid, ticks, boot):
            with contextlib.suppress(psutil.Error):
                found[pid] = psutil.Process(pid)
    for process in list(found.values()):
        with contextlib.suppress(psutil.Error):
            found.update({c.pid: c for c in process.children(recursive=True)})
    ours = {os.getpid(), os.getppid()}  # never kill this process or its ancestors, regardless of their environment
    with contextlib.suppress(psutil.Error):
        ours.update(p.pid for p in psutil.Process().parents())
    return [p for pid, p in sorted(found.items()) if pid not in ours and _lives(p)]


def terminate(processes: Iterable[psutil.Process]) -> None:
    """Ask every process to end. psutil checks the start time first, so a reused pid is never signaled."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.terminate()


def held(ids: set[str]) -> set[str]:
    """Return the ids of the instances that still have a process with their marker. All processes are scanned once."""
    return {marker for p in psutil.process_iter() if (marker := _marker(p)) in ids} if ids else set()


def kill(id: str, named: Iterable[tuple[int, str, str]] = ()) -> bool:  # noqa: A002
    """Kill all of an instance's processes, repeatedly until none is left. Return false if some survived."""
    claims = list(named)
    for _ in range(ROUNDS):
        processes = of(id, claims)
        if not processes:
            return True
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        # Wait briefly until all have exited. They are not reaped here: their parents may wait for the exit codes.
        end = time.monotonic() + SETTLE_S
        while time.monotonic() < end and any(_lives(p) for p in processes):
            time.sleep(0.002)
    return False


def limit_files(id: str, *, full: bool) -> bool:  # noqa: A002
    """Make the kernel refuse writes by an instance's processes, or allow writes again. Return false if this is not
    supported.

    This sets the soft RLIMIT_FSIZE, which also applies to root, does not need a mount, and can be removed. A write
    beyond the first 16 KiB of a file fails with EFBIG ("File too large"); a full disk would fail with ENOSPC.
    """
    try:
        from resource import RLIM_INFINITY, RLIMIT_FSIZE, prlimit
    except ImportError:
        return False
    for process in of(id):
        with contextlib.suppress(OSError, ValueError):
            _, hard = prlimit(process.pid, RLIMIT_FSIZE)
            soft = FULL_DISK_LIMIT if hard == RLIM_INFINITY else min(FULL_DISK_LIMIT, hard)
            prlimit(process.pid, RLIMIT_FSIZE, (soft if full else hard, hard))
    return True


def _marker(process: psutil.Process) -> str:
    try:
        return str(process.environ().get(MARKER, ""))
    except (psutil.Error, OSError):
        return ""


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() not in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD})
    except psutil.Error:
        return False


def _proven(pid: int, ticks: str, boot: str) -> bool:
    """Return whether a process recorded in a status is still the same process; False on systems without /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        here = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[19] == ticks and boot in {"", here}


def wake_supervisor(root: Path) -> None:
    """Start the supervisor of a cloud unless one is running. Returns after the supervisor has detached."""
    from filelock import FileLock, Timeout

    try:
        with FileLock(root / "supervisor.lock", timeout=0, mode=0o600):
            pass
    except Timeout:
        return
    host = subprocess.Popen(
        [sys.executable, "-P", "-m", "gpuwarden.rehearsal.supervisor", str(root)],
        env={k: os.environ[k] for k in SUPERVISOR_ENV if k in os.environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=root.anchor,
        start_new_session=True,
    )
    if hasattr(os, "fork"):
        host.wait()
