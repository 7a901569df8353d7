"""MCP over streamable HTTP at /mcp."""

from __future__ import annotations

from typing import Final

from starlette.datastructures import Headers
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from gpuwarden.core.errors import BadRequest, Refused, WardenError
from gpuwarden.interfaces.http.access import Protected
from gpuwarden.interfaces.http.answers import refuse
from gpuwarden.interfaces.http.principals import Kind, Principal
from gpuwarden.interfaces.http.serving import Serving

PATH: Final = "/mcp"
MAX_STREAMS_EACH: Final = 200
"""Maximum number of open streams per token, far below the maximum number of connections to the server."""
CLIENTS: Final[tuple[Kind, ...]] = ("token",)


class _Endpoint:
    """ASGI application for the route.

    It is a class because Starlette would treat a function as one of its own endpoints.
    """

    def __init__(self, serving: Serving) -> None:
        self.serving = serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to a request from a client with a token. Browser sessions and jobs are not MCP clients."""
        principal: Principal = scope["gpuwarden.principal"]
        if scope["method"] == "GET" and "mcp-session-id" not in Headers(scope=scope):
            error: WardenError = BadRequest("only a session has a stream", "Send a request with POST.")
            await refuse(scope, receive, send, error, 405, {"allow": "POST"})
            return
        if self.serving.streams_of(principal) >= MAX_STREAMS_EACH:
            error = Refused(
                f"this token has {MAX_STREAMS_EACH} open streams", "Close some of them, or use another token."
            )
            await refuse(scope, receive, send, error, 503)
            return
        await self.serving.mcp.handle(
            scope,
            receive,
            send,
            holder=f"{principal.kind}/{principal.id}",
            name=principal.name,
            scopes=principal.scopes,
            person=principal.person,
        )


def routes(serving: Serving) -> list[BaseRoute]:
    """Return the MCP route. Its endpoint is started and stopped with the application."""
    serving.lifespans.append(serving.mcp.running)
    return [
        Protected(
            PATH,
            _Endpoint(serving),
            needs=("read", "submit"),
            kinds=CLIENTS,
            methods=["GET", "POST", "DELETE"],
        )
    ]
