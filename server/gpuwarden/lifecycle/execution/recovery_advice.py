"""How work goes on whose machine is gone for good: nothing is rented anew by itself, so the next call is said."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Final

from gpuwarden.core.models import InstanceState, Verdict
from gpuwarden.core.sanitize import line
from gpuwarden.core.states import Job, Lease
from gpuwarden.lifecycle.artifacts.local_copies import Pulled, last_pull, verified_now
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.execution.running import CAME_BACK
from gpuwarden.lifecycle.monitoring.meter import lease_now
from gpuwarden.lifecycle.records import JobRecord
from gpuwarden.lifecycle.submission.inputs import MAX_BYTES

NOT_ANEW: Final = "No machine is rented anew by itself"


def onward(ctx: Context, job: JobRecord) -> str:
    """The exact next call for a job that was interrupted and can't go on where it was; empty for every other."""
    if job.lease is None or job.state not in {Job.PREEMPTED, Job.FAILED}:
        return ""
    lease = lease_now(ctx, job.lease)
    if job.state is Job.PREEMPTED:
        if lease.instance is None or lease.instance.state is not InstanceState.STOPPED:
            return ""
        return (
            "Its machine lies stopped with what was saved, and gpuwarden does not start it. Start it in the platform's "
            "console and check_job goes on from there; or give it up: pull what can be pulled, then teardown_request."
        )
    if job.handle is None or not (lease.state is Lease.STOPPED or job.why.startswith(CAME_BACK)):
        return ""
    return f"{NOT_ANEW}. {_anew(ctx, job)}"


def _anew(ctx: Context, job: JobRecord) -> str:
    pulled = last_pull(ctx, job.id)
    if pulled is None or verified_now(ctx, job.id, pulled).verdict is not Verdict.PROVEN:
        unproven = (
            "" if pulled is None else f" What was pulled to {pulled.dest} is not proven: verify_checkpoint tells."
        )
        return (
            "There is no verified copy of what it saved, so the same work begins anew: submit_job with the same "
            f"arguments, once without a receipt for the price.{unproven}"
        )
    size = sum(f.size for f in pulled.manifest.files)
    if size > MAX_BYTES:
        return (
            f"The verified copy in {pulled.dest} ({size / 2**20:,.0f} MiB) is too large for an input. Push it to "
            "the Hub, then submit_job with a script that resumes from that repo."
        )
    name = _below(ctx, pulled)
    if name is None:
        return (
            f"To resume, copy {pulled.dest}, which is verified, to a folder below the working directory, say resume; "
            f"then submit_job with the same arguments, inputs {[*job.spec.inputs, 'resume']} and a script that resumes "
            "from there (gpuwarden submit ... --input resume)."
        )
    return (
        f"To resume from the verified copy: submit_job with the same arguments, inputs {[*job.spec.inputs, name]} and "
        f"a script that resumes from {line(name)} (gpuwarden submit ... --input {shlex.quote(name)})."
    )


def _below(ctx: Context, pulled: Pulled) -> str | None:
    """The copy's name below the working directory, where an input can be named; None elsewhere or when hidden."""
    root = (ctx.cwd or Path.cwd()).resolve()
    there = Path(pulled.dest).resolve()
    if not there.is_relative_to(root) or there == root:
        return None
    name = there.relative_to(root)
    return None if any(part.startswith(".") for part in name.parts) else name.as_posix()
