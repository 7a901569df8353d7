"""Advance a job that has a machine: launch and observe it, stop it at a cap, and relaunch it after an interruption.

A step returns whether the job's state changed, so that the caller can run the next step.
"""

from __future__ import annotations

from typing import Any, Final

import anyio
import anyio.to_thread

from gpuwarden.core.errors import Refused, WardenError
from gpuwarden.core.models import Answer, Handle, Instance, InstanceState, Known, Observation, Place, Unknown
from gpuwarden.core.money import usd
from gpuwarden.core.reasons import Code, Reason, because
from gpuwarden.core.sanitize import scrubbed
from gpuwarden.core.states import TERMINAL_JOBS, Job, Lease
from gpuwarden.ledger.events import (
    FolderGone,
    JobCanceled,
    JobFailed,
    JobObserved,
    JobPaused,
    JobPreempted,
    JobQueued,
    JobRunning,
    JobSubmitted,
    JobSubmitting,
    JobSucceeded,
    JobUnknown,
    MachineIdentified,
    ProcessGone,
    RelaunchIntent,
    SubmitIntent,
)
from gpuwarden.lifecycle.context import CAPS, CAPS_PATIENCE_S, STEP_S, Context
from gpuwarden.lifecycle.execution.arrays import refused, send_array, sent_before, submitted
from gpuwarden.lifecycle.execution.bootstrap import pinned
from gpuwarden.lifecycle.execution.launch_order import order_of, secrets_of
from gpuwarden.lifecycle.execution.provisioning import rent, restart
from gpuwarden.lifecycle.execution.relaunch import awaits_store, may_relaunch, next_machine, was_interrupted
from gpuwarden.lifecycle.execution.resume_limits import allowed_attempt, launch_within_limits
from gpuwarden.lifecycle.execution.transitions import MAYBE_DONE, move, over_cap
from gpuwarden.lifecycle.leases.meter import poll_lease
from gpuwarden.lifecycle.leases.self_stop import self_stop_order
from gpuwarden.lifecycle.leases.self_stopped import self_stopped
from gpuwarden.lifecycle.leases.shared_answers import shared_answers
from gpuwarden.lifecycle.posted import with_posted_progress
from gpuwarden.lifecycle.records import JobRecord, read_lease, recalled

CANCEL_GRACE_S: Final = 10.0
FOLDER_GONE_S: Final = 60.0
"""Seconds that a restarted machine may take to mount its volumes."""
INTERRUPTION_S: Final = 120.0
"""Seconds that a platform may take to report an interruption after it ended the machine's processes."""
SAVE_GRACE_S: Final = 120.0
"""Seconds that a job at its cap has to write a checkpoint after SIGTERM. Callers do not wait that long."""


OBSERVED: Final[dict[Job, type[JobObserved]]] = {
    Job.QUEUED: JobQueued,
    Job.RUNNING: JobRunning,
    Job.UNKNOWN: JobUnknown,
    Job.PREEMPTED: JobPreempted,
    Job.PAUSED: JobPaused,
    Job.SUCCEEDED: JobSucceeded,
    Job.FAILED: JobFailed,
    Job.CANCELED: JobCanceled,
}
"""Maps the job states that can result from an observation to the events that record them."""


async def submitting(ctx: Context, job: JobRecord) -> bool:
    """Launch the attempt whose intent is recorded. Repeated calls launch it only once."""
    assert job.place is not None
    announced = ctx.ledger.last(job.subject, JobSubmitting)
    attempt = announced.data.attempt if announced else 1
    if job.array:
        return await send_array(ctx, job.array)
    # Ending a fan-out does not cancel a job whose rented machine is already billed, or a second attempt.
    unwanted = attempt == 1 and job.lease is None and recalled(ctx.ledger, job.id)
    capped = over_cap(ctx, job)
    machine = await poll_lease(ctx, job.lease) if job.lease is not None else None
    if _gone(machine):
        return _lease_ended(ctx, job) and move(ctx, job, JobFailed(), because(Code.GONE_EARLY))
    if job.cancel_requested or unwanted or capped:
        found: Answer[Handle | None] = Known(None)
        if job.attempt >= attempt and not _off(machine):  # the attempt may have been launched
            found = await sent_before(ctx, job)
        if isinstance(found, Unknown):
            return False
        if found.value is None:
            early = because(Code.CANCELED_EARLY)
            if not (job.cancel_requested or unwanted):
                early = because(Code.COST_CAP_EARLY, cap=usd(job.spec.max_cost_usd))
            return move(ctx, job, JobCanceled(), early)
    if _off(machine):
        return move(ctx, job, JobPreempted(), because(Code.INTERRUPTED_EARLY))
    return await _launch(ctx, job, job.place, attempt)


async def _launch(ctx: Context, job: JobRecord, place: Place, attempt: int) -> bool:
    """Record the intent to launch an attempt, then submit it to the backend. Raises NotFound for a missing secret."""
    if job.lease is not None:
        place = place.model_copy(update={"self_stop_order": self_stop_order(ctx, job, place)})
    token = f"{job.id}-a{attempt}"
    backend = ctx.backend(ctx.profile(job.spec.platform).backend)
    secrets = secrets_of(ctx, job, seals=backend.seals)
    repeated = ctx.ledger.used(SubmitIntent, token) is not None
    ctx.blind.pop(job.id, None)
    if not repeated:
        ctx.ledger.add(job.subject, SubmitIntent(attempt=attempt), token=token)
    try:
        with anyio.fail_after(STEP_S):
            task = await order_of(ctx, job, secrets, attempt)
            handle = await backend.submit(
                task.spec, place, job.id, secrets=secrets, attempt=attempt, inputs=task.inputs
            )
    except TimeoutError:
        return False  # submit is idempotent per token and attempt, so the next call repeats it
    except MAYBE_DONE as lost:
        ctx.blind[job.id] = lost
        return False
    except WardenError as refusal:
        return await refused(ctx, job, refusal, attempt, repeated=repeated)
    return submitted(ctx, job, handle, attempt)


async def running(ctx: Context, job: JobRecord) -> bool:
    """Observe the process and its machine, and change the job's state if the two observations determine it."""
    assert job.handle is not None
    machine: Answer[Instance | None] | None = await poll_lease(ctx, job.lease) if job.lease else None
    rests = self_stopped(ctx, job)
    if limit := _limit(ctx, job, rests=rests):
        return await _end(ctx, job, machine, limit)
    if rests:
        return await _judge_self_stopped(ctx, job)
    if job.pausing and (stopped := await _pause(ctx, job, machine)) is not None:
        return stopped
    observed = await observe(ctx, job)
    if limit := _limit(ctx, job, seen=observed):
        return await _end(ctx, job, machine, limit)
    state, reason = judge(job, observed, machine, _restarted(ctx, job, observed, machine))
    if reason.code is Code.INTERRUPTION_UNSEEN and observed is not None and _waited_long(ctx, job):
        claimed = observed.reason is Code.TERMINATED
        state, reason = Job.FAILED, because(Code.NOT_INTERRUPTED if claimed else Code.VANISHED)
    if state is Job.UNKNOWN and observed is not None and observed.lost:
        state, reason = _without_folder(ctx, job, observed)
    elif observed is not None and observed.state is Job.RUNNING and observed.machine:
        _remember_machine(ctx, job, observed.machine)
    if state is Job.UNKNOWN and job.id in ctx.blind:
        reason = because(Code.NO_ANSWER, ctx.blind[job.id].message)
    if state is job.state:
        return False
    if state is Job.FAILED and _gone(machine):
        if not _lease_ended(ctx, job):
            return False  # a second poll must confirm that the machine is gone
        lost = reason.code is Code.GONE and may_relaunch(ctx, job.id) and was_interrupted(ctx, job)
        state = Job.PREEMPTED if lost else state  # the next step rents another machine or fails the job
    return _moved(ctx, job, state, reason, observed)


async def _judge_self_stopped(ctx: Context, job: JobRecord) -> bool:
    """Change the state of a job whose machine stopped itself. The job must not be launched again.

    The machine's disk can't be read, so the outcome is read from the artifact store. Without a final report there,
    it is unknown.
    """
    ctx.observed.pop(job.id, None)
    ctx.blind.pop(job.id, None)
    if job.spec.artifact_store:
        from gpuwarden.lifecycle.artifacts.store_contents import read_store, reported_end, unsettled

        try:
            with anyio.fail_after(STEP_S):  # the job is locked in the meantime
                contents = await read_store(ctx, job)
        except (WardenError, TimeoutError):
            contents = None
        seen = None if contents is None or unsettled(ctx, job, contents) is not None else reported_end(contents)
        if seen is not None and seen.state in TERMINAL_JOBS:
            return _moved(ctx, job, seen.state, Reason(seen.reason or Code.PLATFORM_REPORT, message=seen.why), seen)
    return job.state is not Job.UNKNOWN and move(ctx, job, JobUnknown(), because(Code.SELF_STOPPED))


def _limit(ctx: Context, job: JobRecord, *, seen: Observation | None = None, rests: bool = False) -> Reason | None:
    """Return the reason why a job must be ended: a cancel request, its cost cap, or too many restarts by its engine.

    `rests` is true if the job's machine stopped itself; the cap then does not apply.
    """
    if job.cancel_requested:
        return because(Code.CANCELED)
    if not rests and over_cap(ctx, job):
        return because(Code.COST_CAP, cap=usd(job.spec.max_cost_usd))
    times, limit = seen.allocation.restarts if seen and seen.allocation else 0, job.spec.max_restarts
    if job.lease is not None and times > limit:  # an engine on a rented machine may have no restart limit
        return because(Code.MAX_RESTARTS, times=times, limit=limit)
    return None


def _remember_machine(ctx: Context, job: JobRecord, machine: str) -> None:
    """Record the current boot of a job's machine, because a later boot proves that the process is dead."""
    known = ctx.ledger.last(job.subject, MachineIdentified)
    if known is None or known.data.machine != machine:
        ctx.ledger.add(job.subject, MachineIdentified(machine=machine))


def _moved(ctx: Context, job: JobRecord, state: Job, reason: Reason, observed: Observation | None) -> bool:
    """Record a job's new state with its observation."""
    seen: dict[str, Any] = {"observation": observed.model_dump(mode="json")} if observed else {}
    body = {"why": reason.text, **seen}
    kept = scrubbed(body, ctx.hidden(body, job.spec.secrets))  # a job may have written its secrets into its status file
    return move(ctx, job, OBSERVED[state].model_validate({**kept, "reason": reason.as_dict()}))


def _waited_long(ctx: Context, job: JobRecord) -> bool:
    """Return whether an attempt's process ended so long ago that the platform should have reported an interruption."""
    before = ctx.ledger.last(job.subject, ProcessGone)
    if before is None or before.data.attempt != job.attempt:
        ctx.ledger.add(job.subject, ProcessGone(attempt=job.attempt))
        return False
    return ctx.clock.now() - before.at >= INTERRUPTION_S


def _restarted(ctx: Context, job: JobRecord, seen: Observation | None, machine: Answer[Instance | None] | None) -> bool:
    """Return whether the machine has restarted since the attempt's launch, according to the platform or the kernel."""
    launched = ctx.ledger.last(job.subject, JobSubmitted)
    if launched is None:
        return False
    began = launched.data.running_since
    instance = machine.value if isinstance(machine, Known) else None
    if began is not None and instance is not None and (instance.running_since or 0) > began:
        return True
    first = job.handle.supervisor.machine if job.handle and job.handle.supervisor else ""
    known = ctx.ledger.last(job.subject, MachineIdentified)
    if known is not None and known.seq > launched.seq:
        first = known.data.machine
    return bool(seen and seen.machine and first and seen.machine != first)


def _without_folder(ctx: Context, job: JobRecord, seen: Observation) -> tuple[Job, Reason]:
    """Determine the state of a job whose machine responds but has no run folder.

    If the machine has restarted, the job is FAILED. A volume may be attached late, so a second observation must confirm
    the loss at least `FOLDER_GONE_S` seconds later.
    """
    known = ctx.ledger.last(job.subject, MachineIdentified)
    if known is None or not seen.machine:
        return Job.UNKNOWN, because(Code.FOLDER_UNEXPLAINED)
    if known.data.machine == seen.machine:
        return Job.UNKNOWN, because(Code.FOLDER_REMOVED)
    before = ctx.ledger.last(job.subject, FolderGone)
    if before is None or before.data.machine != seen.machine or before.seq < known.seq:
        ctx.ledger.add(job.subject, FolderGone(machine=seen.machine, why=f"{seen.why}; first observation"))
    elif ctx.clock.now() - before.at >= FOLDER_GONE_S:
        return Job.FAILED, because(Code.CAME_BACK_EMPTY)
    return Job.UNKNOWN, because(Code.FOLDER_LATE)


async def observe(ctx: Context, job: JobRecord) -> Observation | None:
    """Return the backend's observation of a job; None if it can't be observed."""
    if job.handle is None:
        return None
    ctx.observed.pop(job.id, None)
    ctx.blind.pop(job.id, None)
    walk = shared_answers(ctx)
    try:
        if walk is not None:
            seen = await walk.observation(job, job.handle)
        else:
            seen = (await ctx.backend(job.handle.backend).poll([job.handle])).get(job.handle.token)
    except WardenError as error:
        ctx.blind[job.id] = error
        return None
    if seen is not None:
        seen = with_posted_progress(ctx, job.id, seen)
        body = seen.model_dump(mode="json")
        if (clean := scrubbed(body, ctx.hidden(body, job.spec.secrets))) != body:
            seen = Observation.model_validate(clean)  # redact before any text is truncated or stored
        ctx.observed[job.id] = seen
    return seen


def judge(
    job: JobRecord, seen: Observation | None, machine: Answer[Instance | None] | None, restarted: bool
) -> tuple[Job, Reason]:
    """Return a job's next state and its reason, from the process, its machine, and whether the machine restarted.

    A job is PREEMPTED, and therefore relaunched, only if its machine is off or has restarted. A status file that
    reports an interruption proves nothing, because the job can write to that file.
    """
    instance, off = machine.value if isinstance(machine, Known) else None, _off(machine)
    taken = because(Code.INTERRUPTED) if off else because(Code.RESTARTED) if restarted else None
    own = Reason(seen.reason or Code.PLATFORM_REPORT, message=seen.why) if seen is not None else because(Code.NO_ANSWER)
    if seen is not None and seen.state in {Job.SUCCEEDED, Job.CANCELED}:
        return seen.state, own
    vanished, terminated = own.code is Code.VANISHED, own.code is Code.TERMINATED
    if seen is not None and seen.state in {Job.FAILED, Job.PREEMPTED} and not (vanished or terminated):
        return seen.state, own  # known from the command's exit or a report by the platform
    if taken and (vanished or terminated or off):
        return Job.PREEMPTED, taken
    if _gone(machine):
        return Job.FAILED, because(Code.GONE)
    if terminated or (vanished and instance is not None and job.spec.interruptible):
        return Job.UNKNOWN, because(Code.INTERRUPTION_UNSEEN)
    return (seen.state if seen is not None else Job.UNKNOWN), own


def _off(machine: Answer[Instance | None] | None) -> bool:
    instance = machine.value if isinstance(machine, Known) else None
    return instance is not None and instance.state in {InstanceState.INTERRUPTED, InstanceState.STOPPED}


def _gone(machine: Answer[Instance | None] | None) -> bool:
    return isinstance(machine, Known) and machine.value is None


def _lease_ended(ctx: Context, job: JobRecord) -> bool:
    return job.lease is not None and read_lease(ctx.ledger, job.lease).state is Lease.STOPPED


async def _end(ctx: Context, job: JobRecord, machine: Answer[Instance | None] | None, reason: Reason) -> bool:
    """End the process of a job that was canceled or reached a limit. The machine keeps running until its teardown.

    A machine that is off or gone has no process to end. For example, a platform may end a machine at its end date.
    """
    assert job.handle is not None
    observed = await observe(ctx, job)
    if observed is not None and observed.state in {Job.SUCCEEDED, Job.FAILED} and observed.reason is not Code.VANISHED:
        own = Reason(observed.reason or Code.PLATFORM_REPORT, message=observed.why)
        return move(ctx, job, OBSERVED[observed.state](), own)
    if _off(machine) or (_gone(machine) and _lease_ended(ctx, job)):
        return move(ctx, job, JobCanceled(), reason)
    try:
        grace_s = CANCEL_GRACE_S if job.cancel_requested else SAVE_GRACE_S
        result = await ctx.backend(job.handle.backend).stop(job.handle, grace_s=grace_s)
    except WardenError:
        return False
    if result == "pending" or (result == "gone" and observed is not None and observed.reason is Code.UNLISTED):
        return False
    return move(ctx, job, JobCanceled(), reason)


async def _pause(ctx: Context, job: JobRecord, machine: Answer[Instance | None] | None) -> bool | None:
    """End the process of a job whose pause was requested, after a grace period for saving.

    Return None if another cause ended the process, or may have ended it. The caller then ignores the pause request.
    """
    assert job.handle is not None
    if _off(machine) or _gone(machine):
        return None
    observed = await observe(ctx, job)
    if observed is None or observed.state in {Job.SUCCEEDED, Job.PREEMPTED}:
        return None
    if observed.state is Job.RUNNING or observed.state is Job.QUEUED:
        try:
            result = await ctx.backend(job.handle.backend).stop(job.handle, grace_s=SAVE_GRACE_S)
        except WardenError:
            return False
        observed = None if result == "pending" else await observe(ctx, job)
    if observed is None:
        return False
    return _moved(ctx, job, Job.PAUSED, because(Code.PAUSED), observed) if observed.state is Job.CANCELED else None


async def preempted(ctx: Context, job: JobRecord) -> bool:
    """Relaunch the same command in the same folder, so that it resumes from its checkpoint."""
    if job.cancel_requested:
        return move(ctx, job, JobCanceled(), because(Code.CANCELED))
    if over_cap(ctx, job):
        return move(ctx, job, JobCanceled(), because(Code.COST_CAP, cap=usd(job.spec.max_cost_usd)))
    if job.pausing:
        return move(ctx, job, JobPaused(), because(Code.PAUSED_INTERRUPTED))
    times, limit = job.restarts, job.spec.max_restarts
    if times > limit:
        return move(ctx, job, JobFailed(), because(Code.MAX_RESTARTS, times=times, limit=limit))
    if job.lease is not None:
        answer = await poll_lease(ctx, job.lease)
        if isinstance(answer, Unknown):
            return False
        if answer.value is None:
            return _lease_ended(ctx, job) and await relaunch(ctx, job)
        return await _launch_next_attempt(ctx, job, job.lease, answer.value)
    assert job.place is not None
    return move(ctx, job, JobSubmitting(attempt=job.attempt + 1, place=job.place), because(Code.RELAUNCH))


async def _launch_next_attempt(ctx: Context, job: JobRecord, lease: str, machine: Instance) -> bool:
    """Start the next attempt on the job's machine once it is running. If the machine was interrupted, restart it."""
    try:
        if job.resumed:  # the cost of the pause counts against the limits
            allowed_attempt(ctx, job)
        if machine.state is InstanceState.INTERRUPTED:
            await restart(ctx, read_lease(ctx.ledger, lease), machine)
        if machine.state is not InstanceState.RUNNING or machine.place is None:
            return False
        place = pinned(ctx, lease, machine.place)
        if job.resumed:
            return await launch_within_limits(ctx, job, place, Code.RELAUNCH)
    except Refused as dear:
        return move(ctx, job, JobFailed(), because(Code.NOT_RELAUNCHED, cause=dear.message))
    return move(ctx, job, JobSubmitting(attempt=job.attempt + 1, place=place), because(Code.RELAUNCH))


async def relaunch(ctx: Context, job: JobRecord) -> bool:
    """Rent another machine for a job whose machine is permanently lost, if the user allowed it; else fail the job."""
    if not may_relaunch(ctx, job.id):
        return move(ctx, job, JobFailed(), because(Code.TAKEN_FOR_GOOD))
    if awaits_store(ctx, job):
        return False
    async with ctx.lock(CAPS, CAPS_PATIENCE_S):  # so that two relaunches can't use the same budget
        found = next_machine(ctx, job)
        if isinstance(found, str):
            return move(ctx, job, JobFailed(), because(Code.NOT_RELAUNCHED, cause=found))
        intent = RelaunchIntent(
            pull=found.copy.digest,
            record=found.record,
            worst_cost=found.worst_cost,
            left=found.left,
            generation=job.generation,
        )
        ctx.ledger.add(job.subject, intent.because(because(Code.ANOTHER_MACHINE)))
    return await rent(ctx, job)
