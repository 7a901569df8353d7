"""Estimate a running job's remaining time from its steps and from earlier runs of its script on the same GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gpuwarden.core.models import Observation, digest
from gpuwarden.core.states import Job
from gpuwarden.ledger.events import JobSucceeded
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.records import JobRecord, read_job
from gpuwarden.static_analysis.pace import Pace, Remaining, remaining

MOST_EARLIER: Final = 8


def time_left(ctx: Context, job: JobRecord, seen: Observation | None) -> Remaining | None:
    """Return the minimum and maximum time in seconds until the last step.

    Return None if the job is not running or its total number of steps is unknown.
    """
    if seen is None or seen.state is not Job.RUNNING:
        return None
    earlier = list(_earlier(ctx, job))
    total = seen.total_steps or (earlier[0].steps if earlier else None)
    if not total or (seen.step or 0) > total:
        return None
    own = None
    if seen.step and seen.started_at is not None and seen.at > seen.started_at:
        elapsed, seconds = seen.at - seen.started_at, (seen.at - seen.started_at) / seen.step
        if seen.eta_at is not None and seen.total_steps and total > seen.step and seen.eta_at > seen.at:
            seconds = (seen.eta_at - seen.at) / (total - seen.step)  # recent pace
        own = Pace(seconds=seconds, steps=seen.step, elapsed_s=elapsed)
    return remaining(total - (seen.step or 0), own, earlier)


def _earlier(ctx: Context, job: JobRecord) -> Iterator[Pace]:
    """Yield the seconds per step of the latest successful runs of the same script with the same arguments and GPUs."""
    if job.spec.script is None:
        return
    alike = [s for s in ctx.ledger.jobs_of_script(digest(job.spec.script), Job.SUCCEEDED) if s != job.subject]
    for subject in alike[-MOST_EARLIER:][::-1]:
        before = read_job(ctx.ledger, subject.removeprefix("job/"))
        same = (before.spec.script, before.spec.args, before.spec.gpu, before.spec.gpu_count)
        if same != (job.spec.script, job.spec.args, job.spec.gpu, job.spec.gpu_count):
            continue
        ended = ctx.ledger.last(subject, JobSucceeded)
        observation = ended.data.observation if ended is not None else None
        # The observation may contain text written by the job, so check the types.
        values = [(observation or {}).get(name) for name in ("step", "started_at", "ended_at")]
        step, begun, end = (v if isinstance(v, int | float) and not isinstance(v, bool) else 0 for v in values)
        if step and begun and end and end > begun:
            yield Pace(seconds=(end - begun) / step, steps=int(step), elapsed_s=end - begun)
