"""Move a job on as far as it goes now. Any process may do so; what a crash left open, the next call finishes.

Every step writes its intent, commits, makes its call, and writes the outcome. When an intent has no outcome the step
looks for what it may have done before it does it again.
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
    """Take the steps that can be taken now, and return where the job is."""
    read_job(ctx.ledger, job_id)
    async with ctx.lock(job_id):
        return await advance_locked(ctx, job_id)


async def advance_locked(ctx: Context, job_id: str) -> JobRecord:
    """Do the same for a caller that has the job's lock. A long step is started only while others can wait."""
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
