"""The kubernetes backend against a real kube-apiserver, as a user with minimal rights. `make kube` runs it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from contract_backend import EngineContract, ended, until
from gpuwarden.backends.kubernetes import KubernetesBackend
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import AuthFailed, Conflict
from gpuwarden.core.models import Known, Place, StopResult
from gpuwarden.core.states import Job
from kube_life import refused, train, warden, whole_life
from kube_real import RealCluster, RealEngine

pytestmark = [pytest.mark.anyio, pytest.mark.prove]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    """The cluster, shared by all tests because it takes seconds to start."""
    programs = os.environ.get("GPUWARDEN_KUBE", "")
    if not programs:
        pytest.skip("GPUWARDEN_KUBE does not name a folder with kube-apiserver; `make kube` builds one")
    cluster = RealCluster(Path(programs), tmp_path_factory.mktemp("kube"))
    try:
        yield cluster.start()
    finally:
        cluster.stop()


@pytest.fixture(autouse=True)
def configured(cluster: RealCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty the cluster, and use a user with only the rights in docs/kubernetes-rights.yaml."""
    cluster.clear()
    use(cluster, monkeypatch, "gpuwarden")


def use(cluster: RealCluster, patch: pytest.MonkeyPatch, user: str) -> None:
    patch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", f"{cluster.folder}/{user}.config")


@pytest.fixture
async def backend(cluster: RealCluster) -> AsyncIterator[KubernetesBackend]:
    backend = KubernetesBackend(SystemClock())
    yield backend
    await backend.aclose()


@pytest.fixture
def place(cluster: RealCluster) -> Place:
    return Place(platform="kubernetes/test", host="test", run_root=str(cluster.runs))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> RealEngine:
    return RealEngine(monkeypatch)


class TestKubernetes(EngineContract):
    """The whole contract, on real objects."""


async def test_full_job_lifecycle_on_a_real_cluster(cluster: RealCluster, tmp_path: Path) -> None:
    ctx = warden(tmp_path, cluster.runs)
    try:
        await whole_life(ctx, cluster)
    finally:
        await ctx.backend("kubernetes").aclose()  # type: ignore[attr-defined]


async def test_the_documented_rights_suffice_and_missing_rights_are_named(
    cluster: RealCluster, backend: KubernetesBackend, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not [f for f in await backend.check(place) if f.blocks]
    use(cluster, monkeypatch, "nobody")
    ctx = warden(tmp_path, cluster.runs)
    (why,) = await refused(ctx, train())
    await ctx.backend("kubernetes").aclose()  # type: ignore[attr-defined]
    assert why.startswith("PF-PLACE-001: ") and "create jobs, get jobs" in why
    with pytest.raises(AuthFailed, match="forbidden"):
        await KubernetesBackend(SystemClock()).handle_of(place, "r-none")


async def test_a_list_of_several_pages_is_read_to_its_end(
    backend: KubernetesBackend, place: Place, engine: RealEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuwarden.backends._kube_api.PAGE", 2)
    handles = [await backend.submit(engine.job("true"), place, f"r-page{n}", secrets={}) for n in range(5)]
    for handle in handles:
        assert (await ended(backend, handle)).state is Job.SUCCEEDED
    assert all(o.allocation is not None for o in (await backend.poll(handles)).values())


async def test_another_tools_job_with_our_name_is_left_alone(
    cluster: RealCluster, backend: KubernetesBackend, place: Place, engine: RealEngine
) -> None:
    jobs = "/apis/batch/v1/namespaces/team/jobs"
    pod = {"restartPolicy": "Never", "containers": [{"name": "job", "image": "x", "command": ["true"]}]}
    theirs = cluster.put(jobs, {"metadata": {"name": "gw-r-name-a1"}, "spec": {"template": {"spec": pod}}})
    assert await backend.find(place, "r-name") == Known(None)
    with pytest.raises(Conflict, match="gw-r-name-a1"):
        await backend.submit(engine.job("true"), place, "r-name", secrets={})
    backend.api("test").delete_job("gw-r-name-a1", "11111111-2222-3333-4444-555555555555")  # the uid of gpuwarden's job
    there = cluster.admin.get(f"{jobs}/gw-r-name-a1").json()
    assert there["metadata"]["uid"] == theirs["metadata"]["uid"] and "deletionTimestamp" not in there["metadata"]


async def test_a_secret_is_deleted_with_its_job(
    cluster: RealCluster, backend: KubernetesBackend, place: Place, engine: RealEngine
) -> None:
    spec = engine.job('echo "key $KEY"; sleep 60', secrets=("KEY",))
    handle = await backend.submit(spec, place, "r-secret", secrets={"KEY": "s3cret-value"})
    await until(backend, handle, lambda o: o.log_bytes > 0)
    assert (await backend.logs(handle)).text == "key ***\n"
    (pod,) = [p for p in cluster.objects("pods") if p["metadata"]["name"].startswith("gw-r-secret")]
    assert "s3cret-value" not in str(pod) and cluster._secret("gw-r-secret-a1")
    assert await backend.stop(handle, grace_s=1) is StopResult.STOPPED
    assert not [name for name in cluster.names("pods") if name.startswith("gw-r-secret")]
    cluster._wait_for(lambda: cluster._secret("gw-r-secret-a1") is None)


async def test_a_cluster_refusal_is_reported_before_anything_starts(
    cluster: RealCluster, backend: KubernetesBackend, place: Place, engine: RealEngine
) -> None:
    before = cluster.names("jobs")
    options = {"image": "busybox", "gpu_resource": "-.-/gpu"}
    found = await backend.limits(engine.job("true", gpu="any", options=options), place)
    assert "-.-/gpu" in found.refusal
    assert not (await backend.limits(engine.job("true"), place)).refusal
    queue = (await backend.limits(engine.job("true", options={"image": "busybox", "queue": "q"}), place)).queue
    assert queue is not None and queue.open is None, "without Kueue's interface nothing is known of its queues"
    assert cluster.names("jobs") == before
