"""The supervisor of one rehearsal instance: it looks every 50 ms, so that things happen when nobody else looks.

`python -m gpuwarden.rehearsal.supervisor <root>/instances/<id>` detaches itself, holds `<root>/hosts/<id>.lock` and ends
when the instance can't move by itself any more, when the cloud's folder is gone, or after a bounded life. Another
call to the cloud wakes a new one. It is not needed for correctness: whoever looks makes the same moves.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

LOOK_S = 0.05
# Not the marker, which would make it one of the processes that it kills, and none of the caller's secrets.
ENV = ("PATH", "PYTHONPATH", "HOME", "LANG", "SYSTEMROOT", "TEMP", "TMPDIR")


def wake(root: Path, id: str) -> None:  # noqa: A002
    """Start a host for an instance unless one lives. Returns once it has detached itself."""
    from filelock import FileLock, Timeout

    from gpuwarden.private import private_folder

    lock = root / "hosts" / f"{id}.lock"
    private_folder(lock.parent)
    try:
        with FileLock(lock, timeout=0):
            pass
    except Timeout:
        return
    host = subprocess.Popen(
        [sys.executable, "-m", "gpuwarden.rehearsal.supervisor", str(root / "instances" / id)],
        env={k: os.environ[k] for k in ENV if k in os.environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=root.anchor,
        start_new_session=True,
    )
    if hasattr(os, "fork"):
        host.wait()


def main(folder: Path) -> None:
    """Detach, then look until there is nothing left to look at."""
    if hasattr(os, "fork") and os.fork():
        return  # the launcher is waited for; the host itself belongs to nobody
    from filelock import FileLock, Timeout

    root = folder.parent.parent
    if not (root / "hosts").is_dir():
        return
    try:
        with FileLock(root / "hosts" / f"{folder.name}.lock", timeout=0):
            _watch(root, folder.name)
    except (Timeout, FileNotFoundError):
        return


def _watch(root: Path, id: str) -> None:  # noqa: A002
    from gpuwarden.core.clock import SystemClock
    from gpuwarden.core.errors import WardenError
    from gpuwarden.rehearsal.cloud import Cloud
    from gpuwarden.rehearsal.store import Store

    try:
        config = Store(root).config()
        if config is None:
            return
        cloud = Cloud(root, config.profile, SystemClock(), supervise=False, make=False)
        end = time.monotonic() + config.settings.host_life_s
        while time.monotonic() < end and (root / "state.json").exists() and cloud.tick(id):
            time.sleep(LOOK_S)
    except WardenError:
        return  # the cloud is gone or unreadable; whoever calls it next is told


if __name__ == "__main__":
    main(Path(sys.argv[1]))
