"""Check a job: advance it, observe it, read its log."""

from __future__ import annotations

from dataclasses import dataclass

from gpuwarden.core.errors import Conflict, WardenError
from gpuwarden.core.guidance import Action, NextStep, do, steps
from gpuwarden.core.models import LogChunk, Observation
from gpuwarden.core.states import LIVE_LEASES, TERMINAL_JOBS, Job, Lease
from gpuwarden.knowledge import Diagnosis
from gpuwarden.ledger.events import CancelRequested
from gpuwarden.lifecycle.artifacts.local_copies import pulled_log
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.execution.advance import advance
from gpuwarden.lifecycle.execution.price_change import price_question
from gpuwarden.lifecycle.execution.provisioning import tend
from gpuwarden.lifecycle.execution.recovery_advice import recovery_steps
from gpuwarden.lifecycle.execution.running import observe
from gpuwarden.lifecycle.monitoring.diagnose import diagnosed
from gpuwarden.lifecycle.monitoring.meter import lease_now
from gpuwarden.lifecycle.records import JobRecord, LeaseRecord, read_job


@dataclass(frozen=True)
class Checked:
    """A job, its meter and a piece of its log. `note` says what could not be seen, `diagnoses` what may be wrong."""

    job: JobRecord
    observation: Observation | None
    lease: LeaseRecord | None
    log: LogChunk | None
    note: str = ""
    diagnoses: tuple[Diagnosis, ...] = ()
    next_steps: tuple[NextStep, ...] = ()

    @property
    def texts(self) -> list[str]:
        """What the job itself said: its log, and the lines of it that a diagnosis rests on."""
        told = [m.text for found in self.diagnoses for m in found.lines]
        return [self.log.text if self.log else "", *told]


async def check(ctx: Context, job_id: str, *, cursor: int | None = None, limit: int = 4_000) -> Checked:
    """Advance a job and return its state. `cursor` is a byte position in its log; None reads the end."""
    note, blocked = "", steps("")
    try:
        job = await advance(ctx, job_id)
        if job.lease is not None and job.state in TERMINAL_JOBS:
            async with ctx.lock(job_id):
                await tend(ctx, job.lease)
    except Conflict as busy:
        note = busy.message
    except WardenError as waiting:
        note, blocked = waiting.message, waiting.next_steps
    job = read_job(ctx.ledger, job_id)
    lease = lease_now(ctx, job.lease) if job.lease else None
    if lease is not None and lease.state in LIVE_LEASES and (unseen := ctx.unseen.get(lease.id)):
        note = note or f"The machine can't be seen, and counts as billing: {unseen}."
    observation, log = None, None
    start = -limit if cursor is None else cursor
    # A machine takes its logs along; a serverless platform keeps a job's log after its container is gone.
    kept = ctx.profile(job.spec.platform).kind == "serverless"
    if job.handle is not None and (lease is None or lease.state is not Lease.STOPPED or kept):
        observation = await observe(ctx, job)
        try:
            log = await ctx.backend(job.handle.backend).logs(job.handle, start, limit)
        except WardenError as error:
            note = note or f"the log can't be read: {error.message}"
    elif job.handle is not None and (log := pulled_log(ctx, job_id, start, limit)):
        note = note or "The machine is gone; this is the log as it was pulled."
    question = price_question(ctx, job)
    note = " ".join(filter(None, (note, question.text if question else "")))
    waiting_for = question.next_steps if question else recovery_steps(ctx, job)
    following = steps((*blocked, *job.next_steps, *advice(job, lease), *waiting_for))
    return Checked(job, observation, lease, log, note, await diagnosed(ctx, job, observation), following)


async def cancel(ctx: Context, job_id: str) -> JobRecord:
    """End a job's process, with a signal first so that it can save. The machine and its meter stay.

    Canceling a job that has ended changes nothing, but ends a process that lives all the same.
    """
    job = read_job(ctx.ledger, job_id)
    if job.state in TERMINAL_JOBS:
        seen = await observe(ctx, job)
        if job.handle is not None and seen is not None and seen.state is Job.RUNNING:
            await ctx.backend(job.handle.backend).stop(job.handle)
        return job
    if not job.cancel_requested:
        ctx.ledger.add(job.subject, CancelRequested(from_state=job.state))
    return await advance(ctx, job_id)


def advice(job: JobRecord, lease: LeaseRecord | None) -> tuple[NextStep, ...]:
    """Return what an agent or a person does next, by the job's state and its meter."""
    billing = lease is not None and lease.state in LIVE_LEASES
    if job.state not in TERMINAL_JOBS:
        return steps("Check again later; nothing has to wait here.")
    pull, verify = do(Action.PULL, job_id=job.id), do(Action.VERIFY, job_id=job.id)
    if job.lease is None and job.state is Job.SUCCEEDED and job.outputs:
        return steps(("Nothing of it bills.", pull, verify))
    if not billing:
        return steps("The job has ended and nothing of it is billing.")
    end = do(Action.TEARDOWN, "after that", job_id=job.id)
    if job.state is Job.SUCCEEDED:
        return steps(("The meter is still running.", pull, verify, end))
    rest = do(Action.PULL, "to copy what exists", job_id=job.id)
    return steps(("The meter is still running. Read the log.", rest, end))
