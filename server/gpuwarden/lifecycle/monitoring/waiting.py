"""List the decisions waiting for the user, about teardowns, spending and prices.

The list is read from the ledger, so it reflects the last time that a process advanced the jobs.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from gpuwarden.core.guidance import Action, NextStep, approval, do
from gpuwarden.core.models import Verb
from gpuwarden.core.money import at_most, usd, usd_per_hour
from gpuwarden.core.next_step import Machine
from gpuwarden.core.plural import counted
from gpuwarden.core.states import LIVE_LEASES, TERMINAL_JOBS, Job, Teardown
from gpuwarden.ledger.events import AutoTeardownAnnounced, ReceiptIssued, TeardownAwaitingHuman
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.execution.situation import following, machine_of, situation
from gpuwarden.lifecycle.leases.auto_teardown import automatic_teardown, order_for
from gpuwarden.lifecycle.leases.meter import confirmed_end, lease_now
from gpuwarden.lifecycle.notify import ends_at
from gpuwarden.lifecycle.records import JobRecord, LeaseRecord, read_job, read_receipt, read_teardown, receipt_used

RECEIPTS_S = 86_400.0
"""Maximum number of seconds for which a receipt is valid."""


Kind = Literal["teardown", "ordered", "unseen_end", "blocked", "unasked", "spending", "price"]


@dataclass(frozen=True)
class Waiting:
    """One question for the user. `cost_usd` is the machine's cost so far or the job's maximum cost; None if unknown.

    `kind` is teardown, ordered (automatic teardown ends the machine unless the user objects), unseen_end (a teardown is
    not confirmed), blocked (only the user can accept losing unverified outputs), unasked (the machine is no longer
    needed and its teardown was not requested), spending or price. `since` is when the question was first asked.
    """

    subject: str
    ticket: str
    kind: Kind
    text: str
    since: float
    job_id: str | None = None
    name: str = ""
    platform: str = ""
    cost_usd: float | None = None
    estimated: bool = False
    price_usd_per_hour: float | None = None
    expires_at: float | None = None
    next_steps: tuple[NextStep, ...] = ()


def what_waits(ctx: Context) -> list[Waiting]:
    """Return every question that waits for the user's answer, oldest first."""
    tickets = ctx.ledger.subjects("teardown", Teardown.AWAITING_HUMAN, Teardown.NEEDS_HUMAN)
    found = [_teardown(ctx, name.removeprefix("teardown/")) for name in tickets]
    found += _left_billing(ctx, {waiting.job_id for waiting in found})
    issued = ctx.ledger.recent(ReceiptIssued, ctx.clock.now() - RECEIPTS_S)
    found += [w for event in issued if event.data.ask and (w := _spending(ctx, event.subject)) is not None]
    return sorted(found, key=lambda w: w.since)


def _left_billing(ctx: Context, asked: Container[str | None]) -> Iterator[Waiting]:
    """Yield a question for each billed machine of an ended job whose next step requires a user decision."""
    for job_id in ctx.ledger.jobs_with_leases(*LIVE_LEASES):
        job = read_job(ctx.ledger, job_id)
        if job_id in asked or job.state not in TERMINAL_JOBS:
            continue
        now, machine = situation(ctx, job), machine_of(ctx, job)
        if machine is None or now.machine is not Machine.BILLING or now.given_back or not now.settled:
            continue
        found = _of_machine(ctx, job, machine, now.verb, now.ticket)
        step = next(step for step in following(ctx, job) if step.action is not Action.MANUAL)
        if now.ticket_state is None and now.ordered is None:
            yield replace(found, kind="unasked", since=job.since, next_steps=(step,))
        elif now.ticket_state is Teardown.BLOCKED:
            text = f"{found.text}; its teardown is blocked"
            yield replace(found, kind="blocked", text=text, next_steps=(step,))


def _teardown(ctx: Context, ticket: str) -> Waiting:
    record = read_teardown(ctx.ledger, ticket)
    job, lease = read_job(ctx.ledger, record.job_id), lease_now(ctx, record.lease)
    found = replace(_of_machine(ctx, job, lease, record.verb, ticket), since=record.since)
    if record.state is not Teardown.AWAITING_HUMAN:
        text = f"the teardown of {job.spec.name}'s machine is not confirmed; check {lease.platform}'s console"
        return replace(found, kind="unseen_end", text=text, next_steps=(do(Action.CHECK, job_id=job.id),))
    since = next((e.at for e in ctx.ledger.events(record.subject, kind=TeardownAwaitingHuman)), record.since)
    announced = ctx.ledger.last(job.subject, AutoTeardownAnnounced)
    if announced is not None and announced.data.ticket == ticket and automatic_teardown(ctx, job.id) is not None:
        keep = (do(Action.HOLD, "to object", job_id=job.id),)
        text = f"automatic teardown will {found.text}"
        return replace(
            found, kind="ordered", text=text, since=since, expires_at=ends_at(ctx, announced), next_steps=keep
        )
    return replace(found, since=since, expires_at=record.expires_at)


def _of_machine(ctx: Context, job: JobRecord, lease: LeaseRecord, verb: Verb, ticket: str) -> Waiting:
    """Return the question of whether a machine may be torn down, with the machine's costs."""
    off = confirmed_end(ctx, lease.id) == "stopped"
    price = lease.instance.stopped_usd_per_hour if off and lease.instance else lease.price
    rate = "" if price is None else f", {usd_per_hour(price)}"
    meter = f"it is stopped and its disk may be billed{rate}" if off else f"it is billed{rate}"
    cost = usd(lease.cost, lease.estimated)
    return Waiting(
        f"teardown/{ticket}" if ticket else lease.subject,
        ticket,
        "teardown",
        f"{verb} {job.spec.name}'s machine on {lease.platform}: {meter}, {cost} so far",
        job.since,
        job_id=job.id,
        name=job.spec.name,
        platform=lease.platform,
        cost_usd=lease.cost,
        estimated=lease.estimated,
        price_usd_per_hour=price,
        next_steps=(approval(ticket),) if ticket else (),
    )


def _spending(ctx: Context, subject: str) -> Waiting | None:
    """Return the question about a receipt's price; None if the receipt is approved, used, expired or obsolete."""
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
