"""The kubernetes backend against an in-memory API server whose pods are processes: the contract and specific tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import kubernetes_validate
import pytest
import yaml

from contract_arrays import ArrayContract, tasks
from contract_backend import EngineContract, ended, until
from gpuwarden.backends.base import ArrayTask
from gpuwarden.backends.kubernetes import KubernetesBackend
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import AuthFailed, Conflict
from gpuwarden.core.models import Handle, Place, StopResult
from gpuwarden.core.states import Job
from kube_kit import Cluster, KubeEngine
from kube_life import RESUMES, refused, train, warden, whole_life
from paths import ROOT
from wording import Wording

kubernetes = pytest.importorskip("kubernetes")
pytestmark = pytest.mark.anyio


RIGHTS_FILE = ROOT / "docs/kubernetes-rights.yaml"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(cluster.config))
    try:
        yield cluster.start()
    finally:
        cluster.stop()


@pytest.fixture
async def backend(cluster: Cluster) -> AsyncIterator[KubernetesBackend]:
    backend = KubernetesBackend(SystemClock())
    yield backend
    await backend.aclose()


@pytest.fixture
def place(cluster: Cluster, tmp_path: Path) -> Place:
    return Place(platform="kubernetes/test", host="test", run_root=str(tmp_path / "runs"))


@pytest.fixture
def engine(cluster: Cluster) -> KubeEngine:
    return KubeEngine(cluster)


@pytest.mark.prove
class TestKubernetes(EngineContract):
    """The whole contract, over HTTP and WebSockets."""

    async def test_an_interrupted_job_resumes_in_another_pod(
        self, backend: KubernetesBackend, place: Place, engine: KubeEngine, cluster: Cluster
    ) -> None:
        spec = engine.job(RESUMES, secrets=("KEY",))
        handle = await backend.submit(spec, place, "e-taken", secrets={"KEY": "s3cret-value"})
        await until(backend, handle, lambda o: o.state is Job.RUNNING and o.log_bytes > 0)
        cluster.preempt("gw-e-taken-a1")
        log = await _said(backend, handle, "from 1 ***")
        assert log[:2] == ["from 0 ***", "saved"]
        (Path(handle.run_dir) / "work/go").touch()
        seen = await ended(backend, handle)
        assert (seen.state, seen.exit_code, seen.meter) == (Job.SUCCEEDED, 0, False)
        assert "s3cret-value" not in str([o for o in cluster.created if o["kind"] != "Secret"])

    async def test_an_interruption_without_restarts_left_is_a_preemption(
        self, backend: KubernetesBackend, place: Place, engine: KubeEngine, cluster: Cluster
    ) -> None:
        handle = await backend.submit(engine.job(RESUMES, max_restarts=0), place, "e-last", secrets={})
        await until(backend, handle, lambda o: o.state is Job.RUNNING and o.log_bytes > 0)
        cluster.preempt("gw-e-last-a1")
        assert (await ended(backend, handle)).state is Job.PREEMPTED

    async def test_a_job_that_kueue_has_not_admitted_waits_and_can_be_stopped(
        self, backend: KubernetesBackend, place: Place, engine: KubeEngine, cluster: Cluster
    ) -> None:
        spec = engine.job("echo ran", options={"image": "busybox", "queue": "team-queue"})
        handle = await backend.submit(spec, place, "e-kueue", secrets={})
        seen = (await backend.poll([handle]))["e-kueue"]
        assert seen.state is Job.QUEUED and seen.meter is False and "team-queue" in seen.why
        other = await backend.submit(spec, place, "e-admit", secrets={})
        cluster.admit("gw-e-admit-a1")
        assert (await ended(backend, other)).state is Job.SUCCEEDED
        assert await backend.stop(handle) is StopResult.STOPPED
        assert (await backend.poll([handle]))["e-kueue"].state is Job.CANCELED
        await backend.submit(spec, place, "e-kueue", secrets={})
        assert "gw-e-kueue-a1" not in cluster.objects["jobs"], "a late repetition starts nothing"

    async def test_a_job_suspended_by_kueue_waits_and_resumes_once_admitted(
        self, backend: KubernetesBackend, place: Place, engine: KubeEngine, cluster: Cluster
    ) -> None:
        spec = engine.job(RESUMES, options={"image": "busybox", "queue": "team-queue"})
        handle = await backend.submit(spec, place, "e-again", secrets={})
        cluster.admit("gw-e-again-a1")
        await until(backend, handle, lambda o: o.state is Job.RUNNING and o.log_bytes > 0)
        cluster.suspend("gw-e-again-a1")
        seen = await until(backend, handle, lambda o: o.state is Job.QUEUED)
        assert seen.meter is False and "team-queue" in seen.why
        while cluster.names("pods"):
            await anyio.sleep(0.05)
        cluster.admit("gw-e-again-a1")
        assert (await _said(backend, handle, "from 1 "))[:2] == ["from 0 ", "saved"]
        (Path(handle.run_dir) / "work/go").touch()
        assert (await ended(backend, handle)).state is Job.SUCCEEDED

    async def test_another_tools_job_with_our_name_is_left_alone(
        self, backend: KubernetesBackend, place: Place, engine: KubeEngine, cluster: Cluster, wording: Wording
    ) -> None:
        foreign = await backend.submit(engine.job("true"), place, "e-name", secrets={})
        await ended(backend, foreign)
        there = cluster.objects["jobs"]["gw-e-name-a1"]
        there["metadata"]["annotations"] = {"gpuwarden.dev/token": "e-name", "gpuwarden.dev/run-folder": "/elsewhere"}
        assert (await backend.poll([foreign]))["e-name"].allocation is None
        assert await backend.stop(foreign) is StopResult.GONE
        there["metadata"].update(name="gw-e-theirs-a1")
        cluster.objects["jobs"]["gw-e-theirs-a1"] = there
        with pytest.raises(Conflict) as refused:
            await backend.submit(engine.job("true"), place, "e-theirs", secrets={})
        wording(refused, "gw-e-theirs-a1")
        assert cluster.objects["jobs"]["gw-e-theirs-a1"] is there


@pytest.mark.slow
async def test_the_place_is_a_claim_that_every_node_can_mount(
    backend: KubernetesBackend, place: Place, cluster: Cluster, wording: Wording
) -> None:
    assert not [f for f in await backend.check(place) if f.blocks]
    cluster.claim("runs", accessModes=["ReadWriteOnce"])
    (found,) = await backend.check(place)
    assert "ReadWriteOnce" in found.message
    cluster.claim("second")
    (found,) = await backend.check(place)
    wording(found.message, 2)
    cluster.objects["persistentvolumeclaims"].clear()
    (found,) = await backend.check(place)
    assert "kubectl" in str(found.fix)
    wording(found.message)


@pytest.mark.slow
@pytest.mark.parametrize("host", ["nowhere", None])
async def test_a_missing_cluster_is_one_clear_error(
    backend: KubernetesBackend, place: Place, host: str | None, wording: Wording
) -> None:
    (found,) = await backend.check(place.model_copy(update={"host": host}))
    assert found.blocks
    wording(found.message, *([host] if host else []))


@pytest.mark.slow
async def test_missing_rights_are_named(backend: KubernetesBackend, place: Place, cluster: Cluster) -> None:
    named = {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["*"], "resourceNames": ["mine"]}
    cluster.rules = [named, {"apiGroups": [""], "resources": ["pods", "*/exec"], "verbs": ["create", "get", "list"]}]
    (found,) = await backend.check(place)
    assert found.blocks and "create jobs, get jobs, list jobs, delete jobs, delete pods, create secrets, list pers" in (
        found.message
    )
    cluster.rules = next(yaml.safe_load_all(RIGHTS_FILE.read_text("utf-8")))["rules"]
    assert not [f for f in await backend.check(place) if f.blocks]
    cluster.trouble = "forbidden"
    with pytest.raises(AuthFailed, match="forbidden"):
        await backend.poll([await backend.handle_of(place, "e-none")])


@pytest.mark.slow
async def test_kueues_queue_is_checked_before_submission(
    backend: KubernetesBackend, place: Place, engine: KubeEngine, cluster: Cluster
) -> None:
    spec = engine.job("true", options={"image": "busybox", "queue": "team-queue"})
    assert (await backend.limits(spec, place)).queue is None, "Kueue has none of that name"
    cluster.queue("team-queue", Active={"status": "True", "message": "Can submit new workloads"})
    assert (queue := (await backend.limits(spec, place)).queue) and queue.open
    cluster.queue("team-queue", Active={"status": "False", "message": "the cluster queue is stopped"})
    assert (queue := (await backend.limits(spec, place)).queue) and queue.open is False and "stopped" in queue.state
    own = await backend.limits(engine.job("true"), place)
    assert own.queue and (own.queue.name, own.queue.open) == ("team", None)


@pytest.mark.prove
async def test_full_job_lifecycle_on_a_cluster(cluster: Cluster, tmp_path: Path) -> None:
    ctx = warden(tmp_path)
    try:
        await whole_life(ctx, cluster)
    finally:
        await ctx.backend("kubernetes").aclose()  # type: ignore[attr-defined]
    for made in cluster.created:
        if "generateName" not in made["metadata"]:
            kubernetes_validate.validate(made, "1.37", strict=True)


@pytest.mark.slow
async def test_a_namespace_without_rights_is_one_gate_finding(cluster: Cluster, tmp_path: Path) -> None:
    cluster.rules, cluster.trouble = [], "forbidden"
    ctx = warden(tmp_path)
    (why,) = await refused(ctx, train())
    await ctx.backend("kubernetes").aclose()  # type: ignore[attr-defined]
    assert why.startswith("PF-PLACE-001: ") and "create jobs, get jobs" in why
    assert cluster.created == []


async def _said(backend: KubernetesBackend, handle: Handle, line: str) -> list[str]:
    """Wait until the log contains a line; return its lines without the shell's messages about its children."""
    while line not in (log := (await backend.logs(handle)).text.splitlines()):
        await anyio.sleep(0.05)
    return [said for said in log if said != "Terminated"]


@pytest.mark.prove
class TestArrays(ArrayContract):
    """One Indexed Job for many tasks."""

    async def test_an_interrupted_index_resumes_and_leaves_the_others_alone(
        self, backend: KubernetesBackend, place: Place, engine: KubeEngine, cluster: Cluster
    ) -> None:
        given = tasks(engine, RESUMES, ["i-one", "i-two"])
        handles = await backend.submit_array(given, place, "i-taken", at_once=2)
        for handle in handles.values():
            await until(backend, handle, lambda o: o.state is Job.RUNNING and o.log_bytes > 0)
        cluster.preempt("gw-i-taken-array", 1)
        assert (await _said(backend, handles["i-two"], "from 1 "))[:2] == ["from 0 ", "saved"]
        assert cluster.names("jobs") == ["gw-i-taken-array"]
        for handle in handles.values():
            (Path(handle.run_dir) / "work/go").touch()
            assert (await ended(backend, handle)).state is Job.SUCCEEDED
        assert (await backend.logs(handles["i-one"])).text == "from 0 \n"

    async def test_a_submit_cut_before_its_secret_is_completed_by_the_next(
        self, backend: KubernetesBackend, place: Place, engine: KubeEngine, cluster: Cluster
    ) -> None:
        spec = engine.job('echo "$KEY" | tr a-z A-Z', secrets=["KEY"])
        given = [ArrayTask(spec, name, {"KEY": f"of-{name}"}) for name in ("c-one", "c-two")]
        handles = await backend.submit_array(given, place, "c-cut", at_once=2)
        with cluster.lock:
            del cluster.objects["secrets"]["gw-c-cut-array"]
        assert await backend.submit_array(given, place, "c-cut", at_once=2) == handles
        for handle in handles.values():
            assert (await ended(backend, handle)).state is Job.SUCCEEDED

    async def test_another_tools_job_with_the_arrays_name_is_a_conflict(
        self, backend: KubernetesBackend, place: Place, engine: KubeEngine, cluster: Cluster, wording: Wording
    ) -> None:
        about = {"name": "gw-x-all-array", "uid": "u-other", "labels": {}, "annotations": {}}
        cluster.objects["jobs"]["gw-x-all-array"] = {"kind": "Job", "metadata": about, "spec": {}, "status": {}}
        with pytest.raises(Conflict) as refused:
            await backend.submit_array(tasks(engine, "true", ["x-one"]), place, "x-all", at_once=1)
        wording(refused, "gw-x-all-array")
