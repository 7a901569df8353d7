"""Saying how far a piece of work is, to a client that waits for it."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
from mcp.server.mcpserver import Context as ClientContext

T = TypeVar("T")
Note = Callable[[float, float | None], None]
"""Says how far a piece of work is: done, and of how much when that is known."""


async def reporting(client: ClientContext[Any, Any], work: Callable[[Note], Awaitable[T]]) -> T:
    """Do `work`, which is handed a function to say how far it is, and notify the client twice a second."""
    news: list[tuple[float, float | None]] = []

    def note(done: float, total: float | None) -> None:
        news[:] = [(done, total)]

    async def tell() -> None:
        while True:
            await anyio.sleep(0.5)
            if news:
                await client.report_progress(*news[-1])

    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tell)
        try:
            result = await work(note)
        except Exception as error:
            failure = error  # raised below: a task group would wrap it
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return result


def summed(note: Note) -> Callable[[int], None]:
    """Return a callback that takes numbers of bytes, from several threads, and reports their sum."""
    done, lock = 0, threading.Lock()

    def count(more: int) -> None:
        nonlocal done
        with lock:
            done += more
        note(done, None)

    return count
