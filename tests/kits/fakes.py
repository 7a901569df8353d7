"""Small fakes for time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio

from waiting import soon


class FakeClock:
    """A clock that moves only on `advance` and `sleep`."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.time = now

    def now(self) -> float:
        return self.time

    def advance(self, seconds: float) -> None:
        self.time += seconds

    async def sleep(self, seconds: float) -> None:
        self.time += seconds
        await anyio.lowlevel.checkpoint()


class Limits:
    """A replacement for `anyio` in a module of the product that lets the test decide when time limits expire."""

    def __init__(self) -> None:
        self.open: list[anyio.CancelScope] = []
        self.time = 0.0

    @contextmanager
    def fail_after(self, delay: float | None) -> Iterator[anyio.CancelScope]:
        with anyio.CancelScope() as scope:
            self.open.append(scope)
            try:
                yield scope
            finally:
                self.open.remove(scope)
        if scope.cancelled_caught:
            raise TimeoutError

    def current_time(self) -> float:
        return self.time

    async def pass_when(self, happened: Callable[[], object], seconds: float = 60.0) -> None:
        """Wait for an event, then let all open time limits expire."""
        await soon(happened)
        self.time += seconds
        for scope in self.open:
            scope.cancel()

    def __getattr__(self, name: str) -> Any:
        return getattr(anyio, name)
