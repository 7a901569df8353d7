"""Passkeys for approvals on the web page: allowed at a terminal, registered in a browser, and recorded in the ledger.

The ledger stores only public keys. A code shown at a terminal allows one passkey to be registered within minutes.
Therefore neither a browser session alone nor an agent with a token can register a passkey.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from typing import Final

from gpuwarden.core.errors import BadRequest, Conflict, NotFound, Refused
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.sanitize import line
from gpuwarden.ledger.event import Event
from gpuwarden.ledger.events import PasskeyAllowed, PasskeyRegistered, PasskeyRemoved, PasskeyUsed
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.team import check_name

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
CODE_S: Final = 300.0
"""Seconds for which a code to register a passkey is valid."""
ALPHABET: Final = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"
"""Letters and digits, without characters that look alike."""


@dataclass(frozen=True)
class Passkey:
    """One registered passkey. `site` is the host whose pages may use it."""

    name: str
    credential: str
    public_key: str
    site: str
    sign_count: int
    registered_at: float
    person: str = ""
    """The owner; empty for a passkey that was registered with an older version, which did not record owners."""


def passkeys(ctx: Context) -> list[Passkey]:
    """Return the valid passkeys, oldest first."""
    found = []
    for event in ctx.ledger.events(kind=PasskeyRegistered):
        last = ctx.ledger.last(event.subject, PasskeyRegistered)
        removed = ctx.ledger.last(event.subject, PasskeyRemoved)
        if last is None or last.seq != event.seq or (removed is not None and removed.seq > event.seq):
            continue
        used = ctx.ledger.last(event.subject, PasskeyUsed)
        count = used.data.sign_count if used is not None and used.seq > event.seq else event.data.sign_count
        name, data = event.subject.removeprefix("passkey/"), event.data
        found.append(Passkey(name, data.credential, data.public_key, data.site, count, event.at, data.person))
    return found


def allow(ctx: Context, name: str, by: str, person: str = "") -> str:
    """Allow `person` to register a passkey under a name. Return the code to type on the page.

    Raises BadRequest for an invalid name, Conflict if the name is taken, and Refused if the caller may not create a
    passkey for `person`.
    """
    check_name(ctx, person)
    if line(person, 64) != person:
        raise BadRequest(
            "the owner's name is longer than 64 characters, or contains control characters or extra spaces"
        )
    if NAME.fullmatch(name) is None:
        raise BadRequest("the name must have 1 to 63 letters, digits, dots, dashes or underscores")
    if any(known.name == name for known in passkeys(ctx)):
        raise Conflict(f"the passkey {name!r} already exists", "Choose another name, or remove that passkey first.")
    letters = "".join(secrets.choice(ALPHABET) for _ in range(16))
    expires_at = ctx.clock.now() + CODE_S
    ctx.ledger.add(
        f"passkey/{name}", PasskeyAllowed(code=_digest(letters), expires_at=expires_at, by=by, person=person)
    )
    return "-".join(letters[n : n + 4] for n in range(0, 16, 4))


def allowed(ctx: Context, code: str) -> Event[PasskeyAllowed]:
    """Return the permission for a code. Raises Refused if the code is wrong, used or expired."""
    digest, now = _digest(code), ctx.clock.now()
    for event in ctx.ledger.recent(PasskeyAllowed, now - CODE_S):
        same = hmac.compare_digest(event.data.code, digest)
        if same and now <= event.data.expires_at and ctx.ledger.used(PasskeyRegistered, _token(event)) is None:
            return event
    raise Refused("this code is wrong, has been used or has expired", (do(Action.ADD_PASSKEY, "to get a new code"),))


def register(ctx: Context, permit: Event[PasskeyAllowed], body: PasskeyRegistered) -> None:
    """Record a passkey under the allowed name. Raises Conflict if the permission has already been used."""
    body = body.model_copy(update={"person": permit.data.person})
    ctx.ledger.add(permit.subject, body, token=_token(permit))


def remove(ctx: Context, name: str, by: str) -> None:
    """Remove a passkey. Raises NotFound if it is not registered."""
    if all(known.name != name for known in passkeys(ctx)):
        raise NotFound(f"the passkey {name!r} is not registered")
    ctx.ledger.add(f"passkey/{name}", PasskeyRemoved(by=by))


def record_use(ctx: Context, passkey: Passkey, digest: str, sign_count: int) -> None:
    """Record that a passkey signed the facts with this digest."""
    ctx.ledger.add(f"passkey/{passkey.name}", PasskeyUsed(digest=digest, sign_count=sign_count))


def _digest(code: str) -> str:
    return hashlib.sha256("".join(c for c in code.upper() if c.isalnum()).encode()).hexdigest()


def _token(permit: Event[PasskeyAllowed]) -> str:
    return f"passkey-{permit.seq}"
