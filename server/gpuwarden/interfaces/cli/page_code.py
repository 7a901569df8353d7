"""Show the user, at a terminal, the one-time code for an approval on the page. See `lifecycle.teardown.approval_codes`.

The code is written to the terminal itself. No reply contains the code, with or without `--json`.
"""

from __future__ import annotations

import contextlib

from gpuwarden.core.errors import Conflict, NotFound, Refused
from gpuwarden.core.plural import counted
from gpuwarden.core.states import Teardown
from gpuwarden.interfaces.cli.approval import (
    Terminal,
    awaits_approval,
    check_pin,
    open_spending,
    open_terminal,
    ordered_by,
    request_facts,
    spending_digest,
    spending_facts,
    user,
    warn,
)
from gpuwarden.interfaces.http.tokens import TokenStore
from gpuwarden.interfaces.results import Result
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.teardown.approval_codes import CODE_S, make_code
from gpuwarden.lifecycle.teardown.gate import proceed


def allows_codes(ctx: Context) -> bool:
    """Return whether the policy allows codes.

    A code is an approval at a terminal, so the terminal channel must be allowed too.
    """
    return {"terminal", "page"} <= set(ctx.policy.approval.channels)


async def show_code(ctx: Context, ticket: str, session: str, terminal: Terminal | None = None) -> Result:
    """Ask the user at a terminal to approve a ticket, and print a code that is valid for one browser session.

    `session` is the browser session's id; the page shows it. Raises NotFound, Conflict, or Refused.
    """
    if not allows_codes(ctx):
        raise Refused("the policy does not allow codes on the page", "See approval.channels in gpuwarden doctor.")
    with contextlib.nullcontext(terminal) if terminal else open_terminal() as asked:
        if session not in TokenStore(ctx.home, ctx.clock).valid_ids():
            raise NotFound("no open page has that id", "Copy the command from the page of gpuwarden dashboard.")
        facts, digest = await _details_of(ctx, ticket)
        warn(ctx, asked)
        for text in facts:
            asked.say(text)
        asked.say("The code is valid only on the page that shows this command.")
        if asked.ask("Type yes to show the code: ") != "yes":
            raise Refused("no code was created; nothing was changed")
        await check_pin(ctx, asked)
        asked.say(f"Type on the page: {make_code(ctx, ticket, digest, session, user())}")
    return Result(message=f"The code can be used once, within {counted(int(CODE_S // 60), 'minute')}.")


async def _details_of(ctx: Context, ticket: str) -> tuple[list[str], str]:
    """Return a ticket's or receipt's details, one per line, and their digest.

    Raises Conflict if the ticket is not waiting for approval, and Refused if a proof is missing.
    """
    if ticket.startswith("r"):
        issued = open_spending(ctx, ticket)
        facts = spending_facts(issued.data, ordered_by(ctx, ticket))
        if not awaits_approval(ctx, issued):
            raise Conflict("this spending needs no approval, or has already been approved")
        return facts, spending_digest(issued, facts)
    view = await proceed(ctx, ticket)
    if view.record.state is Teardown.BLOCKED:
        raise Refused(f"ticket {ticket} is blocked: not everything is proven", "Fix the findings.", view.findings)
    if view.record.state is not Teardown.AWAITING_HUMAN or view.record.digest is None:
        raise Conflict(f"ticket {ticket} is {view.record.state}, so it can't be approved")
    return request_facts(view), view.record.digest
