"""Streams that update open pages. A stream sends the full view of a page whenever the view changes.

One task builds each view once for all windows that show a page. It does so soon after a change in the ledger or the
metric store, and every few seconds for data that is not recorded there, such as a log. A slow window skips views but
never falls behind, because views are not queued. If no window is open, no views are built.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Final

import anyio
from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from gpuwarden.core.errors import NoCapacity, WardenError
from gpuwarden.core.task_groups import background
from gpuwarden.interfaces.http.access import principal_of
from gpuwarden.interfaces.http.pages.rendering import View
from gpuwarden.lifecycle.context import Context

logger = logging.getLogger(__name__)
EVERY_S: Final = 0.5
"""Seconds between two checks for new records."""
SOONEST_S: Final = 2.0
"""Minimum seconds between two views of a page."""
DUE_S: Final = 4.0
"""Seconds after which a view is rebuilt even without new records."""
ALIVE_S: Final = 15.0
"""Seconds after which an unchanged view is sent again, to detect a dead connection."""
SHARE: Final = 4.0
"""After building views, the task pauses for this multiple of the time that building them took."""
MAX_STREAMS: Final = 200
"""Maximum number of streams for all pages, which share the server's connections.

A page without a stream polls instead.
"""
MAX_EACH: Final = 20
"""Maximum number of streams for one session or token, so that it can't use up the others' streams."""


@dataclass
class Board:
    """One open page, with its latest view and the event that its readers wait for."""

    make: Callable[[], Awaitable[View]]
    readers: int = 0
    made_at: float = -DUE_S
    stale: bool = True
    same_as: str = ""
    text: str = ""
    version: int = 0
    changed: anyio.Event = field(default_factory=anyio.Event)

    def put(self, view: View) -> None:
        """Store a view, and wake its readers unless only the values of meters and clocks have changed."""
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
    """The streams for one server's pages."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self._boards: dict[str, Board] = {}
        self._readers: Counter[str] = Counter()
        self._wanted = anyio.Event()
        self._seen = (-1, -1)
        """The ledger's last event and the metric store's version at the last check."""

    def stream(self, request: Request, make: Callable[[], Awaitable[View]], part: str = "") -> Response:
        """Return the stream for the requested page, or for a part of it. Raises NoCapacity if too many are open."""
        who = principal_of(request).id
        if self._full(who):
            raise NoCapacity("too many pages are open", "Close some of them, then reload.")
        lines = self.lines(f"{request.url.path}?{part}", who, make)
        return StreamingResponse(lines, media_type="text/event-stream")

    async def lines(self, name: str, who: str, make: Callable[[], Awaitable[View]]) -> AsyncIterator[str]:
        """Yield each new view as a server-sent event. JSON escapes line breaks, so text can't start another event."""
        if self._full(who):  # other streams may have been admitted in the meantime
            return
        with self._reading(name, who, make) as board:
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
    def _reading(self, name: str, who: str, make: Callable[[], Awaitable[View]]) -> Iterator[Board]:
        board = self._boards.setdefault(name, Board(make))
        board.readers += 1
        self._readers[who] += 1
        self._wanted.set()
        try:
            yield board
        finally:
            board.readers -= 1
            if not board.readers:
                self._boards.pop(name, None)
            self._readers[who] -= 1
            self._readers += Counter()  # removes the entries without streams

    def running(self) -> AbstractAsyncContextManager[None]:
        """Build views within this context, while pages are open."""
        return background(self._work)

    async def _work(self) -> None:
        while True:
            if not self._boards:
                self._wanted = anyio.Event()
                await self._wanted.wait()
            begun = anyio.current_time()
            try:
                await self.look()
            except Exception as error:  # a temporary disk failure does not end the streams
                _log("no page can be updated", error)
            await anyio.sleep(max(EVERY_S, SHARE * (anyio.current_time() - begun)))

    async def look(self) -> None:
        """Check once for new records, and build the views that are due."""
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
        except Exception as error:  # an error in one page must not stop other pages or the server that runs this task
            _log("a page can't be updated", error)
        board.made_at = anyio.current_time()
