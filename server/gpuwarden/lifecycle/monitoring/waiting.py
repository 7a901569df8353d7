"""List the open questions to a person: machines that may end, prices above the caps, ends that nobody has seen.

Everything is read from the ledger, so the answer is as fresh as the last process that moved the jobs on.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpuwarden.core.guidance import Action, NextStep, approval, do
from gpuwarden.core.money import at_most, usd, usd_per_hour
from gpuwarden.core.plural import counted
from gpuwarden.core.states import Job, Teardown
from gpuwarden.ledger.events import EndingAnnounced, ReceiptIssued, TeardownAwaitingHuman
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.ending.orders import order_for
from gpuwarden.lifecycle.execution.situation import standing_order
from gpuwarden.lifecycle.monitoring.meter import believed, lease_now
from gpuwarden.lifecycle.monitoring.notify import ends_at
from gpuwarden.lifecycle.records import read_job, read_receipt, read_teardown, receipt_used

RECEIPTS_S = 86_400.0
"""No receipt is good for longer."""


@dataclass(frozen=True)
class Waiting:
    """One question to a person. `cost_usd` is what its machine has cost, or what the job may cost; None: unknown.

    `kind` is teardown, ordered (a standing order ends the machine unless somebody objects), unseen_end, spending or
    price. `since` is when it was first asked.
    """

    subject: str
    ticket: str
    kind: str
    text: str
    since: float
    job_id: str | None = None
    name: str = ""
    platform: str = ""
    cost_usd: float | None = None
    price_usd_per_hour: float | None = None
    expires_at: float | None = None
    next_steps: tuple[NextStep, ...] = ()


def what_waits(ctx: Context) -> list[Waiting]:
    """Return every open question to a person, the oldest first."""
    tickets = ctx.ledger.subjects("teardown", Teardown.AWAITING_HUMAN, Teardown.NEEDS_HUMAN)
    found = [_teardown(ctx, name.removeprefix("teardown/")) for name in tickets]
    issued = ctx.ledger.recent(ReceiptIssued, ctx.clock.now() - RECEIPTS_S)
    found += [w for event in issued if event.data.ask and (w := _spending(ctx, event.subject)) is not None]
    return sorted(found, key=lambda w: w.since)


def _teardown(ctx: Context, ticket: str) -> Waiting:
    record = read_teardown(ctx.ledger, ticket)
    job, lease = read_job(ctx.ledger, record.job_id), lease_now(ctx, record.lease)
    price, cost = lease.price, lease.cost
    off = believed(ctx, lease.id) == "stopped"
    if off:
        price = lease.instance.stopped_usd_per_hour if lease.instance else None
    rate = "" if price is None else f", {usd_per_hour(price)}"
    meter = f"it is stopped and its disk may bill{rate}" if off else f"it bills{rate}"
    text = f"{record.verb} the machine of {job.spec.name} on {lease.platform}: {meter}, {usd(cost)} so far"
    kind, steps, since, expires_at = "teardown", (approval(ticket),), record.since, record.expires_at
    if record.state is not Teardown.AWAITING_HUMAN:
        kind, steps = "unseen_end", (do(Action.CHECK, job_id=job.id),)
        text = f"the approved end of the machine of {job.spec.name} is not seen; look at {lease.platform}'s console"
    else:
        since = next((e.at for e in ctx.ledger.events(record.subject, kind=TeardownAwaitingHuman)), since)
        said = ctx.ledger.last(job.subject, EndingAnnounced)
        if said is not None and said.data.ticket == ticket and standing_order(ctx, job.id) is not None:
            kind, steps = "ordered", (do(Action.KEEP, "to object", job_id=job.id),)
            text, expires_at = f"a standing order will {text}", ends_at(ctx, said)
    return Waiting(
        record.subject,
        ticket,
        kind,
        text,
        since,
        job_id=job.id,
        name=job.spec.name,
        platform=lease.platform,
        cost_usd=cost,
        price_usd_per_hour=price,
        expires_at=expires_at,
        next_steps=steps,
    )


def _spending(ctx: Context, subject: str) -> Waiting | None:
    """Return the question about a receipt's price; None where it is answered, used, expired or of no use any more."""
    ticket, now = subject.removeprefix("receipt/"), ctx.clock.now()
    receipt = read_receipt(ctx.ledger, ticket)
    issued = receipt.issued
    if now > issued.expires_at or receipt.approved_at(now) or receipt_used(ctx.ledger, ticket):
        return None
    if issued.job is not None and read_job(ctx.ledger, issued.job).state is not Job.PROVISIONING:
        return None
    order = order_for(ctx, ticket)
    worst = "" if issued.worst_cost is None else f"; {at_most(issued.worst_cost, order.verb if order else None)}"
    others = len(issued.choices) - 1
    where = f"{issued.platform} or {counted(others, 'other platform')}" if others > 0 else issued.platform
    first = ctx.ledger.history(subject)[0]
    return Waiting(
        subject,
        ticket,
        "price" if issued.job else "spending",
        f"{issued.name} on {where} at {usd_per_hour(issued.price)}: {issued.ask}{worst}",
        first.at,
        job_id=issued.job,
        name=issued.name,
        platform=issued.platform,
        cost_usd=issued.worst_cost,
        price_usd_per_hour=issued.price,
        expires_at=issued.expires_at,
        next_steps=(approval(ticket),),
    )
