"""The MCP server as an ASGI endpoint: streamable HTTP, both protocol revisions, with and without sessions.

The caller is already authorized. This module sets the principal, to which the SDK binds sessions and request states,
and from which `call_tool` reads the scopes.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, MutableMapping
from contextlib import asynccontextmanager
from typing import Any, Final, TypeAlias

from mcp.server.auth.middleware.auth_context import auth_context_var
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser, AuthorizationContext
from mcp.server.auth.provider import AccessToken
from mcp.server.streamable_http import StreamableHTTPServerTransport
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings

from gpuwarden.core.task_groups import background
from gpuwarden.interfaces.mcp.server import WardenServer, make_server
from gpuwarden.lifecycle.context import Context

IDLE_S: Final = 30 * 60.0
MAX_SESSIONS: Final = 1_000
MAX_SESSIONS_EACH: Final = 200
"""Maximum number of sessions per principal. Some clients open a session each time they start and never close it."""
Message: TypeAlias = MutableMapping[str, Any]


class _Sessions(StreamableHTTPSessionManager):
    """The SDK's sessions, with a limit per principal. The sessions of a revoked or expired token can be ended."""

    def _admit_session(self, requestor: AuthorizationContext | None) -> StreamableHTTPServerTransport | None:
        """Open a session, or return None if the maximum number of sessions is open.

        If the principal has reached its own limit, its longest-idle session is closed first.
        """
        scopes = [self._server_instances[key].idle_scope for key, owner in self._session_owners.items()
                  if owner == requestor]  # fmt: skip
        open_now = [scope for scope in scopes if scope is not None and not scope.cancel_called]
        if len(open_now) >= MAX_SESSIONS_EACH:
            idlest = min(open_now, key=lambda scope: scope.deadline)
            if idlest.deadline == math.inf:  # every session has a request in progress
                return None
            idlest.cancel()
        return super()._admit_session(requestor)

    def end(self, of: Callable[[str], bool]) -> None:
        """End the sessions of the principals for which `of(client_id)` is true."""
        for key, owner in self._session_owners.items():
            scope = self._server_instances[key].idle_scope
            if scope is not None and of(owner["client_id"]):
                scope.cancel()


class McpEndpoint:
    """One MCP server for all of an application's clients. Enter `running` once to serve requests."""

    def __init__(self, ctx: Context, max_body: int = 4 << 20) -> None:
        self.server: WardenServer = make_server(ctx, scoped=True)
        self._max_body = max_body
        self._manager: _Sessions | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve requests while the context is open."""
        self._manager = _Sessions(
            app=self.server._lowlevel_server,  # noqa: SLF001 - the SDK's public application does not support principals
            # The application's guard has already checked Host and Origin, as it does for every route.
            security_settings=TransportSecuritySettings(enable_dns_rebinding_protection=False),
            session_idle_timeout=IDLE_S,
            max_sessions=MAX_SESSIONS,
            max_request_body_size=self._max_body,
        )
        try:
            async with self._manager.run(), background(self.server.live.run):
                yield
        finally:
            self._manager = None

    def end_sessions(self, of: Callable[[str], bool]) -> None:
        """End the sessions of the principals for which `of(holder)` is true, with `holder` as in `handle`."""
        if self._manager is not None:
            self._manager.end(of)

    async def handle(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
        *,
        holder: str,
        name: str,
        scopes: Collection[str],
        person: str = "",
    ) -> None:
        """Respond to one request from the principal with the id `holder`.

        A session is bound to the principal that opened it.
        """
        assert self._manager is not None, "the endpoint is not running; the application's lifespan starts it"
        token = AccessToken(
            token=holder, client_id=holder, subject=name, scopes=sorted(scopes), claims={"person": person}
        )
        user = AuthenticatedUser(token)
        scope["user"] = user
        before = auth_context_var.set(user)
        try:
            await self._manager.handle_request(scope, receive, send)
        finally:
            auth_context_var.reset(before)
