"""Clocks as parameters, so that tests need not wait."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol

import anyio


class Clock(Protocol):
    """Seconds since the epoch, and a way to wait."""

    def now(self) -> float:
        """Return seconds since the epoch."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


class SystemClock:
    """The machine's own clock."""

    def now(self) -> float:
        """Return seconds since the epoch."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """Wait for real."""
        await anyio.sleep(seconds)


class ShiftedClock:
    """Add the seconds in a file to the system clock, for every process that reads the file.

    A rehearsal needs no real hours that way. Waiting takes real time, so that processes get theirs. A missing or
    unreadable file counts as no shift.
    """

    def __init__(self, file: Path) -> None:
        self.file = file

    def now(self) -> float:
        """Return seconds since the epoch, shifted."""
        try:
            return time.time() + float(self.file.read_text("ascii"))
        except (OSError, ValueError):
            return time.time()

    async def sleep(self, seconds: float) -> None:
        """Wait for real."""
        await anyio.sleep(seconds)
