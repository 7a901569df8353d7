"""Automatic teardown: end machines whose outputs are all proven, because the user decided this in advance.

An order is recorded when its job is accepted, from the policy file or from the job's spending approval at a terminal.
It is executed in two checks, at least a grace period apart. The first check announces the teardown with an alert that
is bound to the current facts. The second check ends the machine if the facts are unchanged, the user has not set a
hold, and the alert was delivered at least a grace period ago. Machines with unproven outputs, machines with findings,
and machines that this ledger did not rent are left to the user.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from anyio.lowlevel import checkpoint

from gpuwarden.core.clock import doubled
from gpuwarden.core.errors import WardenError
from gpuwarden.core.models import InstanceState
from gpuwarden.core.next_step import UNDER_WAY, Copy
from gpuwarden.core.states import LIVE_LEASES, Job, Lease, Teardown
from gpuwarden.ledger.events import (
    AutoTeardownAnnounced,
    AutoTeardownHeld,
    AutoTeardownOrdered,
    CreateIntent,
    SelfStopOrdered,
)
from gpuwarden.lifecycle.artifacts.local_copies import copy_state
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.execution.situation import open_ticket
from gpuwarden.lifecycle.leases.auto_teardown import automatic_teardown
from gpuwarden.lifecycle.leases.meter import lease_now
from gpuwarden.lifecycle.leases.self_stopped import self_stopped
from gpuwarden.lifecycle.leases.termination import call_sent, voided
from gpuwarden.lifecycle.notify import ends_at
from gpuwarden.lifecycle.records import JobRecord, lease_ids_of, read_job, read_lease, read_teardown

FIRST_WAIT_S: Final = 30.0
MOST_WAIT_S: Final = 600.0
_ASKED: Final = frozenset({Teardown.REQUESTED, Teardown.BLOCKED, Teardown.AWAITING_HUMAN})


class HoldOutcome(StrEnum):
    """The effect of a hold. HELD: automatic teardown has sent no call and will send none.

    TOO_LATE: a call was sent, or may have been sent before the process died, and no further call will be sent; or the
    user approved the teardown. NOT_ORDERED: the machine had neither automatic teardown nor self-stop.
    """

    HELD = "held"
    TOO_LATE = "too_late"
    NOT_ORDERED = "not_ordered"


def hold_machine(ctx: Context, job_id: str, channel: str, by: str) -> HoldOutcome:
    """Hold a job's machine until the user decides. The ledger's sequence of events shows whether the hold was in time.

    Raises NotFound if the job does not exist.
    """
    job = read_job(ctx.ledger, job_id)
    if (
        ctx.ledger.last(job.subject, AutoTeardownOrdered) is None
        and ctx.ledger.last(job.subject, SelfStopOrdered) is None
    ):
        return HoldOutcome.NOT_ORDERED
    with ctx.ledger.transaction():
        if ctx.ledger.last(job.subject, AutoTeardownHeld) is None:
            ctx.ledger.add(job.subject, AutoTeardownHeld(channel=channel, by=by))
        names = ctx.ledger.subjects("teardown", job=job.id)
        requests = [read_teardown(ctx.ledger, name.removeprefix("teardown/")) for name in names]
    late = (
        call_sent(ctx, r) if voided(ctx, r) else r.state in {*UNDER_WAY, Teardown.VERIFIED_STOPPED} for r in requests
    )
    return HoldOutcome.TOO_LATE if any(late) else HoldOutcome.HELD


def ordered_jobs(ctx: Context) -> list[JobRecord]:
    """Return the succeeded jobs with automatic teardown whose machine may be billed.

    A self-stopped machine is included if the order is to terminate it and its job has an artifact store, which can
    prove the outputs.
    """
    rented = ctx.ledger.jobs_with_leases(*LIVE_LEASES)  # most are still running, so filter before reading
    found = [read_job(ctx.ledger, name) for name in rented if ctx.ledger.state(f"job/{name}") == Job.SUCCEEDED]
    for name in ctx.ledger.resting():
        job = read_job(ctx.ledger, read_lease(ctx.ledger, name.removeprefix("lease/")).job_id)
        order = automatic_teardown(ctx, job.id)
        if order is not None and order.verb == "terminate" and job.spec.artifact_store and self_stopped(ctx, job):
            found.append(job)
    return [job for job in found if job.state is Job.SUCCEEDED and automatic_teardown(ctx, job.id) is not None]


class AutoTeardowns:
    """Executes the automatic teardowns in one ledger. Jobs that wait for the user are checked less often."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self._misses: dict[str, int] = {}
        self._next: dict[str, float] = {}

    def shortest_grace(self) -> float:
        """Return the shortest grace period of an announced teardown, in seconds."""
        jobs = (job.id for job in ordered_jobs(self.ctx) if self.ctx.ledger.last(job.subject, AutoTeardownAnnounced))
        graces = [order.grace_s for job in jobs if (order := automatic_teardown(self.ctx, job))]
        return min(graces, default=self.ctx.policy.teardown.grace_minutes * 60.0)

    async def round(self, awake_since: float = 0.0) -> dict[str, str]:
        """Announce teardowns of machines with proven outputs, and execute those whose grace period has passed.

        Return the errors by job id. `awake_since` is the time when the last gap between rounds ended. The user could
        not set a hold during the gap, so announcements that were made before the gap are repeated.
        """
        trouble: dict[str, str] = {}
        doubt = self.ctx.ledger.trouble()
        if doubt is not None and doubt.incomplete:
            return trouble  # a hold may be among the lost events
        for job in ordered_jobs(self.ctx):
            await checkpoint()
            if self.ctx.clock.now() < self._next.get(job.id, 0.0):
                continue
            on_its_way = False
            try:
                on_its_way = await _carry_out(self.ctx, job, awake_since)
            except WardenError as error:
                trouble[job.id] = error.message
            n = self._misses[job.id] = 0 if on_its_way else self._misses.get(job.id, 0) + 1
            self._next[job.id] = self.ctx.clock.now() + doubled(FIRST_WAIT_S, n, MOST_WAIT_S)
        return trouble


async def _carry_out(ctx: Context, job: JobRecord, awake_since: float) -> bool:
    """Execute the next step of one order.

    Return False if the user has to decide; the order is then checked less often.
    """
    order = automatic_teardown(ctx, job.id)
    if order is None or not rented_for(ctx, job) or copy_state(ctx, job.id) is not Copy.PROVEN:
        return True  # don't query the machine before its outputs are proven
    assert job.lease is not None
    lease = lease_now(ctx, job.lease)
    present = open_ticket(ctx, lease)
    if present is not None and (present.verb != order.verb or present.state not in _ASKED):
        return True  # the user requested another verb, or the teardown is being executed
    from gpuwarden.lifecycle.teardown.gate import approve_by_order, request, silent, storage_accepted

    view = await request(ctx, job.id, order.verb)
    seen = view.record.digest
    quiet = silent(view, storage_accepted(ctx, view, order))
    if view.record.state is not Teardown.AWAITING_HUMAN or seen is None or not quiet:
        return False
    announced, now = ctx.ledger.last(job.subject, AutoTeardownAnnounced), ctx.clock.now()
    same = announced is not None and (announced.data.ticket, announced.data.digest) == (view.record.id, seen)
    if announced is None or not same or announced.at < awake_since:
        event = AutoTeardownAnnounced(ticket=view.record.id, digest=seen, verb=order.verb, ends_at=now + order.grace_s)
        ctx.ledger.add(job.subject, event)
        return True
    due = ends_at(ctx, announced)
    if due is not None and now >= due:
        await approve_by_order(ctx, view.record.id, seen, order)
    return True


def rented_for(ctx: Context, job: JobRecord) -> bool:
    """Return whether this ledger rented a job's machine, and the machine is running or self-stopped.

    No other machine of the job may be billed.
    """
    rests = self_stopped(ctx, job)
    if job.lease is None or lease_ids_of(ctx.ledger, job.id, *LIVE_LEASES) not in ([job.lease], [] if rests else None):
        return False
    lease = lease_now(ctx, job.lease)
    opened = ctx.ledger.last(lease.subject, CreateIntent)
    ours = opened is not None and opened.data.job == job.id and lease.instance is not None
    if not ours or lease.instance is None or lease.instance.token != lease.id:
        return False
    return rests or (lease.state is Lease.METERING and lease.instance.state is InstanceState.RUNNING)
