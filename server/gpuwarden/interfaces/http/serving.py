"""What the routes of one server share: the use cases, who may call, and the server's own address."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Protocol
from urllib.parse import urlsplit

import anyio

from gpuwarden.core.clock import Clock
from gpuwarden.core.errors import BadRequest, DiskError
from gpuwarden.interfaces.http.principals import Authority, JobAuthority, Principal
from gpuwarden.interfaces.http.tokens import TokenStore
from gpuwarden.interfaces.mcp.over_http import McpEndpoint
from gpuwarden.lifecycle.context import Context

NETLOC: Final = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]{1,5})?")
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
PORT = 8741
RECHECK_S = 5.0
"""How often the tokens of open streams are looked at again."""


@dataclass(frozen=True)
class Settings:
    """Address and limits of one server. `public_url` is what a reverse proxy serves it as, https only."""

    host: str = "127.0.0.1"
    port: int = PORT
    public_url: str = ""
    max_body: int = 4 << 20
    """Bytes of a request's body."""
    body_s: float = 30.0
    """Seconds in which a whole body has to arrive."""
    header_s: float = 10.0
    """Seconds in which the headers have to arrive."""
    send_s: float = 60.0
    """Seconds that a client may leave a part of an answer unread."""

    def __post_init__(self) -> None:
        try:
            public = urlsplit(self.public_url)
        except ValueError:  # brackets that do not match
            public = urlsplit("")
        named = public.scheme == "https" and host_name(public.netloc) and public.path in {"", "/"}
        if self.public_url and not named:
            raise BadRequest("the public address is not https://HOST", "Let a reverse proxy terminate TLS there.")
        if not self.public_url and self.host not in {"localhost", "127.0.0.1", "::1"}:
            raise BadRequest(
                f"{self.host} can be reached by other machines, and tokens would cross the network in clear",
                "Serve on 127.0.0.1, or give --public-url with the https address of your reverse proxy.",
            )

    @cached_property
    def hosts(self) -> frozenset[str]:
        """Return the host names under which requests are answered, on any port: a tunnel may come from another one."""
        return LOOPBACK | ({host_name(urlsplit(self.public_url).netloc)} if self.public_url else set())

    @cached_property
    def origins(self) -> frozenset[str]:
        """Return the origins whose pages may call, with their port: another port is another program's page."""
        own = {f"http://{name}:{self.port}" for name in LOOPBACK}
        return frozenset(own | ({f"https://{urlsplit(self.public_url).netloc.lower()}"} if self.public_url else set()))

    @property
    def local_url(self) -> str:
        """Return the address for a browser on this machine. WebAuthn refuses 127.0.0.1."""
        return f"http://localhost:{self.port}"


def host_name(netloc: str) -> str:
    """Return the host of `host:port`, in lower case; an IPv6 address keeps its brackets. Empty for any other text."""
    found = NETLOC.fullmatch(netloc.lower())
    return found.group(1) if found else ""


class Answer(Protocol):
    """An answer that is being sent, and who asked."""

    started: bool

    @property
    def principal(self) -> Principal | None:
        """Return who asked; None where that is not known yet."""
        ...


@dataclass
class Serving:
    """What routes need. A feature adds to `lifespans` what has to run while the server runs."""

    ctx: Context
    tokens: TokenStore
    authorities: tuple[Authority, ...]
    mcp: McpEndpoint
    settings: Settings
    streams: dict[anyio.CancelScope, Answer] = field(default_factory=dict)
    """The requests that are being answered."""
    lifespans: list[Callable[[], AbstractAsyncContextManager[None]]] = field(default_factory=list)

    @classmethod
    def over(cls, ctx: Context, settings: Settings | None = None) -> Serving:
        """Return the parts of a server over one context."""
        settings = settings or Settings()
        tokens = TokenStore(ctx.home, ctx.clock)
        mcp = McpEndpoint(ctx, settings.max_body)
        return cls(ctx, tokens, (tokens, JobAuthority(ctx.home)), mcp, settings)

    @property
    def clock(self) -> Clock:
        """Return the clock of the use cases."""
        return self.ctx.clock

    def end_streams(self, of: Callable[[Principal | None], bool] = lambda _: True) -> None:
        """End answers that have begun and may never end: of everybody, as the server ends, or of some principals."""
        for scope, answer in list(self.streams.items()):
            if answer.started and of(answer.principal):
                scope.cancel()

    async def end_refused(self) -> None:
        """End, until canceled, the streams of tokens and sessions that have expired or were revoked meanwhile."""
        while True:
            await anyio.sleep(RECHECK_S)
            try:
                valid = self.tokens.valid_ids()
            except DiskError:
                valid = frozenset()
            self.end_streams(lambda who: who is not None and who.kind != "job" and who.id not in valid)  # noqa: B023

    def principal(self, secret: str) -> Principal | None:
        """Return who holds a secret, by whichever authority knows it."""
        return next((found for one in self.authorities if (found := one.principal(secret))), None)
