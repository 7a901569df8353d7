"""The dstack backend against the real dstack server, started on loopback without a network.

With no cloud and no Docker here, the tests play the part of dstack's background work and machines, as `dstack_kit`
describes. Sign-in, projects, plans, names, lists, logs, stops, and every refusal come from the server.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from contract_backend import EngineContract, ended, until
from dstack_kit import PLACE, TOKEN, DstackEngine, RealDstack, recorded
from gpuwarden.backends._dstack_api import Run
from gpuwarden.backends._dstack_options import run_name
from gpuwarden.backends.dstack import DstackBackend
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import AuthFailed, BadRequest, Conflict, NoCapacity, NotFound
from gpuwarden.core.models import InstanceState, Known, Place, Resources, StopResult, Unknown
from gpuwarden.core.rules import Severity
from gpuwarden.core.states import Job
from gpuwarden.profiles import load_profile
from gpuwarden.providers.dstack import DstackProvider
from real_parts import need

pytestmark = [pytest.mark.anyio, pytest.mark.prove, pytest.mark.real("dstack")]
DSTACK = Path(os.environ.get("GPUWARDEN_DSTACK") or "/nowhere/dstack")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealDstack]:
    need("dstack's server (tools/install_engines.sh), which GPUWARDEN_DSTACK names", DSTACK.exists())
    real = RealDstack(DSTACK, tmp_path_factory.mktemp("dstack"))
    try:
        yield real.start()
    finally:
        real.close()


@pytest.fixture(autouse=True)
def forgotten(server: RealDstack) -> None:
    """Delete the runs of earlier tests, whose tokens are used again."""
    server.processes.close()
    server.write("UPDATE runs SET deleted = 1, status = 'TERMINATED'")


@pytest.fixture
def place() -> Place:
    return PLACE


def guest_token(server: RealDstack, name: str) -> str:
    """Return the token of a new user who belongs to no project."""
    server.call("/api/users/create", {"username": name, "global_role": "user", "email": None})
    return str(server.call("/api/users/refresh_token", {"username": name})["creds"]["token"])


@pytest.fixture
def backend(server: RealDstack) -> DstackBackend:
    return DstackBackend(SystemClock(), server.env)


@pytest.fixture
def engine(server: RealDstack, backend: DstackBackend, monkeypatch: pytest.MonkeyPatch) -> DstackEngine:
    return DstackEngine(server, backend, monkeypatch)


@pytest.fixture
def provider(server: RealDstack, tmp_path: Path) -> DstackProvider:
    profile = load_profile("dstack").model_copy(update={"id": "dstack/main"})
    return DstackProvider(profile, tmp_path / "state", SystemClock(), server.env)


class TestRealDstack(EngineContract):
    pass


async def test_the_server_understands_everything_gpuwarden_sends(backend: DstackBackend, engine: DstackEngine) -> None:
    options = {
        "backends": ["runpod", "lambda"], "regions": ["us-east-1"], "fleets": ["gpus"], "instance_types": ["x"],
        "wait_s": 60, "idle_s": 300, "min_gpu_percent": 5, "python": "3.12",
    }  # fmt: skip
    spec = engine.job("true", interruptible=True, gpu_count=8, disk_gb=200, secrets=["HF_TOKEN"], options=options)
    handle = await backend.submit(spec, PLACE, "A_full-one", secrets={})
    run = await backend._server().run_with_id("main", handle.run_dir.rpartition("/")[2])
    assert run is not None and run.run_spec.run_name == run_name("A_full-one")
    assert (run.tags["gpuwarden-lease"], run.attempt, run.project_name) == ("lease-1", 1, "main")
    await backend.stop(handle, grace_s=1)


async def test_dstack_restores_escaped_variables(backend: DstackBackend, engine: DstackEngine) -> None:
    value = "$1 $$2 ${{ secrets.X }} ${HOME} $"
    handle = await backend.submit(engine.job("true", env={"V": value}), PLACE, "words", secrets={})
    project, ident = handle.run_dir.split("/")[2:]
    sent = engine.world.call(f"/api/project/{project}/runs/get", {"id": ident})["run_spec"]["configuration"]  # type: ignore[union-attr]
    code = (
        "import json, sys\n"
        "from dstack._internal.utils.interpolator import VariablesInterpolator as V\n"
        "print(V({'secrets': {}}).interpolate_or_error(json.load(sys.stdin)), end='')\n"
    )
    argv = [str(DSTACK.with_name("python")), "-c", code]
    done = subprocess.run(argv, input=json.dumps(sent["env"]["V"]), capture_output=True, text=True, check=True)
    assert done.stdout == value


async def test_rights_and_refusals_are_the_servers_own(server: RealDstack, backend: DstackBackend) -> None:
    guest = DstackBackend(SystemClock(), server.env | {"DSTACK_TOKEN": guest_token(server, "guest")})
    spec = DstackEngine.job(None, "true")  # type: ignore[arg-type]
    with pytest.raises(AuthFailed, match="Access denied"):
        await guest.submit(spec, PLACE, "guest-1", secrets={})
    assert isinstance(await guest.find(PLACE, "guest-1"), Unknown), "dstack lists nothing for a guest"
    stranger = DstackBackend(SystemClock(), server.env | {"DSTACK_TOKEN": "a-token-of-nobody"})
    with pytest.raises(AuthFailed, match="Invalid token"):
        await stranger.submit(spec, PLACE, "guest-1", secrets={})
    nowhere = PLACE.model_copy(update={"platform": "dstack/nowhere"})
    with pytest.raises(NotFound):
        await backend.submit(spec, nowhere, "guest-1", secrets={})
    with pytest.raises(BadRequest):
        await backend._server().apply("main", {"run_name": "NOT_ALLOWED", "configuration": {"type": "task"}})
    assert TOKEN not in str(await guest.check(PLACE))


async def test_a_guest_gets_unknown_instead_of_an_empty_list(server: RealDstack, tmp_path: Path) -> None:
    env = server.env | {"DSTACK_TOKEN": guest_token(server, "other")}
    profile = load_profile("dstack").model_copy(update={"id": "dstack/main"})
    guest = DstackProvider(profile, tmp_path / "state", SystemClock(), env)
    assert isinstance(await guest.get("lease-1"), Unknown)
    assert isinstance(await guest.list(), Unknown)


async def test_stopping_an_unknown_run_is_silently_accepted(backend: DstackBackend, engine: DstackEngine) -> None:
    await backend._server().stop("main", "gw-never-there", abort=False)
    assert await backend.find(PLACE, "never-there") == Known(None)


async def test_a_second_apply_starts_nothing_while_the_first_runs(
    server: RealDstack, backend: DstackBackend, engine: DstackEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await backend.submit(engine.job("sleep 60"), PLACE, "twice", secrets={})
    looks, plain = iter([False]), backend._ours

    async def blind(project: str, token: str) -> Run | None:
        return await plain(project, token) if next(looks, True) else None

    monkeypatch.setattr(backend, "_ours", blind)  # as if two processes looked before either one started the run
    assert await backend.submit(engine.job("sleep 60"), PLACE, "twice", secrets={}) == first
    rows = server.write("SELECT count(*) FROM runs WHERE run_name = 'gw-twice'")
    assert rows == [(1,)]
    await backend.stop(first, grace_s=1)


async def test_a_foreign_run_with_the_same_name_is_left_alone(
    server: RealDstack, backend: DstackBackend, engine: DstackEngine
) -> None:
    theirs = {"run_name": "gw-theirs", "configuration": {"type": "task", "commands": ["sleep 60"]}}
    server.call("/api/project/main/runs/apply", {"plan": {"run_spec": theirs}, "force": False})
    with pytest.raises(Conflict, match="admin"):
        await backend.submit(engine.job("true"), PLACE, "theirs", secrets={})
    server.write("UPDATE runs SET status = 'DONE' WHERE run_name = 'gw-theirs'")
    with pytest.raises(Conflict, match="admin"):
        await backend.submit(engine.job("true"), PLACE, "theirs", secrets={})


async def test_the_meter_follows_a_run_from_reservation_to_bill(
    server: RealDstack, backend: DstackBackend, engine: DstackEngine, provider: DstackProvider
) -> None:
    with pytest.raises(NoCapacity):
        await provider.quote(Resources(gpu="H100"))  # the plan is real, but no cloud is configured
    provider._write("lease-r", {"at": SystemClock().now(), "usd": 2.49, "most": 2.49, "ended": False})
    handle = await backend.submit(engine.job("sleep 60"), provider._place("lease-r"), "metered", secrets={})
    await until(backend, handle, lambda o: o.state is Job.RUNNING)
    found = await provider.get("lease-r")
    assert isinstance(found, Known) and found.value is not None
    assert (found.value.meter, found.value.price_usd_per_hour) == (True, recorded("machine")["price"])
    assert await provider.terminate("lease-r") == Known(None)
    assert (await ended(backend, handle)).state is Job.CANCELED
    assert await backend.stop(handle) is StopResult.GONE
    over = await provider.get("lease-r")
    assert isinstance(over, Known) and over.value is not None
    assert over.value.state is InstanceState.GONE and over.value.cost_usd is not None


async def test_a_deleted_run_can_still_be_polled_by_its_id(
    server: RealDstack, backend: DstackBackend, engine: DstackEngine
) -> None:
    handle = await backend.submit(engine.job("echo once"), PLACE, "deleted", secrets={})
    await ended(backend, handle)
    server.call("/api/project/main/runs/delete", {"runs_names": ["gw-deleted"]})
    assert (await backend.poll([handle]))["deleted"].state is Job.SUCCEEDED
    assert (await backend.logs(handle)).text == "once\n"
    assert await backend.find(PLACE, "deleted") == Known(None)


async def test_every_page_of_a_list_is_read(
    backend: DstackBackend, engine: DstackEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuwarden.backends._dstack_api.PAGE", 2)
    handles = [await backend.submit(engine.job("sleep 60"), PLACE, f"page-{n}", secrets={}) for n in range(5)]
    before = engine.questions()
    seen = await backend.poll(handles)
    assert len(seen) == 5 and engine.questions() - before == 3, "two full pages and one that is not"
    for handle in handles:
        await backend.stop(handle, grace_s=1)


async def test_a_fleet_with_no_running_nodes_passes_the_check(server: RealDstack, provider: DstackProvider) -> None:
    (finding,) = await provider.check()
    assert finding.severity is Severity.ERROR
    fleet = {"configuration": {"type": "fleet", "name": "gpus", "nodes": {"min": 0, "max": 2}}, "profile": {}}
    server.call("/api/project/main/fleets/apply", {"plan": {"spec": fleet}, "force": False})
    assert await provider.check() == []
    assert await provider.account_id() == Known(f"admin at {server.env['DSTACK_SERVER_URL']}")
    listed = await provider.list()
    assert isinstance(listed, Known) and listed.value == ()
