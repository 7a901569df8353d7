"""Prepare a forked process that will be killed, so that its siblings don't wait for its locks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any


def own_progress_locks() -> None:
    """Give this process its own locks for progress bars.

    tqdm shares a semaphore with forked processes; a process that is killed while it draws a bar would keep it forever.
    """
    if "tqdm.std" in sys.modules:
        for bar in _with_subclasses(sys.modules["tqdm.std"].tqdm):
            bar.set_lock(threading.RLock())


def _with_subclasses(kind: type[Any]) -> Iterator[Any]:
    yield kind
    for below in kind.__subclasses__():
        yield from _with_subclasses(below)
