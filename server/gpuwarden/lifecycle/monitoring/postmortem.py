"""Collect the evidence from a failed job: its log, and its differences from a later run that succeeded."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

import anyio

from gpuwarden.core.errors import BadRequest, NotFound, WardenError
from gpuwarden.core.sanitize import clip, plain, redact
from gpuwarden.core.states import Job
from gpuwarden.knowledge import diagnose, shipped
from gpuwarden.knowledge.evidence import failing_lines, first_error, nameless, versions
from gpuwarden.knowledge.proposal import signature_for
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.monitoring.diagnose import tail_of
from gpuwarden.lifecycle.records import JobRecord, job_ids, read_job
from gpuwarden.static_analysis.script import read_header

MAX_CHANGES = 4_000
MAX_TWINS = 5
QUIET = {"name", "script", "max_cost_usd", "estimate_s"}
FAILED = (Job.FAILED, Job.PREEMPTED)


@dataclass(frozen=True)
class Lesson:
    """The evidence from one failed job. `fixed_by` is the job that succeeded.

    `changes` lists the differences between the two jobs, redacted and truncated. `again` lists other runs of the job
    that failed with the same first error. `known` lists the reference entries that explain that error.
    """

    job: JobRecord
    lines: tuple[str, ...]
    versions: tuple[str, ...]
    known: tuple[str, ...]
    again: tuple[str, ...]
    fixed_by: JobRecord | None
    changes: str

    @property
    def doubts(self) -> list[str]:
        """Return descriptions of missing evidence, which the author of the proposed entry has to add."""
        found = []
        if not self.lines:
            found.append("the log has no error line, so it does not show the cause")
        if self.fixed_by is None:
            found.append("no later run of this job succeeded, so no fix is confirmed")
        elif not self.changes:
            found.append(f"{self.fixed_by.id} succeeded without a change, so the error was temporary")
        if not self.again and (self.fixed_by is None or not self.changes):
            found.append("the error occurred only once, so its cause is a hypothesis")
        return found


async def gather(ctx: Context, job_id: str, succeeded: str | None = None) -> Lesson:
    """Collect the evidence from a failed job. Only the ledger and the logs are read.

    `succeeded` is the id of the job that succeeded; by default, the first later job with the same name or script.
    Raises NotFound for an unknown job, and BadRequest for a job that did not fail.
    """
    job = read_job(ctx.ledger, job_id)
    if job.state not in FAILED:
        raise BadRequest(f"{job_id} {job.state.phrase}; a postmortem needs a job that failed", "Specify a failed job.")
    fixed = _success(ctx, job, succeeded)
    tail = await tail_of(ctx, job, reachable=True)
    hidden = ctx.hidden(tail, job.spec.secrets)
    log = redact(tail, hidden)
    lines = failing_lines(log)
    known = await anyio.to_thread.run_sync(lambda: diagnose(shipped(), log, limit=3))
    again = await _repeated_failures(ctx, job, lines[0]) if lines else ()
    changes = ""
    if fixed is not None:
        old, new = job.spec.model_dump(mode="json"), fixed.spec.model_dump(mode="json")
        names = (name for name in old if name not in QUIET and old[name] != new[name])
        fields = [f"{name}: {_short(old[name])} -> {_short(new[name])}" for name in names]
        scripts = (job.spec.script or "").splitlines(), (fixed.spec.script or "").splitlines()
        changes = "\n".join([*fields, *difflib.unified_diff(*scripts, job.id, fixed.id, n=1, lineterm="")])
    try:
        header = read_header(job.spec.script or "")
    except BadRequest:
        header = None
    return Lesson(
        job=job,
        lines=lines,
        versions=versions(log, header.dependencies if header else ()),
        known=tuple(found.id for found in known),
        again=again,
        fixed_by=fixed,
        changes=clip(plain(nameless(redact(changes, hidden))), MAX_CHANGES, keep="start"),
    )


def _success(ctx: Context, failed: JobRecord, named: str | None) -> JobRecord | None:
    """Return the job that succeeded: the given one, or the first later attempt; None if no attempt succeeded."""
    if named:
        job = read_job(ctx.ledger, named)
        if job.state is not Job.SUCCEEDED or job.id == failed.id:
            raise BadRequest(
                f"{named} {job.state.phrase}; --succeeded needs a job that succeeded", "Omit it to search for one."
            )
        return job
    later = [j for j in (read_job(ctx.ledger, i) for i in job_ids(ctx.ledger, Job.SUCCEEDED)) if _akin(j, failed)]
    later = [j for j in later if j.accepted_at >= failed.accepted_at]
    return min(later, key=lambda j: j.accepted_at, default=None)


def _akin(job: JobRecord, failed: JobRecord) -> bool:
    """Return whether a job is another attempt at a failed job: its script or its non-default name is the same."""
    if job.id == failed.id:
        return False
    same = failed.spec.script is not None and job.spec.script == failed.spec.script
    return same or (job.spec.name == failed.spec.name and job.spec.name != "job")


async def _repeated_failures(ctx: Context, job: JobRecord, error: str) -> tuple[str, ...]:
    """Return the ids of other failed attempts whose logs have the same error, apart from numbers and names."""
    signature = signature_for(error)
    tries = [j for j in (read_job(ctx.ledger, i) for i in job_ids(ctx.ledger, *FAILED)) if _akin(j, job)]
    found = []
    for other in tries[-MAX_TWINS:]:
        try:
            shown = first_error(await tail_of(ctx, other, reachable=True))
        except (WardenError, NotFound):
            continue
        if shown and signature_for(shown) == signature:
            found.append(other.id)
    return tuple(found)


def _short(value: Any) -> str:
    text = ", ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
    return text if len(text) <= 200 else text[:200] + "..."
