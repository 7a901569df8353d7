"""The application of `gpuwarden serve`: the routes of all features, behind one set of security checks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from gpuwarden.core.errors import BadRequest, NotFound
from gpuwarden.core.task_groups import background
from gpuwarden.interfaces.http import contract, mcp_routes, pages, session_routes
from gpuwarden.interfaces.http.access import OPEN, Authenticate, Protected, ProtectedSocket
from gpuwarden.interfaces.http.answers import answer_for
from gpuwarden.interfaces.http.guarding import Guard
from gpuwarden.interfaces.http.serving import Serving

FEATURES: Final = (session_routes, mcp_routes, contract, pages)
"""Each module provides `routes(serving) -> list[BaseRoute]`, and may add to `serving.lifespans`."""


def build(serving: Serving) -> Starlette:
    """Return the application, after asserting that every route except the one-time link is Protected."""
    routes: list[BaseRoute] = [route for feature in FEATURES for route in feature.routes(serving)]
    routes += serving.issuer.routes() if serving.issuer else []
    for route in routes:
        assert isinstance(route, Protected | ProtectedSocket) or getattr(route, "path", "") in OPEN, route

    @asynccontextmanager
    async def running(_app: Starlette) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for lifespan in serving.lifespans:
                await stack.enter_async_context(lifespan())
            async with background(serving.end_refused):
                yield

    app = Starlette(
        routes=routes,
        middleware=[Middleware(Guard, serving=serving), Middleware(Authenticate, serving=serving)],
        exception_handlers={HTTPException: _http_error},
        lifespan=running,
    )
    app.router.redirect_slashes = False  # behind a proxy, the redirect would send the token to an http address
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    """Respond to router errors, such as an unknown path or method, in the common format."""
    assert isinstance(error, HTTPException)
    known = NotFound("this path does not exist") if error.status_code == 404 else BadRequest(error.detail)
    return answer_for(request.headers, known, error.status_code, dict(error.headers or {}))
