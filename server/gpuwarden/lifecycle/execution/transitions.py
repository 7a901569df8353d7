"""Helpers for all job steps: record a state change, define errors with an unknown outcome, and check the cost cap."""

from __future__ import annotations

from gpuwarden.core.errors import BadReply, Unreachable
from gpuwarden.core.reasons import Reason
from gpuwarden.ledger.events import Body
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.leases.meter import spent
from gpuwarden.lifecycle.records import JobRecord

MAYBE_DONE = (Unreachable, BadReply)
"""Errors after which it is unknown whether the call took effect."""


def move(ctx: Context, job: JobRecord, event: Body, reason: Reason | None = None) -> bool:
    """Record a job's new state and the reason for it, as a code and a sentence. Always return True."""
    ctx.ledger.add(job.subject, event.because(reason) if reason else event)
    return True


def over_cap(ctx: Context, job: JobRecord) -> bool:
    """Return whether the cost of a job's machine has reached the job's cost cap."""
    if job.lease is None or job.spec.max_cost_usd is None:
        return False
    cost = spent(ctx, job.lease)
    return cost is not None and cost >= job.spec.max_cost_usd
