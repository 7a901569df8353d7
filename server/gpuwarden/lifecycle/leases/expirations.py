"""Compute danger clocks: the actions that a platform takes on a machine automatically, and their dates."""

from __future__ import annotations

from gpuwarden.core.deadlines import Deadline
from gpuwarden.core.errors import WardenError
from gpuwarden.core.models import InstanceState, JobSpec
from gpuwarden.core.states import TERMINAL_JOBS
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.records import JobRecord, LeaseRecord

OFF = frozenset({InstanceState.STOPPED, InstanceState.INTERRUPTED})
SET_BY_PLATFORM = "the end date set by the platform"


def stopped_at(ctx: Context, lease: LeaseRecord) -> float | None:
    """Return the time when a machine was first reported as off after it last ran; None if it is not off."""
    if lease.instance is None or lease.instance.state not in OFF:
        return None
    first: float | None = None
    for at, instance in reversed(lease.answers):
        if instance.state not in OFF:
            break
        first = at
    return ctx.clock.now() if first is None else first


def longest_run_s(ctx: Context, spec: JobSpec) -> int | None:
    """Return the maximum number of seconds from a machine's rental to its job's end; None if the job has no timeout."""
    if spec.timeout_s is None:
        return None
    runs = 1 + spec.max_restarts if spec.interruptible else 1
    return ctx.profile(spec.platform).limits.boot_timeout_s + runs * spec.timeout_s


def clocks_of(ctx: Context, lease: LeaseRecord, job: JobRecord) -> tuple[Deadline, ...]:
    """Return a rented machine's danger clocks with known dates, earliest first.

    If the platform's profile can't be read, only the end date reported by the platform is known.
    """
    if lease.instance is not None and lease.instance.state is InstanceState.GONE:
        return ()
    created = lease.instance.created_at if lease.instance and lease.instance.created_at else lease.opened_at
    off = stopped_at(ctx, lease)
    try:
        profile = ctx.profile(lease.platform)
    except WardenError:  # one platform's error must not hide the others' machines
        profile = None
    found = [
        Deadline(at, clock.trigger, clock.effect)
        for clock in (profile.danger_clocks if profile else ())
        if not (clock.without_timeout and job.spec.timeout_s) and (at := clock.fires_at(created, off)) is not None
    ]
    ends_at = lease.instance.ends_at if lease.instance else None
    if ends_at is not None:
        effect = "the platform stops or terminates the machine, which ends the job"
        most_s = longest_run_s(ctx, job.spec) if profile else None
        running = off is None and job.state not in TERMINAL_JOBS
        after_job = running and most_s is not None and ends_at >= lease.opened_at + most_s
        found.append(Deadline(ends_at, SET_BY_PLATFORM, effect, after_job))
    return tuple(sorted(found, key=lambda c: c.at))
