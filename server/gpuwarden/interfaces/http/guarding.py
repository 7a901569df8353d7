"""Check every request before routing (Host, Origin, body size and transfer time), and set every response's headers.

The guard is pure ASGI middleware, so it covers routes, mounts, errors and WebSockets, and does not buffer anything.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any, Final

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpuwarden.core.errors import BadRequest, Refused, WardenError, as_warden_error
from gpuwarden.interfaces.http.answers import answer_for, refuse
from gpuwarden.interfaces.http.principals import Principal
from gpuwarden.interfaces.http.serving import Serving, Settings, host_name

logger = logging.getLogger(__name__)

HEADERS: Final = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
}
"""Default headers for every response; a page sends its own content-security-policy."""
MAX_HEADERS: Final = 100
END: Final[dict[str, Message]] = {
    "http": {"type": "http.response.body", "body": b"", "more_body": False},
    "websocket": {"type": "websocket.close", "code": 1001, "reason": ""},
}
"""The last message of a response that the server ends early."""


class _TooLarge(Exception):
    """The body is larger than allowed."""


class _TooSlow(Exception):
    """The body did not arrive in time."""


class _Unread(OSError):
    """The client does not read the response. This is an OSError, because Starlette treats an OSError from `send` as a
    disconnected client.
    """


class Guard:
    """ASGI middleware around the whole application. Unexpected exceptions are logged; responses omit the details."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self.app = app
        self.serving = serving
        self.settings = serving.settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse one request, or pass it on."""
        if scope["type"] not in {"http", "websocket"}:
            await self.app(scope, receive, send)
            return
        answering = Answering(scope, send, self.settings.send_s)
        # h11 strips optional white space around values; httptools keeps trailing white space.
        scope["headers"] = [(name, value.strip(b" \t")) for name, value in scope["headers"]]
        problem = self._problem(Headers(scope=scope))
        if problem is not None:
            status, error = problem
            await refuse(scope, receive, answering, error, status)
            return
        body = _Body(receive, self.settings) if scope["type"] == "http" else receive
        streaming = anyio.CancelScope()
        self.serving.streams[streaming] = answering
        try:
            with streaming:
                await self.app(scope, body, answering)
            if streaming.cancelled_caught:  # the server is stopping, or the token has expired or been revoked
                await send(END[scope["type"]])
        except (_TooLarge, _TooSlow) as cut:
            if answering.started:
                raise
            status = 413 if isinstance(cut, _TooLarge) else 408
            await refuse(scope, receive, answering, self._cut(status), status)
        except (_Unread, ClientDisconnect):
            return  # the server closes the connection after an incomplete response
        except Exception as error:
            if answering.started:
                raise
            known = as_warden_error(error)
            if known is not error:
                logger.exception("a request crashed")
            await answer_for(Headers(scope=scope), known)(scope, receive, answering)
        finally:
            self.serving.streams.pop(streaming, None)

    def _problem(self, headers: Headers) -> tuple[int, WardenError] | None:
        """Return the status and the error for a request that is refused because of its headers."""
        hosts = headers.getlist("host")
        if len(hosts) != 1 or host_name(hosts[0]) not in self.settings.hosts:
            return 421, Refused("the Host header names another server", "Use the address that gpuwarden serve printed.")
        origins = headers.getlist("origin")
        if any(origin.lower() not in self.settings.origins for origin in origins):
            return 403, Refused("pages from another origin can't call this server")
        if len(headers) > MAX_HEADERS:
            return 431, BadRequest(f"the request has more than {MAX_HEADERS} headers")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > self.settings.max_body:
            return 413, self._cut(413)
        return None

    def _cut(self, status: int) -> WardenError:
        if status == 413:
            return BadRequest(f"the body is longer than {self.settings.max_body:,} bytes", "Split the request.")
        return BadRequest(f"the body did not arrive within {self.settings.body_s:g} s", "Send the request again.")


class _Body:
    """Count the bytes in a request body, and limit the time until it is complete."""

    def __init__(self, receive: Receive, settings: Settings) -> None:
        self._receive = receive
        self._settings = settings
        self._left = settings.max_body
        self._deadline: float | None = None
        self._whole = False

    async def __call__(self) -> Message:
        """Return the request's next message. Raises _TooSlow, _TooLarge."""
        if self._whole:
            return await self._receive()
        self._deadline = self._deadline or anyio.current_time() + self._settings.body_s
        message: Message = {"type": ""}
        with anyio.CancelScope(deadline=self._deadline) as scope:
            message = await self._receive()
        if scope.cancelled_caught:
            raise _TooSlow
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            self._whole = not message.get("more_body", False)
        if self._left < 0:
            raise _TooLarge
        return message


class Answering:
    """Add the security headers to a response, and record that it has started."""

    def __init__(self, scope: Scope, send: Send, send_s: float) -> None:
        self._scope = scope
        self._send = send
        self._send_s = send_s
        self.started = False

    @property
    def principal(self) -> Principal | None:
        """Return the principal that the inner middleware found; None before it has run."""
        found: Principal | None = self._scope.get("gpuwarden.principal")
        return found

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        """Send one message of the response. Raises _Unread."""
        if message["type"] in {"http.response.start", "websocket.http.response.start"}:
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
        self.started = True
        with anyio.move_on_after(self._send_s) as scope:
            await self._send(message)
        if scope.cancelled_caught:
            raise _Unread
