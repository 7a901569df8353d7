"""Build an array of jobs as one Indexed Job: each index is one task, with its own run folder and its own secrets.

An annotation lists the tasks in the order of their indexes. A pod gets its index from the job controller and looks up
its folder in the container's arguments. An interrupted index gets another pod; an index that failed or was canceled
ends without affecting the others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gpuwarden.backends import _kube_manifests as manifests
from gpuwarden.backends._kube_manifests import Manifest
from gpuwarden.backends.base import ArrayTask, check_tasks
from gpuwarden.core.errors import BadRequest
from gpuwarden.core.models import Handle

MOST_TASKS: Final = 1_000
"""Maximum number of tasks: the tokens, folders and secrets of all tasks must fit into one Kubernetes object."""
MOST_SECRETS: Final = 900_000
TASKS: Final = "gpuwarden.dev/tasks"
ORDER: Final = "/var/run/gpuwarden/order"
CANCELED: Final = 130
"""The runner's exit code for a canceled index. This code ends the index, whereas the cluster would restart it after
exit code 143.
"""
INDEX: Final = "JOB_COMPLETION_INDEX"
"""The variable that the job controller sets in the containers of an Indexed Job."""
_START: Final = """shift $((2 * JOB_COMPLETION_INDEX)) || exit 2
{order}exec python3 -I -S "$1/{runner}" allot "$1" <<END_OF_REQUEST
{{"attempt": $2, "id": "{pod}", "codes": {{"canceled": {canceled}}}}}
END_OF_REQUEST
"""


def array_name(token: str) -> str:
    """Return the name of an array's Kubernetes Job."""
    return f"{manifests.stem_of(token)}-array"


def check_array(tasks: Sequence[ArrayTask]) -> None:
    """Raise BadRequest if the tasks can't form one array."""
    check_tasks(tasks, _asked)
    if len(tasks) > MOST_TASKS:
        raise BadRequest(
            f"an array on Kubernetes has at most {MOST_TASKS:,} tasks, not {len(tasks):,}", "Split the array."
        )
    if sum(len(json.dumps(dict(task.secrets))) for task in tasks) > MOST_SECRETS:
        raise BadRequest("the secrets of an array are too large for a single Kubernetes secret", "Split the array.")


def _asked(task: ArrayTask) -> tuple[Manifest, int]:
    restarts = task.spec.max_restarts if task.attempt == 1 else 0
    return manifests.pod_spec(task.spec, {"metadata": {"name": ""}}, ""), restarts


def orders_of(job: Mapping[str, Any], tasks: Sequence[ArrayTask]) -> dict[str, str]:
    """Return the secrets for an array's job, keyed by index; empty if no task has secrets or `tasks` is incomplete."""
    given = {task.token: task.secrets for task in tasks}
    tokens = [row[0] for row in json.loads(job["metadata"]["annotations"][TASKS])]
    if not any(given.values()) or not given.keys() >= set(tokens):
        return {}
    return {str(index): json.dumps(dict(given[token])) for index, token in enumerate(tokens)}


def array_manifest(
    tasks: Sequence[ArrayTask], token: str, runner: str, handles: Sequence[Handle], claim: Mapping[str, Any],
    *, at_once: int,
) -> Manifest:  # fmt: skip
    """Return the manifest of an array's Job. `runner` is the name of the runner's file in each run folder."""
    name, mount = array_name(token), handles[0].run_dir.rpartition("/")[0]
    pod = manifests.pod_spec(tasks[0].spec, claim, mount)
    container, order = pod["containers"][0], ""
    if any(task.secrets for task in tasks):
        order = f'GPUWARDEN_ORDER="$(cat {ORDER})" || exit 2\nexport GPUWARDEN_ORDER\n'
        own = {"name": "orders", "mountPath": ORDER, "subPathExpr": f"$({INDEX})", "readOnly": True}
        pod["volumes"].append({"name": "orders", "secret": {"secretName": name}})
        container["volumeMounts"].append(own)
    start = _START.format(order=order, runner=runner, pod=manifests.POD_ID, canceled=CANCELED)
    container["command"] = ["/bin/sh", "-c", start, "sh"]
    container["args"] = [
        word for task, handle in zip(tasks, handles, strict=True) for word in (handle.run_dir, str(task.attempt))
    ]
    listed = [[task.token, handle.run_dir, task.attempt] for task, handle in zip(tasks, handles, strict=True)]
    more = {
        "completionMode": "Indexed",
        "completions": len(tasks),
        "parallelism": max(1, min(at_once, len(tasks))),
        "backoffLimitPerIndex": _asked(tasks[0])[1],
        "podFailurePolicy": manifests.policy("FailIndex"),
    }
    labels = {**manifests.OWNER, manifests.JOB: manifests.stem_of(token)}
    notes = {manifests.TOKEN: token, TASKS: json.dumps(listed)}
    return manifests.whole_job(tasks[0].spec, name, labels, notes, pod, more)
