"""The dstack backend and its meter against a double that answers like the recorded replies of a real server."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clouds.base import KEY, Fault
from clouds.lambda_cloud import LambdaAccount
from clouds_kit import Web
from contract_backend import EngineContract, ended, until
from dstack_kit import PLACE, TOKEN, DstackEngine, FakeDstack, recorded
from gpuwarden.app import open_context
from gpuwarden.backends._dstack_api import Run
from gpuwarden.backends._dstack_observation import observation
from gpuwarden.backends._dstack_options import MOST_PRICE, run_name, run_spec
from gpuwarden.backends.base import Backend, load_backend
from gpuwarden.backends.dstack import DstackBackend
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import (
    AuthFailed,
    BadReply,
    BadRequest,
    Conflict,
    NoCapacity,
    NotFound,
    NotSupported,
    Unreachable,
    WardenError,
)
from gpuwarden.core.models import InstanceState, JobSpec, Known, Place, Resources, StopResult, Unknown
from gpuwarden.core.reasons import Code
from gpuwarden.core.rules import Severity
from gpuwarden.core.states import TERMINAL_JOBS, Job, Lease
from gpuwarden.lifecycle.monitoring.inventory import list_instances, reconcile
from gpuwarden.lifecycle.records import JobRecord, read_job, read_lease
from gpuwarden.lifecycle.submission.submit import submit
from gpuwarden.profiles import load_profile
from gpuwarden.providers.dstack import DstackProvider
from hubserver import hub_server
from lifecycle_kit import clock_of_today
from waiting import soon
from wording import Wording

pytestmark = pytest.mark.anyio


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeDstack]:
    fake = FakeDstack(tmp_path / "containers")
    try:
        yield fake
    finally:
        fake.close()


@pytest.fixture
def backend(server: FakeDstack) -> DstackBackend:
    return DstackBackend(SystemClock(), server.env)


@pytest.fixture
def engine(server: FakeDstack, backend: DstackBackend, monkeypatch: pytest.MonkeyPatch) -> DstackEngine:
    return DstackEngine(server, backend, monkeypatch)


@pytest.fixture
def provider(server: FakeDstack, tmp_path: Path) -> DstackProvider:
    profile = load_profile("dstack").model_copy(update={"id": "dstack/main"})
    return DstackProvider(profile, tmp_path / "state", SystemClock(), server.env)


class TestDstack(EngineContract):
    @pytest.fixture
    def place(self) -> Place:
        return PLACE


def job(text: str, **fields: Any) -> JobSpec:
    given = {"platform": "dstack/main", "command": ["sh", "-c", text], "timeout_s": 600, "gpu": "H100"}
    return JobSpec.model_validate(given | fields)


# ------------------------------------------------------------------------------------------------------------- requests


def test_a_run_limits_duration_price_and_machine_idling() -> None:
    place = PLACE.model_copy(update={"env": {MOST_PRICE: "2.49"}})
    options = {"backends": "runpod", "wait_s": 3600, "min_gpu_percent": 10, "fleets": ["gpus"]}
    spec = job("true", gpu_count=2, interruptible=True, disk_gb=50, secrets=["HF_TOKEN"], options=options)
    sent = run_spec(spec, ["true"], place, "job-1", 3)
    asked = sent["configuration"]
    assert sent["run_name"] == asked["name"] == "gw-job-1"
    assert asked["resources"] == {"gpu": {"name": ["H100"], "count": 2}, "disk": {"size": "50GB.."}}
    assert (asked["max_duration"], asked["idle_duration"], asked["max_price"]) == (600, 0, 2.49)
    assert (asked["spot_policy"], asked["backends"], asked["fleets"]) == ("spot", ["runpod"], ["gpus"])
    assert asked["retry"] == {"on_events": ["no-capacity"], "duration": 3600}, "an interruption is for gpuwarden"
    assert asked["utilization_policy"] == {"min_gpu_utilization": 10, "time_window": 1800}
    assert asked["tags"] == {"gpuwarden-job": "gw-job-1", "gpuwarden-attempt": "3", "gpuwarden-lease": "lease-1"}
    assert asked["env"]["HF_TOKEN"] == "${{ secrets.HF_TOKEN }}"
    plain = run_spec(job("true"), ["true"], PLACE, "job-1", 1)["configuration"]
    assert (plain["spot_policy"], plain["retry"], "utilization_policy" in plain) == ("on-demand", False, False)


@pytest.mark.parametrize("token", ["j", "job-1", "A_b", "x" * 200, "ü", ""])
def test_every_token_maps_to_a_valid_dstack_name(token: str) -> None:
    import re

    assert re.fullmatch(r"[a-z][a-z0-9-]{1,40}", run_name(token))
    assert run_name(token) != run_name(token + "x")


async def test_arguments_and_variables_arrive_unchanged(backend: DstackBackend, engine: DstackEngine) -> None:
    words = ("a b", "$HOME", "'\"", "", "ü", "-x", "*", "line\nline", "${{ groups[0].nodes[0].IP_ADDRESS }}", "\\")
    text = "import os, sys; print(ascii(sys.argv[1:]), os.environ['V'])"
    env = {"V": "$1 $$2 ${{ secrets.X }} $"}
    spec = job("", command=("python3", "-c", text, *words), env=env)
    handle = await backend.submit(spec, PLACE, "words", secrets={})
    assert (await ended(backend, handle)).state is Job.SUCCEEDED
    assert (await backend.logs(handle)).text == f"{list(words)!a} {env['V']}\n"


async def test_secrets_are_never_sent_to_dstack(
    backend: DstackBackend, engine: DstackEngine, server: FakeDstack
) -> None:
    spec = job("true", secrets=["HF_TOKEN"])
    await backend.submit(spec, PLACE, "s", secrets={"HF_TOKEN": "hf_of-a-person", "JOB_TOKEN": "a-report-token"})
    sent = json.dumps(server.asked)
    assert "hf_of-a-person" not in sent and "a-report-token" not in sent and TOKEN not in sent


@pytest.mark.parametrize(
    "options", [{"imge": "x"}, {"idle_s": -1}, {"backends": ["a b"]}, {"wait_s": 0}, {"min_gpu_percent": 101}]
)
def test_invalid_dstack_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=rf"options\.{next(iter(options))}"):
        DstackBackend(SystemClock()).settle(job("true", options=options))


# ---------------------------------------------------------------------------------------------------------- bad input


async def test_a_foreign_run_with_the_same_name_is_left_alone(
    backend: DstackBackend, engine: DstackEngine, server: FakeDstack, wording: Wording
) -> None:
    theirs = {"run_name": "gw-mine", "configuration": {"type": "task", "commands": ["sleep 60"], "env": {}, "tags": {}}}
    server.on_runs_apply({"plan": {"run_spec": theirs}})
    with pytest.raises(Conflict) as refused:
        await backend.submit(job("true"), PLACE, "mine", secrets={})
    wording(refused, "gw-mine")
    assert isinstance(await backend.find(PLACE, "mine"), Unknown)
    assert len(server.runs) == 1 and not any(path.endswith(("/stop", "/apply")) for path, _ in server.asked)


async def test_stopping_a_job_never_ends_a_run_that_reused_its_name(
    backend: DstackBackend, engine: DstackEngine, server: FakeDstack
) -> None:
    handle = await backend.submit(job("true"), PLACE, "again", secrets={})
    await ended(backend, handle)
    theirs = {
        "run_name": "gw-again",
        "configuration": {"type": "task", "commands": ["sleep 60"], "env": {}, "tags": {}},
    }
    server.on_runs_apply({"plan": {"run_spec": theirs}})
    assert (await backend.poll([handle]))["again"].state is Job.SUCCEEDED, "it is known by its id"
    assert await backend.stop(handle) is StopResult.GONE
    assert not any(path.endswith("/stop") for path, _ in server.asked)


@pytest.mark.slow
async def test_a_late_repetition_of_an_earlier_attempt_starts_nothing(
    backend: DstackBackend, engine: DstackEngine, server: FakeDstack
) -> None:
    await ended(backend, await backend.submit(job("exit 7"), PLACE, "t", secrets={}))
    second = await backend.submit(job("true"), PLACE, "t", secrets={}, attempt=2)
    assert (await ended(backend, second)).attempt == 2
    assert await backend.submit(job("true"), PLACE, "t", secrets={}, attempt=1) == second
    assert len(server.runs) == 2


@pytest.mark.parametrize(
    ("status", "raw"),
    [
        (200, b"<html>Sign in</html>"),
        (502, b"<html>Bad gateway</html>"),
        (404, b'{"detail": "Not Found"}'),
        (405, b'{"detail": "Method Not Allowed"}'),
        (500, b'{"detail": [{"msg": "x", "code": null}]}'),
        (200, b"[]"),
        (302, b""),
        (404, b"<html>no such page</html>"),
        (200, b'{"id": "../../x", "status": 5}'),
    ],
)
async def test_an_unexpected_reply_is_never_read_as_no_run(
    backend: DstackBackend, server: FakeDstack, status: int, raw: bytes
) -> None:
    server.replies["/runs/get"] = (status, raw)
    assert isinstance(await backend.find(PLACE, "t"), Unknown)
    with pytest.raises(Unreachable):
        await backend.submit(job("true"), PLACE, "t", secrets={})
    assert not server.runs


async def test_a_reply_about_another_run_is_rejected(
    backend: DstackBackend, engine: DstackEngine, server: FakeDstack
) -> None:
    handle = await backend.submit(job("sleep 60"), PLACE, "t", secrets={})
    other = recorded("run")
    server.replies["/runs/get"] = (200, json.dumps(other).encode())
    with pytest.raises(BadReply):
        await backend.poll([handle])
    with pytest.raises(BadReply):
        await backend.stop(handle)
    assert isinstance(await backend.find(PLACE, "t"), Unknown)
    server.replies.clear()
    await backend.stop(handle, grace_s=1)


@pytest.mark.parametrize(("version", "error"), [("0.20.25", NotSupported), ("welcome", WardenError)])
async def test_an_unsupported_server_gets_only_the_version_request(
    backend: DstackBackend, server: FakeDstack, version: str, error: type[WardenError]
) -> None:
    server.version = version
    with pytest.raises(error):
        await backend.submit(job("true"), PLACE, "t", secrets={})
    assert isinstance(await backend.find(PLACE, "t"), Unknown)
    assert {path for path, _ in server.asked} == {"/api/server/get_info"}


async def test_an_invalid_token_and_a_missing_project_are_refused(server: FakeDstack, wording: Wording) -> None:
    stranger = DstackBackend(SystemClock(), server.env | {"DSTACK_TOKEN": "somebody-else"})
    with pytest.raises(AuthFailed, match="Invalid token"):
        await stranger.submit(job("true"), PLACE, "t", secrets={})
    (finding,) = await stranger.check(PLACE)
    assert finding.severity is Severity.ERROR
    nowhere = PLACE.model_copy(update={"platform": "dstack/other"})
    mine = DstackBackend(SystemClock(), server.env)
    with pytest.raises(NotFound) as refused:
        await mine.submit(job("true"), nowhere, "t", secrets={})
    wording(refused)
    assert isinstance(await mine.find(nowhere, "t"), Unknown), "a project that can't be seen is not an empty one"
    none = DstackBackend(SystemClock(), {"DSTACK_SERVER_URL": server.env["DSTACK_SERVER_URL"]})
    with pytest.raises(AuthFailed) as refused:
        await none.submit(job("true"), PLACE, "t", secrets={})
    wording(refused)
    with pytest.raises(BadRequest, match="https"):
        far = DstackBackend(SystemClock(), server.env | {"DSTACK_SERVER_URL": "http://gpu.example"})
        await far.submit(job("true"), PLACE, "t", secrets={})


# -------------------------------------------------------------------------------------------------------- observations


def seen(of_run: str, /, **start: Any) -> Any:
    run = recorded("run")
    run["status"] = of_run
    run["termination_reason"] = start.pop("run_reason", None)
    run["jobs"][0]["job_submissions"][0] |= start
    run["run_spec"]["configuration"]["tags"] = {"gpuwarden-attempt": "2"}
    return observation(Run.model_validate_json(json.dumps(run)))


@pytest.mark.parametrize(
    ("reason", "state", "code"),
    [
        ("interrupted_by_no_capacity", Job.PREEMPTED, Code.ENGINE_TOOK),
        ("instance_unreachable", Job.FAILED, Code.ENGINE_TOOK),
        ("max_duration_exceeded", Job.FAILED, Code.TIME_LIMIT),
        ("container_exited_with_error", Job.FAILED, Code.EXITED),
        ("terminated_due_to_utilization_policy", Job.FAILED, Code.PLATFORM_REPORT),
        ("failed_to_start_due_to_no_capacity", Job.FAILED, Code.PLATFORM_REPORT),
        ("a_reason_of_next_year", Job.FAILED, Code.PLATFORM_REPORT),
    ],
)
def test_termination_reasons_map_to_job_states(reason: str, state: Job, code: Code) -> None:
    found = seen("failed", status="failed", termination_reason=reason, run_reason="job_failed")
    assert (found.state, found.reason, found.attempt) == (state, code, 2)


def test_run_states_map_to_job_states() -> None:
    assert (seen("submitted").state, seen("submitted").meter) == (Job.QUEUED, False)
    assert seen("provisioning", status="provisioning", job_provisioning_data=recorded("machine")).meter is None
    assert (seen("running", status="running").state, seen("running", status="running").meter) == (Job.RUNNING, True)
    assert seen("pending", status="failed").state is Job.QUEUED
    assert seen("terminating", status="failed", run_reason="stopped_by_user").state is Job.RUNNING
    assert seen("terminated", status="failed", run_reason="stopped_by_user").state is Job.CANCELED
    assert seen("done", status="done", exit_status=0).state is Job.SUCCEEDED
    assert seen("done", status="done", exit_status=None).state is Job.UNKNOWN, "dstack's word alone is no success"
    assert seen("done", status="failed", exit_status=1).state is Job.UNKNOWN
    assert seen("hibernating").state is Job.UNKNOWN


@pytest.mark.slow
async def test_a_long_log_is_read_page_by_page(backend: DstackBackend, engine: DstackEngine) -> None:
    handle = await backend.submit(job("seq 2500"), PLACE, "long", secrets={})
    await ended(backend, handle)
    whole = "".join(f"{n}\n" for n in range(1, 2501))
    assert (await backend.logs(handle)).text == whole
    assert (await backend.logs(handle, len(whole) - 5, 3)).text == whole[-5:-2]
    assert (await backend.logs(handle, -5)).text == "2500\n"


async def test_an_endless_log_stops_and_a_malformed_log_is_rejected(
    backend: DstackBackend, engine: DstackEngine, server: FakeDstack, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    monkeypatch.setattr("gpuwarden.backends.dstack.MOST_PAGES", 5)
    handle = await backend.submit(engine.job("true"), PLACE, "endless", secrets={})
    await ended(backend, handle)
    pages = iter(range(1_000))
    monkeypatch.setattr(server, "on_logs_poll", lambda body: (200, {"logs": [], "next_token": f"page-{next(pages)}"}))
    assert (await backend.logs(handle)).text == "" and next(pages) == 5
    odd = {"logs": [{"message": "é"}], "next_token": None}
    monkeypatch.setattr(server, "on_logs_poll", lambda body: (200, odd))
    with pytest.raises(BadReply) as refused:
        await backend.logs(handle)
    wording(refused)


@pytest.mark.parametrize("lease", ["x" * 256, "../../outside", "/etc/hostname", ".", "", "a\0b"])
async def test_another_members_tag_never_names_a_file(
    server: FakeDstack,
    backend: DstackBackend,
    engine: DstackEngine,
    provider: DstackProvider,
    tmp_path: Path,
    lease: str,
) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path.parent / "outside.json").write_text("[1]")
    place = PLACE.model_copy(update={"instance_id": lease})
    handle = await backend.submit(engine.job("sleep 60"), place, "theirs", secrets={})
    listed = await provider.list()
    assert isinstance(listed, Known)
    (one,) = listed.value
    assert one.id == handle.run_dir.rpartition("/")[2] and one.why.startswith("run ")


async def test_every_page_of_a_list_is_read(
    backend: DstackBackend, engine: DstackEngine, server: FakeDstack, provider: DstackProvider
) -> None:
    handle = await backend.submit(job("sleep 60"), PLACE, "first", secrets={})
    first = server.runs[handle.run_dir.rpartition("/")[2]]
    first["submitted_at"] = "2026-11-22T10:00:00Z"
    for n in range(230):
        run = copy.deepcopy(first)
        run |= {"id": f"00000000-0000-4000-8000-{n:012}", "submitted_at": "2026-11-22T12:00:00Z", "status": "pending"}
        run["run_spec"]["configuration"]["tags"] = {}
        server.runs[run["id"]] = run
    listed = await provider.list()
    assert isinstance(listed, Known) and len(listed.value) == 231
    await backend.stop(handle, grace_s=1)


# ------------------------------------------------------------------------------------------------------------ the meter


async def test_the_quote_is_the_first_available_offer(server: FakeDstack, provider: DstackProvider) -> None:
    price = await provider.quote(Resources(gpu="H100"))
    assert isinstance(price, Known)
    assert (price.value.price_usd_per_hour, price.value.platform) == (2.49, "dstack/main")
    assert "us-east-1" in price.value.source, "the first one is not available"
    assert not server.runs
    server.offers = server.offers[:1]
    with pytest.raises(NoCapacity):
        await provider.quote(Resources(gpu="H100"))
    server.replies["/get_plan"] = (500, b"{}")
    assert isinstance(await provider.quote(Resources(gpu="H100")), Unknown)


async def test_a_reservation_takes_the_checked_price_to_the_run(
    server: FakeDstack, provider: DstackProvider, backend: DstackBackend, engine: DstackEngine
) -> None:
    made = await provider.create(Resources(gpu="H100", max_price_usd_per_hour=2.49), "lease-9")
    assert isinstance(made, Known) and made.value.place is not None
    assert (made.value.meter, made.value.token, server.runs) == (False, "lease-9", {})
    handle = await backend.submit(job("sleep 60"), made.value.place, "j1", secrets={})
    (run,) = server.runs.values()
    assert run["run_spec"]["configuration"]["max_price"] == 2.49
    await until(backend, handle, lambda o: o.state is Job.RUNNING)
    found = await provider.get("lease-9")
    assert isinstance(found, Known) and found.value is not None
    assert (found.value.state, found.value.meter, found.value.price_usd_per_hour) == (InstanceState.RUNNING, True, 2.49)
    assert await provider.terminate("lease-9") == Known(None)
    assert (await ended(backend, handle)).state is Job.CANCELED
    over = await provider.get("lease-9")
    assert isinstance(over, Known) and over.value is not None
    assert (over.value.state, over.value.meter, over.value.cost_usd) == (InstanceState.GONE, False, 0.0125)
    assert await provider.terminate("lease-9") == Known(None)
    assert await provider.list() == Known(())


async def test_an_ended_run_whose_machine_idles_still_bills(
    server: FakeDstack, provider: DstackProvider, backend: DstackBackend, engine: DstackEngine, wording: Wording
) -> None:
    made = await provider.create(Resources(gpu="H100"), "lease-8")
    assert isinstance(made, Known) and made.value.place is not None
    handle = await backend.submit(job("true"), made.value.place, "j1", secrets={})
    assert (await ended(backend, handle)).meter is None, "the run has ended, and nobody knows about its machine"
    fleet = recorded("fleet")
    server.fleets = [fleet]
    fleet["instances"][0]["created"] = "2999-01-01T00:00:00Z"
    left = await provider.get("lease-8")
    assert isinstance(left, Known) and left.value is not None
    assert (left.value.state, left.value.meter) == (InstanceState.TERMINATING, True)
    wording(left.value.why, "gpus")
    fleet["instances"][0]["created"] = "2026-01-01T00:00:00Z"
    own = await provider.get("lease-8")
    assert isinstance(own, Known) and own.value is not None and own.value.state is InstanceState.GONE
    listed = await provider.list()
    assert isinstance(listed, Known), "the machine was there before: it is the fleet's, and shown as such"
    assert [(i.meter, i.price_usd_per_hour) for i in listed.value] == [(True, 2.49)]
    server.replies["/fleets/list"] = (503, b"")
    assert isinstance(await provider.get("lease-8"), Unknown)


async def test_a_machine_of_unknown_address_or_state_may_belong_to_the_run(
    server: FakeDstack, provider: DstackProvider, backend: DstackBackend, engine: DstackEngine
) -> None:
    """If the run ended while its machine was being provisioned, the address may be missing in either record."""
    made = await provider.create(Resources(gpu="H100"), "lease-6")
    assert isinstance(made, Known) and made.value.place is not None
    await ended(backend, await backend.submit(job("true"), made.value.place, "j1", secrets={}))
    (run,) = server.runs.values()
    machine = run["jobs"][0]["job_submissions"][0]["job_provisioning_data"]
    fleet, own = recorded("fleet"), machine["hostname"]
    server.fleets = [fleet]
    one = fleet["instances"][0] | {"created": "2999-01-01T00:00:00Z"}
    fleet["instances"] = [one]

    async def state(hostname: str | None, theirs: str | None, **changes: Any) -> InstanceState:
        machine["hostname"] = hostname
        fleet["instances"][0] = one | {"hostname": theirs} | changes
        found = await provider.get("lease-6")
        assert isinstance(found, Known) and found.value is not None
        return found.value.state

    assert await state(None, own) is InstanceState.TERMINATING
    assert await state(own, None, status="provisioning") is InstanceState.TERMINATING
    assert await state(own, own, status="hibernating") is InstanceState.TERMINATING, "a state that is not known"
    assert await state(own, own, status="terminated") is InstanceState.GONE
    assert await state(own, "192.0.2.77") is InstanceState.GONE
    assert await state(None, None, region="elsewhere-1") is InstanceState.GONE
    fleet["instances"][0] = one | {"status": "hibernating"}
    listed = await provider.list()
    assert isinstance(listed, Known) and {i.id for i in listed.value} == {"lease-6", one["id"]}


async def test_a_copy_of_a_runs_configuration_is_another_run(
    server: FakeDstack, provider: DstackProvider, backend: DstackBackend, engine: DstackEngine
) -> None:
    """If a project member runs gpuwarden's configuration again, the copy has the same tags but another name."""
    made = await provider.create(Resources(gpu="H100"), "lease-5")
    assert isinstance(made, Known) and made.value.place is not None
    handle = await backend.submit(job("sleep 60"), made.value.place, "j1", secrets={})
    copied = copy.deepcopy(server.runs[handle.run_dir.rpartition("/")[2]])
    copied |= {
        "id": "00000000-0000-4000-8000-000000000001",
        "status": "pending",
        "submitted_at": "2999-01-01T00:00:00Z",
    }
    copied["run_spec"]["run_name"] = copied["run_spec"]["configuration"]["name"] = "copied"
    server.runs[copied["id"]] = copied
    listed = await provider.list()
    assert isinstance(listed, Known) and {i.id for i in listed.value} == {"lease-5", copied["id"]}, "both may bill"
    assert {i.token for i in listed.value if i.id == copied["id"]} == {""}
    assert await provider.terminate("lease-5") == Known(None)
    assert (await ended(backend, handle)).state is Job.CANCELED
    assert copied["status"] == "pending", "another's run is not ended"
    over = await provider.get("lease-5")
    assert isinstance(over, Known) and over.value is not None and over.value.state is InstanceState.GONE


async def test_the_cloud_itself_must_confirm_the_end(
    server: FakeDstack,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    web: Web,
    wording: Wording,
) -> None:
    clock = clock_of_today()
    account = LambdaAccount(tmp_path / "lambda", clock)
    url = web.add(account)
    monkeypatch.setenv("LAMBDA_API_KEY", KEY)
    monkeypatch.setenv("GPUWARDEN_LAMBDA_CLOUD_URL", url)
    order = {"name": "gpus-0", "instance_type_name": "gpu_1x_h100", "region_name": "us-east-1", "ssh_key_names": ["d"]}
    rented = account.rent("gpus-0", Resources(gpu="H100 (80 GB PCIe)"), order=order)
    profile = load_profile("dstack").model_copy(update={"id": "dstack/main"})
    alone = DstackProvider(profile, tmp_path / "state", clock, server.env)
    asking = DstackProvider(profile, tmp_path / "state", clock, server.env | {"LAMBDA_API_KEY": KEY})
    made = await alone.create(Resources(gpu="H100"), "lease-7")
    assert isinstance(made, Known) and made.value.place is not None
    backend = DstackBackend(clock, server.env)
    await ended(backend, await backend.submit(job("true"), made.value.place, "j1", secrets={}))
    (run,) = server.runs.values()
    run["jobs"][0]["job_submissions"][0]["job_provisioning_data"]["instance_id"] = rented.id
    word = await alone.get("lease-7")
    assert isinstance(word, Known) and word.value is not None and word.value.state is InstanceState.GONE
    still = await asking.get("lease-7")
    assert isinstance(still, Known) and still.value is not None
    assert (still.value.state, still.value.meter) == (InstanceState.TERMINATING, True)
    wording(still.value.why, "lambda", rented.id)
    account.faults = [Fault("other", ".", count=99, status=503, body=b"")]
    assert isinstance(await asking.get("lease-7"), Unknown)
    account.faults = []
    account.cloud.terminate(rented.id)
    clock.time += 600
    gone = await asking.get("lease-7")
    assert isinstance(gone, Known) and gone.value is not None and gone.value.state is InstanceState.GONE


async def test_gateways_and_other_runs_are_disclosed(
    server: FakeDstack, provider: DstackProvider, backend: DstackBackend, engine: DstackEngine, wording: Wording
) -> None:
    server.gateways = [{"id": "5e153a59-4f9b-4ab4-8b6e-673c09e8e3c9", "name": "web", "status": "running"}]
    handle = await backend.submit(job("sleep 60"), PLACE, "other", secrets={})
    listed = await provider.list()
    assert isinstance(listed, Known)
    run, gateway = listed.value
    wording(run.why.partition(":")[0], "gw-other")
    wording(gateway.why.partition(":")[0])
    assert all(i.meter is not False for i in listed.value)
    await backend.stop(handle, grace_s=1)


async def test_an_inaccessible_list_is_unknown_not_empty(server: FakeDstack, tmp_path: Path) -> None:
    profile = load_profile("dstack").model_copy(update={"id": "dstack/other"})
    provider = DstackProvider(profile, tmp_path / "state", SystemClock(), server.env)
    assert isinstance(await provider.get("lease-1"), Unknown)
    assert isinstance(await provider.list(), Unknown)
    with pytest.raises(NotFound):
        await provider.terminate("lease-1")


async def test_a_project_without_a_fleet_is_reported_by_the_check(
    server: FakeDstack, provider: DstackProvider, wording: Wording
) -> None:
    (finding,) = await provider.check()
    assert finding.severity is Severity.ERROR
    wording(finding.message)
    server.fleets = [recorded("fleet")]
    assert await provider.check() == []
    assert await provider.account_id() == Known(f"admin at {server.env['DSTACK_SERVER_URL']}")


def test_the_backend_is_found_by_name() -> None:
    backend: Backend = load_backend("dstack", SystemClock())
    assert (backend.name, backend.seals, backend.takes_inputs) == ("dstack", False, False)


# ------------------------------------------------------------------------------------------------- a job's whole life


@pytest.mark.slow
@pytest.mark.parametrize("taken", [False, True])
async def test_full_lifecycle_with_and_without_an_interruption(
    server: FakeDstack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text("[caps]\nper_job_usd = 5\nper_day_usd = 50\nper_instance_usd = 5\n")
    with hub_server(tmp_path / "hub") as hub:
        env = {**hub.env, **server.env, "GPUWARDEN_HOME": str(tmp_path / "home"), "GPUWARDEN_POLICY": str(policy)}
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        server.fleets = [recorded("fleet") | {"instances": []}]
        clock = clock_of_today()
        ctx = open_context("cli", env=env, clock=clock)
        spec = job(
            "sleep 600" if taken else "echo once",
            outputs=["/hub/models/rehearsal/walked"],
            max_cost_usd=2.0,
            interruptible=taken,
        )
        checked = await submit(ctx, spec)
        assert checked.receipt, checked.findings
        assert not server.runs, "a dry run starts nothing"
        launched = (await submit(ctx, spec, receipt=checked.receipt)).job
        assert launched is not None

        async def next_look() -> JobRecord:
            run = next(iter(server.runs.values()), None)
            if taken and run and run["status"] == "running" and len(server.runs) == 1:
                server.processes.kill(run["id"])
                server.end(run["id"], "failed", "interrupted_by_no_capacity", None)
            if run is None or run["status"] not in {"submitted", "provisioning", "running"}:
                clock.time += 30  # a running job is a real process, which takes real time
            assert not await reconcile(ctx)
            return read_job(ctx.ledger, launched.id)

        seen = await soon(next_look, every=0.05, good=lambda seen: seen.state in TERMINAL_JOBS)
        assert (seen.state, seen.reason) == (
            (Job.FAILED, Code.TAKEN_FOR_GOOD) if taken else (Job.SUCCEEDED, Code.EXITED)
        )
        (run,) = server.runs.values()  # another machine is new spending, which needs approval first
        assert run["run_spec"]["configuration"]["max_price"] == 2.49
        lease = run["run_spec"]["configuration"]["tags"]["gpuwarden-lease"]
        for _ in range(10):
            clock.time += 30
            assert not await reconcile(ctx)
        assert read_lease(ctx.ledger, lease).state is Lease.STOPPED
        assert read_lease(ctx.ledger, lease).billed == 0.0125, "the engine's own reckoning"
        server.gateways = [{"id": "5e153a59-4f9b-4ab4-8b6e-673c09e8e3c9", "name": "web", "status": "running"}]
        [row] = (await list_instances(ctx)).rows
        assert (row.platform, row.ours) == ("dstack/main", False) and row.billing is not False
        ctx.ledger.close()
