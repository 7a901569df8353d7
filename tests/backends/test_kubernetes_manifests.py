"""The objects that gpuwarden creates in a cluster, checked against Kubernetes' published schemas."""

from __future__ import annotations

import json
import sys
from typing import Any

import kubernetes_validate
import pytest
import yaml

from gpuwarden.backends._kube_api import KUEUE_RIGHTS, RIGHTS
from gpuwarden.backends._kube_arrays import MOST_TASKS, array_manifest, check_array, orders_of
from gpuwarden.backends._kube_manifests import (
    files_manifest,
    job_manifest,
    secret_manifest,
    stem_of,
)
from gpuwarden.backends._kube_options import engine_request, read_options
from gpuwarden.backends.base import BACKENDS, ArrayTask
from gpuwarden.core.errors import BadRequest, NotSupported
from gpuwarden.core.guidance import manual_text
from gpuwarden.core.models import Handle, JobSpec, Place
from paths import ROOT
from wording import Wording

VERSIONS = ["1.30", "1.34", "1.37"]
CLAIM = {
    "metadata": {"name": "runs", "uid": "u-1", "annotations": {"gpuwarden.dev/user": "1000"}},
    "spec": {"accessModes": ["ReadWriteMany"]},
}
FULL: dict[str, Any] = {
    "image": "ghcr.io/team/train:1",
    "cpus": 8,
    "memory_gb": 64,
    "shm_gb": 16,
    "node_selector": ["pool=gpu"],
    "tolerations": ["nvidia.com/gpu:NoSchedule", "spot=true:NoExecute"],
    "queue": "team-queue",
    "priority_class": "low",
    "service_account": "train",
    "pull_secret": "registry",
}


def spec(options: dict[str, Any] | None = None, **given: Any) -> JobSpec:
    fields = {"platform": "kubernetes/test", "command": ("true",), "options": options or {"image": "busybox"}, **given}
    return JobSpec.model_validate(fields)


def job(wanted: JobSpec, attempt: int = 1, *, secret: bool = False) -> dict[str, Any]:
    return job_manifest(wanted, "t-1", attempt, "/runs/gw-t-1/runner.py", "/runs/gw-t-1", CLAIM, secret=secret)


@pytest.mark.parametrize("version", VERSIONS)
def test_created_objects_match_the_published_schema(version: str) -> None:
    full = job(spec(FULL, gpu="NVIDIA-H100-80GB-HBM3", gpu_count=8, timeout_s=3600, disk_gb=100), secret=True)
    made = {"metadata": {"name": full["metadata"]["name"], "uid": "u-2"}}
    for manifest in (full, job(spec()), secret_manifest(made, {"order": "{}"}), files_manifest(CLAIM, "/runs")):
        kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_an_array_matches_the_published_schema(version: str) -> None:
    tasks = [ArrayTask(spec(FULL, gpu="any", max_restarts=3), f"t-{n}", {"A": str(n)}) for n in range(MOST_TASKS)]
    check_array(tasks)
    made = array_of(tasks)
    kubernetes_validate.validate(made, version, strict=True)
    given = {**made, "metadata": {**made["metadata"], "uid": "u-2"}}
    kubernetes_validate.validate(secret_manifest(given, orders_of(given, tasks)), version, strict=True)
    wanted = made["spec"]
    assert (wanted["completionMode"], wanted["completions"], wanted["parallelism"]) == ("Indexed", MOST_TASKS, 4)
    assert wanted["backoffLimitPerIndex"] == 3 and "backoffLimit" not in wanted
    assert wanted["podFailurePolicy"]["rules"][1]["action"] == "FailIndex"
    assert len(json.dumps(made)) < 1_000_000, "etcd takes 1.5 MB"


def array_of(tasks: list[ArrayTask]) -> dict[str, Any]:
    place = Place(platform="kubernetes/test", host="test", run_root="/runs")
    handles = [
        Handle(backend="kubernetes", token=task.token, run_dir=f"/runs/gw-{task.token}", place=place) for task in tasks
    ]
    return array_manifest(tasks, "t-all", "runner.py", handles, CLAIM, at_once=4)


def test_an_arrays_secrets_are_not_in_its_job() -> None:
    tasks = [ArrayTask(spec(), f"t-{n}", {"KEY": f"s3cret-{n}"}) for n in range(2)]
    made = array_of(tasks)
    assert "s3cret" not in str(made)
    assert orders_of(made, tasks) == {"0": '{"KEY": "s3cret-0"}', "1": '{"KEY": "s3cret-1"}'}
    assert orders_of(made, tasks[:1]) == {}, "the others would start without theirs"
    assert orders_of(made, [ArrayTask(spec(), f"t-{n}") for n in range(2)]) == {}


def test_oversized_array_secrets_are_refused(wording: Wording) -> None:
    with pytest.raises(BadRequest) as refused:
        check_array([ArrayTask(spec(), f"t-{n}", {"KEY": "x" * 500_000}) for n in range(2)])
    wording(refused)


def test_the_validator_refuses_an_unknown_field() -> None:
    wrong = job(spec())
    wrong["spec"]["podFailurePolicies"] = wrong["spec"].pop("podFailurePolicy")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_the_documented_rights_match_those_used() -> None:
    documents = list(yaml.safe_load_all((ROOT / "docs/kubernetes-rights.yaml").read_text("utf-8")))
    for document in documents:
        kubernetes_validate.validate(document, VERSIONS[-1], strict=True)
    role = next(d for d in documents if d["kind"] == "Role")
    given = {
        (g, r, v) for rule in role["rules"] for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]
    }
    assert given == {(g, r, v) for (g, r), verbs in (RIGHTS | KUEUE_RIGHTS).items() for v in verbs}


def test_an_interruption_is_retried_but_the_jobs_own_failure_is_not() -> None:
    policy = job(spec())["spec"]["podFailurePolicy"]["rules"]
    assert policy[0]["action"] == "Count" and policy[0]["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert policy[1]["action"] == "FailJob" and policy[1]["onExitCodes"]["values"] == [0, 143]
    assert job(spec(max_restarts=5))["spec"]["backoffLimit"] == 5
    assert job(spec(max_restarts=5), attempt=2)["spec"]["backoffLimit"] == 0


def test_the_pod_requests_gpus_tolerations_and_the_claims_user() -> None:
    pod = job(spec(FULL, gpu="NVIDIA-H100-80GB-HBM3", gpu_count=8))["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": "8"}
    assert pod["nodeSelector"] == {"pool": "gpu", "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    assert [t["operator"] for t in pod["tolerations"]] == ["Exists", "Equal"]
    assert pod["securityContext"] == {"runAsUser": 1000, "runAsNonRoot": True, "fsGroup": 1000}
    assert "nodeSelector" not in files_manifest(CLAIM, "/runs")["spec"]
    assert "nvidia.com/gpu.product" not in job(spec(gpu="any"))["spec"]["template"]["spec"]["nodeSelector"]


@pytest.mark.parametrize("token", ["Upper_Case", "x" * 80, "ü", "t-1"])
def test_any_token_maps_to_a_valid_kubernetes_name(token: str) -> None:
    name = f"{stem_of(token)}-a9999"
    assert len(name) <= 57 and name == name.lower() and name.replace("-", "").isalnum()
    assert stem_of(token) != stem_of(token.swapcase()) or token == token.swapcase()


@pytest.mark.parametrize(
    "options", [{}, {"image": "-x"}, {"image": "a", "tolerations": ["x"]}, {"image": "a", "namespace": "kube-system"}]
)
def test_an_invalid_option_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=r"options\."):
        read_options(JobSpec.model_validate({"platform": "kubernetes/t", "command": ["x"], "options": options}))


def test_a_missing_client_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "gpuwarden.backends.kubernetes", raising=False)
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(NotSupported, match="kubernetes") as caught:
        BACKENDS.load("kubernetes")
    assert "pip install" in manual_text(caught.value.next_steps)


def test_the_gate_reads_the_requested_resources() -> None:
    asked = engine_request(spec(FULL, gpu="any", gpu_count=2, timeout_s=60), "team")
    assert (asked.queue, asked.gpu, asked.gpus, asked.memory_mb, asked.walltime_s) == ("team-queue", "", 2, 65_536, 300)
    assert engine_request(spec(), "team").queue == "team"
