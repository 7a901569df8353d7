"""Change a fan-out's budget and its number of machines.

Lower limits need no approval. Higher limits or a higher price require the same as a launch: a new receipt, and the
user's approval if they exceed the caps. If the user approved the current limits, every increase needs a new approval.
"""

from __future__ import annotations

import secrets as random
from dataclasses import dataclass
from typing import Final

from gpuwarden.core.errors import BadRequest, Conflict
from gpuwarden.core.fan_out import FanOutPlan, cell_spec
from gpuwarden.core.guidance import Action, NextStep, approval, do
from gpuwarden.core.inputs import build
from gpuwarden.core.models import digest
from gpuwarden.core.money import usd
from gpuwarden.ledger.events import ApprovalGranted, FanOutLimited, ReceiptIssued
from gpuwarden.lifecycle.context import CAPS, Context
from gpuwarden.lifecycle.fan_out.records import FanOutRecord, read_fan_out
from gpuwarden.lifecycle.fan_out.search import chosen
from gpuwarden.lifecycle.leases.budgets import spending_approved, spending_question
from gpuwarden.lifecycle.records import read_receipt
from gpuwarden.lifecycle.submission.submit import CheckedSubmission, NeedsApproval, check_spec
from gpuwarden.lifecycle.team import check_receipt

WITHOUT_RECEIPT: Final = "Omit the receipt to get a new one."


@dataclass(frozen=True)
class LimitIncrease:
    """Higher limits that have been checked but not applied. A call with `receipt` applies them, after an approval if
    required.
    """

    fan_id: str
    receipt: str
    issued: ReceiptIssued

    @property
    def next_steps(self) -> tuple[NextStep, ...]:
        """Return the approval, if needed, and the call that applies the limits."""
        again = do(
            Action.RESUME,
            "to apply these limits",
            job_id=self.fan_id,
            max_cost_usd=self.issued.worst_cost or 0.0,
            max_machines=self.issued.machines,
            receipt=self.receipt,
        )
        return (approval(self.receipt), again) if self.issued.ask else (again,)


def consented(ctx: Context, fan: FanOutRecord, cost: float = 0.0) -> bool:
    """Return whether the user approved a fan-out's total cost before its current limits were applied.

    `cost` is in US dollars. The approval of an accepted plan does not expire, but covers only the cost on the receipt.
    """
    if fan.shown is not None and cost > fan.shown:
        return False
    granted = ctx.ledger.events(f"receipt/{fan.consent}", kind=ApprovalGranted)
    return any(event.at <= fan.consented_at and event.data.holds_at(fan.consented_at) for event in granted)


async def change_limits(
    ctx: Context,
    fan_id: str,
    by: str,
    *,
    max_cost_usd: float | None = None,
    max_machines: int | None = None,
    receipt: str | None = None,
) -> LimitIncrease | None:
    """Change the limits of a fan-out; None leaves a limit unchanged.

    Return the new limits if they were only checked, or None if they have been applied. Raises BadRequest
    for invalid limits, Conflict for a receipt that is outdated or was issued for another request, and Refused if the
    gate blocks the change or the user has to approve it first.
    """
    fan = read_fan_out(ctx.ledger, fan_id)
    limits = {
        "max_cost_usd": fan.budget if max_cost_usd is None else max_cost_usd,
        "max_machines": fan.plan.max_machines if max_machines is None else max_machines,
    }
    wanted = build(FanOutPlan, {**dict(fan.plan), **limits})
    changed = (wanted.max_cost_usd, wanted.max_machines) != (fan.plan.max_cost_usd, fan.plan.max_machines)
    if receipt is not None and fan.consent == receipt != fan.receipt and not changed:
        return None  # a repeated call, perhaps after a lost reply
    checked = await check_spec(ctx, cell_spec(wanted, (fan.cells or chosen(wanted, (), {}, 1))[0]))
    if not _rises(fan, wanted, checked):
        if receipt is not None:
            raise BadRequest("these limits don't exceed the current ones, so they need no receipt", WITHOUT_RECEIPT)
        if changed:
            _record(ctx, fan, wanted, by)
        return None
    if checked.facts.metered and (checked.facts.price is None or wanted.max_cost_usd is None):
        raise BadRequest("the price or the budget is unknown, so higher limits can't be checked; nothing was changed")
    if receipt is None:
        return _issue(ctx, fan, wanted, checked)
    issued = read_receipt(ctx.ledger, receipt).issued
    if issued.spec_digest != _change_digest(fan, wanted):
        raise Conflict(
            "the receipt was issued for other limits, or the limits have changed since then", WITHOUT_RECEIPT
        )
    if ctx.clock.now() > issued.expires_at or issued.facts_digest != checked.facts.digest:
        raise Conflict("the receipt has expired, or the checked facts have changed", WITHOUT_RECEIPT)
    async with ctx.lock(CAPS):  # so that two increases, or an increase and a launch, can't use the same budget
        ask = _question(ctx, fan, wanted, checked)
        if ask and not spending_approved(ctx, receipt):
            raise NeedsApproval(f"the user has to approve this spending first: {ask}", receipt)
        if ask:
            check_receipt(ctx, receipt)
        _record(ctx, fan, wanted, by, receipt=receipt, price=issued.price)
    return None


def _rises(fan: FanOutRecord, wanted: FanOutPlan, checked: CheckedSubmission) -> bool:
    """Return whether the requested limits exceed the current limits, or the price is higher than the accepted price."""
    if not checked.facts.metered:
        return False
    more = fan.budget is not None and wanted.max_cost_usd is not None and wanted.max_cost_usd > fan.budget
    dearer = checked.facts.price is None or checked.facts.price > (fan.price or 0.0)
    return more or dearer or wanted.max_machines > fan.plan.max_machines


def _change_digest(fan: FanOutRecord, wanted: FanOutPlan) -> str:
    """Return the digest of a limit change: the fan-out's id, its number of decisions, and the requested plan."""
    return digest([fan.id, fan.decisions, wanted.digest])


def _question(ctx: Context, fan: FanOutRecord, wanted: FanOutPlan, checked: CheckedSubmission) -> str:
    """Return the reason why an increase needs the user's approval.

    Return an empty string if the increase is within the caps and the current limits needed no approval.
    """
    asks = [spending_question(ctx, checked.facts, wanted.max_cost_usd, of=tuple(q.job for q in fan.queues))]
    if consented(ctx, fan):
        machines = fan.plan.max_machines
        asks.append(f"the approval of {fan.id} covers at most {usd(fan.shown)} and max_machines={machines}")
    return "; ".join(filter(None, asks))


def _issue(ctx: Context, fan: FanOutRecord, wanted: FanOutPlan, checked: CheckedSubmission) -> LimitIncrease:
    """Record that higher limits passed the gate, with the question for the user, and return the limits."""
    facts, ticket = checked.facts, f"r{random.token_hex(8)}"
    issued = ReceiptIssued(
        spec_digest=_change_digest(fan, wanted),
        facts_digest=facts.digest,
        price=facts.price,
        expires_at=ctx.clock.now() + ctx.policy.receipt_ttl_s,
        worst_cost=wanted.max_cost_usd,
        name=wanted.base.name,
        platform=wanted.base.platform,
        timeout_s=wanted.base.timeout_s,
        ask=_question(ctx, fan, wanted, checked),
        artifact_store=wanted.base.artifact_store,
        cells=fan.plan.size,
        machines=wanted.max_machines,
        fan_out=fan.id,
    )
    ctx.ledger.add(f"receipt/{ticket}", issued)
    return LimitIncrease(fan.id, ticket, issued)


def _record(
    ctx: Context, fan: FanOutRecord, wanted: FanOutPlan, by: str, *, receipt: str = "", price: float | None = None
) -> None:
    """Record new limits. Raises Conflict for a receipt that has already been used."""
    body = FanOutLimited(
        max_machines=wanted.max_machines, max_cost_usd=wanted.max_cost_usd, receipt=receipt, price=price, by=by
    )
    ctx.ledger.add(fan.subject, body, token=receipt or None)
