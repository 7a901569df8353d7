"""Wait for real processes and servers. Only this module lets a test read a running clock."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

T = TypeVar("T")

PATIENCE = float(os.environ.get("GPUWARDEN_TEST_PATIENCE", "1"))
"""Factor on every time limit of a test; CI sets 4."""
IDLE = 2.0
"""Pause after a look, as a multiple of its duration, so that costly looks don't slow down what they wait for."""
LONGEST_S = 0.5
"""Longest pause that the duration of a look adds."""


def real_time() -> float:
    """Return the real time, as the start of a test's clock or for a real program that reads it; never as a limit."""
    return time.time()


def eventually(
    look: Callable[[], T], within: float = 30.0, *, every: float = 0.02, good: Callable[[T], object] = bool
) -> T:
    """Call `look` until its answer is `good`, and return that. Fails after `within` seconds times PATIENCE."""
    end = time.monotonic() + within * PATIENCE
    while True:
        began = time.monotonic()
        if good(seen := look()):
            return seen
        assert time.monotonic() < end, f"still {seen!r} after {within * PATIENCE:.0f} s"
        time.sleep(_pause(began, every))


async def soon(
    look: Callable[[], T | Awaitable[T]],
    within: float = 30.0,
    *,
    every: float = 0.02,
    good: Callable[[T], object] = bool,
) -> T:
    """Do the same as `eventually` without blocking the event loop; `look` may be async."""
    end = time.monotonic() + within * PATIENCE
    while True:
        began = time.monotonic()
        answer = look()
        seen: T = await answer if inspect.isawaitable(answer) else answer
        if good(seen):
            return seen
        assert time.monotonic() < end, f"still {seen!r} after {within * PATIENCE:.0f} s"
        await anyio.sleep(_pause(began, every))


def _pause(began: float, every: float) -> float:
    return max(every, min(IDLE * (time.monotonic() - began), LONGEST_S))
