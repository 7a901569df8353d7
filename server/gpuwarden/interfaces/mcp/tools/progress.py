"""Progress notifications for a waiting client."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
from mcp.server.mcpserver import Context as ClientContext

T = TypeVar("T")
Note = Callable[[float, float | None], None]
"""Progress callback. Its arguments are the number of bytes done and, if known, the total."""


async def reporting(client: ClientContext[Any, Any], work: Callable[[Note], Awaitable[T]], doing: str) -> T:
    """Run `work` with a progress callback, and notify the client twice a second.

    `doing` is the verb in the message, such as "verifying".
    """
    news: list[tuple[float, float | None]] = []

    def note(done: float, total: float | None) -> None:
        news[:] = [(done, total)]

    async def tell() -> None:
        while True:
            await anyio.sleep(0.5)
            if news:
                done, total = news[-1]
                of = "" if total is None else f" of {total:,.0f}"
                await client.report_progress(done, total, f"{doing}: {done:,.0f}{of} bytes")

    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tell)
        try:
            result = await work(note)
        except Exception as error:
            failure = error  # raised outside the task group, which would wrap it
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return result
