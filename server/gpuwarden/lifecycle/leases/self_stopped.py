"""Determine whether a job's machine stopped itself or may do so, from the ledger and the last poll.

`lifecycle/leases/self_stop.py` decides whether a machine may stop itself.
"""

from __future__ import annotations

from gpuwarden.core.models import InstanceState
from gpuwarden.core.states import Lease
from gpuwarden.ledger.events import JobSubmitted, LeaseCameBack, ResumeIntent, VerbSent
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.leases.meter import confirmed_end, lease_now
from gpuwarden.lifecycle.records import JobRecord


def self_stopped(ctx: Context, job: JobRecord) -> bool:
    """Return whether a job's machine is off, was allowed to stop itself, and was not stopped by gpuwarden.

    The user may also have stopped it in the platform's console. In both cases, its disk has the declared outputs.
    """
    if job.lease is None or job.handle is None or job.handle.place.self_stop_order is None:
        return False
    lease = lease_now(ctx, job.lease)
    if lease.instance is None or lease.instance.state is not InstanceState.STOPPED or lease.state is Lease.STOPPING:
        return False
    sent, began = ctx.ledger.last(lease.subject, VerbSent), ctx.ledger.last(job.subject, JobSubmitted)
    back = ctx.ledger.last(lease.subject, LeaseCameBack)
    since = max(event.seq for event in (began, back) if event is not None) if began or back else 0
    return confirmed_end(ctx, lease.id) != "gone" and (sent is None or sent.seq < since)


def started_since(ctx: Context, job: JobRecord, seq: int) -> bool:
    """Return whether a job's machine is known to have been started again after the ledger event with number `seq`."""
    if job.lease is None:
        return False
    launched, instance = ctx.ledger.last(job.subject, JobSubmitted), lease_now(ctx, job.lease).instance
    before = launched.data.running_since if launched is not None else None
    later = before is not None and instance is not None and (instance.running_since or 0) > before
    starts = (ctx.ledger.last(f"lease/{job.lease}", ResumeIntent), ctx.ledger.last(f"lease/{job.lease}", LeaseCameBack))
    return later or any(event is not None and event.seq > seq for event in starts)


def may_self_stop(ctx: Context, job: JobRecord) -> bool:
    """Return whether a job's machine is running and may stop itself."""
    if job.lease is None or job.handle is None or job.handle.place.self_stop_order is None:
        return False
    instance = lease_now(ctx, job.lease).instance
    return instance is not None and instance.state is InstanceState.RUNNING
