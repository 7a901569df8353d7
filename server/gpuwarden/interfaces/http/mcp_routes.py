"""MCP over streamable HTTP at /mcp."""

from __future__ import annotations

from typing import Final

from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from gpuwarden.interfaces.http.access import Protected
from gpuwarden.interfaces.http.principals import Kind, Principal
from gpuwarden.interfaces.http.serving import Serving

PATH: Final = "/mcp"
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
