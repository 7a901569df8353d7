"""Accept a fan-out's plan with one receipt: check the cells, limit their total cost, then launch them."""

from __future__ import annotations

import hashlib
import secrets as random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from gpuwarden.core.errors import BadRequest, Conflict, NotSupported
from gpuwarden.core.fan_out import QUEUE_START_S, FanOutPlan, cell_spec, queue_spec, representatives
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.models import digest
from gpuwarden.core.plural import counted
from gpuwarden.ledger.events import FanOutAccepted, ReceiptIssued
from gpuwarden.lifecycle.context import CAPS, REHEARSAL, Context
from gpuwarden.lifecycle.fan_out.launching import FanOutResult, advance_fan_out
from gpuwarden.lifecycle.fan_out.queues import takes_arrays
from gpuwarden.lifecycle.fan_out.records import fan_out_ids, fan_out_status, read_fan_out
from gpuwarden.lifecycle.fan_out.search import chosen
from gpuwarden.lifecycle.leases.budgets import spending_approved, spending_question
from gpuwarden.lifecycle.records import read_receipt
from gpuwarden.lifecycle.submission.submit import (
    CheckedSubmission,
    Checks,
    NeedsApproval,
    check_spec,
    settled,
    storage_after,
)
from gpuwarden.lifecycle.team import check_receipt

ANOTHER_RECEIPT: Final = do(Action.RETRY, "without the receipt, to get a new one")


async def fan_out(
    ctx: Context, plan: FanOutPlan, *, dry_run: bool = False, receipt: str | None = None, script_file: str = ""
) -> FanOutResult:
    """Check a plan, and launch it if it is allowed. On a metered platform, a launch needs a receipt, as for a job.

    Raises Refused with the findings, NotFound or Conflict for a receipt that is unknown, stale or for another request,
    and BadRequest for a plan whose cost has no upper bound.
    """
    if receipt is not None and dry_run:
        raise BadRequest(
            "a receipt is for a launch and can't be combined with a dry run; nothing was done", "Omit one of them."
        )
    plan = plan.model_copy(update={"base": settled(ctx, plan.base)})
    if not ctx.profile(plan.base.platform).runner:
        raise NotSupported(
            f"{plan.base.platform} runs one program in one container, but a fan-out needs gpuwarden's runner",
            "Submit each run as a separate job there, or choose another platform.",
        )
    plan = FanOutPlan.model_validate(plan.model_dump())
    for fan_id in reversed(fan_out_ids(ctx.ledger)) if not dry_run else ():
        known = read_fan_out(ctx.ledger, fan_id)
        if known.asked == plan.digest and (
            known.receipt == receipt or (receipt is None and not fan_out_status(ctx, known).over)
        ):  # a repeated call, possibly after a lost reply
            return replace(await advance_fan_out(ctx, fan_id), adopted=True)
    issued = None if receipt is None else read_receipt(ctx.ledger, receipt).issued
    if issued is not None and issued.spec_digest != plan.digest:
        raise Conflict("the receipt was issued for other arguments", ANOTHER_RECEIPT)
    if issued is not None and ctx.clock.now() > issued.expires_at:
        raise Conflict("the receipt has expired, and the facts may have changed", ANOTHER_RECEIPT)
    first = plan.cells or chosen(plan, (), {}, 1)
    tasks = plan.size if plan.search is None and takes_arrays(ctx, plan) else 1
    checks = Checks.DRY_RUN if dry_run else Checks.RECEIPT if issued is None else Checks.LAUNCH
    cells = [cell_spec(plan, cell) for cell in representatives(plan) or first]
    checked = [await check_spec(ctx, cell, tasks=tasks, checks=checks) for cell in cells]
    facts = digest([each.facts.digest for each in checked])
    if issued is None:
        result = _issue(ctx, plan, checked, facts, script_file)
        if dry_run or checked[0].facts.metered:
            return result
        receipt = result.receipt
    elif issued.facts_digest != facts:
        raise Conflict("the checked facts have changed since the receipt was issued", ANOTHER_RECEIPT)
    assert receipt is not None
    return await _accept(ctx, plan, checked, receipt)


def _issue(
    ctx: Context, plan: FanOutPlan, checked: Sequence[CheckedSubmission], facts_digest: str, script_file: str
) -> FanOutResult:
    """Record that a plan has passed the submit gate, record its maximum cost, and return the result."""
    facts, ticket = checked[0].facts, f"r{random.token_hex(8)}"
    worst = _worst(plan, checked[0])
    if facts.metered and worst is None:
        raise BadRequest(
            "a cell's price or time limit is unknown, so its cost has no upper bound; nothing was launched",
            "Specify --timeout, and choose a platform with a known price.",
        )
    ask, expires = _question(ctx, plan, checked, worst), ctx.clock.now() + ctx.policy.receipt_ttl_s
    issued = ReceiptIssued(
        spec_digest=plan.digest,
        facts_digest=facts_digest,
        price=facts.price,
        expires_at=expires,
        worst_cost=worst,
        name=plan.base.name,
        platform=plan.base.platform,
        timeout_s=plan.base.timeout_s,
        ask=ask,
        hub=facts.hub.watched if facts.hub else {},
        inputs={file.path: file.sha256 for file in facts.inputs},
        artifact_store=plan.base.artifact_store,
        storage=storage_after(ctx, plan.base) if facts.metered else (),
        storage_usd_per_hour=checked[0].quote.storage_usd_per_hour if checked[0].quote else None,
        cells=plan.size,
        machines=plan.max_machines,
        plan=plan,
        script_file=script_file,
    )
    ctx.ledger.add(f"receipt/{ticket}", issued)
    findings = {(f.rule, f.message): f for each in checked for f in each.findings}
    return FanOutResult(plan, tuple(findings.values()), facts.price, worst, ticket, expires, ask)


def _question(ctx: Context, plan: FanOutPlan, checked: Sequence[CheckedSubmission], worst: float | None) -> str:
    """Return the reason why a plan needs the user's approval; empty if it is within the caps and does not repeat paid
    cells.
    """
    asks, configs = [spending_question(ctx, checked[0].facts, worst)], {cell.config for cell in plan.cells}
    for known in (read_fan_out(ctx.ledger, fan_id) for fan_id in fan_out_ids(ctx.ledger)):
        again = len(configs & {cell.config for cell in known.cells})
        paid = again and checked[0].facts.metered and ctx.profile(known.plan.base.platform).meter.metered
        pretend = known.plan.base.platform.startswith(REHEARSAL) is plan.base.platform.startswith(REHEARSAL)
        if paid and pretend and not fan_out_status(ctx, known).over:
            cells = f"{counted(again, 'cell')} of this plan's {counted(plan.size, 'cell')}"
            asks.append(f"fan-out {known.id} already has {cells} and has not finished, so they would be paid for twice")
            break
    return "; ".join(filter(None, asks))


def _worst(plan: FanOutPlan, checked: CheckedSubmission) -> float | None:
    """Return the maximum cost of a plan in US dollars, which is the cost of all queues, limited by the budget; None if
    unknown.
    """
    cost = replace(checked.facts, spec=queue_spec(plan, (), plan.base.name)).worst_cost
    each = replace(checked.facts, spec=plan.base).worst_cost
    if cost is None or each is None or plan.base.timeout_s is None:
        return None
    machines = min(plan.max_machines, plan.size)
    whole = (each * plan.size + each / plan.base.timeout_s * QUEUE_START_S * machines) * plan.max_tries
    return whole if plan.max_cost_usd is None else min(whole, plan.max_cost_usd)


async def _accept(ctx: Context, plan: FanOutPlan, checked: Sequence[CheckedSubmission], receipt: str) -> FanOutResult:
    """Record the plan, once per receipt, and advance it."""
    fan_id = "f" + hashlib.sha256(receipt.encode()).hexdigest()[:10]
    issued = read_receipt(ctx.ledger, receipt).issued
    async with ctx.lock(CAPS):
        if ctx.ledger.used(FanOutAccepted, receipt) is None:
            ask = _question(ctx, plan, checked, issued.worst_cost)
            if ask and not spending_approved(ctx, receipt):
                raise NeedsApproval(f"the user has to approve this spending first: {ask}", receipt)
            if ask:
                check_receipt(ctx, receipt)
            price, folder = checked[0].facts.price, str(ctx.cwd or Path.cwd())
            body = FanOutAccepted(plan=plan, receipt=receipt, price=price, folder=folder)
            ctx.ledger.add(f"fanout/{fan_id}", body, token=receipt)
    return await advance_fan_out(ctx, fan_id)
