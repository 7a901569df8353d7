"""Poll machines for the pages and for jobs' status requests: one poll per target at a time, every few seconds.

A browser sends a request every two seconds, and several windows may be open. All of them get the result of the last
poll. A due poll runs in the background; if there is no earlier result, a request briefly waits for the poll.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

from gpuwarden.core.errors import WardenError, as_warden_error
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.monitoring.check import CheckedJob, check
from gpuwarden.lifecycle.monitoring.overview import Overview, overview

T = TypeVar("T")
EVERY_S: Final = 5.0
"""Seconds between two polls of one job."""
OVERVIEW_S: Final = 15.0
"""Seconds between two polls of all platforms. Each poll calls every provider in use."""
FIRST_S: Final = 1.0
"""Seconds that a page waits for a first poll; after that it shows the state in the ledger."""
LOG_BYTES: Final = 64 << 10
"""Number of bytes at the end of a log that a poll reads."""
KEPT: Final = 100
"""Maximum number of jobs whose last poll is kept."""


class Poll(Generic[T]):
    """The latest result of polling one target. `error` is set if the last poll failed."""

    def __init__(self, ask: Callable[[], Awaitable[T]], every_s: float) -> None:
        self._ask, self._every_s = ask, every_s
        self._task: asyncio.Task[None] | None = None
        self._due = 0.0
        self.value: T | None = None
        self.error: WardenError | None = None

    async def newest(self, patience_s: float = FIRST_S) -> T | None:
        """Return the last result, and start a poll if one is due.

        Without a result, wait up to `patience_s` seconds for the first one.
        """
        now = asyncio.get_running_loop().time()
        if self._task is None and now >= self._due:
            self._task = asyncio.create_task(self._run())
        if self._task is not None and self.value is None and patience_s > 0:
            await asyncio.wait({self._task}, timeout=patience_s)
        return self.value

    async def _run(self) -> None:
        try:
            self.value, self.error = await self._ask(), None
        except Exception as error:
            self.error = as_warden_error(error)
        finally:
            self._due = asyncio.get_running_loop().time() + self._every_s
            self._task = None


class Polls:
    """One server's latest polls: of all platforms, and of the jobs whose pages are open."""

    def __init__(self, ctx: Context, log_bytes: int = LOG_BYTES) -> None:
        self.ctx, self.log_bytes = ctx, log_bytes
        self.everything: Poll[Overview] = Poll(lambda: overview(ctx), OVERVIEW_S)
        self._jobs: OrderedDict[str, Poll[CheckedJob]] = OrderedDict()

    def job(self, job_id: str) -> Poll[CheckedJob]:
        """Return the `Poll` for one job."""
        found = self._jobs.setdefault(job_id, Poll(lambda: check(self.ctx, job_id, limit=self.log_bytes), EVERY_S))
        self._jobs.move_to_end(job_id)
        if len(self._jobs) > KEPT:
            self._jobs.popitem(last=False)
        return found
