"""Open and close browser sessions: exchange the one-time link from `gpuwarden dashboard` for a read-only cookie."""

from __future__ import annotations

from typing import Final

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Route

from gpuwarden.core.errors import AuthFailed
from gpuwarden.interfaces.http.access import PATH, Protected, cookie_name, principal_of
from gpuwarden.interfaces.http.answers import answer_for
from gpuwarden.interfaces.http.serving import Serving, host_name
from gpuwarden.interfaces.http.tokens import SESSION_S

ENTERED: Final = (
    '<!doctype html><html lang="en"><title>gpuwarden</title><meta http-equiv="refresh" content="0;url={path}">'
    '<a href="{path}">gpuwarden</a></html>'
)


def routes(serving: Serving) -> list[BaseRoute]:
    """Return the session routes."""

    async def enter(request: Request) -> Response:
        """GET: invalidate the one-time link, set the cookie, and load the page `to` without the secret in its URL."""
        session = await to_thread.run_sync(serving.tokens.open_session, request.query_params.get("link", ""))
        if session is None:
            error = AuthFailed("this link has already been used or has expired", "Run gpuwarden dashboard again.")
            return answer_for(request.headers, error)
        # This is not a redirect: if the link was opened from another site or a file, a browser would not send a strict
        # cookie after a redirect. A request from a page on this server counts as same-site.
        path = request.query_params.get("to", "/")
        response = HTMLResponse(ENTERED.format(path=path if PATH.fullmatch(path) else "/"))
        local = host_name(request.headers["host"]) in {"localhost", "127.0.0.1", "[::1]"}
        response.set_cookie(
            cookie_name(serving),
            session,
            max_age=int(SESSION_S),
            path="/",
            httponly=True,
            samesite="strict",
            secure=not local,
        )
        return response

    async def leave(request: Request) -> Response:
        """POST: end this browser's session."""
        await to_thread.run_sync(serving.tokens.close_session, principal_of(request).id)
        response = Response(status_code=204)
        response.delete_cookie(cookie_name(serving), path="/")
        return response

    return [
        Route("/enter", enter, methods=["GET"]),
        Protected("/leave", leave, needs="read", methods=["POST"]),
    ]
