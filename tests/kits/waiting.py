"""Wait for real processes and servers. Tests read a running clock only through this module."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

T = TypeVar("T")

PATIENCE = float(os.environ.get("GPUWARDEN_TEST_PATIENCE", "1"))
"""Multiplier for every time limit in the tests; CI sets 4."""


def real_time() -> float:
    """Return the real time, to start a test's clock or to pass to a real program; never for a time limit."""
    return time.time()


def eventually(
    look: Callable[[], T], within: float = 30.0, *, every: float = 0.02, good: Callable[[T], object] = bool
) -> T:
    """Call `look` until its answer is `good`, and return the answer. Fails after `within` seconds times PATIENCE."""
    end = time.monotonic() + within * PATIENCE
    while not good(seen := look()):
        assert time.monotonic() < end, f"still {seen!r} after {within * PATIENCE:.0f} s"
        time.sleep(every)
    return seen


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
        answer = look()
        seen: T = await answer if inspect.isawaitable(answer) else answer
        if good(seen):
            return seen
        assert time.monotonic() < end, f"still {seen!r} after {within * PATIENCE:.0f} s"
        await anyio.sleep(every)
