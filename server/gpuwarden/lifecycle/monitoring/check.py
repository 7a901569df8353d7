"""Check a job: advance it, observe it, read its log."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpuwarden.core.errors import Conflict, WardenError
from gpuwarden.core.guidance import NextStep, steps
from gpuwarden.core.models import LogChunk, Observation, RunnerAlert
from gpuwarden.core.states import LIVE_LEASES, TERMINAL_JOBS, Job, Lease
from gpuwarden.knowledge import Diagnosis
from gpuwarden.ledger.events import CancelRequested
from gpuwarden.lifecycle.artifacts.local_copies import pulled_log
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.execution.advance import advance
from gpuwarden.lifecycle.execution.price_change import price_question
from gpuwarden.lifecycle.execution.provisioning import tend
from gpuwarden.lifecycle.execution.running import observe
from gpuwarden.lifecycle.execution.situation import following
from gpuwarden.lifecycle.monitoring.diagnose import diagnosed
from gpuwarden.lifecycle.monitoring.meter import lease_now
from gpuwarden.lifecycle.records import JobRecord, LeaseRecord, read_job
from gpuwarden.remote.runner.log_reader import LogReader


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
        """Return the job's own output: its log, and the lines of it that a diagnosis rests on."""
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
            observation = with_printed_progress(observation, log.text)
        except WardenError as error:
            note = note or f"the log can't be read: {error.message}"
    elif job.handle is not None and (log := pulled_log(ctx, job_id, start, limit)):
        note = note or "The machine is gone; this is the log as it was pulled."
    question = price_question(ctx, job)
    note = " ".join(filter(None, (note, question.text if question else "")))
    rest = steps((*blocked, *job.next_steps, *following(ctx, job)))
    return Checked(job, observation, lease, log, note, await diagnosed(ctx, job, observation), rest)


@dataclass(frozen=True)
class Canceled:
    """A job after a request to end its process, with its meter as the last look saw it."""

    job: JobRecord
    lease: LeaseRecord | None
    next_steps: tuple[NextStep, ...]


def with_printed_progress(seen: Observation | None, text: str) -> Observation | None:
    """Return an observation with the step and the metrics that a piece of log names.

    Only where nothing else is known: a serverless platform runs no runner that would have read them.
    """
    if seen is None or seen.step is not None or seen.metrics or seen.last_beat_at is not None:
        return seen
    reader, last = LogReader(), dict[str, float]()
    for row in reader.feed(text.encode("utf-8", "replace") + b"\n"):
        last |= row
    known = {name: value for name, value in last.items() if math.isfinite(value)}
    if not last:
        return seen
    step = known.pop("step", None)
    odd = tuple(
        RunnerAlert(kind="nonfinite", text=f"{name} is not finite", subject=name)
        for name in ("loss", "grad_norm")
        if not math.isfinite(last.get(name, 0.0))
    )
    found = {"step": None if step is None else int(step), "total_steps": reader.total, "metrics": known}
    return seen.model_copy(update={**found, "source": "output", "alerts": (*seen.alerts, *odd)})


async def cancel(ctx: Context, job_id: str) -> Canceled:
    """End a job's process, with a signal first so that it can save. The machine and its meter stay.

    Canceling a job that has ended changes nothing, but ends a process that lives all the same.
    """
    job = read_job(ctx.ledger, job_id)
    if job.state in TERMINAL_JOBS:
        seen = await observe(ctx, job)
        if job.handle is not None and seen is not None and seen.state is Job.RUNNING:
            await ctx.backend(job.handle.backend).stop(job.handle)
    else:
        if not job.cancel_requested:
            ctx.ledger.add(job.subject, CancelRequested(from_state=job.state))
        job = await advance(ctx, job_id)
    if job.lease is not None and job.state in TERMINAL_JOBS:
        async with ctx.lock(job_id):
            await tend(ctx, job.lease)  # so that the cost is that of now
    return Canceled(job, lease_now(ctx, job.lease) if job.lease else None, following(ctx, job))
