"""Suggest the next steps for a job whose machine is gone. No replacement machine is rented automatically."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from gpuwarden.core.guidance import Action, NextStep, do, steps
from gpuwarden.core.models import MAX_INPUT_BYTES, InstanceState, Verdict
from gpuwarden.core.next_step import Copy, stopped_machine
from gpuwarden.core.reasons import Code
from gpuwarden.core.states import Job, Lease
from gpuwarden.ledger.events import RelaunchIntent, VerbSent
from gpuwarden.lifecycle.artifacts.local_copies import Pulled, copy_for, copy_state, verified_now
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.leases.meter import lease_now
from gpuwarden.lifecycle.records import JobRecord

OWN_FAULTS: Final = frozenset({
    Code.EXITED, Code.NOT_STARTED, Code.TIME_LIMIT, Code.OUT_OF_MEMORY, Code.RESTARTS_USED, Code.REFUSED_LAUNCH,
    Code.UNFIT_HOST, Code.NOT_INTERRUPTED,
})  # fmt: skip
"""Reasons for a job's end that would recur on any other machine."""
UNCLEAR: Final = frozenset({Code.VANISHED, Code.KILLED_BY_SIGNAL, Code.TERMINATED, Code.STOPPED})
"""Reasons for a job's end that may be due to the loss of its machine, unless gpuwarden ended the machine."""
NOT_RENTED_AGAIN: Final = "No replacement machine is rented automatically."


def recovery_steps(ctx: Context, job: JobRecord) -> tuple[NextStep, ...]:
    """Return the next steps for an interrupted job that can't continue on its machine; empty for any other job."""
    lost = job.state in {Job.PREEMPTED, Job.FAILED} or job.reason is Code.ENDED_PAUSED
    if job.lease is None or not lost:
        return ()
    asked = ctx.ledger.last(f"lease/{job.lease}", VerbSent) is not None
    if job.state is Job.FAILED and (job.reason in OWN_FAULTS or (job.reason in UNCLEAR and asked)):
        return ()
    lease = lease_now(ctx, job.lease)
    if job.state is Job.PREEMPTED:
        if lease.instance is None or lease.instance.state is not InstanceState.STOPPED:
            return ()
        return stopped_machine(job.id)
    unrented = ctx.ledger.last(job.subject, RelaunchIntent) is not None and lease.state is Lease.NONE
    lost = lease.state is Lease.STOPPED or job.reason is Code.CAME_BACK_EMPTY
    if job.handle is None and lost and job.reason is Code.GONE_EARLY:
        return steps((NOT_RENTED_AGAIN, do(Action.SUBMIT, ", which checks the price again", receipt="")))
    if not unrented and (job.handle is None or not lost):
        return ()
    if job.spec.artifact_store and copy_state(ctx, job.id) in {Copy.NONE, Copy.STALE, Copy.UNVERIFIED}:
        return ()  # the files in its artifact store are copied and verified first
    pulled = copy_for(ctx, job.id)
    if pulled is None or verified_now(ctx, job.id, pulled).verdict is not Verdict.PROVEN:
        start = "Its outputs have no verified copy, so the work has to start from the beginning."
        again = do(Action.SUBMIT, ", which checks the price again", receipt="")
        if pulled is None:
            return steps((NOT_RENTED_AGAIN, start, again))
        verify = do(Action.VERIFY, "to check it", job_id=job.id)
        return steps((NOT_RENTED_AGAIN, start, again, f"The copy in {pulled.dest} is not proven.", verify))
    size = sum(f.size for f in pulled.manifest.files)
    if size > MAX_INPUT_BYTES:
        large = f"The verified copy in {pulled.dest} ({size / 2**20:,.0f} MiB) is too large for an input."
        resume = do(Action.SUBMIT, ", but with a script that resumes from that repo", receipt="")
        return steps((NOT_RENTED_AGAIN, large, "Push it to the Hub first.", resume))
    name = name_below_cwd(ctx, pulled)
    first = f"To resume, copy the verified files in {pulled.dest} to a folder named resume in the working directory."
    if name is not None:
        first = "To resume, use the verified copy."
    folder = name or "resume"
    resume = do(Action.SUBMIT, f"and a script that resumes from {folder}", inputs=(*job.spec.inputs, folder))
    return steps((NOT_RENTED_AGAIN, first, resume))


def name_below_cwd(ctx: Context, pulled: Pulled) -> str | None:
    """Return the copy's path in the working directory, for use as an input; None if it is elsewhere or hidden."""
    root = (ctx.cwd or Path.cwd()).resolve()
    there = Path(pulled.dest).resolve()
    if not there.is_relative_to(root) or there == root:
        return None
    name = there.relative_to(root)
    return None if any(part.startswith(".") for part in name.parts) else name.as_posix()
