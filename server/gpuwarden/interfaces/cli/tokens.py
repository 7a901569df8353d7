"""Create, list and revoke tokens for the HTTP server. The user has to confirm a new token at a terminal, so an agent
can't create one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import cast

from pydantic import BaseModel

from gpuwarden.core.errors import Refused
from gpuwarden.interfaces.cli.approval import Terminal, check_pin, open_terminal, user
from gpuwarden.interfaces.http.principals import Scope
from gpuwarden.interfaces.http.tokens import TokenStore
from gpuwarden.interfaces.results import Result
from gpuwarden.ledger.events import TokenMade, TokenRevoked
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.team import check_name
from gpuwarden.people import current_user


class TokenReply(BaseModel):
    """One token, without its secret. Times are in ISO 8601, UTC."""

    id: str
    name: str
    person: str
    scopes: list[str]
    created_at: str
    expires_at: str


class TokensReply(Result):
    """The valid tokens."""

    tokens: list[TokenReply]


async def create_token(
    ctx: Context, name: str, scopes: Sequence[str], days: float, terminal: Terminal | None = None, person: str = ""
) -> Result:
    """Create a token after the user approves at a terminal, and show it only there, never in a reply.

    Raises Refused if the answer is no.
    """
    store, person = TokenStore(ctx.home, ctx.clock), person or current_user()
    check_name(ctx, person)
    with contextlib.nullcontext(terminal) if terminal else open_terminal() as asked:
        asked.say(f"A token named {name!r} for {person}, with the scopes {', '.join(scopes)}, valid for {days:g} days.")
        if "submit" in scopes:
            asked.say("The token's holder can submit and cancel jobs, and spend within your caps, until you revoke it.")
        if asked.ask("Type yes to create it: ") != "yes":
            raise Refused("no token was created")
        await check_pin(ctx, asked)
        grant, secret = store.create(name, cast("Sequence[Scope]", scopes), days, person)
        made = TokenMade(
            name=grant.name,
            scopes=grant.scopes,
            expires_at=grant.expires_at,
            channel="terminal",
            by=user(),
            person=person,
        )
        ctx.ledger.add(f"token/{grant.id}", made)
        asked.say("The token, shown only once; store it in the client's secrets:")
        asked.say(secret)
    return Result(code="created", message=f"Token {grant.name!r} ({grant.id}) is valid until {_at(grant.expires_at)}.")


def list_tokens(ctx: Context) -> TokensReply:
    """Return the valid tokens."""
    found = TokenStore(ctx.home, ctx.clock).listed()
    rows = [
        TokenReply(
            id=grant.id,
            name=grant.name,
            person=grant.person or grant.name,
            scopes=list(grant.scopes),
            created_at=_at(grant.created_at),
            expires_at=_at(grant.expires_at),
        )
        for grant in found
    ]
    return TokensReply(message="" if found else "No valid tokens.", tokens=rows)


def revoke_token(ctx: Context, name: str) -> Result:
    """Revoke a token by its name or id. Raises NotFound."""
    grant = TokenStore(ctx.home, ctx.clock).revoke(name)
    ctx.ledger.add(f"token/{grant.id}", TokenRevoked(name=grant.name, by=user()))
    return Result(code="revoked", message=f"Token {grant.name!r} ({grant.id}) is revoked.")


def _at(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
