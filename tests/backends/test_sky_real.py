"""SkyPilot's real API server, started offline with no cloud enabled, and the behavior that the double copies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import sky_kit
from contract_backend import until
from gpuwarden.backends.sky_jobs import SkyJobsBackend
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import AuthFailed, NoCapacity, NotFound, Unreachable, WardenError
from gpuwarden.core.models import InstanceState, JobSpec, Known, Place, Resources, StopResult
from gpuwarden.core.rules import Severity
from gpuwarden.core.states import Job
from gpuwarden.profiles import load_profile
from gpuwarden.providers.sky import SkyProvider
from gpuwarden.providers.sky_jobs import SkyJobsProvider
from gpuwarden.remote.sky.client import SkyClient
from gpuwarden.remote.sky.rows import Cost, JobQueue, Log, ManagedQueue
from sky_kit import RealServer
from waiting import soon

pytestmark = [pytest.mark.anyio, pytest.mark.real, pytest.mark.prove, pytest.mark.usefixtures("patient_sky")]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    home = tmp_path_factory.mktemp("skyhome")
    (home / ".sky").mkdir()
    (home / ".sky/config.yaml").write_text("jobs: {controller: {consolidation_mode: true}}\n")
    server = RealServer.start(home)
    yield server
    server.stop()


@pytest.fixture
def provider(real: RealServer, tmp_path: Path) -> SkyProvider:
    profile = load_profile("sky").model_copy(update={"id": "sky/aws"})
    return SkyProvider(profile, tmp_path, SystemClock(), real.env)


async def test_the_double_matches_the_real_servers_paths_and_fields(real: RealServer) -> None:
    described = real.read("/openapi.json")
    verbs = {name.removeprefix("do_") for name in dir(sky_kit.SkyServer) if name.startswith("do_")}
    paths = {f"/{verb.replace('__', '/')}" for verb in verbs} | {"/api/health", "/api/get", "/api/status"}
    assert paths <= set(described["paths"])
    bodies = described["components"]["schemas"]
    for name, fields in {
        "LaunchBody": {"task", "cluster_name", "dryrun"}, "ExecBody": {"task", "cluster_name"},
        "StatusBody": {"cluster_names", "refresh", "all_users"}, "QueueBody": {"cluster_name", "all_users"},
        "CancelBody": {"cluster_name", "job_ids"}, "StopOrDownBody": {"cluster_name"},
        "AutostopBody": {"cluster_name", "idle_minutes", "down"}, "ClusterJobBody": {"cluster_name", "job_id"},
        "JobsQueueV2Body": {"refresh", "skip_finished", "all_users", "fields", "name_match"},
        "JobsLaunchBody": {"task", "name"}, "JobsCancelBody": {"job_ids", "graceful"},
        "JobsLogsBody": {"job_id", "follow"},
    }.items():  # fmt: skip
        assert fields <= set(bodies[name]["properties"]), name
    health = real.read("/api/health")
    assert set(health) == set(sky_kit.HEALTH)
    assert (health["version"], health["api_version"]) == (sky_kit.HEALTH["version"], sky_kit.HEALTH["api_version"])


async def test_an_empty_server_answers_every_request(real: RealServer, provider: SkyProvider) -> None:
    sky = SkyClient(real.env)
    assert await provider.list() == Known(())
    assert await provider.find("never") == Known(())
    assert await provider.get("gw-never") == Known(None)
    assert await sky.ask(list[Cost], "cost", names=["gw-never"]) == []
    for ask, shape, more in (("jobs", JobQueue, {}), ("logs", Log, {"job_id": 1})):
        with pytest.raises(NotFound, match="does not exist"):
            await sky.ask(shape, ask, cluster="gw-never", **more)
    assert await provider.terminate("gw-never") == Known(None)
    for verb in (provider.stop, provider.start):

        async def refused(verb: Callable[[str], Awaitable[object]] = verb) -> bool:
            try:
                await verb("gw-never")
            except NotFound:
                return True
            return False  # a late refusal reaches no caller, and a repeated call is refused too

        assert await soon(refused, 300)
    account = await provider.account_id()
    assert isinstance(account, Known) and real.url in account.value
    (found,) = await provider.check()
    assert found.severity is Severity.ERROR and "aws" in found.message


async def test_without_a_cloud_a_dry_run_is_refused_and_a_launch_leaves_nothing(provider: SkyProvider) -> None:
    with pytest.raises(AuthFailed, match="sky check"):
        await provider.quote(Resources(options={"cpus": "2+"}))
    with suppress(AuthFailed, NoCapacity):  # or the server is still working on it
        seen = await provider.create(Resources(options={"cpus": "2+"}), "p-real")
        assert isinstance(seen, Known) and seen.value.state is InstanceState.BOOTING

    async def gone() -> bool:
        answer = await provider.get("gw-p-real")
        return isinstance(answer, Known) and (answer.value is None or answer.value.state is InstanceState.GONE)

    await soon(gone, 300)
    answer = await provider.get("gw-p-real")
    assert isinstance(answer, Known) and answer.value is not None and "sky check" in answer.value.why
    assert await provider.list() == Known(())


async def test_a_managed_job_is_queued_adopted_and_canceled_by_the_real_controller(
    real: RealServer, tmp_path: Path
) -> None:
    """The controller runs in the API server (consolidation mode). It launches nothing from this port."""
    profile = load_profile("sky-jobs").model_copy(update={"id": "sky-jobs/aws"})
    meter = SkyJobsProvider(profile, tmp_path, SystemClock(), real.env)
    backend = SkyJobsBackend(SystemClock(), SkyClient(real.env))
    place = Place(platform="sky-jobs/aws", run_root="~/gpuwarden", instance_id="m-i1")
    assert await meter.list() == Known(()) and await backend.find(place, "m") == Known(None)
    spec = JobSpec(platform="sky-jobs/aws", command=("true",), interruptible=True, options={"cpus": "4+"})
    first = await backend.submit(spec, place, "m", secrets={"TOKEN": "hunter22-hunter22"})
    assert await backend.submit(spec, place, "m", secrets={"TOKEN": "hunter22-hunter22"}) == first
    assert await backend.find(place, "m") == Known(first)
    seen = await until(backend, first, lambda o: o.allocation is not None)
    assert (seen.state, seen.meter, seen.attempt) == (Job.QUEUED, False, 1)
    (row,) = (await SkyClient(real.env).ask(ManagedQueue, "managed", match="gw-m", finished=True)).rows
    assert (row.name, row.recoveries, row.over) == ("gw-m-i1-a1", 0, False)
    running = await meter.get("m-i1")
    assert isinstance(running, Known) and running.value is not None and running.value.meter is None
    assert (await backend.logs(first)).truncated is False
    assert await backend.stop(first) in {StopResult.PENDING, StopResult.STOPPED}
    ended = await until(backend, first, lambda o: o.state is Job.CANCELED and o.meter is False)
    assert ended.exit_code is None and await backend.stop(first) is StopResult.GONE
    gone = await meter.get("m-i1")
    assert isinstance(gone, Known) and gone.value is not None
    assert (gone.value.state, gone.value.meter) == (InstanceState.GONE, False)
    assert await meter.list() == Known(())


async def test_a_stopped_server_is_unreachable_and_not_started_by_a_request(
    real: RealServer, provider: SkyProvider
) -> None:
    real.stop()
    for ask in (provider.list(), provider.get("gw-x"), provider.create(Resources(), "p-dark")):
        with pytest.raises(Unreachable):
            await ask
    with pytest.raises(OSError, match="refused"):
        real.read("/api/health")
    assert [f.severity for f in await provider.check()] == [Severity.UNKNOWN]
    assert issubclass(Unreachable, WardenError)
