"""Handle a machine that costs more than the checked price: launch its job only within the caps or after approval.

Some platforms report the true price only after a machine is created. The job's cost at that price is compared with
the caps before the launch. If a cap is exceeded, the job waits for approval. If the price is not approved in time, the
machine is terminated before it has run a job.
"""

from __future__ import annotations

import secrets as random
from dataclasses import dataclass
from typing import Final, Literal

from gpuwarden.core.guidance import Action, NextStep, approval, do
from gpuwarden.core.models import Instance
from gpuwarden.core.money import usd_per_hour
from gpuwarden.core.states import Job
from gpuwarden.ledger.events import JobAccepted, PriceAccepted, PriceAsk, ReceiptIssued
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.leases.budgets import over_caps, spending_approved
from gpuwarden.lifecycle.records import JobRecord

ROUNDING: Final = 1.01
"""A price may exceed the checked price by this factor, because platforms round prices differently."""


def price_settled(ctx: Context, job: JobRecord, machine: Instance) -> Literal["yes", "ask", "no"]:
    """Return "yes" if a job may be launched at its machine's price, "ask" while the price needs the user's approval,
    and "no" if it was not approved in time.
    """
    price, allowed = machine.price_usd_per_hour, allowed_price(ctx, job)
    if price is None or allowed is None or price <= allowed * ROUNDING:
        return "yes"
    asked = ctx.ledger.last(job.subject, PriceAsk)
    if asked is None or price > asked.data.price * ROUNDING:
        question = _question(ctx, job, price, allowed)
        if not question:
            ctx.ledger.add(job.subject, PriceAccepted(price=price, why=_price_change(price, allowed)))
            return "yes"
        # `approve` accepts this ticket. The ticket matches no submission, so it can't rent a second machine.
        ticket, spec = f"r{random.token_hex(8)}", job.spec
        expires = ctx.clock.now() + ctx.profile(spec.platform).limits.boot_timeout_s
        issued = ReceiptIssued(
            job=job.id,
            ask=question,
            price=price,
            expires_at=expires,
            name=spec.name,
            platform=spec.platform,
            timeout_s=spec.timeout_s,
            spec_digest="",
            facts_digest="",
        )
        with ctx.ledger.transaction():
            ctx.ledger.add(f"receipt/{ticket}", issued)
            ctx.ledger.add(job.subject, PriceAsk(ticket=ticket, price=price, expires_at=expires, why=question))
        return "ask"
    if spending_approved(ctx, asked.data.ticket):
        ctx.ledger.add(job.subject, PriceAccepted(price=price, why="the user approved it"))
        return "yes"
    return "ask" if ctx.clock.now() <= asked.data.expires_at else "no"


@dataclass(frozen=True)
class PriceQuestion:
    """A question for the user about the price of a job's machine, and the next steps."""

    text: str
    next_steps: tuple[NextStep, ...]
    ticket: str


def price_question(ctx: Context, job: JobRecord) -> PriceQuestion | None:
    """Return the open question about the price of a job's machine; None if no question is open."""
    asked = ctx.ledger.last(job.subject, PriceAsk)
    if asked is None or job.state is not Job.PROVISIONING or spending_approved(ctx, asked.data.ticket):
        return None
    text = (
        f"{asked.data.why}. The job has not been launched, and the machine is billed. Without approval, the machine is "
        "terminated when the boot limit is reached."
    )
    resume = do(Action.CHECK, "to launch the job after the approval", job_id=job.id)
    return PriceQuestion(text, (approval(asked.data.ticket), resume), asked.data.ticket)


def allowed_price(ctx: Context, job: JobRecord) -> float | None:
    """Return the checked price per hour, or a higher price that was accepted later; None if it is unknown."""
    settled = ctx.ledger.last(job.subject, PriceAccepted)
    return settled.data.price if settled else job.price


def _price_change(price: float, allowed: float) -> str:
    return f"the machine costs {usd_per_hour(price)}, but the checked price was {usd_per_hour(allowed)}"


def _question(ctx: Context, job: JobRecord, price: float, allowed: float) -> str:
    """Return the reason why the user must approve the price; empty if the job stays within the caps."""
    accepted = ctx.ledger.last(job.subject, JobAccepted)
    issued = ctx.ledger.last(f"receipt/{accepted.data.receipt}", ReceiptIssued) if accepted else None
    if issued is not None and issued.data.ask:
        return f"{_price_change(price, allowed)}, and the user approved only that price"
    if job.worst_cost is None or job.price is None:
        return f"{_price_change(price, allowed)}, and the job's maximum cost is unknown"
    over = over_caps(ctx, job.spec, job.worst_cost * price / job.price, job.person, of=(job.id,))
    return f"{_price_change(price, allowed)}: {over}" if over else ""
