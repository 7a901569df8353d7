"""From a machine to a job's end: launch, observe, judge, park at a cap, relaunch after an interruption."""

from __future__ import annotations

from typing import Any, Final

import anyio
import anyio.to_thread

from gpuwarden.core.errors import NotFound, WardenError
from gpuwarden.core.models import Answer, Instance, InstanceState, Known, Observation, Unknown
from gpuwarden.core.money import usd
from gpuwarden.core.sanitize import scrubbed
from gpuwarden.core.states import Job, Lease
from gpuwarden.ledger.events import (
    FolderGone,
    JobCanceled,
    JobFailed,
    JobObserved,
    JobPreempted,
    JobQueued,
    JobRunning,
    JobSubmitted,
    JobSubmitting,
    JobSucceeded,
    JobUnknown,
    MachineSeen,
    SubmitIntent,
)
from gpuwarden.lifecycle.artifacts.seal_keys import SEAL_KEY, job_key
from gpuwarden.lifecycle.context import STEP_S, Context
from gpuwarden.lifecycle.execution.bootstrap import pinned
from gpuwarden.lifecycle.execution.provisioning import restart
from gpuwarden.lifecycle.execution.transitions import MAYBE_DONE, move, over_cap
from gpuwarden.lifecycle.monitoring.meter import look
from gpuwarden.lifecycle.records import JobRecord, read_lease
from gpuwarden.lifecycle.submission.input_store import staged
from gpuwarden.remote.launch import DIED

CANCEL_GRACE_S: Final = 10.0
FOLDER_GONE_S: Final = 60.0
"""How long a machine that came back may take to show its volumes."""
CAME_BACK: Final = "the machine was started anew and came back without the job's run folder"
_CLOSE: Final = "Whether its process lives can't be told; look there, and cancel_job closes the job"
SAVE_GRACE_S: Final = 120.0
"""What a job that met its cap has after SIGTERM to write a checkpoint; a caller does not wait for all of it."""


OBSERVED: Final[dict[Job, type[JobObserved]]] = {
    Job.QUEUED: JobQueued,
    Job.RUNNING: JobRunning,
    Job.UNKNOWN: JobUnknown,
    Job.PREEMPTED: JobPreempted,
    Job.SUCCEEDED: JobSucceeded,
    Job.FAILED: JobFailed,
    Job.CANCELED: JobCanceled,
}
"""The event of each state that an observation can move a job to."""


async def submitting(ctx: Context, job: JobRecord) -> bool:
    """Launch the attempt that was announced, once however often this is called."""
    assert job.place is not None
    attempt = _attempt(ctx, job)
    if job.cancel_requested:
        launched = await _launched(ctx, job, attempt)
        if launched is None:
            return False
        if not launched:
            return move(ctx, job, JobCanceled(why="canceled before it was launched"))
    if job.lease is not None:
        answer = await look(ctx, job.lease)
        if isinstance(answer, Known) and (stopped := _machine_lost(ctx, job, answer.value)) is not None:
            return stopped
    token = f"{job.id}-a{attempt}"
    secrets = _secret_values(ctx, job)
    ctx.known_secrets.remember(secrets.values())
    if ctx.ledger.used(SubmitIntent, token) is None:
        ctx.ledger.add(job.subject, SubmitIntent(attempt=attempt), token=token)
    backend = ctx.backend(ctx.profile(job.spec.platform).backend)
    if backend.seals:
        secrets[SEAL_KEY] = job_key(ctx, job.id)
    try:
        with anyio.fail_after(STEP_S):
            inputs = await anyio.to_thread.run_sync(staged, ctx.input_store, job.inputs)
            handle = await backend.submit(job.spec, job.place, job.id, secrets=secrets, attempt=attempt, inputs=inputs)
    except (*MAYBE_DONE, TimeoutError):
        return False  # submit is idempotent on token and attempt: the next call asks again
    except WardenError as refusal:
        why = f"the job could not be launched: {refusal.message}"
        return move(ctx, job, JobFailed(why=why, code=refusal.code))
    return move(ctx, job, JobSubmitted(handle=handle, attempt=attempt))


def _attempt(ctx: Context, job: JobRecord) -> int:
    """The attempt that the present move to *submitting* announced; the first is 1."""
    moved = ctx.ledger.last(job.subject, JobSubmitting)
    return moved.data.attempt if moved else 1


async def _launched(ctx: Context, job: JobRecord, attempt: int) -> bool | None:
    """Whether an attempt may have been launched; None when nobody can tell."""
    if job.attempt < attempt:
        return False
    assert job.place is not None
    try:
        found = await ctx.backend(ctx.profile(job.spec.platform).backend).find(job.place, job.id)
    except WardenError:
        return None
    return None if isinstance(found, Unknown) else found.value is not None


def _secret_values(ctx: Context, job: JobRecord) -> dict[str, str]:
    missing = [name for name in job.spec.secrets if not ctx.env.get(name)]
    if missing:
        raise NotFound(
            f"job {job.id} needs secrets that have no value in this process: {', '.join(missing)}",
            "Set them in the environment that gpuwarden runs in, then call again; the job waits.",
        )
    return {name: ctx.env[name] for name in job.spec.secrets}


async def running(ctx: Context, job: JobRecord) -> bool:
    """Observe the process and the machine under it, and move on when they say so."""
    assert job.handle is not None
    machine: Answer[Instance | None] | None = await look(ctx, job.lease) if job.lease else None
    if job.cancel_requested or over_cap(ctx, job):
        return await _end(ctx, job)
    observed = await observe(ctx, job)
    state, why = judge(job, observed, machine)
    if state is Job.UNKNOWN and observed is not None and observed.lost:
        state, why = _without_folder(ctx, job, observed)
    elif observed is not None and observed.state is Job.RUNNING:
        _remember(ctx, job, observed)
    if state is Job.UNKNOWN and job.id in ctx.blind:
        why = ctx.blind[job.id].message
    if state is job.state:
        return False
    if state is Job.FAILED and _gone(machine) and not _lease_ended(ctx, job):
        return False  # gone is believed on the second look
    told: dict[str, Any] = {"observation": observed.model_dump(mode="json")} if observed else {}
    body = {"why": why, **told}
    kept = scrubbed(body, ctx.hidden(body, job.spec.secrets))  # what the job itself may have said
    return move(ctx, job, OBSERVED[state].model_validate(kept))


def _remember(ctx: Context, job: JobRecord, seen: Observation) -> None:
    """Keep which start of its machine a job runs on: a later one proves that its process is dead."""
    known = ctx.ledger.last(job.subject, MachineSeen)
    if seen.machine and (known is None or known.data.machine != seen.machine):
        ctx.ledger.add(job.subject, MachineSeen(machine=seen.machine))


def _without_folder(ctx: Context, job: JobRecord, seen: Observation) -> tuple[Job, str]:
    """What it means that a machine answers and has no run folder: dead if it was started since, seen twice.

    A volume may come up late, so the second look is a while later.
    """
    known = ctx.ledger.last(job.subject, MachineSeen)
    if known is None or not seen.machine:
        return Job.UNKNOWN, f"{seen.why}. {_CLOSE}"
    if known.data.machine == seen.machine:
        return Job.UNKNOWN, f"{seen.why}, which has not started anew since: somebody removed it. {_CLOSE}"
    before = ctx.ledger.last(job.subject, FolderGone)
    if before is None or before.data.machine != seen.machine or before.seq < known.seq:
        ctx.ledger.add(job.subject, FolderGone(machine=seen.machine, why=f"{seen.why}; one look"))
    elif ctx.clock.now() - before.at >= FOLDER_GONE_S:
        return Job.FAILED, (f"{CAME_BACK}, seen twice: its process is dead, and what only lay there is gone")
    return Job.UNKNOWN, f"{seen.why}, and the machine was started anew; another look will tell"


async def observe(ctx: Context, job: JobRecord) -> Observation | None:
    """What the backend sees of a job; None when it can't see it."""
    if job.handle is None:
        return None
    ctx.observed.pop(job.id, None)
    ctx.blind.pop(job.id, None)
    try:
        seen = (await ctx.backend(job.handle.backend).poll([job.handle])).get(job.handle.token)
    except WardenError as error:
        ctx.blind[job.id] = error
        return None
    if seen is not None:
        body = seen.model_dump(mode="json")
        if (clean := scrubbed(body, ctx.hidden(body, job.spec.secrets))) != body:
            seen = Observation.model_validate(clean)  # before anything is cut to length, or kept
        ctx.observed[job.id] = seen
    return seen


def judge(job: JobRecord, seen: Observation | None, machine: Answer[Instance | None] | None) -> tuple[Job, str]:
    """The job's next state from two observations: of the process, and of the machine under it."""
    instance = machine.value if isinstance(machine, Known) else None
    off = instance is not None and instance.state in {InstanceState.INTERRUPTED, InstanceState.STOPPED}
    if seen is not None and seen.state in {Job.SUCCEEDED, Job.CANCELED, Job.PREEMPTED}:
        return seen.state, seen.why
    if seen is not None and seen.state is Job.FAILED:
        if not seen.why.startswith(DIED):
            return Job.FAILED, seen.why
        if off or (job.spec.interruptible and instance is not None):
            return Job.PREEMPTED, "the machine was taken back in the middle of the run"
        if _gone(machine):
            return Job.FAILED, "the instance is gone, and the job with it"
        return Job.FAILED, seen.why
    if _gone(machine):
        return Job.FAILED, "the instance is gone, and the job with it"
    if off:
        return Job.PREEMPTED, "the machine was taken back in the middle of the run"
    if seen is None or seen.state is Job.UNKNOWN:
        return Job.UNKNOWN, seen.why if seen else "the machine does not answer"
    return seen.state, seen.why


def _gone(machine: Answer[Instance | None] | None) -> bool:
    return isinstance(machine, Known) and machine.value is None


def _lease_ended(ctx: Context, job: JobRecord) -> bool:
    return job.lease is not None and read_lease(ctx.ledger, job.lease).state is Lease.STOPPED


async def _end(ctx: Context, job: JobRecord) -> bool:
    """End the process of a job that was canceled or met its cap. The machine stays: that is another question."""
    assert job.handle is not None
    observed = await observe(ctx, job)
    if observed is not None and observed.state in {Job.SUCCEEDED, Job.FAILED} and not observed.why.startswith(DIED):
        return move(ctx, job, OBSERVED[observed.state](why=observed.why))
    try:
        grace_s = CANCEL_GRACE_S if job.cancel_requested else SAVE_GRACE_S
        result = await ctx.backend(job.handle.backend).stop(job.handle, grace_s=grace_s)
    except WardenError:
        return False
    if result == "pending":
        return False
    why = "canceled on request" if job.cancel_requested else f"stopped at max_cost_usd of {usd(job.spec.max_cost_usd)}"
    return move(ctx, job, JobCanceled(why=why))


async def preempted(ctx: Context, job: JobRecord) -> bool:
    """Relaunch the identical command in the same folder, so that it resumes from its checkpoint."""
    if job.cancel_requested:
        return move(ctx, job, JobCanceled(why="canceled on request"))
    if over_cap(ctx, job):
        return move(ctx, job, JobCanceled(why=f"stopped at max_cost_usd of {usd(job.spec.max_cost_usd)}"))
    if job.attempt > job.spec.max_restarts:
        why = f"interrupted {job.attempt} times; max_restarts is {job.spec.max_restarts}"
        return move(ctx, job, JobFailed(why=why))
    place = job.place
    if job.lease is not None:
        answer = await look(ctx, job.lease)
        if isinstance(answer, Unknown):
            return False
        if answer.value is None:
            why = "the machine was taken back for good, with what was on it"
            return _lease_ended(ctx, job) and move(ctx, job, JobFailed(why=why))
        if answer.value.state is InstanceState.INTERRUPTED:
            await restart(ctx, read_lease(ctx.ledger, job.lease), answer.value)
        if answer.value.state is not InstanceState.RUNNING or answer.value.place is None:
            return False
        place = pinned(ctx, job.lease, answer.value.place)
    assert place is not None
    return move(ctx, job, JobSubmitting(why="relaunch", attempt=job.attempt + 1, place=place))


def _machine_lost(ctx: Context, job: JobRecord, instance: Instance | None) -> bool | None:
    """Handle a machine that went away while a launch was being made; None when it is there."""
    if instance is None:
        return _lease_ended(ctx, job) and move(ctx, job, JobFailed(why="the instance was gone before the launch"))
    if instance.state in {InstanceState.INTERRUPTED, InstanceState.STOPPED}:
        return move(ctx, job, JobPreempted(why="the machine was taken back before the launch"))
    return None
