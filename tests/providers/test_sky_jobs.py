"""The meter for managed jobs: SkyPilot's real SDK against a double of its API server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.backends.sky_jobs import SkyJobsBackend
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import BadRequest, NotSupported
from gpuwarden.core.models import InstanceState, JobSpec, Known, Resources, Unknown
from gpuwarden.core.rules import Severity
from gpuwarden.profiles import load_profile
from gpuwarden.providers.sky_jobs import SkyJobsProvider
from gpuwarden.remote.sky.client import SkyClient
from sky_kit import FarManaged, SkyServer, sky_env
from wording import Wording

pytestmark = [pytest.mark.anyio, pytest.mark.real, pytest.mark.prove, pytest.mark.usefixtures("patient_sky")]
SPEC = JobSpec(platform="sky-jobs/aws", command=("sleep", "1800"))


@pytest.fixture
def provider(sky_server: SkyServer, tmp_path: Path) -> Iterator[SkyJobsProvider]:
    profile = load_profile("sky-jobs").model_copy(update={"id": "sky-jobs/aws"})
    sky_server.refusals.clear()
    yield SkyJobsProvider(profile, tmp_path / "sky_jobs", SystemClock(), sky_env(sky_server.folder, sky_server.url))
    for job in sky_server.managed_jobs:
        job.end("CANCELLED")
        job.name = f"over-{job.id}"
    sky_server.costs.clear()
    sky_server.held = False
    sky_server.requests.clear()


def known(answer: Any) -> Any:
    assert isinstance(answer, Known), answer
    return answer.value


async def started(provider: SkyJobsProvider, server: SkyServer, lease: str) -> FarManaged:
    """Create a reservation and start its job, as the lifecycle does."""
    reserved = known(await provider.create(Resources(options={"cpus": "4+"}), lease))
    backend = SkyJobsBackend(SystemClock(), SkyClient(sky_env(server.folder, server.url)))
    await backend.submit(SPEC, reserved.place, lease.partition("-")[0], secrets={})
    assert server.managed_jobs[-1].name == f"gw-{lease}-a1"
    return server.managed_jobs[-1]


async def test_a_reservation_costs_nothing_and_can_be_released(
    provider: SkyJobsProvider, sky_server: SkyServer
) -> None:
    before = sky_server.count("/jobs/launch")
    first = known(await provider.create(Resources(gpu="A100"), "p1-i1"))
    assert known(await provider.create(Resources(gpu="A100"), "p1-i1")) == first
    assert (first.id, first.token, first.state, first.meter) == ("p1-i1", "p1-i1", InstanceState.RUNNING, False)
    assert first.price_usd_per_hour == 3.5 and first.place.instance_id == "p1-i1"
    assert known(await provider.find("p1-i1")) == (first,) and known(await provider.find("p1-i2")) == ()
    assert [row.id for row in known(await provider.list())] == ["p1-i1"]
    known(await provider.terminate("p1-i1"))
    assert known(await provider.get("p1-i1")) is None and known(await provider.list()) == ()
    assert sky_server.count("/jobs/launch") == before


async def test_the_quote_discloses_the_controller(
    provider: SkyJobsProvider, sky_server: SkyServer, wording: Wording
) -> None:
    quote = known(await provider.quote(Resources(gpu="A100")))
    assert quote.price_usd_per_hour == 3.5
    wording(quote.note)
    told = [f for f in await provider.check() if "controller" in f.message]
    assert [f.severity for f in told] == [Severity.INFO]
    sky_server.up("sky-jobs-controller-abc")
    try:
        assert Severity.WARNING in {f.severity for f in await provider.check()}
        assert [row.id for row in known(await provider.list())] == ["sky-jobs-controller-abc"]
    finally:
        del sky_server.clusters["sky-jobs-controller-abc"]


@pytest.mark.parametrize("given", [{"gpu": "any"}, {"durable_storage": True}, {"options": {"cpus": "many"}}])
async def test_unsupported_resources_are_refused_before_anything_is_sent(
    provider: SkyJobsProvider, given: dict[str, Any]
) -> None:
    with pytest.raises((BadRequest, NotSupported)) as refused:
        await provider.create(Resources.model_validate(given), "p2-i1")
    assert refused.value.unsent and known(await provider.list()) == ()
    with pytest.raises(NotSupported, match=r"\$3\.50/h"):
        await provider.create(Resources(gpu="A100", max_price_usd_per_hour=3.0), "p2-i1")


async def test_an_end_counts_when_the_controller_and_the_cost_report_agree(
    provider: SkyJobsProvider, sky_server: SkyServer
) -> None:
    job = await started(provider, sky_server, "p3-i1")
    seen = known(await provider.get("p3-i1"))
    assert (seen.state, seen.meter) == (InstanceState.RUNNING, True)
    assert [row.id for row in known(await provider.list())] == ["p3-i1"], "not once more as somebody else's"
    job.cleaned = False
    known(await provider.terminate("p3-i1"))
    assert job.status == "CANCELLED"
    seen = known(await provider.get("p3-i1"))
    assert (seen.state, seen.meter) == (InstanceState.TERMINATING, None), "its machine may still be there"
    job.cleaned = True
    cost = {"name": f"{job.name}-{job.id}", "cluster_hash": "h", "status": "UP", "duration": 9, "total_cost": 0.5}
    sky_server.costs.append(cost)
    assert isinstance(await provider.get("p3-i1"), Unknown)
    cost["status"] = None
    for _ in range(2):
        gone = known(await provider.get("p3-i1"))
        assert (gone.state, gone.meter, gone.cost_usd) == (InstanceState.GONE, False, 0.5)
    assert known(await provider.list()) == ()


async def test_a_recovered_job_bills_and_its_recovery_is_counted(
    provider: SkyJobsProvider, sky_server: SkyServer, wording: Wording
) -> None:
    job = await started(provider, sky_server, "p4-i1")
    job.end("RECOVERING")
    seen = known(await provider.get("p4-i1"))
    assert (seen.state, seen.meter) == (InstanceState.RUNNING, None) and "RECOVERING" in seen.why
    job.recover()
    seen = known(await provider.get("p4-i1"))
    assert seen.meter is True and re.findall(r"\d+", seen.why)[-1] == "1"
    wording(seen.why)


async def test_a_machine_left_by_a_failed_controller_is_unknown(
    provider: SkyJobsProvider, sky_server: SkyServer, wording: Wording
) -> None:
    job = await started(provider, sky_server, "p5-i1")
    job.end("FAILED_CONTROLLER")
    seen = known(await provider.get("p5-i1"))
    assert seen.meter is None and seen.state is not InstanceState.GONE
    wording(seen.why)


async def test_a_job_no_longer_listed_by_the_controller_is_not_gone(
    provider: SkyJobsProvider, sky_server: SkyServer, wording: Wording
) -> None:
    job = await started(provider, sky_server, "p6-i1")
    known(await provider.get("p6-i1"))
    job.name = "another"
    assert isinstance(await provider.get("p6-i1"), Unknown)
    assert isinstance(await provider.terminate("p6-i1"), Unknown) and job.status == "RUNNING", "it may still run"
    sky_server.refusals["jobs/queue/v2"] = ("ClusterNotUpError", "Controller's latest status is STOPPED")
    sky_server.up("sky-jobs-controller-abc", status="STOPPED")
    try:
        answer = await provider.get("p6-i1")
        assert isinstance(answer, Unknown)
        wording(answer.why)
    finally:
        del sky_server.clusters["sky-jobs-controller-abc"]
        sky_server.refusals.clear()


async def test_a_pending_launch_may_bill_and_cannot_be_canceled_yet(
    provider: SkyJobsProvider, sky_server: SkyServer
) -> None:
    reserved = known(await provider.create(Resources(), "p7-i1"))
    sky_server.held = True
    backend = SkyJobsBackend(SystemClock(), SkyClient(sky_env(sky_server.folder, sky_server.url)))
    await backend.submit(SPEC, reserved.place, "p7", secrets={})
    assert known(await provider.get("p7-i1")).meter is None
    assert isinstance(await provider.terminate("p7-i1"), Unknown)


async def test_a_failing_server_is_unknown_and_stop_and_start_are_unsupported(
    provider: SkyJobsProvider, sky_server: SkyServer
) -> None:
    known(await provider.create(Resources(), "p8-i1"))
    for verb in (provider.start, provider.stop):
        with pytest.raises(NotSupported):
            await verb("p8-i1")
    for mode in ("down", "odd"):
        sky_server.mode = mode
        try:
            for answer in (await provider.get("p8-i1"), await provider.find("p8-i1"), await provider.list()):
                assert isinstance(answer, Unknown)
            with pytest.raises(Exception, match="SkyPilot"):
                await provider.create(Resources(), "p8-i2")
        finally:
            sky_server.mode = ""
    sky_server.mode = "down"
    try:
        assert isinstance(await provider.terminate("p8-i1"), Unknown)
    finally:
        sky_server.mode = ""
