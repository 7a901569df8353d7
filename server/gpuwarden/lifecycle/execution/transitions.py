"""What every step of a job uses: the record of a move, and the errors and the cap that decide it."""

from __future__ import annotations

from gpuwarden.core.errors import BadReply, Unreachable
from gpuwarden.ledger.events import Body
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.monitoring.meter import spent
from gpuwarden.lifecycle.records import JobRecord

MAYBE_DONE = (Unreachable, BadReply)
"""After these nobody knows whether the call was carried out."""


def move(ctx: Context, job: JobRecord, event: Body) -> bool:
    """Record a job's move and return True, so that a step can end with it."""
    ctx.ledger.add(job.subject, event)
    return True


def over_cap(ctx: Context, job: JobRecord) -> bool:
    """Whether a job's machine has cost what the job may cost."""
    if job.lease is None or job.spec.max_cost_usd is None:
        return False
    cost = spent(ctx, job.lease)
    return cost is not None and cost >= job.spec.max_cost_usd
