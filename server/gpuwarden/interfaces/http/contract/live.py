"""Follow jobs: poll the ledger for events, and the metric store for points and alerts, at most four times a second.

One task polls for all subscribers and detects writes by every process: this one, the watch and commands. The
queue of a slow subscriber holds only the newest point of each metric, and at most MAX_WAITING events. Further events
remain in storage until the subscriber reads them, so a slow connection loses no events.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import anyio
from anyio import to_thread

from gpuwarden.core.errors import NoCapacity, WardenError
from gpuwarden.core.sanitize import named, redact
from gpuwarden.core.task_groups import background
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.records import read_job
from gpuwarden.metrics.store import Point

logger = logging.getLogger(__name__)
EVERY_S: Final = 0.25
MAX_WAITING: Final = 256
"""Maximum number of queued events for one subscriber."""
MAX_SUBSCRIBERS: Final = 200
MAX_EACH: Final = 50
"""Maximum number of streams for one token or session, so that none can use up all streams."""
Json = dict[str, Any]


@dataclass
class Place:
    """A subscriber's position in the ledger and in the store's alerts."""

    seq: int = 0
    alert: int = 0

    def __str__(self) -> str:
        return f"{self.seq}.{self.alert}"

    @classmethod
    def parse(cls, text: str) -> Place | None:
        """Parse the position that a client sends back. Return None for any other text."""
        seq, dot, alert = text.partition(".")
        if dot and all(part.isascii() and part.isdigit() and len(part) < 16 for part in (seq, alert)):
            return cls(int(seq), int(alert))
        return None


@dataclass
class Subscriber:
    """One stream's queue."""

    job_id: str
    place: Place
    who: str = ""
    events: list[Json] = field(default_factory=list)
    points: dict[str, Json] = field(default_factory=dict)
    sent: dict[str, Point] = field(default_factory=dict)
    behind: bool = False
    """Whether storage may contain events that did not fit in the queue."""
    some: anyio.Event = field(default_factory=anyio.Event)

    @property
    def room(self) -> int:
        """Return the number of further events that the queue can hold."""
        return MAX_WAITING - len(self.events)

    def put(self, event: Json) -> None:
        """Queue an event."""
        self.events.append(event)
        self.behind = self.room == 0
        self.some.set()

    def show(self, latest: dict[str, Point]) -> None:
        """Queue the points that have changed."""
        for name, point in latest.items():
            if self.sent.get(name) != point:
                # JSON has no `nan`, `inf` and `-inf`, so they become text.
                value = point.value if math.isfinite(point.value) else str(point.value)
                self.points[named(name)] = {"step": point.step, "at": point.at, "value": value}
        self.sent = latest
        if self.points:
            self.some.set()

    async def take(self) -> list[Json]:
        """Wait for new events and points, and return all of them."""
        await self.some.wait()
        self.some = anyio.Event()
        news = self.events
        if self.points:
            news.append({"type": "metrics", "metrics": self.points})
        self.events, self.points = [], {}
        return news


class Live:
    """One server's streams."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self._subscribers: list[Subscriber] = []
        self._wanted = anyio.Event()
        self._seen = (-1, -1)
        """The ledger's last event and the store's version at the last poll."""

    @contextmanager
    def following(self, job_id: str, since: Place | None = None, who: str = "") -> Iterator[Subscriber]:
        """Subscribe to a job. The first event is the job's current state; later events report its changes.

        `since` replays the events after a position. Raises NotFound, or NoCapacity if too many streams are open in
        total or for `who`.
        """
        if len(self._subscribers) >= MAX_SUBSCRIBERS:
            raise NoCapacity(f"{MAX_SUBSCRIBERS} streams are already open", "Close one, then retry.")
        if sum(one.who == who for one in self._subscribers) >= MAX_EACH:
            raise NoCapacity(f"{MAX_EACH} streams are already open for this token", "Close one, then retry.")
        job = read_job(self.ctx.ledger, job_id)
        present = Place(self.ctx.ledger.last_seq(), self.ctx.metrics.last_alert(job_id))
        # A position beyond the end belongs to another ledger; waiting for that position would skip new events.
        since = Place(min(since.seq, present.seq), min(since.alert, present.alert)) if since else present
        one = Subscriber(job_id, since, who)
        one.put({"type": "state", "state": str(job.state), "at": job.since, "why": self._shown(job.why)})
        self._subscribers.append(one)
        self._seen = (-1, -1)
        self._wanted.set()
        try:
            yield one
        finally:
            self._subscribers.remove(one)

    def _shown(self, text: str) -> str:
        """Return text as a single line without secrets, which are removed before the text is truncated."""
        return named(redact(text, self.ctx.hidden(text)), 300)

    def running(self) -> AbstractAsyncContextManager[None]:
        """Poll for changes within this context, while there are subscribers."""
        return background(self._work)

    async def _work(self) -> None:
        while True:
            if not self._subscribers:
                self._wanted = anyio.Event()
                await self._wanted.wait()
            try:
                await self.look()
            except WardenError as error:  # a temporary disk failure does not end the streams
                logger.warning("events could not be read: %s", error.message)
                self._seen = (-1, -1)  # the next poll reads everything again
            await anyio.sleep(EVERY_S)

    async def look(self) -> None:
        """Poll once, and queue the changes for each subscriber until its queue is full."""
        seen = self.ctx.ledger.last_seq(), await to_thread.run_sync(self.ctx.metrics.version)
        moved, stored = seen[0] != self._seen[0], seen[1] != self._seen[1]
        self._seen = seen
        for job_id in {one.job_id for one in self._subscribers}:
            latest = await to_thread.run_sync(self.ctx.metrics.latest, job_id) if stored else None
            for one in [one for one in self._subscribers if one.job_id == job_id]:
                behind, one.behind = one.behind, one.room == 0
                if latest is not None:
                    one.show(latest)
                if (moved or behind) and one.room:
                    for event in self.ctx.ledger.events(f"job/{job_id}", after=one.place.seq, limit=one.room):
                        one.place.seq = event.seq
                        why = getattr(event.data, "why", None)
                        row = {"type": "event", "id": str(one.place), "kind": event.kind, "state": event.state}
                        more = {"why": self._shown(why)} if isinstance(why, str) and why else {}
                        one.put({**row, "at": event.at, **more})
                if (stored or behind) and one.room:
                    room = one.room
                    alerts = await to_thread.run_sync(self.ctx.metrics.alerts, job_id, one.place.alert, room)
                    for alert in alerts:
                        one.place.alert = alert.id
                        body = {n: self._shown(v) if isinstance(v, str) else v for n, v in alert.fields.items()}
                        shown = {"type": "alert", "id": str(one.place), "alert": alert.type, "at": alert.at}
                        one.put({**shown, "body": body})
                    # The queue may have been emptied during the query, so it can't show whether more alerts are stored.
                    one.behind = one.behind or len(alerts) == room
