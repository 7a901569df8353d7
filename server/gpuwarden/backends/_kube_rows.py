"""Combine a Kubernetes Job and its pods into one row.

The row uses Slurm's names for states, such as PENDING and COMPLETED, so that `_slurm_observation` can combine it with
the runner's status as for a Slurm job. An array is one Indexed Job, and each of its indexes becomes a row. A Job whose
annotations contain another token or run folder was created by another tool, and is ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from gpuwarden.backends._kube_api import part_of, rows_in
from gpuwarden.backends._kube_arrays import MOST_TASKS, TASKS, array_name
from gpuwarden.backends._kube_exec import waits_for
from gpuwarden.backends._kube_manifests import ATTEMPT, KUEUE, MAIN, RUN_DIR, TOKEN, stem_of
from gpuwarden.backends._slurm_rows import Row
from gpuwarden.core.errors import BadReply
from gpuwarden.core.models import Allocation, Handle
from gpuwarden.core.sanitize import line

_LIMITS: Final = frozenset({"DeadlineExceeded"})
_INDEX: Final = "batch.kubernetes.io/job-completion-index"
_ATTEMPT: Final = re.compile(r"[1-9]\d{0,8}")
_ENDED: Final = frozenset({"Succeeded", "Failed"})


@dataclass(frozen=True)
class KubeRow(Row):
    """One job, or one task in an array: its Job object, and its pods that have not ended."""

    token: str = ""
    job: str = ""
    uid: str = ""
    index: int | None = None
    pods: tuple[tuple[str, str], ...] = ()
    """The name and uid of each pod that has not ended."""


@dataclass(frozen=True)
class _Task:
    """The data that identifies one task in a Kubernetes Job."""

    token: str
    run_dir: str
    attempt: int
    index: int | None = None


def is_of(job: Mapping[str, Any], handle: Handle) -> bool:
    """Return whether a job in the cluster belongs to a handle, alone or as a task in an array."""
    return any((task.token, task.run_dir) == (handle.token, handle.run_dir) for task in _tasks(job))


def _tasks(job: Mapping[str, Any]) -> Iterator[_Task]:
    """Yield a job's tasks; a job that is not an array has one task. Raises BadReply for an array in an unknown
    format.

    A copy of gpuwarden's job that another tool created has the same labels and annotations, but another name.
    """
    notes = part_of(job["metadata"], "annotations")
    own = array_name(str(notes.get(TOKEN))) if TASKS in notes else rf"{stem_of(str(notes.get(TOKEN)))}-a[1-9]\d*"
    if re.fullmatch(own, str(job["metadata"]["name"])) is None:
        return
    if TASKS not in notes:
        attempt = str(part_of(job["metadata"], "labels").get(ATTEMPT))
        yield _Task(str(notes.get(TOKEN)), str(notes.get(RUN_DIR)), int(attempt) if _ATTEMPT.fullmatch(attempt) else 0)
        return
    try:
        listed = json.loads(notes[TASKS])
        for index, (token, run_dir, attempt) in enumerate(listed):
            yield _Task(str(token), str(run_dir), int(attempt), index)
    except (ValueError, TypeError, RecursionError) as error:
        name = line(job["metadata"]["name"])
        raise BadReply(
            f"the array {name} lists tasks in an unknown format", "The reply was ignored; try again."
        ) from error


def rows_of(
    jobs: Iterable[Mapping[str, Any]], pods: Iterable[Mapping[str, Any]], handles: Iterable[Handle]
) -> dict[str, KubeRow]:
    """Return the row of each handle's newest attempt, by token."""
    known = {(h.token, h.run_dir) for h in handles}
    owned: dict[str, list[Mapping[str, Any]]] = {}
    for pod in pods:
        for owner in rows_in(pod["metadata"], "ownerReferences"):
            if owner.get("controller"):
                owned.setdefault(str(owner.get("uid")), []).append(pod)
    rows: dict[str, KubeRow] = {}
    for job in jobs:
        tasks = [task for task in _tasks(job) if (task.token, task.run_dir) in known]
        if not tasks:
            continue
        by_index: dict[int | None, list[Mapping[str, Any]]] = {}
        for pod in owned.get(job["metadata"]["uid"], ()):
            text = str(part_of(pod["metadata"], "annotations").get(_INDEX))
            index = int(text) if re.fullmatch(r"\d{1,6}", text) else -1
            by_index.setdefault(index if tasks[0].index is not None else None, []).append(pod)
        status = part_of(job, "status")
        ends = {kind: indexes(status.get(f"{kind}Indexes")) for kind in ("completed", "failed")}
        for task in tasks:
            row = _row(job, by_index.get(task.index, []), task, ends)
            if task.token not in rows or rows[task.token].attempt < row.attempt:
                rows[task.token] = row
    return rows


def indexes(text: object) -> frozenset[int]:
    """Parse a list of indexes such as `0,2-4`. Raises BadReply for an unknown format or an index above `MOST_TASKS`."""
    found: set[int] = set()
    for part in str(text or "").split(",") if text else ():
        ends = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part)
        if ends is None or int(ends[2] or ends[1]) > MOST_TASKS:
            raise BadReply("the cluster lists indexes in an unknown format", "The list was ignored; try again.")
        found.update(range(int(ends[1]), int(ends[2] or ends[1]) + 1))
    return frozenset(found)


def _row(
    job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]], task: _Task, ends: Mapping[str, frozenset[int]]
) -> KubeRow:
    about = job["metadata"]
    if not task.attempt:
        raise BadReply(f"the job {line(about['name'])} has no attempt number", "The reply was ignored; try again.")
    # The creation time is in whole seconds, so of two equally old pods, the one that has not ended is the newer one.
    newest = max(
        pods,
        key=lambda pod: (str(pod["metadata"].get("creationTimestamp")), _phase(pod) not in _ENDED),
        default=None,
    )
    state, why = _state(job, newest) if task.index is None else _state_of_index(job, pods, newest, task.index, ends)
    ended = _ended(newest)
    status = part_of(job, "status")
    code = ended.get("exitCode")
    whole = part_of(job, "status") if task.index is None else {}
    uid = str(about["uid"])
    live = (pod["metadata"] for pod in pods if _phase(pod) not in _ENDED)
    return KubeRow(
        stem=stem_of(task.token),
        attempt=task.attempt,
        id=0,
        state=state,
        flags=frozenset({"COMPLETING"}) if about.get("deletionTimestamp") else frozenset(),
        exit_code=code if isinstance(code, int) else None,
        signal=None,
        submitted_at=_when(about.get("creationTimestamp")) or 0.0,
        started_at=_when(ended.get("startedAt")) or _when(status.get("startTime")),
        ended_at=_when(ended.get("finishedAt")) or _when(whole.get("completionTime")),
        allocation=Allocation(
            engine="kubernetes",
            id=uid if task.index is None else f"{uid}/{task.index}",
            state=state,
            why=why,
            queue=line(part_of(about, "labels").get(KUEUE, ""), 100),
            nodes=line(part_of(newest or {}, "spec").get("nodeName") or "", 100),
        ),
        token=task.token,
        job=str(about["name"]),
        uid=uid,
        index=task.index,
        pods=tuple((str(pod["name"]), str(pod["uid"])) for pod in live),
    )


def _phase(pod: Mapping[str, Any]) -> str:
    return str(part_of(pod, "status").get("phase"))


def _state_of_index(
    job: Mapping[str, Any],
    pods: Sequence[Mapping[str, Any]],
    newest: Mapping[str, Any] | None,
    index: int,
    ends: Mapping[str, frozenset[int]],
) -> tuple[str, str]:
    """Return an array task's state, and the reason why it is waiting."""
    if index in ends["completed"] or any(_phase(pod) == "Succeeded" for pod in pods):
        return "COMPLETED", ""
    if index in ends["failed"]:
        return _failure("", newest), ""
    state, why = _state(job, newest)
    if newest is None and state == "PENDING" and not part_of(job, "spec").get("suspend"):
        why = "it is waiting for its turn in the array"
    return state, why


def _state(job: Mapping[str, Any], pod: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return a job's state, and the reason why it is waiting."""
    rows = rows_in(part_of(job, "status"), "conditions")
    conditions = {str(row.get("type")): row for row in rows if row.get("status") == "True"}
    if "Complete" in conditions:
        return "COMPLETED", ""
    if failed := conditions.get("Failed"):
        return _failure(str(failed.get("reason")), pod), line(failed.get("message"), 200)
    if part_of(job, "spec").get("suspend"):
        queue = part_of(job["metadata"], "labels").get(KUEUE)
        return "PENDING", f"Kueue has not admitted it to the queue {line(queue, 100)}" if queue else "it is suspended"
    if pod is None:
        return "PENDING", "it has no pod yet"
    phase = _phase(pod)
    if phase == "Pending":
        return "PENDING", waits_for(pod) or "its pod is not scheduled yet"
    if phase in _ENDED and _interrupted(pod):
        return "PENDING", "it was interrupted and will get another pod"
    return "RUNNING", ""


def _failure(reason: str, pod: Mapping[str, Any] | None) -> str:
    if pod is None:
        # If the command fails, the PodFailurePolicy ends the Job. The backoff limit counts only interruptions.
        lost = "PREEMPTED" if reason == "BackoffLimitExceeded" else "FAILED"
        return "TIMEOUT" if reason in _LIMITS else lost
    if _interrupted(pod):
        return "PREEMPTED"
    if _ended(pod).get("reason") == "OOMKilled":
        return "OUT_OF_MEMORY"
    late = reason in _LIMITS or str(part_of(pod, "status").get("reason")) in _LIMITS
    return "TIMEOUT" if late else "FAILED"


def _interrupted(pod: Mapping[str, Any]) -> bool:
    """Return whether the cluster interrupted the pod: it was preempted or evicted, or its node was lost."""
    conditions = rows_in(part_of(pod, "status"), "conditions")
    return any(c.get("type") == "DisruptionTarget" and c.get("status") == "True" for c in conditions)


def _ended(pod: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the `terminated` state of the job's container; empty if the container has not ended."""
    for container in rows_in(part_of(pod or {}, "status"), "containerStatuses"):
        if container.get("name") == MAIN:
            return part_of(part_of(container, "state"), "terminated")
    return {}


def _when(text: object) -> float | None:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def settled(row: KubeRow | None, status: Mapping[str, Any]) -> KubeRow | None:
    """Mark a waiting task's row as canceled if its run folder records the cancellation, because its pod will exit."""
    if row is None or row.index is None or not row.waits:
        return row
    whose = (status.get("token"), status.get("attempt"))
    canceled = status.get("state") == "canceled" and whose == (row.token, row.attempt)
    return replace(row, state="CANCELLED") if canceled else row
