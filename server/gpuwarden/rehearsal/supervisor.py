"""The supervisor of one rehearsal instance: it polls every 50 ms, so that due changes happen without other callers.

`python -m gpuwarden.rehearsal.supervisor ROOT/instances/ID` detaches itself, locks `ROOT/hosts/ID.lock` and ends when
the instance can't change by itself any more, when the cloud's folder is gone, or after a bounded life. The next call to
the cloud starts a new one. It is not needed for correctness: any caller applies the same transitions.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

LOOK_S = 0.05


def main(folder: Path) -> None:
    """Detach, then poll until nothing can change any more."""
    if hasattr(os, "fork") and os.fork():
        return  # the launcher is awaited; the supervisor itself is orphaned
    from filelock import FileLock, Timeout

    from gpuwarden.core.errors import WardenError

    root = folder.parent.parent
    if not (root / "hosts").is_dir():
        return
    try:
        with FileLock(root / "hosts" / f"{folder.name}.lock", timeout=0):
            from gpuwarden.core.clock import SystemClock
            from gpuwarden.rehearsal.cloud import Cloud
            from gpuwarden.rehearsal.store import Store

            config = Store(root).config()
            if config is None:
                return
            cloud = Cloud(root, config.profile, SystemClock(), supervise=False, make=False)
            end = time.monotonic() + config.settings.host_life_s
            while time.monotonic() < end and (root / "state.json").exists() and cloud.tick(folder.name):
                time.sleep(LOOK_S)
    except (Timeout, FileNotFoundError, WardenError):
        return  # another supervisor runs, or the cloud is gone or unreadable; the next caller gets the error


if __name__ == "__main__":
    main(Path(sys.argv[1]))
