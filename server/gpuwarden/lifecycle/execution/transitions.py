"""Parts that all steps of a job share: recording a move, and the errors and the cost cap that decide it."""

from __future__ import annotations

from gpuwarden.core.errors import BadReply, Unreachable
from gpuwarden.core.reasons import Reason
from gpuwarden.ledger.events import Body
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.leases.meter import spent
from gpuwarden.lifecycle.records import JobRecord

MAYBE_DONE = (Unreachable, BadReply)
"""After these nobody knows whether the call was carried out."""


def move(ctx: Context, job: JobRecord, event: Body, reason: Reason | None = None) -> bool:
    """Record a job's move with its reason, as a code and as a sentence. Return True, so that a step can end with it."""
    ctx.ledger.add(job.subject, event.because(reason) if reason else event)
    return True


def over_cap(ctx: Context, job: JobRecord) -> bool:
    """Return whether a job's machine has cost as much as the job may."""
    if job.lease is None or job.spec.max_cost_usd is None:
        return False
    cost = spent(ctx, job.lease)
    return cost is not None and cost >= job.spec.max_cost_usd
