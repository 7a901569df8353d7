"""Build the objects that gpuwarden creates in a cluster: a job, its secret, and the file access pod.

An object's name contains the token. Its annotations repeat the token and the run folder, because another tool may use
the same name.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, Final

from gpuwarden.backends._kube_options import ANY_GPU, IMAGE, ROOM_S, read_options
from gpuwarden.core.models import JobSpec
from gpuwarden.remote import launch
from gpuwarden.remote.ssh.shell_quote import quote

OWNER: Final = {"app.kubernetes.io/managed-by": "gpuwarden"}
JOB: Final = "gpuwarden.dev/job"
"""The label on a job and its pods. Its value is the name that all attempts share."""
ATTEMPT: Final = "gpuwarden.dev/attempt"
TOKEN: Final = "gpuwarden.dev/token"  # noqa: S105 - the name of an annotation
RUN_DIR: Final = "gpuwarden.dev/run-folder"
RUNS: Final = "gpuwarden.dev/runs"
"""The label that marks the volume claim for run folders; the user sets it."""
FILES_IMAGE: Final = "gpuwarden.dev/image"
USER: Final = "gpuwarden.dev/user"
KUEUE: Final = "kueue.x-k8s.io/queue-name"
MAIN: Final = "job"
POD_ID: Final = "GPUWARDEN_POD"
"""The variable that the runner uses to distinguish a job's pods."""
SAVE_S: Final = 150
"""Seconds between SIGTERM and SIGKILL; longer than any grace period that gpuwarden gives a job to save."""
KEPT_S: Final = 7 * 86400
"""The number of seconds for which the cluster keeps an ended job."""
FILES_S: Final = 4 * 3600
"""Lifetime in seconds of the file access pod; the pod is recreated when needed."""
INTERRUPTED: Final = 143
"""The runner's exit code after an interruption."""

Manifest = dict[str, Any]


def stem_of(token: str) -> str:
    """Return the name that all attempts of a token share, short enough for a label and for a pod's host name."""
    name = launch.run_name(token)
    if re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,46}[a-z0-9])?", name):
        return name
    return f"gw-{hashlib.sha256(token.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"


def job_manifest(
    spec: JobSpec, token: str, attempt: int, runner: str, run_dir: str, claim: Mapping[str, Any], *, secret: bool
) -> Manifest:
    """Return the manifest of the Job for one attempt.

    The cluster restarts the pod after an interruption, as often as the job allows, but not if the job itself fails.
    """
    stem = stem_of(token)
    runner_request = json.dumps({"attempt": attempt, "id": POD_ID})
    start = f"exec python3 -I -S {quote(runner)} allot {quote(run_dir)} <<'END_OF_REQUEST'"
    pod = pod_spec(spec, claim, run_dir.rpartition("/")[0])
    container = pod["containers"][0]
    container["command"] = ["/bin/sh", "-c", f"{start}\n{runner_request}\nEND_OF_REQUEST\n"]
    if secret:
        own = {"secretKeyRef": {"name": f"{stem}-a{attempt}", "key": "order"}}
        container["env"].append({"name": "GPUWARDEN_ORDER", "valueFrom": own})
    # An attempt after the first is a restart by gpuwarden. If the cluster also restarted it, the number of restarts
    # could reach the product of both limits.
    restarts = {"backoffLimit": spec.max_restarts if attempt == 1 else 0, "podFailurePolicy": policy("FailJob")}
    labels = {**OWNER, JOB: stem, ATTEMPT: str(attempt)}
    return whole_job(spec, f"{stem}-a{attempt}", labels, {TOKEN: token, RUN_DIR: run_dir}, pod, restarts)


def whole_job(
    spec: JobSpec, name: str, labels: Mapping[str, str], notes: Mapping[str, str], pod: Manifest, more: Manifest
) -> Manifest:
    """Return the manifest of a Job that runs this pod. `more` contains the Job's restart settings."""
    queue = read_options(spec).queue
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "labels": {**labels, **({KUEUE: queue} if queue else {})},
            "annotations": dict(notes),
        },
        "spec": {
            **more,
            "podReplacementPolicy": "Failed",
            "ttlSecondsAfterFinished": KEPT_S,
            "suspend": queue is not None,
            "template": {"metadata": {"labels": dict(labels)}, "spec": pod},
        },
    }


def policy(action: str) -> Manifest:
    """Return the pod failure policy: restart an interrupted pod, and apply `action` if the job itself fails."""
    ends = {"containerName": MAIN, "operator": "NotIn", "values": [0, INTERRUPTED]}
    taken = {"action": "Count", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return {"rules": [taken, {"action": action, "onExitCodes": ends}]}


def pod_spec(spec: JobSpec, claim: Mapping[str, Any], mount: str) -> Manifest:
    """Return a job's pod specification, without the command."""
    options = read_options(spec)
    labels = dict(pair.split("=", 1) for pair in options.node_selector)
    if spec.gpu and spec.gpu.lower() not in ANY_GPU:
        labels.setdefault("nvidia.com/gpu.product", spec.gpu)  # set by NVIDIA's device plug-in
    pod: Manifest = {
        **_shared(claim),
        "terminationGracePeriodSeconds": SAVE_S,
        "nodeSelector": labels,
        "tolerations": [_toleration(word) for word in options.tolerations],
        "containers": [
            {
                "name": MAIN,
                "image": options.image,
                "env": [{"name": POD_ID, "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}],
                "resources": _resources(spec),
                "volumeMounts": [{"name": "runs", "mountPath": mount}],
            }
        ],
    }
    if spec.timeout_s:
        pod["activeDeadlineSeconds"] = spec.timeout_s + ROOM_S
    if options.shm_gb:
        pod["volumes"].append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{options.shm_gb}Gi"}})
        pod["containers"][0]["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108 - a mount
    if options.priority_class:
        pod["priorityClassName"] = options.priority_class
    if options.service_account:
        pod["serviceAccountName"] = options.service_account
    if options.pull_secret:
        pod["imagePullSecrets"] = [{"name": options.pull_secret}]
    return pod


def _shared(claim: Mapping[str, Any]) -> Manifest:
    """Return the settings that all pods share: mount the claim, run as the claim's user, get no cluster credentials."""
    user = str(claim["metadata"].get("annotations", {}).get(USER, ""))
    as_user = {"runAsUser": int(user), "runAsNonRoot": user != "0", "fsGroup": int(user)} if user.isdecimal() else {}
    return {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": as_user,
        "volumes": [{"name": "runs", "persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}}],
    }


def _toleration(word: str) -> Manifest:
    taint, _, effect = word.rpartition(":")
    key, given, value = taint.partition("=")
    return {
        "key": key,
        "operator": "Equal" if given else "Exists",
        "effect": effect,
        **({"value": value} if given else {}),
    }


def _resources(spec: JobSpec) -> Manifest:
    options = read_options(spec)
    asked = {
        "cpu": str(options.cpus) if options.cpus else None,
        "memory": f"{options.memory_gb}Gi" if options.memory_gb else None,
        "ephemeral-storage": f"{spec.disk_gb}Gi" if spec.disk_gb else None,
    }
    requests = {name: amount for name, amount in asked.items() if amount}
    gpus = {options.gpu_resource: str(spec.gpu_count)} if spec.gpu else {}
    memory = {"memory": requests["memory"]} if "memory" in requests else {}
    return {"requests": {**requests, **gpus}, "limits": {**memory, **gpus}}


def secret_manifest(job: Mapping[str, Any], orders: Mapping[str, str]) -> Manifest:
    """Return the manifest for a job's secret. The cluster deletes the secret together with the job."""
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": job["metadata"]["name"], "uid": job["metadata"]["uid"]}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": job["metadata"]["name"], "labels": OWNER, "ownerReferences": [owner]},
        "type": "Opaque",
        "stringData": dict(orders),
    }


def files_manifest(claim: Mapping[str, Any], mount: str) -> Manifest:
    """Return the manifest of the file access pod, which requests few resources and exits on its own."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": files_name(claim),
            "labels": {**OWNER, "gpuwarden.dev/files": "yes"},
            "annotations": {RUN_DIR: mount},
        },
        "spec": {
            **_shared(claim),
            "activeDeadlineSeconds": FILES_S,
            "terminationGracePeriodSeconds": 1,
            "containers": [
                {
                    "name": MAIN,
                    "image": str(claim["metadata"].get("annotations", {}).get(FILES_IMAGE, IMAGE)),
                    "command": ["/bin/sh", "-c", "trap 'exit 0' TERM; while :; do sleep 30 & wait $!; done"],
                    "resources": {
                        "requests": {"cpu": "50m", "memory": "64Mi"},
                        "limits": {"memory": "2Gi"},
                    },
                    "volumeMounts": [{"name": "runs", "mountPath": mount}],
                }
            ],
        },
    }


def files_name(claim: Mapping[str, Any]) -> str:
    """Return the name of a claim's file access pod."""
    return f"gpuwarden-files-{hashlib.sha256(str(claim['metadata']['uid']).encode()).hexdigest()[:10]}"
