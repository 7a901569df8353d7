"""Self-stop: a machine stops itself after its job has ended, if the outputs survive a stop and are not pulled in time.

The user allows this in the policy file. A job keeps the setting that applied when it was accepted. The runner gets the
setting at launch, but only if the profile states that the machine can stop itself with its own key and that every
declared output survives a stop. A self-stopped machine is started again for a pull, within the caps.
"""

from __future__ import annotations

import contextlib
from typing import Final

from gpuwarden.backends.base import SelfStopping
from gpuwarden.core.clock import ShiftedClock
from gpuwarden.core.errors import NotSupported, Refused, Unreachable, WardenError
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.models import Instance, InstanceState, JobSpec, Known, Place, SelfStop, SelfStopOrder, Unknown
from gpuwarden.ledger.events import (
    AutoTeardownHeld,
    AutoTeardownOrdered,
    ResumeIntent,
    SelfStopArmed,
    SelfStopOrdered,
    StartRefused,
    VerbSent,
)
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.leases.accounts import BoundProvider
from gpuwarden.lifecycle.leases.budgets import over_caps
from gpuwarden.lifecycle.leases.meter import lease_now, poll_lease
from gpuwarden.lifecycle.leases.self_stopped import self_stopped
from gpuwarden.lifecycle.records import JobRecord, read_job

MARGIN_S: Final = 300.0
"""Seconds between the end of automatic teardown's grace period and a self-stop, so that the watch acts first."""
OVERRUN_S: Final = 600.0
"""Seconds that the supervisor needs to end the job after its timeout. Only then does the machine count as idle."""
STATUS: Final = "status.json"
"""The file that records how the job ended. Like output paths, this path is relative to the run root."""
WAKE_S: Final = 50.0
LOOK_S: Final = 2.0
FETCH_H: Final = 1.0
"""Assumed number of billed hours between a machine's restart and the end of the pull."""


def self_stop_for(ctx: Context, order: AutoTeardownOrdered | None) -> SelfStopOrdered | None:
    """Return the self-stop order for a job that is being accepted; None if the policy does not allow self-stop.

    A machine stops itself only after automatic teardown's grace period has passed.
    """
    active = ctx.active_policy
    after_s = active.policy.teardown.self_stop_minutes * 60.0
    if after_s <= 0 or any(notice.question for notice in active.notices):
        return None
    return SelfStopOrdered(after_s=max(after_s, order.grace_s + MARGIN_S if order else 0.0), policy=active.digest)


def self_stop_allowed(ctx: Context, job_id: str) -> SelfStopOrdered | None:
    """Return the self-stop order that applies to a job's machine.

    Return None after a hold, or if the active policy does not allow self-stop or can't be read.
    """
    ordered = ctx.ledger.last(f"job/{job_id}", SelfStopOrdered)
    objected = ctx.ledger.last(f"job/{job_id}", AutoTeardownHeld)
    with contextlib.suppress(WardenError):
        if ordered is not None and objected is None and ctx.policy.teardown.self_stop_minutes > 0:
            return ordered.data
    return None


def self_stop_order(ctx: Context, job: JobRecord, place: Place) -> SelfStopOrder | None:
    """Return the self-stop instructions for a job's runner; None if self-stop is not allowed or could lose files.

    Interruptible machines get no instructions, because an outbid machine can't be distinguished from a self-stopped
    one.
    """
    ordered, profile = self_stop_allowed(ctx, job.id), ctx.profile(job.spec.platform)
    facts = profile.unattended
    if ordered is None or facts is None or facts.self_stop is not True or facts.by is None or job.spec.interruptible:
        return None
    if not all(survives_stop(ctx, job.spec, path) for path in (STATUS, *job.outputs)):
        return None
    by = SelfStop(command=place.self_stop_command) if place.root else facts.by
    if place.root and not place.self_stop_command:
        return None  # the stop command for a real machine must never run on the local machine
    url = by.url.replace("{instance}", place.instance_id or "")
    late_s = None if job.spec.timeout_s is None else job.spec.timeout_s + OVERRUN_S
    outputs = () if place.root else job.outputs
    clock = str(ctx.clock.file.absolute()) if place.root and isinstance(ctx.clock, ShiftedClock) else ""
    by = by.model_copy(update={"url": url})
    return SelfStopOrder(after_s=ordered.after_s, deadline_s=late_s, by=by, outputs=outputs, clock=clock)


def survives_stop(ctx: Context, spec: JobSpec, path: str) -> bool:
    """Return whether a file on a job's machine survives stopping the machine."""
    profile = ctx.profile(spec.platform)
    return profile.survives(profile.place_of(path), "stop", requested=spec.durable_storage)


async def wake(ctx: Context, job_id: str) -> None:
    """Start a job's machine if it stopped itself, wait until it runs, and allow it to stop itself again.

    Concurrent calls start the machine only once. Raises Refused if the cost would exceed both the approved amount and
    the caps, and Unreachable while the machine is starting or if it can't be started.
    """
    job = read_job(ctx.ledger, job_id)
    if job.lease is None or job.handle is None or job.handle.place.self_stop_order is None:
        return
    async with ctx.lock(job_id):
        answer = await poll_lease(ctx, job.lease)  # its state may have changed since the last poll
        machine, subject = answer.value if isinstance(answer, Known) else None, f"lease/{job.lease}"
        woken = ctx.ledger.last(subject, ResumeIntent)
        later = (ctx.ledger.last(subject, SelfStopArmed), ctx.ledger.last(subject, VerbSent))  # a stop cancels a start
        starts = woken is not None and all(event is None or event.seq < woken.seq for event in later)
        up = machine is not None and machine.state is InstanceState.RUNNING
        if machine is not None and (self_stopped(ctx, job) or (starts and not up)):
            await _start(ctx, job, machine)
            starts = True
        if not starts:
            return
        handle = read_job(ctx.ledger, job_id).handle  # its address may have changed
        backend = ctx.backend(job.handle.backend)
        if handle is not None and isinstance(backend, SelfStopping) and self_stop_allowed(ctx, job_id) is not None:
            await backend.arm(handle, job.attempt)
        ctx.ledger.add(subject, SelfStopArmed())


async def _start(ctx: Context, job: JobRecord, machine: Instance) -> None:
    """Ask the platform to start the machine unless it is already starting. Wait up to `WAKE_S` seconds for it to run.

    Raises the same errors as `wake`.
    """
    assert job.lease is not None
    lease = lease_now(ctx, job.lease)
    if machine.state is InstanceState.STOPPED:
        if why := _too_dear(ctx, job):
            console = "Start it in the platform's console, or raise the caps in the policy."
            raise Refused(f"job {job.id}'s machine stopped itself and can't be started again: {why}", console)
        ctx.ledger.add(lease.subject, ResumeIntent(why="its outputs were requested"))
        try:
            started = await BoundProvider(ctx, lease).start(machine.id)
        except WardenError as refusal:
            ctx.ledger.add(lease.subject, StartRefused(why=refusal.message))
            raise Unreachable(
                f"{lease.platform} could not start job {job.id}'s machine: {refusal.message}",
                ("Its outputs remain on its disk.", do(Action.RETRY, "later")),
            ) from refusal
        if isinstance(started, Unknown):
            ctx.ledger.add(lease.subject, StartRefused(why=started.why))
    until = ctx.clock.now() + WAKE_S
    while True:
        answer = await poll_lease(ctx, job.lease)
        instance = answer.value if isinstance(answer, Known) else None
        if instance is not None and instance.state is InstanceState.RUNNING and instance.place is not None:
            return
        if ctx.clock.now() >= until:
            state = instance.state if instance else "not listed"
            again = do(Action.PULL, "again in a few minutes", job_id=job.id)
            raise Unreachable(f"job {job.id}'s machine was started and is still {state}", again)
        await ctx.clock.sleep(LOOK_S)


def _too_dear(ctx: Context, job: JobRecord) -> str:
    """Return the reason why a restart needs approval; empty if the approved amount or the caps cover its cost."""
    assert job.lease is not None
    lease = lease_now(ctx, job.lease)
    if lease.price is None or lease.cost is None:
        return "its price is unknown"
    total = lease.cost + lease.price * FETCH_H
    if job.worst_cost is not None and total <= job.worst_cost:
        return ""
    return over_caps(ctx, job.spec, total, job.person, of=(job.id,))


async def hold(ctx: Context, job_id: str) -> bool:
    """Cancel self-stop for a job's machine.

    Return False if the machine has no self-stop. Raises an error if the machine can't be reached.
    """
    job = read_job(ctx.ledger, job_id)
    if job.handle is None or job.handle.place.self_stop_order is None or job.lease is None or self_stopped(ctx, job):
        return False
    backend = ctx.backend(job.handle.backend)
    if not isinstance(backend, SelfStopping):
        raise NotSupported("this backend can't cancel a machine's self-stop")
    await backend.hold(job.handle)
    return True
