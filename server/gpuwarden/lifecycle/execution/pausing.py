"""Resume a paused job: launch its command again in the folder in which its process saved a checkpoint and ended.

A pause does not count as a restart. Every user who may submit jobs may pause and resume them; the cost of a resume
stays within the amount approved for the job, or within the caps. The machine is billed until the user approves stopping
it.
"""

from __future__ import annotations

from typing import Final

from gpuwarden.core.clock import doubled
from gpuwarden.core.errors import WardenError
from gpuwarden.core.models import Instance, InstanceState, Unknown
from gpuwarden.core.money import usd
from gpuwarden.core.reasons import Code, because
from gpuwarden.core.states import Lease
from gpuwarden.ledger.events import (
    JobCanceled,
    JobFailed,
    ResumeIntent,
    ResumeRequested,
    StartRefused,
    VerbSent,
)
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.execution.bootstrap import pinned
from gpuwarden.lifecycle.execution.provisioning import restart
from gpuwarden.lifecycle.execution.relaunch import may_relaunch, was_interrupted
from gpuwarden.lifecycle.execution.resume_limits import allowed_attempt, launch_within_limits
from gpuwarden.lifecycle.execution.running import relaunch
from gpuwarden.lifecycle.execution.transitions import move, over_cap
from gpuwarden.lifecycle.leases.accounts import BoundProvider
from gpuwarden.lifecycle.leases.meter import poll_lease
from gpuwarden.lifecycle.leases.self_stop import STATUS, survives_stop
from gpuwarden.lifecycle.records import JobRecord, LeaseRecord, read_lease

START_AGAIN_S: Final = 30.0
"""Seconds before the first retry of a failed start; the wait doubles with each retry."""
LONGEST_START_S: Final = 300.0


async def paused(ctx: Context, job: JobRecord) -> bool:
    """If a resume was requested, start the job's machine and launch the job in the folder with its checkpoint.

    A job that was canceled or has reached its cost cap ends instead.
    """
    if job.cancel_requested:
        return move(ctx, job, JobCanceled(), because(Code.CANCELED))
    if over_cap(ctx, job):
        return move(ctx, job, JobCanceled(), because(Code.COST_CAP, cap=usd(job.spec.max_cost_usd)))
    place = job.place
    if job.lease is not None:
        answer = await poll_lease(ctx, job.lease)
        if isinstance(answer, Unknown):
            return False
        lease = read_lease(ctx.ledger, job.lease)
        if answer.value is None:
            return lease.state is Lease.STOPPED and await _handle_reclaimed(ctx, job)
        if not job.resume_requested:
            return False
        if not await _up(ctx, job, lease, answer.value) or answer.value.place is None:
            return False
        place = pinned(ctx, job.lease, answer.value.place)
    if not job.resume_requested:
        return False
    interrupted = job.reason is Code.PAUSED_INTERRUPTED
    times, limit = job.restarts, job.spec.max_restarts
    if interrupted and times > limit:
        return move(ctx, job, JobFailed(), because(Code.MAX_RESTARTS, times=times, limit=limit))
    assert place is not None
    return await launch_within_limits(ctx, job, place, Code.RELAUNCH if interrupted else Code.RESUMED)


async def _handle_reclaimed(ctx: Context, job: JobRecord) -> bool:
    """Relaunch a job whose machine was reclaimed, if the user allowed it; otherwise end the job."""
    if may_relaunch(ctx, job.id) and was_interrupted(ctx, job):
        return job.resume_requested and await relaunch(ctx, job)
    if ctx.ledger.last(f"lease/{job.lease}", VerbSent) is not None:
        return move(ctx, job, JobCanceled(), because(Code.ENDED_PAUSED))
    return move(ctx, job, JobFailed(), because(Code.GONE))


async def _up(ctx: Context, job: JobRecord, lease: LeaseRecord, machine: Instance) -> bool:
    """Return whether a machine is running. If not, ask the platform to start it; the next call polls it again."""
    if machine.state is InstanceState.INTERRUPTED:
        await restart(ctx, lease, machine)
    if machine.state is InstanceState.STOPPED and lease.state is not Lease.STOPPING and _start_due(ctx, job, lease):
        allowed_attempt(ctx, job)  # raises Refused if starting it would cost too much
        ctx.ledger.add(lease.subject, ResumeIntent(why="its paused job resumes"))
        try:
            started = await BoundProvider(ctx, lease).start(machine.id)
            refused = started.why if isinstance(started, Unknown) else ""
        except WardenError as refusal:
            refused = refusal.message
        if refused:
            ctx.ledger.add(lease.subject, StartRefused(why=refused))
    return machine.state is InstanceState.RUNNING and lease.state is not Lease.STOPPING


def _start_due(ctx: Context, job: JobRecord, lease: LeaseRecord) -> bool:
    """Return whether a start may be requested now: immediately the first time, then after increasing delays."""
    asked, word = ctx.ledger.events(lease.subject, kind=ResumeIntent), ctx.ledger.last(job.subject, ResumeRequested)
    tries = [event for event in asked if word is None or event.seq > word.seq]
    return not tries or ctx.clock.now() - tries[-1].at >= doubled(START_AGAIN_S, len(tries), LONGEST_START_S)


def stop_is_reversible(ctx: Context, job: JobRecord) -> bool:
    """Return whether stopping a job's machine ends its billing, is reversible, and keeps the files for a resume."""
    profile = ctx.profile(job.spec.platform)
    undone = "stop" in profile.verbs.reversible and "stop" in profile.meter.stops_on
    return undone and all(survives_stop(ctx, job.spec, path) for path in (STATUS, *job.outputs))
