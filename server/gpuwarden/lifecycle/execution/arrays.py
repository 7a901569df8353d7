"""Submit jobs to their engine as one array, exactly once, and record each job as submitted.

One transaction records the jobs' acceptance, the intent to submit each job, and the intent to submit the array. Any
process that advances one of the jobs submits the entire array, under the array's lock. After a crash or a lost reply,
the array is submitted again, and the backend skips the jobs that it already has. If the fan-out was ended in the
meantime, only the jobs that the backend already has are recorded as submitted.
"""

from __future__ import annotations

import anyio

from gpuwarden.backends.base import ArrayBackend
from gpuwarden.core.errors import WardenError
from gpuwarden.core.models import Answer, Handle, Known, Unknown
from gpuwarden.core.reasons import Code, because
from gpuwarden.core.states import Job
from gpuwarden.ledger.events import ArrayIntent, JobCanceled, JobFailed, JobSubmitted
from gpuwarden.lifecycle.context import STEP_S, Context
from gpuwarden.lifecycle.execution.launch_order import order_of, secrets_of
from gpuwarden.lifecycle.execution.transitions import MAYBE_DONE, move
from gpuwarden.lifecycle.records import JobRecord, read_job, read_lease, recalled


async def send_array(ctx: Context, token: str) -> bool:
    """Submit the remaining jobs in an array. Return whether their states changed. Raises NotFound for a missing secret.

    A job with a cancel request is included if it may have been submitted before, so that it can be stopped. If the
    fan-out was ended, no job is submitted until the engine has reported for each job whether it exists.
    """
    intent = ctx.ledger.used(ArrayIntent, token)
    assert intent is not None, token
    async with ctx.lock(token):
        known = [read_job(ctx.ledger, job_id) for job_id in intent.data.jobs]
        unsent = [job for job in known if job.state is Job.SUBMITTING and job.array == token]
        jobs = []
        for job in unsent:
            ended = recalled(ctx.ledger, job.id)
            found = await sent_before(ctx, job) if ended or job.cancel_requested else None
            if found == Known(None):
                move(ctx, job, JobCanceled(), because(Code.CANCELED_EARLY))
            elif ended and isinstance(found, Unknown):
                return False
            else:
                jobs.append(job)
        if not jobs:
            return True
        first = jobs[0]
        backend = ctx.backend(ctx.profile(first.spec.platform).backend)
        assert isinstance(backend, ArrayBackend) and first.place is not None
        secrets = {job.id: secrets_of(ctx, job, seals=backend.seals) for job in jobs}
        try:
            with anyio.fail_after(STEP_S):
                tasks = [await order_of(ctx, job, secrets[job.id], 1) for job in jobs]
                handles = await backend.submit_array(tasks, first.place, token, at_once=intent.data.at_once)
        except (*MAYBE_DONE, TimeoutError):
            return False  # the array may have been submitted; the next call submits it again
        except WardenError as refusal:
            return any([await refused(ctx, job, refusal, 1, repeated=True) for job in jobs])
        with ctx.ledger.transaction():
            for job in jobs:
                move(ctx, job, JobSubmitted(handle=handles[job.id], attempt=1))
        return True


async def sent_before(ctx: Context, job: JobRecord) -> Answer[Handle | None]:
    """Return the backend's handle for a job that may have been submitted; Known(None) if no such job exists."""
    assert job.place is not None
    try:
        return await ctx.backend(ctx.profile(job.spec.platform).backend).find(job.place, job.id)
    except WardenError as error:
        return Unknown(error.message)


async def refused(ctx: Context, job: JobRecord, refusal: WardenError, attempt: int, *, repeated: bool) -> bool:
    """Fail a job whose launch was refused, unless this call or an earlier one has launched the attempt.

    `repeated` is true if an earlier call may have been made. If the backend then can't report whether the job exists,
    and the job has no rented machine, it is not marked failed, because a failed job would no longer be observed.
    """
    found = await sent_before(ctx, job)
    if isinstance(found, Known) and found.value is not None and attempt > 1:  # `find` does not distinguish attempts
        handle = found.value
        try:
            seen = (await ctx.backend(handle.backend).poll([handle])).get(handle.token)
        except WardenError as error:
            found = Unknown(error.message)
        else:
            if seen is None:
                found = Unknown("the job was not observed")
            elif seen.attempt < attempt:
                found = Known(None)
    if isinstance(found, Unknown) and repeated and job.lease is None:
        ctx.blind[job.id] = refusal
        return False
    if isinstance(found, Known) and found.value is not None:
        return submitted(ctx, job, found.value, attempt)
    return move(ctx, job, JobFailed(code=refusal.code), because(Code.REFUSED_LAUNCH, message=refusal.message))


def submitted(ctx: Context, job: JobRecord, handle: Handle, attempt: int) -> bool:
    """Record that the backend has an attempt, and the time at which its rented machine started running."""
    instance = read_lease(ctx.ledger, job.lease).instance if job.lease else None
    since = instance.running_since if instance else None
    return move(ctx, job, JobSubmitted(handle=handle, attempt=attempt, running_since=since))
