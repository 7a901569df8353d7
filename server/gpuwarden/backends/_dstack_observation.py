"""Convert a dstack run to an observation of its job.

dstack reports the exit code of the container's command, and the reason why a run ended. A run in the `done` state
counts as a success only if its newest submission has exit code 0.
"""

from __future__ import annotations

from typing import Any, Final

from gpuwarden.backends._dstack_api import Run, epoch
from gpuwarden.core.models import Allocation, Observation
from gpuwarden.core.reasons import Code, Reason, because
from gpuwarden.core.sanitize import line
from gpuwarden.core.states import Job

_REASONS: Final[dict[str, tuple[Job, Code]]] = {
    "interrupted_by_no_capacity": (Job.PREEMPTED, Code.ENGINE_TOOK),
    "instance_unreachable": (Job.FAILED, Code.ENGINE_TOOK),
    "max_duration_exceeded": (Job.FAILED, Code.TIME_LIMIT),
    "container_exited_with_error": (Job.FAILED, Code.EXITED),
    "terminated_by_user": (Job.CANCELED, Code.STOPPED),
    "aborted_by_user": (Job.CANCELED, Code.STOPPED),
}
"""The job's state and reason for each of dstack's termination reasons. For any other reason, the job has failed, and
dstack's message explains why.
"""
_BILLS: Final = frozenset({"provisioning", "pulling", "running", "terminating"})
"""Submission states in which the machine exists."""


def observation(run: Run) -> Observation:
    """Return the observation of a run. Its machine may outlive the run, so the provider observes the machine."""
    last = run.submissions[-1] if run.submissions else None
    machine = run.machine
    texts = [line(text or "", 200) for text in ((last and last.termination_reason_message), run.status_message)]
    allocation = Allocation(
        engine="dstack",
        id=run.id,
        state=run.status,
        why=next((text for text in texts if text), ""),
        queue=run.fleet.name if run.fleet else "",
        nodes=f"{machine.backend}/{machine.region}" if machine else "",
        restarts=max(0, sum(one.job_provisioning_data is not None for one in run.submissions) - 1),
        resources=machine.instance_type.name if machine else "",
    )
    began = epoch(last.submitted_at) if last else None
    shared: dict[str, Any] = {"attempt": run.attempt, "allocation": allocation, "started_at": began}
    if run.ended:
        state, reason = _end(run, allocation.why)
        shared |= {"ended_at": epoch(last.finished_at) if last else None}
        shared |= {"exit_code": last.exit_status if last else None, "meter": None if machine else False}
        return Observation(state=state, reason=reason.code, why=reason.text, **shared)
    if run.status == "running" and last is not None and last.status == "running":
        return Observation(
            state=Job.RUNNING, meter=True, reason=Code.ALIVE, why=f"dstack reports {run.status}", **shared
        )
    if run.status == "terminating":
        reason = because(Code.ENDING, state=run.termination_reason or "terminating")
        return Observation(state=Job.RUNNING, reason=reason.code, why=reason.text, **shared)
    if run.status in {"pending", "submitted", "provisioning", "running"}:
        waits = last is None or last.status not in _BILLS
        reason = because(Code.ENGINE_QUEUE, why=allocation.why or run.status)
        meter = None if machine or not waits else False
        return Observation(state=Job.QUEUED, meter=meter, reason=reason.code, why=reason.text, **shared)
    reason = because(Code.UNKNOWN_STATE, state=line(run.status, 40))
    return Observation(state=Job.UNKNOWN, reason=reason.code, why=reason.text, **shared)


def _end(run: Run, message: str) -> tuple[Job, Reason]:
    """Return the state and reason for an ended run. A run that was stopped while it was failing counts as failed."""
    last = run.submissions[-1] if run.submissions else None
    if run.status == "done":
        if last is not None and last.status == "done" and last.exit_status == 0:
            return Job.SUCCEEDED, because(Code.EXITED)
        return Job.UNKNOWN, because(Code.ENGINE_DISAGREES, message, state="done")
    if run.termination_reason in {"stopped_by_user", "aborted_by_user"}:
        return Job.CANCELED, because(Code.STOPPED, message)
    state, code = _REASONS.get((last and last.termination_reason) or "", (Job.FAILED, Code.PLATFORM_REPORT))
    named = line((last and last.termination_reason) or run.termination_reason or run.status, 60)
    return state, because(code, message, state=named)
