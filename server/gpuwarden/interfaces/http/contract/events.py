"""GET /api/jobs/{job}/events: a job's events as server-sent events, and as a WebSocket at the same path.

Both send the same JSON objects. The first object has the `type` `state`; the others have the `type` `event` (a ledger
event), `alert`, or `metrics` (the newest point of each metric that has changed). To continue after an event, send its
`id` as `Last-Event-ID` or as `?after=`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Final

import anyio
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from gpuwarden.core.errors import WardenError
from gpuwarden.interfaces.http.access import Protected, ProtectedSocket, principal_of
from gpuwarden.interfaces.http.contract.live import EVERY_S, Json, Live, Place, Subscriber
from gpuwarden.interfaces.http.serving import Serving

ALIVE_S: Final = 15.0
"""After this many seconds without an event, a comment is sent to keep the stream alive."""
SEND_S: Final = 30.0
"""Maximum time in seconds that a WebSocket client may take to read one message."""
PATH: Final = "/api/jobs/{job}/events"


def routes(serving: Serving) -> list[BaseRoute]:
    """Return the routes for the stream and the WebSocket."""
    live = Live(serving.ctx)
    serving.lifespans.append(live.running)

    async def stream(request: Request) -> Response:
        """Follow a job through server-sent events."""
        return EventStream(live, request)

    async def socket(websocket: WebSocket) -> None:
        """Follow a job through a WebSocket. Messages from the client are ignored."""
        try:
            who = principal_of(websocket).id
            with live.following(websocket.path_params["job"], _since(websocket), who) as one:
                await websocket.accept()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(_until_closed, websocket, tasks.cancel_scope)
                    await _send_news(websocket, one)
        except WardenError:
            await websocket.close(1008)

    return [
        Protected(PATH, stream, needs="read", methods=["GET"]),
        ProtectedSocket(PATH, socket, needs="read"),
    ]


def _since(connection: HTTPConnection) -> Place | None:
    return Place.parse(connection.headers.get("last-event-id") or connection.query_params.get("after", ""))


class EventStream(StreamingResponse):
    """A job's server-sent events.

    The subscription starts before the response is sent. If there are too many streams, the request therefore gets an
    error status, even if many clients connect at once. The subscription ends with the response.
    """

    def __init__(self, live: Live, request: Request) -> None:
        super().__init__((), media_type="text/event-stream")
        self.live, self.request = live, request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the client or the server ends the stream."""
        job_id, who = self.request.path_params["job"], principal_of(self.request).id
        with self.live.following(job_id, _since(self.request), who) as one:
            self.body_iterator = _lines(one)
            await super().__call__(scope, receive, send)


async def _lines(one: Subscriber) -> AsyncIterator[str]:
    """Yield new events, at most four times a second."""
    yield "retry: 2000\n\n"
    while True:
        news: list[Json] = []
        with anyio.move_on_after(ALIVE_S):
            news = await one.take()
        yield "".join(map(_sse, news)) or ": alive\n\n"
        await anyio.sleep(EVERY_S)


def _sse(event: Json) -> str:
    """Return one server-sent event. JSON escapes line breaks, so the content can't start another event."""
    mark = f"id: {event['id']}\n" if "id" in event else ""
    return f"{mark}event: {event['type']}\ndata: {json.dumps(event)}\n\n"


async def _until_closed(websocket: WebSocket, scope: anyio.CancelScope) -> None:
    try:
        while True:
            await websocket.receive()
    except (WebSocketDisconnect, RuntimeError):
        scope.cancel()


async def _send_news(websocket: WebSocket, one: Subscriber) -> None:
    while True:
        for event in await one.take():
            with anyio.fail_after(SEND_S):
                await websocket.send_text(json.dumps(event))
        await anyio.sleep(EVERY_S)
