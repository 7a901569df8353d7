"""Streams that keep open pages current: the whole view of a page, each time that it differs from the one before.

One task makes the views, a view once for all windows of a page: soon after the ledger or the store of metrics has
something new, and every few seconds for what nobody records, such as a log. A window that reads slowly misses views and
never falls behind, since no view waits in a queue. Without windows nothing is made.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Final

import anyio
from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from gpuwarden.core.errors import NoCapacity, WardenError
from gpuwarden.interfaces.http.access import principal_of
from gpuwarden.interfaces.http.pages.rendering import View
from gpuwarden.lifecycle.context import Context

logger = logging.getLogger(__name__)
EVERY_S: Final = 0.5
"""Seconds between two looks at whether anything was recorded."""
SOONEST_S: Final = 2.0
"""Seconds between two views of a page, however much is recorded."""
DUE_S: Final = 4.0
"""Seconds after which a view is made again where nothing was recorded."""
ALIVE_S: Final = 15.0
"""Seconds after which a view is sent again although it is the same: so a dead connection is noticed."""
SHARE: Final = 4.0
"""Making views pauses for so many times as long as it took."""
MAX_STREAMS: Final = 200
"""Streams of all pages, a part of the connections that the server takes. A page without one asks again and again."""
MAX_EACH: Final = 20
"""Streams of one session or token, so that none takes those of the others."""


@dataclass
class Board:
    """One page that somebody looks at: its latest view, and who waits for the next one."""

    make: Callable[[], Awaitable[View]]
    readers: int = 0
    made_at: float = -DUE_S
    stale: bool = True
    same_as: str = ""
    text: str = ""
    version: int = 0
    changed: anyio.Event = field(default_factory=anyio.Event)

    def put(self, view: View) -> None:
        """Keep a view, and wake readers unless it only differs in what a meter or a clock counts."""
        rates = {name: meter["rate"] for name, meter in view.get("meters", {}).items()}
        texts = {name: text for name, text in view.get("texts", {}).items() if name != "updated"}
        self.text = json.dumps(view, allow_nan=False)
        lasting = json.dumps({**view, "at": None, "meters": rates, "texts": texts})
        if lasting == self.same_as:
            return
        self.same_as = lasting
        self.version += 1
        self.changed.set()
        self.changed = anyio.Event()


def _log(what: str, error: Exception) -> None:
    if isinstance(error, WardenError):
        logger.warning("%s: %s", what, error.message)
    else:
        logger.error(what, exc_info=error)


class Following:
    """The streams of one server's pages."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self._boards: dict[str, Board] = {}
        self._readers: Counter[str] = Counter()
        self._wanted = anyio.Event()
        self._seen = (-1, -1)
        """The ledger's last event and the version of the store of metrics at the last look."""

    def stream(self, request: Request, make: Callable[[], Awaitable[View]]) -> Response:
        """Return the stream of the page that a request is about. Raises NoCapacity where too many are open."""
        who = principal_of(request).id
        if self._full(who):
            raise NoCapacity("too many pages are followed already", "Close some of them.")
        return StreamingResponse(self.lines(request.url.path, who, make), media_type="text/event-stream")

    async def lines(self, path: str, who: str, make: Callable[[], Awaitable[View]]) -> AsyncIterator[str]:
        """Yield each new view as a server-sent event. JSON escapes line ends, so that no text begins another event."""
        if self._full(who):  # many were admitted at the same moment
            return
        with self._reading(path, who, make) as board:
            yield "retry: 2000\n\n"
            sent = 0
            while True:
                news = board.changed
                if board.version == sent:
                    with anyio.move_on_after(ALIVE_S):
                        await news.wait()
                sent = board.version
                yield f"event: view\ndata: {board.text}\n\n" if board.text else ": alive\n\n"

    def _full(self, who: str) -> bool:
        return self._readers[who] >= MAX_EACH or self._readers.total() >= MAX_STREAMS

    @contextmanager
    def _reading(self, path: str, who: str, make: Callable[[], Awaitable[View]]) -> Iterator[Board]:
        board = self._boards.setdefault(path, Board(make))
        board.readers += 1
        self._readers[who] += 1
        self._wanted.set()
        try:
            yield board
        finally:
            board.readers -= 1
            if not board.readers:
                self._boards.pop(path, None)
            self._readers[who] -= 1
            self._readers += Counter()  # drops who reads nothing

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Make views while somebody looks."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._work)
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()

    async def _work(self) -> None:
        while True:
            if not self._boards:
                self._wanted = anyio.Event()
                await self._wanted.wait()
            begun = anyio.current_time()
            try:
                await self.look()
            except Exception as error:  # a disk that fails for a moment ends no stream
                _log("no page can be kept current", error)
            await anyio.sleep(max(EVERY_S, SHARE * (anyio.current_time() - begun)))

    async def look(self) -> None:
        """Look once whether anything was recorded, and make the views that are due."""
        seen = self.ctx.ledger.last_seq(), await to_thread.run_sync(self.ctx.metrics.version)
        recorded, now = seen != self._seen, anyio.current_time()
        self._seen = seen
        async with anyio.create_task_group() as tasks:
            for board in self._boards.values():
                board.stale |= recorded
                if now - board.made_at >= (SOONEST_S if board.stale else DUE_S):
                    tasks.start_soon(self._make, board)

    async def _make(self, board: Board) -> None:
        board.stale = False
        try:
            board.put(await board.make())
        except Exception as error:  # of one page: the others, and the server that this task is a part of, go on
            _log("a page can't be kept current", error)
        board.made_at = anyio.current_time()
