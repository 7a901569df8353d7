"""A clock that can be set forward for all processes at once, so that a pretend world needs no real hours."""

from __future__ import annotations

import time
from pathlib import Path

import anyio


class ShiftedClock:
    """The machine's own clock plus the seconds in a file. Whoever writes the file moves every process that reads it.

    Waiting is real, so that processes get their time. A file that is missing or can't be read counts as no shift.
    """

    def __init__(self, file: Path) -> None:
        self.file = file

    def now(self) -> float:
        """Seconds since the epoch, shifted."""
        try:
            return time.time() + float(self.file.read_text("ascii"))
        except (OSError, ValueError):
            return time.time()

    async def sleep(self, seconds: float) -> None:
        """Wait for real."""
        await anyio.sleep(seconds)
