"""Check a job: advance it, observe it, and read its log."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Final

from gpuwarden.core.errors import Conflict, NotSupported, WardenError
from gpuwarden.core.guidance import Action, NextStep, do, steps
from gpuwarden.core.models import InstanceState, Observation, RunnerAlert
from gpuwarden.core.next_step import UNDER_WAY, Copy
from gpuwarden.core.states import AT_REST, LIVE_LEASES, TERMINAL_JOBS, Job, Lease
from gpuwarden.knowledge import Diagnosis
from gpuwarden.knowledge.version_skew import Skew
from gpuwarden.ledger.events import CancelRequested, PauseRequested, ResumeRequested
from gpuwarden.lifecycle.artifacts.local_copies import copy_state, pulled_log
from gpuwarden.lifecycle.artifacts.proof_steps import ProofStep, proof_steps
from gpuwarden.lifecycle.artifacts.store_contents import StoreView, store_view
from gpuwarden.lifecycle.context import CAPS, CAPS_PATIENCE_S, Context
from gpuwarden.lifecycle.execution.advance import advance, advance_locked
from gpuwarden.lifecycle.execution.price_change import price_question
from gpuwarden.lifecycle.execution.provisioning import refresh_lease
from gpuwarden.lifecycle.execution.resume_limits import allowed_attempt
from gpuwarden.lifecycle.execution.running import observe
from gpuwarden.lifecycle.execution.situation import TeardownPlan, following, open_ticket, teardown_plan
from gpuwarden.lifecycle.leases.meter import confirmed_end, lease_now
from gpuwarden.lifecycle.monitoring.alert_conditions import raise_overdue
from gpuwarden.lifecycle.monitoring.decision_checks import CheckOutcome
from gpuwarden.lifecycle.monitoring.diagnose import NOTHING, Explanations, diagnosed
from gpuwarden.lifecycle.monitoring.log_part import LogPart, log_part
from gpuwarden.lifecycle.monitoring.time_left import time_left
from gpuwarden.lifecycle.posted import posted_problems
from gpuwarden.lifecycle.records import JobRecord, LeaseRecord, read_job
from gpuwarden.metrics.store import StoredAlert
from gpuwarden.remote.runner.log_reader import LogReader
from gpuwarden.static_analysis.pace import Remaining

PAUSABLE: Final = frozenset({Job.SUBMITTING, Job.QUEUED, Job.RUNNING, Job.PREEMPTED, Job.UNKNOWN})
"""Job states in which a process may exist."""


@dataclass(frozen=True)
class CheckedJob:
    """A job, its lease and part of its log. `note` explains missing information; `explained` explains failures."""

    job: JobRecord
    observation: Observation | None
    lease: LeaseRecord | None
    log: LogPart | None
    note: str = ""
    explained: Explanations = NOTHING
    next_steps: tuple[NextStep, ...] = ()
    ending: TeardownPlan | None = None
    artifact_store: StoreView | None = None
    """Contents of the job's artifact store, if its machine can't be read."""
    evidence: tuple[ProofStep, ...] = ()
    """The completed and remaining steps in verifying the job's outputs."""
    posted: tuple[StoredAlert, ...] = ()
    """Problems that the job posted as alerts, the newest of each type."""
    remaining: Remaining | None = None
    """Estimated minimum and maximum time until the job's last step."""

    @property
    def diagnoses(self) -> tuple[Diagnosis, ...]:
        """Return the reference entries that may explain the failure."""
        return self.explained.diagnoses

    @property
    def skew(self) -> Skew | None:
        """Return the package releases that contain a name missing from the job's environment."""
        return self.explained.skew

    @property
    def checks(self) -> tuple[CheckOutcome, ...]:
        """Return the outcomes of the checks on the job's machine."""
        return self.explained.checks

    @property
    def texts(self) -> list[str]:
        """Return the job's output: its log, and the log lines that led to a diagnosis."""
        told = [m.text for found in self.diagnoses for m in found.lines]
        return [self.log.text if self.log else "", *told]


async def check(ctx: Context, job_id: str, *, cursor: int | None = None, limit: int = 4_000) -> CheckedJob:
    """Advance a job and return its state. `cursor` is a byte position in its log; None selects the log's end."""
    note, blocked = "", steps("")
    try:
        job = await advance(ctx, job_id)
        if job.lease is not None and job.state in TERMINAL_JOBS:
            async with ctx.lock(job_id):
                await refresh_lease(ctx, job.lease)
    except Conflict as busy:
        note = busy.message
    except WardenError as waiting:
        note, blocked = waiting.message, waiting.next_steps
    raise_overdue(ctx)
    job = read_job(ctx.ledger, job_id)
    lease = lease_now(ctx, job.lease) if job.lease else None
    if lease is not None and lease.state in LIVE_LEASES and (unseen := ctx.unseen.get(lease.id)):
        note = note or f"The state of the machine is unknown, so it counts as billed: {unseen}."
    observation, log = None, None
    start = -limit if cursor is None else cursor
    pulled = partial(pulled_log, ctx, job_id)
    # Logs are lost with a machine, but a serverless platform keeps a job's log after its container is gone.
    kept = ctx.profile(job.spec.platform).kind == "serverless"
    if job.handle is not None and (lease is None or lease.state is not Lease.STOPPED or kept):
        observation = await observe(ctx, job)
        try:
            if limit:
                read = partial(ctx.backend(job.handle.backend).logs, job.handle)
                log = await log_part(ctx, job, read, start, limit)
            observation = with_printed_progress(observation, log.text if log else "")
        except WardenError as error:
            log = await log_part(ctx, job, pulled, start, limit) if limit else None
            note = note or f"the log can't be read: {error.message}{'; this is the pulled copy' if log else ''}"
    elif job.handle is not None and (log := await log_part(ctx, job, pulled, start, limit)):
        note = note or "The machine is gone; this is the pulled copy of the log."
    question = price_question(ctx, job)
    note = " ".join(filter(None, (note, question.text if question else "")))
    rest = steps((*blocked, *job.next_steps, *following(ctx, job)))
    up = lease is None or (lease.instance is not None and lease.instance.state is InstanceState.RUNNING)
    away = job.spec.artifact_store and job.handle is not None and (observation is None or not up)
    stored = await store_view(ctx, job) if away and copy_state(ctx, job.id) is not Copy.PROVEN else None
    found = await diagnosed(ctx, job, observation)
    ending = _arranged(ctx, job, lease)
    left = time_left(ctx, job, observation)
    posted = tuple(posted_problems(ctx, job_id).values())
    return CheckedJob(
        job, observation, lease, log, note, found, rest, ending, stored, proof_steps(ctx, job), posted, left
    )


def _arranged(ctx: Context, job: JobRecord, lease: LeaseRecord | None) -> TeardownPlan | None:
    """Return the user's advance decision about the machine's teardown; None if no decision or machine exists."""
    return None if lease is None or confirmed_end(ctx, lease.id) == "gone" else teardown_plan(ctx, job)


@dataclass(frozen=True)
class SignaledJob:
    """A job after a request to end, pause or resume its process, with the last observed state of its lease."""

    job: JobRecord
    lease: LeaseRecord | None
    next_steps: tuple[NextStep, ...]
    ending: TeardownPlan | None = None


def with_printed_progress(seen: Observation | None, text: str) -> Observation | None:
    """Add the step and the metrics from part of the log to an observation that has neither.

    This applies to serverless platforms, where no runner reads the log. Other observations are returned unchanged.
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


async def cancel(ctx: Context, job_id: str) -> SignaledJob:
    """Send a signal to a job's process so that it can save its state, then end it. The machine keeps running and is
    billed.

    Canceling an ended job does not change its state, but ends any process that is still running.
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
    return await _signaled(ctx, job)


async def _signaled(ctx: Context, job: JobRecord) -> SignaledJob:
    if job.lease is not None and job.state in AT_REST:
        async with ctx.lock(job.id):
            await refresh_lease(ctx, job.lease)  # so that the cost is current
    lease = lease_now(ctx, job.lease) if job.lease else None
    return SignaledJob(job, lease, following(ctx, job), _arranged(ctx, job, lease))


async def pause(ctx: Context, job_id: str) -> SignaledJob:
    """End a job's process so that it can resume later: send a signal, allow time to save, and do not relaunch it.

    The machine is kept and billed. Raises Conflict if the job has no process, and NotSupported if the job's files are
    deleted when the process ends.
    """
    job = read_job(ctx.ledger, job_id)
    if job.state is not Job.PAUSED and job.state not in PAUSABLE:
        cancel = do(Action.CANCEL, "to end the job", alternative=True, job_id=job_id)
        raise Conflict(
            f"job {job_id} {job.state.phrase}, so there is nothing to pause",
            () if job.state in TERMINAL_JOBS else cancel,
        )
    if ctx.profile(job.spec.platform).kind == "serverless":
        raise NotSupported(
            f"a job on {job.spec.platform} can't be paused: its files are deleted when its process ends",
            do(Action.CANCEL, "to end it", job_id=job_id),
        )
    if job.resume_requested or (job.state is not Job.PAUSED and not job.pausing):
        ctx.ledger.add(job.subject, PauseRequested(from_state=job.state))
    return await _signaled(ctx, await advance(ctx, job_id))


async def resume(ctx: Context, job_id: str) -> SignaledJob:
    """Relaunch a paused job in its folder, and start the machine if it is stopped.

    Raises Conflict for a job that is not paused or whose machine is being ended, and Refused if the cost may exceed
    both the amount approved for the job and the caps.
    """
    async with ctx.lock(job_id):
        job = read_job(ctx.ledger, job_id)
        if job.state in TERMINAL_JOBS or (job.state is not Job.PAUSED and not job.pausing):
            raise Conflict(f"job {job_id} {job.state.phrase}; it is not paused", do(Action.CHECK, job_id=job_id))
        ticket = open_ticket(ctx, lease_now(ctx, job.lease)) if job.lease else None
        if ticket is not None and ticket.state in UNDER_WAY:
            raise Conflict(
                f"a {ticket.verb} request for job {job_id}'s machine is in progress",
                do(Action.TEARDOWN, "to follow the request; then resume the job", job_id=job_id, verb=ticket.verb),
            )
        if not job.resume_requested:
            async with ctx.lock(CAPS, CAPS_PATIENCE_S):  # so that two resumes can't use the same budget
                ctx.ledger.add(job.subject, ResumeRequested(worst_cost=allowed_attempt(ctx, job).worst_cost))
        job = await advance_locked(ctx, job_id)
    return await _signaled(ctx, job)
