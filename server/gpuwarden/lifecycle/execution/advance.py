"""Advance a job as far as currently possible. Any process may do this; after a crash, the next call finishes the step.

Every step records its intent, commits, makes its call, and records the outcome. If an intent has no outcome, the step
first checks whether the earlier call took effect, and repeats the call only if it did not.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import anyio

from gpuwarden.core.states import TERMINAL_JOBS, Job
from gpuwarden.lifecycle.context import LOCK_PATIENCE_S, STEP_S, Context
from gpuwarden.lifecycle.execution.pausing import paused
from gpuwarden.lifecycle.execution.provisioning import accepted, provisioning
from gpuwarden.lifecycle.execution.running import preempted, running, submitting
from gpuwarden.lifecycle.records import JobRecord, read_job

MAX_STEPS: Final = 8


async def advance(ctx: Context, job_id: str) -> JobRecord:
    """Perform the steps that are currently possible, and return the job."""
    read_job(ctx.ledger, job_id)
    async with ctx.lock(job_id):
        return await advance_locked(ctx, job_id)


async def advance_locked(ctx: Context, job_id: str) -> JobRecord:
    """Advance a job whose lock the caller holds.

    A step is not started if it could take longer than other callers wait for the lock.
    """
    begun = anyio.current_time()
    for _ in range(MAX_STEPS):
        job = read_job(ctx.ledger, job_id)
        step = STEPS.get(job.state)
        if step is None or not await step(ctx, job) or anyio.current_time() - begun > LOCK_PATIENCE_S - STEP_S:
            break
    return read_job(ctx.ledger, job_id)


Step = Callable[[Context, JobRecord], Awaitable[bool]]
STEPS: Final[dict[Job, Step]] = {
    Job.ACCEPTED: accepted,
    Job.PROVISIONING: provisioning,
    Job.SUBMITTING: submitting,
    Job.QUEUED: running,
    Job.RUNNING: running,
    Job.UNKNOWN: running,
    Job.PREEMPTED: preempted,
    Job.PAUSED: paused,
}
assert set(STEPS) | TERMINAL_JOBS | {Job.DRAFT} == set(Job)
