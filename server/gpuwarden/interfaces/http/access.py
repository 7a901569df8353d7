"""Authenticate callers and check each route's scopes. Every request needs a principal, even on loopback."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Collection
from http.cookies import CookieError, SimpleCookie
from typing import Final, cast

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as Asgi
from starlette.websockets import WebSocket

from gpuwarden.core.errors import AuthFailed, DiskError, Refused, Unreachable
from gpuwarden.core.sanitize import line
from gpuwarden.interfaces.http.answers import refuse, wants_page
from gpuwarden.interfaces.http.principals import GRANTED, Kind, Principal, Scope
from gpuwarden.interfaces.http.serving import Serving
from gpuwarden.people import acting_as

logger = logging.getLogger(__name__)
OPEN: Final = frozenset({"/enter", "/.well-known/oauth-protected-resource/mcp"})
"""Paths that don't require a principal: the one-time link for a browser session, and the OAuth metadata."""
PATH: Final = re.compile(r"(?!//)/[\w./-]*", re.ASCII)
"""A path on this server without characters that must be escaped in HTML or in a shell. `//HOST` is another server."""
SAFE: Final = frozenset({"GET", "HEAD"})


def challenge(serving: Serving) -> dict[str, str]:
    """Return the header that asks for a token, with the address of the OAuth metadata if an issuer is configured."""
    parts = {"realm": "gpuwarden"}
    if serving.issuer is not None:
        parts |= {"scope": " ".join(sorted(GRANTED)), "resource_metadata": serving.issuer.metadata_url}
    return {"www-authenticate": "Bearer " + ", ".join(f'{key}="{value}"' for key, value in parts.items())}


def cookie_name(serving: Serving) -> str:
    """Return the name of the session cookie. It includes the port, because all ports on a host share cookies."""
    return f"gpuwarden_session_{serving.settings.port}"


def principal_of(connection: HTTPConnection) -> Principal:
    """Return the principal for a request."""
    return cast("Principal", connection.scope["gpuwarden.principal"])


class Authenticate:
    """ASGI middleware that refuses requests without valid credentials, before routing."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self.app = app
        self.serving = serving

    async def __call__(self, scope: Asgi, receive: Receive, send: Send) -> None:
        """Refuse one request, or pass it on with its principal."""
        if scope["type"] not in {"http", "websocket"} or scope["path"] in OPEN:
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            found = self._who(headers) or await self._from_issuer(scope, headers)
        except Unreachable as unverified:
            await refuse(scope, receive, send, unverified, 503)
            return
        except DiskError as unreadable:  # its message contains a path, and the caller is not authenticated
            logger.error("%s", line(unreadable.message, 300))
            refused = DiskError("the server can't read its tokens", "Run gpuwarden doctor on the server's machine.")
            await refuse(scope, receive, send, refused, 503)
            return
        if found is None:
            hint = "Create one with gpuwarden token create, or run gpuwarden dashboard."
            if wants_page(headers) and PATH.fullmatch(scope["path"]):
                hint = f"Open this page with: gpuwarden dashboard {scope['path']}"
            error = AuthFailed("the request has no valid token", hint)
            await refuse(scope, receive, send, error, 401, challenge(self.serving))
            return
        if found.kind == "session" and not self._from_own_page(scope, headers):
            await refuse(
                scope, receive, send, Refused("browser sessions can change data only from pages on this server"), 403
            )
            return
        scope["gpuwarden.principal"] = found
        with acting_as(found.person):
            await self.app(scope, receive, send)

    def _who(self, headers: Headers) -> Principal | None:
        """Return the principal for a request; None if its credentials are missing, invalid or ambiguous."""
        bearers = headers.getlist("authorization")
        keys, name = headers.getlist("x-api-key"), cookie_name(self.serving)
        try:
            jar = SimpleCookie(headers.get("cookie", "")[:4_096])
        except CookieError:
            jar = SimpleCookie()
        cookie = jar[name].value if name in jar else ""
        if len(bearers) + len(keys) > 1:
            return None
        if bearers:
            kind, _, secret = bearers[0].partition(" ")
            found = self.serving.principal(secret.strip()) if kind.lower() == "bearer" else None
            return found if found is not None and found.kind != "session" else None
        if keys:
            found = self.serving.principal(keys[0])
            return found if found is not None and found.kind != "session" else None
        found = self.serving.principal(cookie) if cookie else None
        return found if found is not None and found.kind == "session" else None

    async def _from_issuer(self, scope: Asgi, headers: Headers) -> Principal | None:
        """Return the principal for an OAuth access token. Raises Unreachable."""
        if self.serving.issuer is None or len(headers.getlist("authorization")) != 1 or "x-api-key" in headers:
            return None
        return await self.serving.issuer.principal(HTTPConnection(scope))

    def _from_own_page(self, scope: Asgi, headers: Headers) -> bool:
        """Return whether a browser's request comes from a page on this server.

        The Guard has already refused every other Origin, so here the header only has to be present. A read request does
        not need the header.
        """
        site = headers.get("sec-fetch-site", "same-origin")
        if site not in {"same-origin", "none"}:
            return False
        return (scope["type"] == "http" and scope["method"] in SAFE) or "origin" in headers


class _Needs:
    """A route's requirements: one of the given scopes and, if kinds are given, a principal of one of these kinds."""

    def __init__(self, scopes: Scope | Collection[Scope], kinds: Collection[Kind]) -> None:
        self.scopes: frozenset[Scope] = frozenset([scopes] if isinstance(scopes, str) else scopes)
        self.kinds = frozenset(kinds)

    def lacking(self, scope: Asgi) -> Refused | None:
        """Return the error for a principal that does not meet the requirements."""
        principal: Principal = scope["gpuwarden.principal"]
        if self.kinds and principal.kind not in self.kinds:
            return Refused(f"this route accepts a {' or a '.join(sorted(self.kinds))}, not a {principal.kind}")
        if principal.scopes & self.scopes:
            return None
        wanted = " or ".join(sorted(self.scopes))
        return Refused(
            f"this route needs the scope {wanted}", "Create a token with this scope: gpuwarden token create."
        )


class Protected(Route):
    """A route for principals that have one of the given scopes and, if kinds are given, are of one of these kinds."""

    def __init__(
        self,
        path: str,
        endpoint: Callable[[Request], Awaitable[Response]] | ASGIApp,
        *,
        needs: Scope | Collection[Scope],
        kinds: Collection[Kind] = (),
        methods: Collection[str] | None = None,
    ) -> None:
        super().__init__(path, endpoint, methods=methods)
        self.needs = _Needs(needs, kinds)

    async def handle(self, scope: Asgi, receive: Receive, send: Send) -> None:
        """Call the endpoint, or refuse the request."""
        if (refused := self.needs.lacking(scope)) is not None:
            await refuse(scope, receive, send, refused, 403)
            return
        await super().handle(scope, receive, send)


class ProtectedSocket(WebSocketRoute):
    """A WebSocket for principals that have one of the given scopes and, if kinds are given, are of one of these
    kinds.
    """

    def __init__(
        self,
        path: str,
        endpoint: Callable[[WebSocket], Awaitable[None]],
        *,
        needs: Scope | Collection[Scope],
        kinds: Collection[Kind] = (),
    ) -> None:
        super().__init__(path, endpoint)
        self.needs = _Needs(needs, kinds)

    async def handle(self, scope: Asgi, receive: Receive, send: Send) -> None:
        """Call the endpoint, or refuse the request."""
        if (refused := self.needs.lacking(scope)) is not None:
            await refuse(scope, receive, send, refused, 403)
            return
        await super().handle(scope, receive, send)
