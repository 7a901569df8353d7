"""Write metrics posts to the store in batches: all posts that arrive during a commit go into the next one.

The response to a post is sent after the post has been committed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import anyio
from anyio import to_thread

from gpuwarden.core.errors import RateLimited, WardenError, as_warden_error
from gpuwarden.metrics.points import PostedAlert, PostedPoints
from gpuwarden.metrics.store import Batch, MetricStore, PostResult

MOST_WAITING: Final = 5_000
"""The maximum number of posts that can wait for a commit. Further posts are rejected, and senders must try again."""


@dataclass
class _Waiting:
    """One post that is waiting for its commit."""

    post: PostedPoints | PostedAlert
    done: anyio.Event = field(default_factory=anyio.Event)
    written: PostResult | None = None
    error: WardenError | None = None


class Batches:
    """Collect posts from any number of tasks, and commit them in batches.

    Use the object inside a `running()` block, which commits the remaining posts when it ends.
    """

    def __init__(self, store: MetricStore) -> None:
        self.store = store
        self.changed = anyio.Event()
        """An event that is set at each commit by this process and then replaced with a new event."""
        self._waiting: list[_Waiting] = []
        self._some = anyio.Event()

    async def add(self, post: PostedPoints | PostedAlert) -> PostResult:
        """Store a post and return after its commit. Raises RateLimited if the queue is full, or DiskError."""
        if len(self._waiting) >= MOST_WAITING:
            raise RateLimited("too many posts are waiting to be written", "Send the post again in a second.")
        mine = _Waiting(post)
        self._waiting.append(mine)
        self._some.set()
        await mine.done.wait()
        if mine.error is not None:
            raise mine.error
        return mine.written or PostResult(0, 0, ())

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Batches]:
        """Commit in the background until the block ends."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._work)
            try:
                yield self
            finally:
                tasks.cancel_scope.cancel()
                with anyio.CancelScope(shield=True):
                    await self.commit()

    async def _work(self) -> None:
        while True:
            await self._some.wait()
            with anyio.CancelScope(shield=True):  # every waiting caller must get a result
                await self.commit()

    async def commit(self) -> None:
        """Write all waiting posts and set their results."""
        taken, self._waiting = self._waiting, []
        self._some = anyio.Event()
        if not taken:
            return
        points = [one for one in taken if isinstance(one.post, PostedPoints)]
        batch = Batch(
            posts=[one.post for one in points if isinstance(one.post, PostedPoints)],
            alerts=[one.post for one in taken if isinstance(one.post, PostedAlert)],
        )
        try:
            for one, written in zip(points, await to_thread.run_sync(self.store.write, batch), strict=True):
                one.written = written
        except Exception as error:  # every waiting caller must get a result, even after an unexpected error
            for one in taken:
                one.error = as_warden_error(error)
        for one in taken:
            one.done.set()
        self.changed.set()
        self.changed = anyio.Event()
