"""Responses in one format, without secrets: JSON with `ok`, `code`, `message` and `hint`, or a page for browsers."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import Receive, Scope, Send

from gpuwarden.core.errors import WardenError
from gpuwarden.core.sanitize import redact
from gpuwarden.interfaces.cli.wording import in_commands
from gpuwarden.interfaces.results import worded
from gpuwarden.interfaces.results.base import error_reply

STATUS: Final = {
    "refused": 403,
    "no_sandbox": 403,
    "bad_request": 422,
    "not_found": 404,
    "conflict": 409,
    "auth_failed": 401,
    "no_capacity": 503,
    "rate_limited": 429,
    "unreachable": 502,
    "not_supported": 501,
    "bad_reply": 502,
}
"""HTTP status by error code; 500 for all others."""


def error_answer(error: WardenError, status: int | None = None, headers: dict[str, str] | None = None) -> JSONResponse:
    """Return the response to a failed request."""
    reply = worded(error_reply(error), in_commands)
    body: dict[str, Any] = {**reply.short(), "ok": False}
    clean = {name: redact(value) if isinstance(value, str) else value for name, value in body.items()}
    return JSONResponse(clean, status or STATUS.get(error.code, 500), headers)


PAGE: Final = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    "<title>gpuwarden</title><h1>gpuwarden</h1><p>{message}.<p>{hint}</html>"
)


def wants_page(asked: Mapping[str, str]) -> bool:
    """Return whether a request with these headers comes from a browser's window."""
    return "text/html" in asked.get("accept", "")


def answer_for(
    asked: Mapping[str, str], error: WardenError, status: int | None = None, headers: dict[str, str] | None = None
) -> Response:
    """Return the response to a failed request with the headers `asked`: a page for a browser, otherwise JSON."""
    if not wants_page(asked):
        return error_answer(error, status, headers)
    text = PAGE.format(message=escape(redact(error.message)), hint=escape(redact(in_commands(error.next_steps))))
    return HTMLResponse(text, status or STATUS.get(error.code, 500), headers)


async def refuse(
    scope: Scope, receive: Receive, send: Send, error: WardenError, status: int, headers: dict[str, str] | None = None
) -> None:
    """Refuse a request, or a WebSocket before it is accepted.

    The connection is closed, because part of the body may be unread.
    """
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008, "reason": ""})
        return
    closing = {"connection": "close", **(headers or {})}
    await answer_for(Headers(scope=scope), error, status, closing)(scope, receive, send)
