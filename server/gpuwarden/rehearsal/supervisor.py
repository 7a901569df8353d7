"""The supervisor of a rehearsal cloud. It polls the cloud, so that scheduled changes happen even if no other process
calls the cloud.

`python -m gpuwarden.rehearsal.supervisor ROOT` detaches itself, locks `ROOT/supervisor.lock` and exits when no instance
has a scheduled change, when the cloud's folder is gone, or after a maximum lifetime. The next call to the cloud starts
a new supervisor. A supervisor is not needed for correctness, because every caller applies the same transitions.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

LOOK_S = 0.05
IDLE_S = 1.0
"""The longest wait between two polls. The waits grow while nothing changes."""


def main(root: Path) -> None:
    """Detach from the caller, then poll until the cloud can't change without a call."""
    if hasattr(os, "fork") and os.fork():
        return  # the caller waits only for this process; the forked child becomes the supervisor
    from filelock import FileLock, Timeout

    from gpuwarden.core.errors import WardenError

    if not (root / "state.json").exists():
        return
    try:
        with FileLock(root / "supervisor.lock", timeout=0):
            from gpuwarden.core.clock import SystemClock
            from gpuwarden.rehearsal.cloud import Cloud
            from gpuwarden.rehearsal.store import Store

            config = Store(root).config()
            if config is None:
                return
            cloud = Cloud(root, config.profile, SystemClock(), supervise=False, make=False)
            end = time.monotonic() + config.settings.host_life_s
            wait, seen = LOOK_S, 0
            while time.monotonic() < end and (due := cloud.tick()) is not None:
                saved = (root / "state.json").stat().st_mtime_ns
                wait, seen = (min(1.5 * wait, IDLE_S) if saved == seen else LOOK_S), saved
                time.sleep(min(wait, max(due, LOOK_S)))
    except (Timeout, FileNotFoundError, WardenError):
        return  # another supervisor is running, or the cloud is gone or unreadable; the next call reports the error


if __name__ == "__main__":
    main(Path(sys.argv[1]))
