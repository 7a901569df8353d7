"""The sky provider: SkyPilot's real SDK against a double of its API server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import AuthFailed, BadRequest, Conflict, NoCapacity, NotSupported, Unreachable
from gpuwarden.core.models import Instance, InstanceState, Known, Resources, Unknown
from gpuwarden.core.rules import Severity
from gpuwarden.profiles import load_profile
from gpuwarden.providers import base
from gpuwarden.providers.sky import SkyProvider
from sky_kit import SkyServer, sky_env
from wording import Wording

pytestmark = [pytest.mark.anyio, pytest.mark.real, pytest.mark.prove, pytest.mark.usefixtures("patient_sky")]


@pytest.fixture
def provider(sky_server: SkyServer, tmp_path: Path) -> SkyProvider:
    return made("sky/aws", sky_server, tmp_path)


def made(platform: str, server: SkyServer, folder: Path) -> SkyProvider:
    profile = load_profile("sky").model_copy(update={"id": platform})
    server.refusals.clear()
    return SkyProvider(profile, folder / "sky", SystemClock(), sky_env(server.folder, server.url))


def known(answer: Any) -> Any:
    assert isinstance(answer, Known), answer
    return answer.value


def sent(server: SkyServer, path: str) -> dict[str, Any]:
    return next(body for asked, body in reversed(server.asked) if asked == path)


async def test_a_cluster_is_launched_once_with_autostop_and_without_autodown(
    provider: SkyProvider, sky_server: SkyServer
) -> None:
    before = sky_server.count("/launch")
    wanted = Resources(deadline_s=7_230, disk_gb=100)
    first = known(await provider.create(wanted, "p-once-i1"))
    again = known(await provider.create(wanted, "p-once-i1"))
    assert sky_server.count("/launch") - before == 1 and first == again
    assert (first.id, first.token, first.state, first.meter) == (
        "gw-p-once-i1",
        "p-once-i1",
        InstanceState.RUNNING,
        True,
    )
    task = list(yaml.safe_load_all(sent(sky_server, "/launch")["task"]))[-1]
    assert "run" not in task and task["resources"]["infra"] == "aws" and task["resources"]["disk_size"] == 100
    assert task["resources"]["autostop"] == {"idle_minutes": 121, "down": False, "wait_for": "none"}
    cluster = sky_server.clusters["gw-p-once-i1"]
    assert (cluster["autostop"], cluster["to_down"]) == (121, False)


@pytest.mark.parametrize(
    ("given", "usd"),
    [
        ({"gpu": "A100"}, 3.5),
        ({"options": {"cpus": "4+"}}, None),
    ],
)
async def test_the_quote_is_the_cheapest_offer_after_a_dry_run(
    provider: SkyProvider, sky_server: SkyServer, given: dict[str, Any], usd: float | None
) -> None:
    quote = known(await provider.quote(Resources.model_validate(given)))
    assert quote.price_usd_per_hour == usd and quote.note
    assert sent(sky_server, "/launch")["dryrun"] is True
    assert "gw-quote" not in sky_server.clusters


async def test_an_offer_above_the_checked_price_is_not_launched(provider: SkyProvider, sky_server: SkyServer) -> None:
    with pytest.raises(NotSupported, match=r"\$3\.50/h") as refused:
        await provider.create(Resources(gpu="A100", max_price_usd_per_hour=3.0), "p-dear")
    assert refused.value.unsent and "gw-p-dear" not in sky_server.clusters


async def test_without_a_deadline_a_cluster_stops_an_hour_after_its_last_job(
    provider: SkyProvider, sky_server: SkyServer
) -> None:
    known(await provider.create(Resources(), "p-idle"))
    task = list(yaml.safe_load_all(sent(sky_server, "/launch")["task"]))[-1]
    assert task["resources"]["autostop"] == {"idle_minutes": 60, "down": False, "wait_for": "jobs"}


async def test_a_cloud_without_stop_gets_no_autostop(sky_server: SkyServer, tmp_path: Path) -> None:
    provider = made("sky/runpod", sky_server, tmp_path)
    known(await provider.create(Resources(deadline_s=600), "p-runpod"))
    task = list(yaml.safe_load_all(sent(sky_server, "/launch")["task"]))[-1]
    assert "autostop" not in task["resources"] or not task["resources"]["autostop"]


async def test_a_launch_with_a_lost_reply_is_found_by_name(provider: SkyProvider, sky_server: SkyServer) -> None:
    sky_server.lose.add("/launch")
    with pytest.raises(Unreachable):
        await provider.create(Resources(), "p-lost")
    (found,) = known(await provider.find("p-lost"))
    assert known(await provider.create(Resources(), "p-lost")) == found
    assert known(await provider.find("p-never")) == ()


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("ResourcesUnavailableError", NoCapacity),
        ("NoCloudAccessError", AuthFailed),
        ("NotSupportedError", NotSupported),
    ],
)
async def test_a_refused_launch_raises_the_matching_error(
    provider: SkyProvider, sky_server: SkyServer, kind: str, error: type[Exception]
) -> None:
    sky_server.refusals["launch"] = (kind, "no such luck")
    with pytest.raises(error, match="no such luck"):
        await provider.create(Resources(), "p-refused")
    sky_server.refusals.clear()
    ended = known(await provider.get("gw-p-refused"))
    assert ended.state is InstanceState.GONE and ended.meter is False and "no such luck" in ended.why


@pytest.mark.parametrize(
    "given",
    [{"gpu": "any"}, {"durable_storage": True}, {"options": {"partition": "x"}}, {"options": {"cpus": "many"}}],
)
async def test_unsupported_resources_are_refused_before_anything_is_sent(
    provider: SkyProvider, sky_server: SkyServer, given: dict[str, Any]
) -> None:
    before = sky_server.count("/launch")
    with pytest.raises((BadRequest, NotSupported)) as refused:
        await provider.create(Resources.model_validate(given), "p-bad")
    assert refused.value.unsent and sky_server.count("/launch") == before
    with pytest.raises(BadRequest):
        await provider.create(Resources(), "p_bad/../x")


async def test_an_end_is_confirmed_by_the_cost_report(provider: SkyProvider, sky_server: SkyServer) -> None:
    known(await provider.create(Resources(), "p-end"))
    assert known(await provider.get("gw-p-end")).place.host == "gw-p-end"
    known(await provider.terminate("gw-p-end"))
    ended = known(await provider.get("gw-p-end"))
    assert (ended.state, ended.meter, ended.cost_usd) == (InstanceState.GONE, False, 1.25)
    known(await provider.terminate("gw-p-end"))
    sky_server.costs.clear()
    assert isinstance(await provider.get("gw-p-end"), Unknown), "a cluster that was seen has costs"


async def test_a_cluster_missing_only_from_the_list_is_not_gone(
    provider: SkyProvider, sky_server: SkyServer, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    known(await provider.create(Resources(), "p-half"))
    monkeypatch.setattr(sky_server, "do_status", lambda body: [])
    answer = await provider.get("gw-p-half")
    assert isinstance(answer, Unknown)
    wording(answer.why)


async def test_another_cluster_with_the_same_name_is_not_ours(provider: SkyProvider, sky_server: SkyServer) -> None:
    known(await provider.create(Resources(), "p-name"))
    sky_server.clusters["gw-p-name"]["cluster_hash"] = "another"
    assert isinstance(await provider.get("gw-p-name"), Unknown)
    before = [sky_server.count(path) for path in ("/down", "/stop", "/start")]
    for verb in (provider.terminate, provider.stop, provider.start):
        with pytest.raises(Conflict):
            await verb("gw-p-name")
    assert [sky_server.count(path) for path in ("/down", "/stop", "/start")] == before


class Direct:
    """A stand-in for gpuwarden's own adapter for the cloud."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.asked = answer, []  # type: ignore[var-annotated]

    async def get(self, ident: str) -> Any:
        self.asked.append(ident)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("says", "gone"),
    [
        (Known(None), True),
        (Known(Instance(id="pod1", state=InstanceState.GONE)), True),
        (Known(Instance(id="pod1", state=InstanceState.RUNNING)), False),
        (Unknown("its list has another form"), False),
        (Unreachable("nobody answers"), False),
    ],
)
async def test_the_clouds_own_adapter_must_confirm_the_end(
    sky_server: SkyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Any, gone: bool
) -> None:
    provider = made("sky/runpod", sky_server, tmp_path)
    provider._env = {**provider._env, "RUNPOD_API_KEY": "key-of-a-test"}
    known(await provider.create(Resources(), "p-pod"))
    known(await provider.get("gw-p-pod"))
    file = tmp_path / "sky/gw-p-pod.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "ids": ["pod1"]}))
    direct = Direct(says)
    monkeypatch.setattr(base, "load_provider", lambda *_: direct)
    known(await provider.terminate("gw-p-pod"))
    answer = await provider.get("gw-p-pod")
    assert direct.asked == ["pod1"]
    assert isinstance(answer, Known if gone else Unknown)
    sky_server.costs.clear()


async def test_a_controller_is_disclosed_as_billing(provider: SkyProvider, sky_server: SkyServer) -> None:
    sky_server.up("sky-jobs-controller-abc", cloud="gcp")
    sky_server.up("someone-elses", cloud="azure")
    rows = {row.id: row for row in known(await provider.list())}
    assert "someone-elses" not in rows
    controller = rows["sky-jobs-controller-abc"]
    assert controller.meter is True and controller.token == ""
    (told,) = [f for f in await provider.check() if "controller" in f.message]
    assert told.severity is Severity.WARNING
    del sky_server.clusters["sky-jobs-controller-abc"], sky_server.clusters["someone-elses"]


async def test_a_managed_job_is_disclosed_without_a_listed_cluster(
    provider: SkyProvider, sky_server: SkyServer
) -> None:
    job = {"job_name": "night", "submitted_at": 5.0, "recovery_count": 2}
    sky_server.managed = [
        {**job, "job_id": 1, "status": "RUNNING", "cloud": "AWS"},
        {**job, "job_id": 2, "status": "RECOVERING", "cloud": None},
        {**job, "job_id": 3, "status": "RUNNING", "cloud": "GCP"},
        {**job, "job_id": 4, "status": "WINDING_DOWN", "cloud": "AWS", "submitted_at": None},
    ]
    try:
        rows = [row for row in known(await provider.list()) if row.id.startswith("jobs/")]
        assert [(row.id, row.token, row.state, row.meter) for row in rows] == [
            ("jobs/1", "", InstanceState.RUNNING, True),
            ("jobs/2", "", InstanceState.BOOTING, None),
            ("jobs/4", "", InstanceState.RUNNING, True),
        ]
        assert "sky jobs cancel 1" in rows[0].why and "2" in rows[0].why
        sky_server.refusals["jobs/queue/v2"] = ("ClusterNotUpError", "No in-progress managed jobs.")
        assert not [row for row in known(await provider.list()) if row.id.startswith("jobs")]
        sky_server.refusals["jobs/queue/v2"] = ("RuntimeError", "ssh to the controller failed")
        (unknown,) = [row for row in known(await provider.list()) if row.id.startswith("jobs")]
        assert (unknown.state, unknown.meter) == (InstanceState.UNCLEAR, None) and "ssh to the" in unknown.why
    finally:
        sky_server.managed = []
        sky_server.refusals.clear()


async def test_a_cluster_with_autodown_is_reported(
    provider: SkyProvider, sky_server: SkyServer, wording: Wording
) -> None:
    known(await provider.create(Resources(), "p-down"))
    sky_server.clusters["gw-p-down"] |= {"autostop": 5, "to_down": True}
    wording(known(await provider.get("gw-p-down")).why)


@pytest.mark.parametrize(
    ("status", "state", "meter"),
    [
        ("INIT", InstanceState.BOOTING, None),
        ("UP", InstanceState.RUNNING, True),
        ("AUTOSTOPPING", InstanceState.STOPPING, None),
        ("STOPPED", InstanceState.STOPPED, False),
    ],
)
async def test_cluster_states_map_to_instance_states(
    provider: SkyProvider, sky_server: SkyServer, status: str, state: InstanceState, meter: bool | None
) -> None:
    sky_server.up("gw-p-state", status=status, cluster_hash="one")
    seen = known(await provider.get("gw-p-state"))
    assert (seen.state, seen.meter) == (state, meter)


async def test_a_cloud_that_is_not_enabled_is_named(sky_server: SkyServer, tmp_path: Path) -> None:
    (found,) = [f for f in await made("sky/gcp", sky_server, tmp_path).check() if f.severity is Severity.ERROR]
    assert "gcp" in found.message and "aws, runpod" in found.message and found.fix


async def test_stop_and_start_change_the_cluster(provider: SkyProvider, sky_server: SkyServer) -> None:
    known(await provider.create(Resources(), "p-stop"))
    known(await provider.stop("gw-p-stop"))
    assert known(await provider.get("gw-p-stop")).state is InstanceState.STOPPED
    known(await provider.start("gw-p-stop"))
    assert known(await provider.get("gw-p-stop")).state is InstanceState.RUNNING
    sky_server.refusals["stop"] = ("NotSupportedError", "Stopping not supported.")
    with pytest.raises(NotSupported, match="not supported"):
        await provider.stop("gw-p-stop")


async def test_a_failing_server_raises_for_every_cluster_request(provider: SkyProvider, sky_server: SkyServer) -> None:
    for mode in ("down", "odd"):
        sky_server.mode = mode
        try:
            for ask in (provider.get("gw-x"), provider.find("x"), provider.list(), provider.create(Resources(), "x")):
                with pytest.raises(Exception, match="SkyPilot"):
                    await ask
            assert [f.severity for f in await provider.check()] in ([Severity.UNKNOWN], [Severity.ERROR])
        finally:
            sky_server.mode = ""
