"""The sky backend and provider: SkyPilot's real SDK against a double of its API server."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from contract_backend import EngineContract, ended
from gpuwarden.backends.sky import STATES, SkyBackend
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import BadReply, BadRequest
from gpuwarden.core.models import Place, StopResult
from gpuwarden.core.states import Job
from gpuwarden.remote.sky.client import SkyClient
from sky_kit import SkyEngine, SkyServer, sky_env
from sshd import Sshd

pytestmark = [pytest.mark.anyio, pytest.mark.real, pytest.mark.usefixtures("patient_sky")]


@pytest.fixture
def sky(sky_server: SkyServer) -> SkyClient:
    return SkyClient(sky_env(sky_server.folder, sky_server.url))


@pytest.fixture
async def backend(sky: SkyClient, sshd: Sshd) -> AsyncIterator[SkyBackend]:
    backend = SkyBackend(SystemClock(), sshd.config, sky)
    yield backend
    await backend.aclose()


@pytest.fixture
def place(sky_server: SkyServer, tmp_path: Path) -> Place:
    """The test's own cluster, reached through the alias `box` in the SSH configuration."""
    name = f"gw-{tmp_path.name}".replace("_", "-")[:40].rstrip("-")
    sky_server.up(name)
    return Place(platform="sky/aws", instance_id=name, host="box", run_root=str(tmp_path / "runs"))


@pytest.fixture
def engine(sky_server: SkyServer) -> SkyEngine:
    return SkyEngine(sky_server)


@pytest.mark.prove
class TestSky(EngineContract):
    pass


@pytest.mark.prove
async def test_a_job_that_never_reached_its_runner_shows_skypilots_log(
    backend: SkyBackend, place: Place, engine: SkyEngine, sky_server: SkyServer
) -> None:
    handle = await backend.submit(engine.job("true"), place, "s-none", secrets={})
    await ended(backend, handle)
    shutil.rmtree(handle.run_dir)
    queue = sky_server.jobs[str(place.instance_id)]
    queue[-1].process.wait()
    queue[-1] = replace(queue[-1], process=subprocess.Popen(["false"]))
    queue[-1].process.wait()
    queue[-1].log.write_text("\x1b[31msetup failed: no disk\x1b[0m\n")
    seen = (await backend.poll([handle]))["s-none"]
    assert (seen.state, seen.meter) == (Job.FAILED, True) and "no disk" in seen.why
    chunk = await backend.logs(handle, 6)
    assert (chunk.text, chunk.size) == ("failed: no disk\n", 22)
    assert (await backend.logs(handle, chunk.next)).text == ""


@pytest.mark.prove
async def test_secrets_use_skypilots_secrets_and_the_job_gets_only_its_own(
    backend: SkyBackend, place: Place, engine: SkyEngine, sky_server: SkyServer
) -> None:
    spec = engine.job('echo "$TOKEN" | wc -c; echo "${GPUWARDEN_ORDER-none}"', secrets=["TOKEN"])
    handle = await backend.submit(spec, place, "s-secret", secrets={"TOKEN": "hunter22-hunter22"})
    assert (await ended(backend, handle)).state is Job.SUCCEEDED
    assert (await backend.logs(handle)).text.split() == ["18", "none"]
    task = next(body["task"] for path, body in reversed(sky_server.asked) if path == "/exec")
    assert "GPUWARDEN_ORDER" in task.partition("\nsecrets:")[2], "in no other part of the task"
    assert "hunter22" not in task.partition("\nsecrets:")[0]
    written = b"".join(f.read_bytes() for f in Path(handle.run_dir).rglob("*") if f.is_file())
    assert b"hunter22" not in written


@pytest.mark.prove
async def test_a_job_that_is_being_submitted_is_not_gone(
    backend: SkyBackend, place: Place, engine: SkyEngine, sky_server: SkyServer
) -> None:
    await ended(backend, await backend.submit(engine.job("true"), place, "s-first", secrets={}))
    row = next(r for r in reversed(sky_server.requests.values()) if r["name"] == "sky.exec")
    own = {"request_id": "on-its-way", "status": "RUNNING", "body": row["body"].replace("gw-s-first", "gw-s-late")}
    handle = await backend.handle_of(place, "s-late")
    sky_server.requests["on-its-way"] = {**row, **own}
    assert await backend.stop(handle, grace_s=0) is StopResult.PENDING
    del sky_server.requests["on-its-way"]
    assert await backend.stop(handle, grace_s=0) is StopResult.GONE


@pytest.mark.prove
async def test_an_unknown_state_is_rejected(
    backend: SkyBackend, place: Place, engine: SkyEngine, sky_server: SkyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = await backend.submit(engine.job("true"), place, "s-odd", secrets={})
    await ended(backend, handle)
    monkeypatch.setitem(STATES, "SUCCEEDED", "WAITING_FOR_GODOT")
    monkeypatch.delitem(STATES, "SUCCEEDED")
    with pytest.raises(BadReply, match="SUCCEEDED"):
        await backend.poll([handle])


@pytest.mark.prove
def test_an_option_that_skypilot_lacks_is_refused(engine: SkyEngine) -> None:
    with pytest.raises(BadRequest, match="partition"):
        SkyBackend(SystemClock()).settle(engine.job("true", options={"partition": "low"}))
