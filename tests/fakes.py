"""Small stand-ins for time. Everything else in the tests is real."""

from __future__ import annotations

import anyio


class FakeClock:
    """A clock that moves when it is told to, or slept on."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.time = now

    def now(self) -> float:
        return self.time

    def advance(self, seconds: float) -> None:
        self.time += seconds

    async def sleep(self, seconds: float) -> None:
        self.time += seconds
        await anyio.lowlevel.checkpoint()
