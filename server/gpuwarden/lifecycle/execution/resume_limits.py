"""Limit the time and cost of an attempt after a pause to the job's approved amount, or else to the caps."""

from __future__ import annotations

from typing import Final, NamedTuple

from gpuwarden.core.errors import Refused
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.models import Place
from gpuwarden.core.reasons import Code, because
from gpuwarden.ledger.events import (
    JobAccepted,
    JobPaused,
    JobPreempted,
    JobSubmitted,
    JobSubmitting,
    ReceiptIssued,
)
from gpuwarden.lifecycle.context import CAPS, CAPS_PATIENCE_S, Context
from gpuwarden.lifecycle.execution.transitions import move
from gpuwarden.lifecycle.leases.budgets import DAY_S, over_caps
from gpuwarden.lifecycle.leases.meter import lease_now
from gpuwarden.lifecycle.records import JobRecord
from gpuwarden.lifecycle.team import unlisted

SHORTEST_S: Final = 60
"""Minimum time limit of an attempt in seconds, so that the job can save again. No attempt is started after the job has
used up its time limit.
"""
WORTH_S: Final = 300.0
"""An attempt is started only if the approved amount pays for at least this many seconds."""


class Attempt(NamedTuple):
    """An attempt that may be launched: its time limit in seconds, and the job's maximum cost including this attempt, in
    USD.
    """

    timeout_s: int | None
    worst_cost: float | None


def allowed_attempt(ctx: Context, job: JobRecord) -> Attempt:
    """Return the attempt that may follow a pause.

    The time and cost before the pause are included, so the attempt ends when the approved amount is used up. Raises
    Refused if neither the approved amount nor the caps leave enough for an attempt.
    """
    if not ctx.policy.allows(job.spec.platform):
        raise _refused(job, "the policy no longer allows its platform")
    limit = job.spec.timeout_s
    ran = ran_s(ctx, job)
    if limit is not None and ran >= limit:
        raise _refused(job, "its time limit is used up")
    left = None if limit is None else max(SHORTEST_S, round(limit - ran))
    if job.lease is None:
        return Attempt(left, None)
    lease = lease_now(ctx, job.lease)
    price, cost = lease.price, lease.cost
    if price is None or cost is None:
        raise _refused(job, "its price is unknown")
    ends = [cost + price * left / 3600] if left is not None else []
    ends += [job.spec.max_cost_usd] if job.spec.max_cost_usd is not None else []
    if not ends:
        raise _refused(job, "it has no time limit and no cost cap")
    worst, approved = min(ends), _approved(ctx, job)
    if approved is not None and worst <= approved:
        return Attempt(left, worst)
    asks = [notice.question for notice in ctx.notices]
    asks += [unlisted(ctx, job.spec, job.person), over_caps(ctx, job.spec, worst, job.person, of=(job.id,))]
    why = "; ".join(filter(None, asks))
    if not why:
        return Attempt(left, worst)
    bought_s = (approved - cost) / price * 3600 if approved is not None else 0.0
    if bought_s < WORTH_S:
        raise _refused(job, why)
    return Attempt(int(bought_s), approved)


async def launch_within_limits(ctx: Context, job: JobRecord, place: Place, why: Code) -> bool:
    """Move a job that has been paused to its next attempt.

    Raises Refused as `allowed_attempt` does, and Conflict if another process holds the CAPS lock.
    """
    async with ctx.lock(CAPS, CAPS_PATIENCE_S):  # so that two attempts can't use the same budget
        left = allowed_attempt(ctx, job)
        attempt = JobSubmitting(
            attempt=job.attempt + 1, place=place, timeout_s=left.timeout_s, worst_cost=left.worst_cost
        )
        return move(ctx, job, attempt, because(why))


def _approved(ctx: Context, job: JobRecord) -> float | None:
    """Return the cost in US dollars that a job may reach without checking the caps; None if the caps must be checked.

    A user's approval remains valid. Without an approval, a cost that was within one day's caps must be checked again on
    another day, because many paused jobs could resume on the same day.
    """
    accepted = ctx.ledger.last(job.subject, JobAccepted)
    issued = ctx.ledger.last(f"receipt/{accepted.data.receipt}", ReceiptIssued) if accepted else None
    asked = issued is not None and bool(issued.data.ask)
    return job.worst_cost if asked or ctx.clock.now() - job.accepted_at < DAY_S else None


def _refused(job: JobRecord, why: str) -> Refused:
    return Refused(
        f"job {job.id} was not resumed: {why}",
        (
            "Its files are unchanged. To resume the job, raise the caps in the policy.",
            do(Action.SUBMIT, ", but with a script that resumes from its copy; this checks the price", receipt=""),
        ),
    )


def ran_s(ctx: Context, job: JobRecord) -> float:
    """Return the total duration in seconds of the attempts that ended in a pause since the last interruption.

    Each relaunch after an interruption gets the full time limit and counts as a restart.
    """
    total, begun = 0.0, None
    for event in ctx.ledger.history(job.subject):
        if isinstance(event.data, JobSubmitted):
            begun = event.at
        elif isinstance(event.data, JobPaused) and begun is not None:
            total, begun = total + event.at - begun, None
        elif isinstance(event.data, JobPreempted):
            total, begun = 0.0, None
    return total
