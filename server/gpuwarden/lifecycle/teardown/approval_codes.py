"""One-time codes: the user approves at a terminal, reads a code there, and types it on the page.

The page alone can't distinguish the user from an agent. An agent under the same account can open a browser session,
load the page without a window, and read every file in the state folder. It can't answer the prompt of `gpuwarden
approve`, because that prompt is written directly to the terminal, and asks for the PIN if one is set. Therefore a code
is created only after that prompt, for the facts that were shown there, and is written only to that terminal, not to
standard output, a log or the ledger. The code is not sent as a desktop notification, because every program in the same
session can read notifications.

A code is bound to other values, so that a stolen code is of little use:

- the ticket and the digest of its facts: the code approves only these facts;
- one browser session, whose id the user copies from the page: the code is invalid in an agent's session;
- five minutes, five tries and one use. A newer code for the ticket, or a change to the facts, voids the older code.

The ledger stores a salted scrypt hash of the code and these values. Guessing 40 bits with such a hash takes years, but
a code is valid only for minutes.

A code proves as much as an approval at the terminal, because it can be read only at that terminal. With a code, the
user can approve in a browser without a passkey, such as on a phone. The limits are those of an approval at the
terminal: without a PIN, a program that drives a pseudo-terminal can get a code, and a program under the same account
can write to the ledger file.
"""

from __future__ import annotations

import secrets
from typing import Final

from anyio import to_thread

from gpuwarden.core.errors import Refused
from gpuwarden.core.guidance import Action, NextStep, do
from gpuwarden.core.policy import hash_pin, pin_matches
from gpuwarden.ledger.event import Event
from gpuwarden.ledger.events import ApprovalCodeMade, ApprovalCodeUsed, ApprovalCodeWrong
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.teardown.passkeys import ALPHABET

CODE_S: Final = 300.0
"""Seconds for which a code is valid."""
LENGTH: Final = 8
TRIES: Final = 5
"""Number of wrong codes after which the correct code becomes invalid."""


def make_code(ctx: Context, ticket: str, digest: str, session: str, by: str) -> str:
    """Return a new code with which one browser session can approve the facts with this digest.

    The new code voids older codes for the ticket.
    """
    letters = "".join(secrets.choice(ALPHABET) for _ in range(LENGTH))
    made = ApprovalCodeMade(
        code=hash_pin(_bound(letters, ticket, digest, session)),
        digest=digest,
        session=session,
        expires_at=ctx.clock.now() + CODE_S,
        by=by,
    )
    ctx.ledger.add(_subject(ticket), made)
    return f"{letters[:4]}-{letters[4:]}"


async def use_code(ctx: Context, ticket: str, digest: str, session: str, code: str) -> Event[ApprovalCodeMade]:
    """Mark a code as used, and return its event, which contains the approving user.

    Raises Refused if this session has no open code for these facts, or if the code is wrong; a wrong code is counted.
    """
    # One call at a time, so that parallel calls can't exceed the limit on tries.
    async with ctx.lock(f"code-{ticket}"):
        made, now = ctx.ledger.last(_subject(ticket), ApprovalCodeMade), ctx.clock.now()
        if made is None or made.data.session != session or now > made.data.expires_at:
            raise Refused("no code was created for this page, or it has expired", _again(ticket, session))
        if made.data.digest != digest:
            raise Refused("the facts have changed since the terminal showed them", _again(ticket, session))
        tried = [one for one in ctx.ledger.recent(ApprovalCodeWrong, now - CODE_S) if one.data.made == made.seq]
        if len(tried) >= TRIES or ctx.ledger.used(ApprovalCodeUsed, _token(made)) is not None:
            raise Refused("this code has been used, or too many wrong codes were tried", _again(ticket, session))
        if not await to_thread.run_sync(pin_matches, _bound(code, ticket, digest, session), made.data.code):
            ctx.ledger.add(made.subject, ApprovalCodeWrong(made=made.seq))
            raise Refused("this is not the code that the terminal showed")
        ctx.ledger.add(made.subject, ApprovalCodeUsed(digest=digest), token=_token(made))
    return made


def _again(ticket: str, session: str) -> NextStep:
    return do(Action.APPROVE, "to get a new code", ticket=ticket, code=session)


def _subject(ticket: str) -> str:
    return f"code/{ticket}"


def _token(made: Event[ApprovalCodeMade]) -> str:
    return f"approval-code-{made.seq}"


def _bound(code: str, *to: str) -> str:
    """Return the text to hash: the code without its dash, and the values that it is bound to."""
    return "\n".join(("".join(c for c in code.upper() if c.isalnum()), *to))
