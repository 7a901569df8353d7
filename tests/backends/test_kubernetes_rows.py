"""A cluster's jobs and pods as rows: the meaning of each state; an odd reply is never read as an answer."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from gpuwarden.backends._kube_api import _is_object
from gpuwarden.backends._kube_arrays import TASKS, array_manifest
from gpuwarden.backends._kube_manifests import job_manifest
from gpuwarden.backends._kube_rows import indexes, is_of, rows_of
from gpuwarden.backends._slurm_observation import observation
from gpuwarden.backends.base import ArrayTask
from gpuwarden.core.errors import BadReply
from gpuwarden.core.models import Handle, JobSpec, Place
from gpuwarden.core.states import Job
from kube_kit import INDEX, PREEMPTED

HANDLE = Handle(
    backend="kubernetes",
    token="t-1",
    run_dir="/runs/gw-t-1",
    place=Place(platform="kubernetes/test", host="test", run_root="/runs"),
)
SPEC = JobSpec.model_validate({"platform": "kubernetes/test", "command": ("x",), "options": {"image": "i"}})
CLAIM = {"metadata": {"name": "runs", "uid": "u-c"}}


def job(uid: str = "u-1", **status: Any) -> dict[str, Any]:
    made = job_manifest(SPEC, "t-1", 1, "/runs/r.py", HANDLE.run_dir, CLAIM, secret=False)
    made["metadata"] |= {"uid": uid, "creationTimestamp": "2026-11-01T10:00:00Z"}
    return {**made, "status": status}


def pod(phase: str, code: int | None = None, *, at: str = "10:00:01", **status: Any) -> dict[str, Any]:
    state = {"terminated": {"exitCode": code, "startedAt": "2026-11-01T10:00:02Z"}} if code is not None else {}
    about = {
        "name": f"p-{at}", "uid": f"u-{at}", "creationTimestamp": f"2026-11-01T{at}Z",
        "ownerReferences": [{"kind": "Job", "uid": "u-1", "controller": True}],
    }  # fmt: skip
    given = {"phase": phase, "containerStatuses": [{"name": "job", "state": state}], **status}
    return {"metadata": about, "spec": {"nodeName": "n1"}, "status": given}


def done(kind: str, reason: str = "") -> dict[str, Any]:
    return {"conditions": [{"type": kind, "status": "True", "reason": reason, "message": "why"}]}


@pytest.mark.parametrize(
    ("status", "pods", "state"),
    [
        ({}, [], Job.QUEUED),
        ({}, [pod("Pending")], Job.QUEUED),
        ({}, [pod("Running")], Job.RUNNING),
        ({}, [pod("Failed", 143, conditions=[PREEMPTED])], Job.QUEUED),
        ({}, [pod("Failed", 143, conditions=[PREEMPTED]), pod("Running", at="10:05:00")], Job.RUNNING),
        (done("Failed", "PodFailurePolicy"), [pod("Failed", 7)], Job.FAILED),
        (done("Failed", "BackoffLimitExceeded"), [pod("Failed", 143, conditions=[PREEMPTED])], Job.PREEMPTED),
        (done("Failed", "BackoffLimitExceeded"), [], Job.PREEMPTED),
        (done("Failed", "PodFailurePolicy"), [], Job.FAILED),
        (done("Failed", "DeadlineExceeded"), [], Job.FAILED),
        (done("Complete"), [pod("Succeeded", 0)], Job.UNKNOWN),
    ],
)
def test_the_cluster_status_decides_the_job_state(
    status: dict[str, Any], pods: list[dict[str, Any]], state: Job
) -> None:
    row = rows_of([job(**status)], pods, [HANDLE])["t-1"]
    assert observation({"folder": "none"}, row).state is state


def test_foreign_jobs_and_pods_are_ignored() -> None:
    other = job("u-2")
    other["metadata"]["annotations"] = {**other["metadata"]["annotations"], "gpuwarden.dev/run-folder": "/elsewhere"}
    assert rows_of([other], [pod("Running")], [HANDLE]) == {}
    stranger = pod("Running")
    stranger["metadata"]["ownerReferences"] = [{"kind": "Job", "uid": "u-2", "controller": True}]
    assert rows_of([job()], [stranger], [HANDLE])["t-1"].waits


@pytest.mark.parametrize("alone", [True, False])
def test_a_renamed_job_copy_is_another_tools_job(alone: bool) -> None:
    """A job created from an edited copy of `kubectl get job NAME -o yaml` has gpuwarden's labels and annotations."""
    own = job() if alone else array()
    copied = copy.deepcopy(own) | {"status": done("Complete") | {"completedIndexes": "0-2"}}
    copied["metadata"] |= {"name": "a-copy", "uid": "u-9"}
    for listed in ([copied, own], [own, copied]):
        row = rows_of(listed, [], [HANDLE])["t-1"]
        assert (row.job, row.uid, row.state) == (own["metadata"]["name"], "u-1", "PENDING")
    assert rows_of([copied], [], [HANDLE]) == {} and not is_of(copied, HANDLE)


def oddities(whole: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a reply."""
    yield path
    for key in whole if isinstance(whole, dict) else range(len(whole)) if isinstance(whole, list) else ():
        yield from oddities(whole[key], (*path, key))


@pytest.mark.parametrize("odd", [None, 5, "x", [], {}, [5], {"a": 5}, True])
def test_an_odd_value_anywhere_is_read_or_refused(odd: object) -> None:
    plain = {"job": job(**done("Failed", "PodFailurePolicy")), "pod": pod("Failed", 7, conditions=[PREEMPTED])}
    read = 0
    for path in oddities(plain):
        if len(path) < 2:
            continue
        reply = copy.deepcopy(plain)
        inner: Any = reply
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = odd
        if not all(map(_is_object, reply.values())):
            continue
        try:
            rows = rows_of([reply["job"]], [reply["pod"]], [HANDLE])
        except BadReply:
            continue
        for row in rows.values():
            assert observation({"folder": "none"}, row).state in set(Job)
            read += 1
    assert read


# ----------------------------------------------------------------------------------------------------------- arrays

TOKENS = ("t-1", "t-2", "t-3")


def handle_of(token: str) -> Handle:
    return HANDLE.model_copy(update={"token": token, "run_dir": f"/runs/gw-{token}"})


def array(**status: Any) -> dict[str, Any]:
    tasks = [ArrayTask(SPEC, token) for token in TOKENS]
    handles = [handle_of(token) for token in TOKENS]
    made = array_manifest(tasks, "all", "r.py", handles, CLAIM, at_once=2)
    made["metadata"] |= {"uid": "u-1", "creationTimestamp": "2026-11-01T10:00:00Z"}
    return {**made, "status": status}


def pod_of(index: object, phase: str, code: int | None = None, **given: Any) -> dict[str, Any]:
    found = pod(phase, code, **given)
    found["metadata"]["annotations"] = {INDEX: str(index)}
    return found


def seen(job: dict[str, Any], pods: list[dict[str, Any]]) -> list[str]:
    rows = rows_of([job], pods, [handle_of(token) for token in TOKENS])
    return [rows[token].state for token in TOKENS]


TAKEN = {"conditions": [PREEMPTED]}


@pytest.mark.parametrize(
    ("status", "pods", "states"),
    [
        ({}, [], ["PENDING"] * 3),
        ({}, [pod_of(1, "Running")], ["PENDING", "RUNNING", "PENDING"]),
        ({"completedIndexes": "0,2"}, [], ["COMPLETED", "PENDING", "COMPLETED"]),
        ({"completedIndexes": "0-1", "failedIndexes": "2"}, [], ["COMPLETED", "COMPLETED", "FAILED"]),
        ({"failedIndexes": "0"}, [pod_of(0, "Failed", 143, **TAKEN)], ["PREEMPTED", "PENDING", "PENDING"]),
        ({}, [pod_of(0, "Failed", 143, **TAKEN)], ["PENDING"] * 3),
        ({}, [pod_of(2, "Succeeded", 0)], ["PENDING", "PENDING", "COMPLETED"]),
        (done("Failed") | {"completedIndexes": "0", "failedIndexes": "1-2"}, [], ["COMPLETED", "FAILED", "FAILED"]),
        (done("Complete") | {"completedIndexes": "0-2"}, [], ["COMPLETED"] * 3),
        ({}, [pod_of("x", "Running"), pod_of(7, "Running")], ["PENDING"] * 3),
    ],
)
def test_each_index_of_an_array_has_its_own_state(
    status: dict[str, Any], pods: list[dict[str, Any]], states: list[str]
) -> None:
    assert seen(array(**status), pods) == states


@pytest.mark.parametrize("text", ["x", "0-", "-1", "1-2-3", "0,,1", "9999999", "5000", "0-1000000000", "٣x"])
def test_a_malformed_index_list_is_refused(text: str) -> None:
    with pytest.raises(BadReply):
        indexes(text)


@pytest.mark.parametrize("odd", [None, 5, "x", [], {}, [5], {"a": 5}, True])
def test_an_odd_value_anywhere_in_an_array_never_crashes(odd: object) -> None:
    plain = {"job": array(completedIndexes="0", failedIndexes="1"), "pod": pod_of(2, "Running")}
    for path in oddities(plain):
        if len(path) < 2 or path[1] == "spec":
            continue
        reply = copy.deepcopy(plain)
        inner: Any = reply
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = odd
        if not all(map(_is_object, reply.values())):
            continue
        with suppress(BadReply):
            rows_of([reply["job"]], [reply["pod"]], [handle_of(token) for token in TOKENS])


@pytest.mark.parametrize(
    "listed", ["", "5", "{}", '["x"]', "[[1]]", '[["t-1", "/runs/gw-t-1", "x"]]', "[[[]]]", "[" * 9999]
)
def test_malformed_tasks_are_never_read(listed: str) -> None:
    changed = array()
    changed["metadata"]["annotations"][TASKS] = listed
    with suppress(BadReply):
        assert rows_of([changed], [], [handle_of("t-1")]) == {}


def test_of_two_simultaneous_pods_the_running_one_counts() -> None:
    pods = [pod("Running"), pod("Failed", 143, conditions=[PREEMPTED])]
    for order in (pods, pods[::-1]):
        assert rows_of([job()], order, [HANDLE])["t-1"].state == "RUNNING"
