"""Objects that all routes share: the context, the authorities that authenticate requests, and the settings."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import urlsplit

import anyio

from gpuwarden.core.clock import Clock
from gpuwarden.core.errors import BadRequest, DiskError
from gpuwarden.interfaces.http.principals import Authority, JobAuthority, Principal
from gpuwarden.interfaces.http.tokens import TokenStore
from gpuwarden.interfaces.mcp.over_http import McpEndpoint
from gpuwarden.lifecycle.context import Context

if TYPE_CHECKING:
    from gpuwarden.interfaces.http.oauth import Issuer

NETLOC: Final = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]{1,5})?")
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
PORT = 8741
RECHECK_S = 5.0
"""Seconds between two checks of the tokens that open streams and sessions use."""


@dataclass(frozen=True)
class Settings:
    """Address and limits of one server. `public_url` is its https address at a reverse proxy."""

    host: str = "127.0.0.1"
    port: int = PORT
    public_url: str = ""
    max_body: int = 4 << 20
    """Maximum number of bytes in a request body."""
    body_s: float = 30.0
    """Seconds within which the complete body must arrive."""
    header_s: float = 10.0
    """Seconds within which the headers must arrive."""
    send_s: float = 60.0
    """Maximum time in seconds for which a client may leave part of a response unread."""

    def __post_init__(self) -> None:
        try:
            public = urlsplit(self.public_url)
        except ValueError:  # unbalanced brackets
            public = urlsplit("")
        named = public.scheme == "https" and host_name(public.netloc) and public.path in {"", "/"}
        if self.public_url and not named:
            raise BadRequest(
                "the public address is not https://HOST", "Use the address of a reverse proxy that terminates TLS."
            )
        if not self.public_url and self.host not in {"localhost", "127.0.0.1", "::1"}:
            raise BadRequest(
                f"other machines can reach {self.host}, so tokens would cross the network unencrypted",
                "Serve on 127.0.0.1, or set --public-url to the https address of your reverse proxy.",
            )

    @cached_property
    def hosts(self) -> frozenset[str]:
        """Return the accepted host names. They are accepted with any port, because a tunnel may use another port."""
        return LOOPBACK | ({host_name(urlsplit(self.public_url).netloc)} if self.public_url else set())

    @cached_property
    def origins(self) -> frozenset[str]:
        """Return the origins whose pages may send requests. Each includes the port, because other ports belong to
        other programs.
        """
        own = {f"http://{name}:{self.port}" for name in LOOPBACK}
        return frozenset(own | ({f"https://{urlsplit(self.public_url).netloc.lower()}"} if self.public_url else set()))

    @property
    def endpoint(self) -> str:
        """Return the MCP URL, for which an OAuth issuer issues tokens."""
        return f"{self.public_url.rstrip('/') or self.local_url}/mcp"

    @property
    def local_url(self) -> str:
        """Return the address for a browser on this machine. It names localhost, because WebAuthn refuses 127.0.0.1."""
        return f"http://localhost:{self.port}"


def host_name(netloc: str) -> str:
    """Return the host in `host:port`, in lower case; an IPv6 address keeps its brackets. Empty for any other string."""
    found = NETLOC.fullmatch(netloc.lower())
    return found.group(1) if found else ""


class Answer(Protocol):
    """A response that is being sent, and its request's principal."""

    started: bool

    @property
    def principal(self) -> Principal | None:
        """Return the request's principal; None if it has not been authenticated yet."""
        ...


@dataclass
class Serving:
    """The dependencies of all routes. `lifespans` contains the tasks that features run while the server runs."""

    ctx: Context
    tokens: TokenStore
    authorities: tuple[Authority, ...]
    mcp: McpEndpoint
    settings: Settings
    issuer: Issuer | None = None
    """The user's OAuth issuer, whose tokens are also accepted."""
    streams: dict[anyio.CancelScope, Answer] = field(default_factory=dict)
    """The responses in progress."""
    lifespans: list[Callable[[], AbstractAsyncContextManager[None]]] = field(default_factory=list)

    @classmethod
    def over(cls, ctx: Context, settings: Settings | None = None) -> Serving:
        """Return a server's dependencies for one context."""
        settings = settings or Settings()
        tokens = TokenStore(ctx.home, ctx.clock)
        mcp = McpEndpoint(ctx, settings.max_body)
        issuer = None
        if address := ctx.policy.http.oauth_issuer:
            from gpuwarden.interfaces.http.oauth import Issuer

            issuer = Issuer(address, settings.endpoint, ctx.clock)
        return cls(ctx, tokens, (tokens, JobAuthority(ctx.home)), mcp, settings, issuer)

    @property
    def clock(self) -> Clock:
        """Return the use cases' clock."""
        return self.ctx.clock

    def end_streams(self, of: Callable[[Principal | None], bool] = lambda _: True) -> None:
        """End responses that have started, such as streams: all of them, or those whose principal satisfies `of`."""
        for scope, answer in list(self.streams.items()):
            if answer.started and of(answer.principal):
                scope.cancel()

    def streams_of(self, principal: Principal) -> int:
        """Return the number of a principal's responses that have started and not ended, such as streams."""
        return sum(answer.started and answer.principal == principal for answer in self.streams.values())

    async def end_refused(self) -> None:
        """End the streams and MCP sessions whose token has expired or been revoked. Runs until canceled."""
        while True:
            await anyio.sleep(RECHECK_S)
            try:
                valid = self.tokens.valid_ids()
            except DiskError:
                valid = frozenset()
            valid |= self.issuer.valid_ids() if self.issuer else frozenset()
            self.end_streams(lambda who: who is not None and who.kind != "job" and who.id not in valid)  # noqa: B023
            self.mcp.end_sessions(lambda holder: holder.rpartition("/")[2] not in valid)  # noqa: B023

    def principal(self, secret: str) -> Principal | None:
        """Return the principal for a secret, from the first authority that accepts the secret."""
        return next((found for one in self.authorities if (found := one.principal(secret))), None)
