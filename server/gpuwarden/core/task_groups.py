"""Task groups: run work in the background of a block, and raise the first error instead of an exception group."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import anyio


@asynccontextmanager
async def background(work: Callable[[], Coroutine[Any, Any, object]]) -> AsyncIterator[None]:
    """Run `work` in the background until the block ends."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(work)
        try:
            yield
        finally:
            tasks.cancel_scope.cancel()


@contextmanager
def first_error() -> Iterator[None]:
    """Raise the first error of a task group instead of the exception group that contains it."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
