"""Diagnose a job from the end of its log and its last observation, using the reference entries.

A healthy job is never diagnosed. A job that succeeded is diagnosed only if its last metrics are not finite.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import anyio

from gpuwarden.core.errors import WardenError
from gpuwarden.core.models import Heartbeat, LogChunk, Observation
from gpuwarden.core.reasons import Code
from gpuwarden.core.states import Job
from gpuwarden.knowledge import Diagnosis, ObservedSign, Sign, diagnose, shipped
from gpuwarden.knowledge.decisions import for_signs
from gpuwarden.knowledge.failure import Reading
from gpuwarden.knowledge.version_skew import Skew, explain
from gpuwarden.lifecycle.artifacts.local_copies import pulled_log
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.monitoring.decision_checks import CheckOutcome, outcomes
from gpuwarden.lifecycle.monitoring.runner_alerts import open_alerts, text_of
from gpuwarden.lifecycle.records import JobRecord

TAIL = 64 << 10
LIMIT = 3
FULL_BYTES = 1 << 20  # a disk with less free space counts as full
FULL_INODES = 4


@dataclass(frozen=True)
class Explanations:
    """Possible explanations for a job's problem; any of them may be missing.

    They are the best-matching reference entries, the package releases that contain a missing name, and the outcomes of
    checks on the job's machine.
    """

    diagnoses: tuple[Diagnosis, ...] = ()
    skew: Skew | None = None
    checks: tuple[CheckOutcome, ...] = ()


NOTHING = Explanations()


async def diagnosed(ctx: Context, job: JobRecord, seen: Observation | None) -> Explanations:
    """Return possible explanations for a job that failed, stalled or reports abnormal metrics."""
    failed = job.state is Job.FAILED
    signs = tuple(signs_of(job.state, seen)) if seen else ()
    if not failed and not signs:
        return NOTHING
    # A program that succeeded may have printed harmless errors.
    log = "" if job.state is Job.SUCCEEDED else await tail_of(ctx, job, reachable=seen is not None)
    code = None
    if failed and seen:
        code = 128 + seen.signal if seen.signal else seen.exit_code  # the exit status that a shell would report

    def explained() -> Explanations:
        reading = Reading(log, code)
        found = diagnose(shipped(), log, exit_code=code, seen=signs, failed=failed, limit=LIMIT, reading=reading)
        return Explanations(found, explain(reading.failure) if failed else None)

    # run in a thread, because reading the references takes a second the first time
    found = await anyio.to_thread.run_sync(explained)
    if seen is None or not signs or job.state is Job.SUCCEEDED:
        return found
    return replace(found, checks=await outcomes(ctx, job, for_signs(one.sign for one in signs)))


def signs_of(state: Job, seen: Observation) -> Iterator[ObservedSign]:
    """Yield the signs of problems in an observation, except problems from which the job has recovered."""
    if state in {Job.RUNNING, Job.FAILED, Job.SUCCEEDED}:
        kinds = {"nonfinite"} if state is Job.SUCCEEDED else {"nonfinite", "spike", "slowed", "stall"}
        for alert in (a for a in open_alerts(seen) if a.kind in kinds):
            yield ObservedSign(sign=_sign(alert.kind, alert.subject, seen.metrics), text=text_of(alert))
    if state is Job.RUNNING and seen.stale:
        yield ObservedSign(sign=Sign.STALL, text=f"the runner: {seen.why}")
    if state is not Job.FAILED:
        return
    beat = seen.beat or Heartbeat()
    if seen.reason is Code.TIME_LIMIT:
        yield ObservedSign(sign=Sign.TIME_LIMIT, text=f"the job ended: {seen.why}", sure=True)
    elif seen.reason is Code.VANISHED:
        yield ObservedSign(sign=Sign.VANISHED, text=f"the job ended: {seen.why}")
    if seen.reason is Code.OUT_OF_MEMORY:
        yield ObservedSign(
            sign=Sign.OOM_KILL, text=f"the kernel killed a process to free memory: {seen.why}", sure=True
        )
    elif beat.oom_kills:
        text = f"the kernel killed processes to free memory, {beat.oom_kills} times while the job ran"
        yield ObservedSign(sign=Sign.OOM_KILL, text=text)
    if beat.disk_free is not None and beat.disk_free < FULL_BYTES:
        yield ObservedSign(
            sign=Sign.DISK_FULL, text=f"heartbeat: {beat.disk_free:,} bytes free of {beat.disk_total or 0:,}"
        )
    if beat.inodes_free is not None and beat.inodes_free <= FULL_INODES:
        text = f"heartbeat: {beat.inodes_free:,} inodes free of {beat.inodes_total or 0:,}"
        yield ObservedSign(sign=Sign.INODES_USED, text=text)


def _sign(kind: str, name: str, metrics: dict[str, float]) -> Sign:
    """Return the sign that an alert indicates. If a value is not finite, the sign depends on the metric's name."""
    if kind != "nonfinite":
        return {"spike": Sign.LOSS_SPIKE, "slowed": Sign.SLOWED, "stall": Sign.STALL}[kind]
    last = re.split(r"[/.]", name.lower())[-1]
    if "loss" in last:
        return Sign.NONFINITE_LOSS
    hidden = last == "grad_norm" and metrics.get("loss") == 0.0
    return Sign.NONFINITE_HIDDEN if hidden else Sign.NONFINITE_METRIC


async def tail_of(ctx: Context, job: JobRecord, *, reachable: bool) -> str:
    """Return the end of the log, from the machine if possible, else from the pulled copy."""
    if job.handle is not None and reachable:
        try:
            return _whole_lines(await ctx.backend(job.handle.backend).logs(job.handle, -TAIL, TAIL))
        except WardenError:
            pass  # the pulled copy may still help
    kept = await pulled_log(ctx, job.id, -TAIL, TAIL)
    return _whole_lines(kept) if kept else ""


def _whole_lines(chunk: LogChunk) -> str:
    """Return a chunk without its first line if the line may be cut off, because it may contain part of a secret.

    If the chunk has no other line, only its first word is removed.
    """
    if chunk.start <= 0:
        return chunk.text
    return chunk.text.partition("\n")[2] or re.sub(r"\A\S*\s?", "", chunk.text)
