"""Combine the runner's status and Slurm's row into one observation.

The runner reports the command's result, and Slurm reports whether the job can still run. A job can write to the
runner's status file, so a success counts only if Slurm reports exit code 0 for the runner.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gpuwarden.backends._slurm_rows import TAKEN, Row
from gpuwarden.core.models import Observation
from gpuwarden.core.reasons import Code, Reason, because
from gpuwarden.core.states import Job
from gpuwarden.remote import launch

MOST_SILENCE_S: Final = 180.0
_FINAL: Final = frozenset({"succeeded", "failed", "canceled", "preempted", "timeout"})
_ENDS: Final[dict[str, tuple[Job, Code]]] = {
    "COMPLETED": (Job.SUCCEEDED, Code.EXITED),
    "FAILED": (Job.FAILED, Code.EXITED),
    "CANCELLED": (Job.CANCELED, Code.STOPPED),
    "TIMEOUT": (Job.FAILED, Code.TIME_LIMIT),
    "DEADLINE": (Job.FAILED, Code.TIME_LIMIT),
    "OUT_OF_MEMORY": (Job.FAILED, Code.OUT_OF_MEMORY),
    **dict.fromkeys(TAKEN, (Job.PREEMPTED, Code.ENGINE_TOOK)),
}


def observation(status: Mapping[str, Any], row: Row | None) -> Observation:
    """Return the observation of one job, based on the poll of its run folder and on Slurm's row."""
    there = status.get("folder") == "present"
    if row is None and unfinished(status) and _recently_running(status):
        # The list may come from another cluster, for example behind a tunnel, or the engine may have lost its records.
        unlisted = _because(Job.UNKNOWN, because(Code.UNLISTED))
        return _plain(launch.observation(status)).model_copy(update=unlisted)
    if row is None and there:  # Slurm no longer lists the job, so the runner's last status is used
        ended = launch.observation({**status, "alive": False, "child_alive": False})
        return _plain(ended).model_copy(update={"meter": False})
    if row is None:
        return _plain(launch.observation(status))
    restarts = requeues if isinstance(requeues := status.get("requeues", 0), int) else 0
    current = there and status.get("attempt") == row.attempt and restarts >= row.allocation.restarts
    seen = _plain(launch.observation({**status, "alive": True, "child_alive": True})) if there else Observation(
        state=Job.UNKNOWN, at=float(status.get("now") or 0.0)
    )  # fmt: skip
    update: dict[str, Any] = {"allocation": row.allocation, "attempt": row.attempt, "meter": not row.over}
    if row.waits:
        update |= {"meter": False, **_because(Job.QUEUED, because(Code.ENGINE_QUEUE, why=row.allocation.why or "none"))}
        return _unended(seen, update)
    if not row.over:
        if not (current and seen.state is Job.RUNNING) or status.get("state") in _FINAL:
            started = status.get("state") in _FINAL and current
            code = because(Code.ENDING, state=str(status.get("state"))) if started else because(Code.ENGINE_STARTS)
            update |= _because(Job.RUNNING, code)
            return _unended(seen, update)
        return seen.model_copy(update=update)
    return _ended(status if current else {}, seen, row, update)


def unfinished(status: Mapping[str, Any]) -> bool:
    """Return whether the runner's last status is "running"."""
    return status.get("folder") == "present" and status.get("state") == "running"


def _recently_running(status: Mapping[str, Any]) -> bool:
    """Return whether the runner recently recorded that the job is running. The job itself could forge the time."""
    seen = launch.observation({**status, "alive": True, "child_alive": True})
    recent = seen.last_beat_at is not None and abs(seen.at - seen.last_beat_at) <= MOST_SILENCE_S
    return seen.state is Job.RUNNING and recent and not seen.stale


def _ended(status: Mapping[str, Any], seen: Observation, row: Row, update: dict[str, Any]) -> Observation:
    """Return the observation of a job that has ended. The runner's last status is used if it agrees with Slurm."""
    state, code = _ENDS[row.state]
    update |= {"ended_at": row.ended_at, "started_at": row.started_at}
    claimed = str(status.get("state"))
    if claimed == "succeeded" and row.state == "COMPLETED":
        update.pop("started_at"), update.pop("ended_at")
        return launch.observation({**status, "alive": False}).model_copy(
            update={**update, "machine": "", "lost": False}
        )
    if claimed in {"failed", "timeout", "canceled"} and row.state in {"FAILED", "CANCELLED"}:
        own = launch.observation({**status, "alive": False})
        if row.state == "CANCELLED" and claimed != "canceled":
            own = own.model_copy(update=_because(Job.CANCELED, because(Code.STOPPED)))
        return own.model_copy(update={**update, "machine": "", "lost": False})
    if claimed == "preempted" and row.state in {"FAILED", "TIMEOUT"}:
        state, code = Job.PREEMPTED, Code.ENGINE_TOOK
    elif row.dropped and not status:  # otherwise its runner has started
        code = Code.ENGINE_DROPPED
    elif row.state == "COMPLETED":  # Slurm's exit code is 0, but the runner's status is not a success
        state, code = Job.UNKNOWN, Code.ENGINE_DISAGREES
    reason = because(code, row.message, state=row.state)
    update |= {**_because(state, reason), "exit_code": row.exit_code, "signal": row.signal}
    return seen.model_copy(update=update)


def _unended(seen: Observation, update: dict[str, Any]) -> Observation:
    """Return the observation of an unfinished job, without the result of an earlier run."""
    return seen.model_copy(update={"exit_code": None, "signal": None, "ended_at": None, "stale": False, **update})


def _because(state: Job, reason: Reason) -> dict[str, Any]:
    return {"state": state, "reason": reason.code, "why": reason.text}


def _plain(seen: Observation) -> Observation:
    """Return an observation without the fields that are valid only on the job's own machine."""
    return seen.model_copy(update={"machine": "", "lost": False})
