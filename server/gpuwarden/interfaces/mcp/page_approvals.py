"""Ask the user to decide on the `gpuwarden serve` page, through a client that can open URLs.

The client's answer means only that the user opened the page. The user then decides on the page or at a terminal, and
the ledger records the channel. A forged or replayed answer from the client therefore has no effect.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import anyio
from mcp.server.mcpserver import Context as ClientContext
from mcp.shared.exceptions import MCPError
from mcp_types import (
    CallToolResult,
    ElicitCompleteNotification,
    ElicitCompleteNotificationParams,
    ElicitRequest,
    ElicitRequestURLParams,
    ElicitResult,
    InputRequiredResult,
)
from mcp_types.version import is_version_at_least

from gpuwarden.core.errors import WardenError
from gpuwarden.core.guidance import Action, read_steps
from gpuwarden.core.states import Teardown
from gpuwarden.interfaces.mcp.tools.base import edited
from gpuwarden.interfaces.mcp.wording import in_calls

if TYPE_CHECKING:
    from gpuwarden.lifecycle.context import Context

TOOLS: Final = frozenset({"submit_job", "teardown_request"})
KEY: Final = "page"
ROUNDS: Final = "2026-07-28"
"""First protocol revision in which a call can return a question, which the client answers by repeating the call."""
APPROVED: Final = "The user has approved the spending. This call launched nothing."
MESSAGE: Final = (
    "{} Open gpuwarden's page to decide? Opening it approves nothing. If the page asks for a token, run gpuwarden "
    "dashboard in a terminal first."
)
LOOK_S: Final = 0.5
"""Seconds between two checks for a decision."""

Outcome: TypeAlias = CallToolResult | InputRequiredResult
Call: TypeAlias = Callable[[], Awaitable[Outcome]]


@dataclass(frozen=True)
class Question:
    """A request that waits for approval: a ticket (t...) with the digest of its facts, or a receipt (r...)."""

    ticket: str
    digest: str = ""

    @property
    def id(self) -> str:
        """Return an id that is unique to these facts."""
        return f"{self.ticket}-{self.digest[7:19]}" if self.digest else self.ticket

    def waits(self, ctx: Context) -> bool:
        """Return whether the request is still undecided, according to the ledger."""
        from gpuwarden.lifecycle.leases.budgets import spending_approved
        from gpuwarden.lifecycle.records import read_teardown, receipt_used

        if self.ticket.startswith("r"):
            return not receipt_used(ctx.ledger, self.ticket) and not spending_approved(ctx, self.ticket)
        record = read_teardown(ctx.ledger, self.ticket)
        return record.state is Teardown.AWAITING_HUMAN and record.digest == self.digest


class PageApprovals:
    """The questions asked by one server. If `public`, clients may be on other machines and get the public address."""

    def __init__(self, ctx: Context, *, public: bool) -> None:
        self._ctx, self._public = ctx, public
        self._asked: set[str] = set()
        """Ids of the questions that were sent. A question about the same facts is sent only once."""

    async def asking(
        self, client: ClientContext[Any, Any], arguments: Mapping[str, Any], call: Call, patience_s: float
    ) -> Outcome:
        """Return the result of a call. If it needs the user's approval, ask the client to open the page, and wait.

        The result is the state in the ledger after a bounded wait, regardless of the client's answer.
        """
        if (resumed := _resumed(client)) is not None:
            reply = (client.input_responses or {}).get(KEY)
            opened = isinstance(reply, ElicitResult) and reply.action == "accept"
            return await self._outcome(*resumed, opened, arguments, call)
        first = await call()
        if not isinstance(first, CallToolResult) or arguments.get("dry_run") or not _opens_urls(client):
            return first
        asked, base = self._question(first), self._page()
        if asked is None or not base or asked.id in self._asked:
            return first
        self._asked.add(asked.id)
        message = MESSAGE.format((first.structured_content or {})["message"])
        url = f"{base}/approve/{asked.ticket}"
        if is_version_at_least(client.protocol_version or "", ROUNDS):
            request = ElicitRequest(params=ElicitRequestURLParams(message=message, url=url))
            state = {"ticket": asked.ticket, "digest": asked.digest, "result": first.model_dump(mode="json")}
            return InputRequiredResult(input_requests={KEY: request}, request_state=json.dumps(state))
        action = "cancel"  # also used if the client fails or does not answer in time
        with contextlib.suppress(MCPError, ValueError), anyio.move_on_after(patience_s):
            action = (await client.elicit_url(message, url, asked.id)).action
        outcome = await self._outcome(asked, first, action == "accept", arguments, call)
        if not asked.waits(self._ctx):
            done = ElicitCompleteNotificationParams(elicitation_id=asked.id)
            await client.session.send_notification(ElicitCompleteNotification(params=done), client.request_id)
        return outcome

    def _question(self, result: CallToolResult) -> Question | None:
        """Return the question if a result needs approval on the page, else None."""
        from gpuwarden.lifecycle.records import read_teardown

        body = result.structured_content or {}
        steps = read_steps(body.get("next") or ())
        named = (str(step.parameters.get("ticket", "")) for step in steps if step.action is Action.APPROVE)
        ticket = str(body.get("ticket") or next(named, ""))
        if body.get("code") != "approval_required" or ticket[:1] not in {"t", "r"}:
            return None  # the page does not show other questions, such as consent to a rehearsal (s...)
        found = Question(ticket, (read_teardown(self._ctx.ledger, ticket).digest or "") if ticket[0] == "t" else "")
        return found if found.waits(self._ctx) else None

    def _page(self) -> str:
        """Return the address of this ledger's page; empty if no page is running or the policy does not allow it."""
        from gpuwarden.interfaces.http.record import running_server

        with contextlib.suppress(WardenError, OSError):
            if KEY in self._ctx.policy.approval.channels:
                server = running_server(self._ctx.home)
                return ((self._public and server.public_url) or server.url).rstrip("/")
        return ""

    async def _outcome(
        self, asked: Question, result: CallToolResult, opened: bool, arguments: Mapping[str, Any], call: Call
    ) -> Outcome:
        """Return the request's state. If the user opened the page, first wait for a decision.

        A call that ends a machine or launches a receipt is repeated, which is safe because an approval can be used only
        once. A check is not repeated, because that would issue another receipt.
        """
        from gpuwarden.lifecycle.monitoring.wait import MAX_WAIT_S

        clock = self._ctx.clock
        until = clock.now() + (MAX_WAIT_S if opened else 0)
        while asked.waits(self._ctx) and clock.now() < until:
            await clock.sleep(LOOK_S)
        if asked.ticket.startswith("t") or arguments.get("receipt") == asked.ticket:
            return await call()
        if asked.waits(self._ctx):
            return result
        later = (result.structured_content or {})["next"][1:]
        return edited(result, code="checked", message=APPROVED, hint=in_calls(read_steps(later)), next=later)


def _opens_urls(client: ClientContext[Any, Any]) -> bool:
    """Return whether the client declared that it can ask its user to open a URL."""
    declared = client.client_capabilities.elicitation if client.client_capabilities else None
    return declared is not None and declared.url is not None


def _resumed(client: ClientContext[Any, Any]) -> tuple[Question, CallToolResult] | None:
    """Return the question that a repeated call answers, and the result that contained the question.

    The SDK has verified that this server issued the state, for this caller, tool and arguments.
    """
    state = json.loads(client.request_state or "{}")
    if "ticket" not in state:  # the first call, or the answer to a form
        return None
    return Question(state["ticket"], state["digest"]), CallToolResult.model_validate(state["result"])
