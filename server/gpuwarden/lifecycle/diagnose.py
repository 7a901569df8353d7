"""What the references know about a job that is not well, from the end of its log. A healthy job is never diagnosed."""

from __future__ import annotations

import re
from pathlib import Path

import anyio

from gpuwarden.core.errors import WardenError
from gpuwarden.core.models import Observation
from gpuwarden.core.states import TERMINAL_JOBS, Job
from gpuwarden.knowledge import Diagnosis, diagnose, shipped
from gpuwarden.lifecycle.copies import last_pull
from gpuwarden.lifecycle.records import JobRecord
from gpuwarden.lifecycle.warden import Warden
from gpuwarden.remote.names import LOG_NAME

TAIL = 64 << 10
LIMIT = 3
_STALLED = re.compile(r"stall: .*\(last step (\w+)\)")
_NOT_FINITE = re.compile(r"nonfinite: (.+) is not finite at step ")


async def diagnosed(w: Warden, job: JobRecord, seen: Observation | None) -> tuple[Diagnosis, ...]:
    """The best explained entries for a job that failed, stalls or reports odd metrics; often none."""
    if not unwell(job.state, seen):
        return ()
    log = await tail_of(w, job, reachable=seen is not None)
    exit_code = seen.exit_code if seen and job.state is Job.FAILED else None
    # In a thread: the references take a second to read the first time.
    return await anyio.to_thread.run_sync(lambda: diagnose(shipped(), log, exit_code=exit_code, limit=LIMIT))


def unwell(state: Job, seen: Observation | None) -> bool:
    """Whether a job failed, stalls now, or reports a metric that is not finite now.

    The runner keeps its alerts. One that the job has got over, by a later step or a finite value, doesn't count.
    """
    if state is Job.FAILED:
        return True
    if seen is None or state not in {Job.RUNNING, Job.SUCCEEDED}:
        return False
    return any(_stands(alert, seen) for alert in seen.alerts) or (seen.stale and state not in TERMINAL_JOBS)


def _stands(alert: str, seen: Observation) -> bool:
    if stalled := _STALLED.fullmatch(alert):
        return seen.state is Job.RUNNING and stalled[1] == str(seen.step)
    odd = _NOT_FINITE.match(alert)
    return odd is not None and odd[1] not in seen.metrics


async def tail_of(w: Warden, job: JobRecord, *, reachable: bool) -> str:
    """The end of the log: from the machine, or from the copy that was pulled before it went."""
    if job.handle is not None and reachable:
        try:
            return (await w.backend(job.handle.backend).logs(job.handle, -TAIL, TAIL)).text
        except WardenError:
            pass  # the copy may still say something
    pulled = last_pull(w, job.id)
    return _end_of(Path(pulled.dest) / LOG_NAME) if pulled else ""


def _end_of(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, file.stat().st_size - TAIL))
            return stream.read(TAIL).decode("utf-8", "replace")
    except OSError:
        return ""
