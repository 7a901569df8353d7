"""A resource for each job, and notifications of changes: `resources/subscribe` and `subscriptions/listen`.

Changes are read from the ledger, so changes made by any process are reported. Alerts are sent as log messages to the
clients that have set a log level, and as messages to the model in clients that support channels. Notifications are sent
at most once a second. A client that does not read its messages delays each notification by at most SEND_S seconds.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, get_args

import anyio
import anyio.lowlevel
from mcp.server.connection import Connection
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError
from mcp.shared.subscriptions import ResourceUpdated, ServerEvent
from mcp_types import (
    INVALID_PARAMS,
    EmptyResult,
    LoggingLevel,
    SetLevelRequestParams,
    SubscribeRequestParams,
    UnsubscribeRequestParams,
)

from gpuwarden.core.errors import WardenError
from gpuwarden.core.sanitize import line, quoted, scrubbed
from gpuwarden.interfaces.mcp.wording import in_calls

if TYPE_CHECKING:
    from gpuwarden.lifecycle.context import Context

JOB_TEMPLATE: Final = "gpuwarden://jobs/{job_id}"
EVERY_S: Final = 1.0
SEND_S: Final = 5.0
"""Maximum time in seconds that a client may take to read a notification."""
MAX_SUBSCRIPTIONS: Final = 200
MAX_URI: Final = 2_048
CHANNEL: Final = "claude/channel"
"""Experimental capability of Claude Code: its notifications wake an idle session."""
CHANNEL_MESSAGE: Final = f"notifications/{CHANNEL}"
LEVELS: Final[tuple[LoggingLevel, ...]] = get_args(LoggingLevel)
"""Log levels from the least to the most severe."""

logger = logging.getLogger(__name__)


def job_uri(job_id: str) -> str:
    """Return the URI of a job's resource."""
    return JOB_TEMPLATE.format(job_id=job_id)


def job_text(ctx: Context, job_id: str) -> str:
    """Return a job as JSON, based on the ledger and this process's last poll. Raises NotFound."""
    from gpuwarden.interfaces.results.overview import job_line
    from gpuwarden.lifecycle.monitoring.overview import line_of
    from gpuwarden.lifecycle.records import read_job

    body = job_line(line_of(ctx, read_job(ctx.ledger, job_id))).model_dump(mode="json", exclude_none=True)
    return json.dumps(scrubbed(body, ctx.hidden(body)), ensure_ascii=False)


class LiveJobs:
    """The server's subscription bus, for clients that use either protocol version."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self._listeners: dict[object, Callable[[ServerEvent], None]] = {}
        self._subscribed: dict[Connection, set[str]] = {}
        self._levels: dict[Connection, LoggingLevel] = {}
        self._changed: set[str] = set()
        self._channels: set[Connection] = set()
        self._after: int | None = None
        """Number of the last event before the first subscription or `run`; None before both."""

    def changed(self, job_id: str) -> None:
        """Record that a job has changed outside the ledger, for example because a new metric value has arrived."""
        self._changed.add(job_id)

    async def publish(self, event: ServerEvent) -> None:
        """Deliver an event to every `subscriptions/listen` stream."""
        for listener in list(self._listeners.values()):
            listener(event)
        await anyio.lowlevel.checkpoint()

    def subscribe(self, listener: Callable[[ServerEvent], None]) -> Callable[[], None]:
        """Add a stream. Return a function that removes it."""
        self._start()
        key = object()
        self._listeners[key] = listener

        def unsubscribe() -> None:
            self._listeners.pop(key, None)

        return unsubscribe

    def serve(self, server: Server[Any]) -> None:
        """Register the handlers for the older protocol version. The SDK's server has no other hook for them."""
        server.add_request_handler("resources/subscribe", SubscribeRequestParams, self._subscribe)
        server.add_request_handler("resources/unsubscribe", UnsubscribeRequestParams, self._unsubscribe)
        server.add_request_handler("logging/setLevel", SetLevelRequestParams, self._set_level)

    async def run(self) -> None:
        """Notify clients of changes until this task is canceled."""
        after = self._start()
        while True:
            await anyio.sleep(EVERY_S)  # other processes write in real time, regardless of a rehearsal's clock
            try:
                after = await self.round(after)
            except WardenError as error:  # the ledger is temporarily unreadable
                logger.warning("%s", line(error.message, 300))

    def _start(self) -> int:
        """Return the number of the event after which changes are reported: the last one when this is first called."""
        if self._after is None:
            self._after = self.ctx.ledger.last_seq()
        return self._after

    async def round(self, after: int) -> int:
        """Notify clients of the events after event number `after`. Return the number of the last event."""
        from gpuwarden.ledger.events import AlertRaised
        from gpuwarden.lifecycle.notify import Alert

        events = self.ctx.ledger.events(after=after, limit=1_000)
        changed = self._changed | {job for event in events if (job := self._job_of(event.subject))}
        self._changed = set()
        for uri in map(job_uri, sorted(changed)):
            await self.publish(ResourceUpdated(uri))
            for connection in [c for c, uris in self._subscribed.items() if uri in uris]:
                await self._send(connection, "notifications/resources/updated", {"uri": uri})
        heard = LEVELS.index("warning")
        for event in events:
            if isinstance(event.data, AlertRaised) and (self._levels or self._channels):
                alert = Alert.read(event)
                # Part of the text may come from the job, so all of it is marked as data.
                text = f"{alert.kind}: {quoted(alert.text)} {in_calls(alert.next_steps)}".strip()
                data = line(scrubbed(text, self.ctx.hidden(text)), 600)
                params = {"level": "warning", "logger": "gpuwarden.watch", "data": data}
                for connection in [c for c, level in self._levels.items() if LEVELS.index(level) <= heard]:
                    await self._send(connection, "notifications/message", params)
                for connection in list(self._channels):
                    await self._send(connection, CHANNEL_MESSAGE, {"content": data, "meta": {"alert": alert.kind}})
        return events[-1].seq if events else after

    def _job_of(self, subject: str) -> str | None:
        kind, _, name = subject.partition("/")
        if kind == "job":
            return name
        row = self.ctx.ledger.row(subject) if kind in {"lease", "teardown"} else None
        return row.job if row else None

    async def _send(self, connection: Connection, method: str, params: dict[str, Any]) -> None:
        """Send a notification to one client.

        Skip a client that does not read its messages, and drop a client that has disconnected.
        """
        try:
            with anyio.move_on_after(SEND_S):
                await connection.outbound.notify(method, params)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            self._forget(connection)

    async def _subscribe(self, ctx: ServerRequestContext[Any, Any], params: SubscribeRequestParams) -> EmptyResult:
        self._start()
        uris = self._subscribed.setdefault(self._connection(ctx), set())
        if len(str(params.uri)) > MAX_URI or len(uris) >= MAX_SUBSCRIPTIONS:
            raise MCPError(code=INVALID_PARAMS, message=f"a client can have at most {MAX_SUBSCRIPTIONS} subscriptions")
        uris.add(str(params.uri))
        return EmptyResult()

    async def _unsubscribe(self, ctx: ServerRequestContext[Any, Any], params: UnsubscribeRequestParams) -> EmptyResult:
        self._subscribed.get(self._connection(ctx), set()).discard(str(params.uri))
        return EmptyResult()

    def open_channel(self, ctx: ServerRequestContext[Any, Any]) -> None:
        """Send alerts to this request's client as messages to its model."""
        self._channels.add(self._connection(ctx))

    async def _set_level(self, ctx: ServerRequestContext[Any, Any], params: SetLevelRequestParams) -> EmptyResult:
        self._levels[self._connection(ctx)] = params.level
        return EmptyResult()

    def _connection(self, ctx: ServerRequestContext[Any, Any]) -> Connection:
        """Return the client's connection. The client's subscriptions are removed when the connection closes."""
        connection = ctx.session._connection  # noqa: SLF001 - the session exists for one request only
        if not any(connection in known for known in (self._subscribed, self._levels, self._channels)):
            connection.exit_stack.callback(self._forget, connection)
        return connection

    def _forget(self, connection: Connection) -> None:
        self._subscribed.pop(connection, None)
        self._levels.pop(connection, None)
        self._channels.discard(connection)
