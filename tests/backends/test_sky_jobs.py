"""The managed jobs backend: SkyPilot's real SDK against a double of its API server, whose machines are folders."""

from __future__ import annotations

import base64
import io
import json
import random
import re
import subprocess
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from contract_backend import EngineContract, ended, until
from gpuwarden.backends._sky_jobs_task import command, named, stem_of
from gpuwarden.backends.sky import SkyBackend
from gpuwarden.backends.sky_jobs import STATES, SkyJobsBackend, observation
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import BadReply, BadRequest, Conflict, NotFound, NotSupported, Unreachable, WardenError
from gpuwarden.core.models import Artifact, JobSpec, Known, Place, StopResult
from gpuwarden.core.reasons import Code
from gpuwarden.core.states import Job
from gpuwarden.remote.runner import upload_process
from gpuwarden.remote.runner.uploader import ArtifactUploader
from gpuwarden.remote.sky.client import SkyClient
from gpuwarden.remote.sky.rows import Done, ManagedJob, ManagedQueue
from sky_kit import NOW, FarManaged, ManagedEngine, SkyServer, sky_env
from waiting import soon
from wording import Wording

pytestmark = [pytest.mark.anyio, pytest.mark.real, pytest.mark.usefixtures("patient_sky")]
PLACE = Place(platform="sky-jobs/aws", run_root="~/gpuwarden")


@pytest.fixture
def backend(sky_server: SkyServer) -> SkyJobsBackend:
    return SkyJobsBackend(SystemClock(), SkyClient(sky_env(sky_server.folder, sky_server.url)))


@pytest.fixture
def place(sky_server: SkyServer) -> Place:
    for job in sky_server.managed_jobs:
        job.end(job.status if job.row()["end_at"] else "CANCELLED")
        job.name = f"over-{job.id}"  # a controller's queue keeps jobs forever
    return PLACE


@pytest.fixture
def engine(sky_server: SkyServer) -> ManagedEngine:
    return ManagedEngine(sky_server)


@pytest.mark.prove
class TestSkyJobs(EngineContract):
    pass


@pytest.mark.prove
async def test_a_request_that_the_sdk_repeats_rents_one_machine(
    backend: SkyJobsBackend, place: Place, engine: ManagedEngine, sky_server: SkyServer
) -> None:
    with engine.cut(), pytest.raises(Unreachable):
        await backend.submit(engine.job("sleep 1800"), place, "m-twice", secrets={})
    first = next(job for job in sky_server.managed_jobs if job.name == "gw-m-twice-a1")
    if sum(job.name == first.name for job in sky_server.managed_jobs) == 1:  # this SDK did not repeat it
        sky_server.do_jobs__launch({"task": json.dumps(first.task), "name": first.name})
    handle = await backend.submit(engine.job("sleep 1800"), place, "m-twice", secrets={})
    states = [job.status for job in sky_server.managed_jobs if job.name == first.name]
    assert states[0] == "RUNNING" and set(states[1:]) == {"CANCELLED"}
    assert (await backend.poll([handle]))["m-twice"].state is Job.RUNNING
    await backend.stop(handle)


@pytest.mark.prove
async def test_a_recovery_is_shown_and_starts_in_an_empty_folder(
    backend: SkyJobsBackend, place: Place, engine: ManagedEngine, sky_server: SkyServer, wording: Wording
) -> None:
    handle = await backend.submit(engine.job("ls; touch saved; echo ready; sleep 1800"), place, "m-spot", secrets={})
    job = sky_server.managed_jobs[-1]

    async def printed() -> bool:
        return (await backend.logs(handle)).text.endswith("ready\n")

    await soon(printed)
    job.end("RECOVERING")
    seen = (await backend.poll([handle]))["m-spot"]
    assert (seen.state, seen.meter, seen.reason) == (Job.QUEUED, None, Code.ENGINE_QUEUE)
    wording(seen.why)
    assert (await backend.logs(handle)).text == "", "nobody is asked for the log of a job that has no machine"
    job.recover()
    seen = await until(backend, handle, lambda o: o.state is Job.RUNNING)
    assert seen.meter is True and seen.allocation is not None and seen.allocation.restarts == 1
    await soon(printed)
    assert (await backend.logs(handle)).text == "ready\n", "nothing that the last machine had"
    assert await backend.stop(handle) is StopResult.STOPPED


@pytest.mark.prove
async def test_secrets_use_skypilots_secrets_and_the_job_gets_only_its_own(
    backend: SkyJobsBackend, place: Place, engine: ManagedEngine, sky_server: SkyServer
) -> None:
    spec = engine.job('echo "$TOKEN" | wc -c; echo "${GPUWARDEN_ORDER-none}"; echo $TOKEN', secrets=["TOKEN"])
    handle = await backend.submit(spec, place, "m-secret", secrets={"TOKEN": "hunter22-hunter22"})
    assert (await ended(backend, handle)).state is Job.SUCCEEDED
    assert (await backend.logs(handle)).text.split() == ["18", "none", "***"]
    task = next(body["task"] for path, body in reversed(sky_server.asked) if path == "/jobs/launch")
    assert "hunter22" not in task.partition("\nsecrets:")[0] + json.dumps(sky_server.managed_jobs[-1].row())
    home = sky_server.folder / f"machine-{sky_server.managed_jobs[-1].id}-0"
    assert b"hunter22" not in b"".join(f.read_bytes() for f in home.rglob("*") if f.is_file())


@pytest.mark.prove
async def test_a_script_gets_its_arguments_and_a_refused_launch_shows_why(
    backend: SkyJobsBackend, place: Place, sky_server: SkyServer
) -> None:
    words = ("a b", "$HOME", "'\"", "END_OF_FILES", "ü")
    spec = JobSpec(platform="sky-jobs/aws", script="import sys\nprint(ascii(sys.argv[1:]))\n", args=words)
    handle = await backend.submit(spec, place, "m-args", secrets={})
    assert (await ended(backend, handle)).exit_code == 0
    assert (await backend.logs(handle)).text == f"{list(words)!a}\n"
    sky_server.refusals["jobs/launch"] = ("ResourcesUnavailableError", "no A100 anywhere")
    try:
        with pytest.raises(Exception, match="no A100"):
            await backend.submit(spec, place, "m-none", secrets={})
    finally:
        sky_server.refusals.clear()
    lost = backend._handle(place, "m-none")
    seen = (await backend.poll([lost]))["m-none"]  # as seen by a process started after a kill
    assert (seen.state, seen.meter, seen.reason) == (Job.FAILED, False, Code.NOT_STARTED) and "no A100" in seen.why
    assert await backend.find(place, "m-none") == Known(None)


@pytest.mark.prove
async def test_a_pending_launch_is_found_and_not_resent(
    backend: SkyJobsBackend, place: Place, engine: ManagedEngine, sky_server: SkyServer
) -> None:
    sky_server.held = True
    try:
        with anyio.move_on_after(60):
            handle = await backend.submit(engine.job("true"), place, "m-slow", secrets={})
        sent = sky_server.count("/jobs/launch")
        later = {"name": "sky.status", "status": "SUCCEEDED", "created_at": NOW + 1}
        row = next(r for r in sky_server.requests.values() if r["name"] == "sky.jobs.launch")
        sky_server.requests |= {f"r{n}": {**row, **later, "request_id": f"r{n}"} for n in range(200)}
        assert await backend.submit(engine.job("true"), place, "m-slow", secrets={}) == handle
        assert sky_server.count("/jobs/launch") == sent
        assert await backend.find(place, "m-slow") == Known(handle)
        assert (await backend.poll([handle]))["m-slow"].state is Job.QUEUED
        assert await backend.stop(handle) is StopResult.PENDING
        with pytest.raises(Conflict):
            await backend.submit(engine.job("true"), place, "m-slow", secrets={}, attempt=2)
    finally:
        sky_server.held = False
        sky_server.requests.clear()


@pytest.mark.prove
async def test_reading_files_from_an_unreachable_machine_raises(backend: SkyJobsBackend) -> None:
    handle = backend._handle(PLACE, "m-files")
    for asking in (backend.list_files(handle, ["out"]), backend.manifest(handle, ["out"])):
        with pytest.raises(Unreachable):
            await asking
    with pytest.raises(Unreachable):
        async for _ in backend.read(handle, Artifact(path="out", size=1)):
            pytest.fail("a byte came")
    with pytest.raises(NotSupported):
        await backend.submit(JobSpec(platform="x", command=("a",)), PLACE, "t", secrets={}, inputs={"a": Path("a")})


def job(**changes: Any) -> ManagedJob:
    """Return a row of the queue."""
    given = FarManaged(3, "gw-t-a2", {}, Path("/nowhere")).row()
    row = {name: given[name] for name in ("cloud", "resources", "submitted_at", "status")}
    row |= {"id": 3, "name": "gw-t-a2", "schedule": "ALIVE", "where": "AWS (us-east-1)", "started_at": 1.0}
    return ManagedJob.model_validate({**row, "ended_at": None, "recoveries": 0, "why": "", "cluster": "c", **changes})


@pytest.mark.parametrize(
    ("changes", "state", "code", "meter"),
    [
        ({"status": "PENDING"}, Job.QUEUED, None, False),
        ({"status": "PENDING", "recoveries": 1}, Job.QUEUED, None, None),
        ({"status": "STARTING"}, Job.QUEUED, None, None),
        ({"status": "RUNNING"}, Job.RUNNING, None, True),
        ({"status": "CANCELLING"}, Job.RUNNING, None, None),
        ({"status": "SUCCEEDED"}, Job.SUCCEEDED, 0, None),
        ({"status": "SUCCEEDED", "schedule": "DONE"}, Job.SUCCEEDED, 0, False),
        ({"status": "CANCELLED", "schedule": "DONE"}, Job.CANCELED, None, False),
        ({"status": "FAILED", "why": "Job exited with exit codes [3]"}, Job.FAILED, 3, None),
        ({"status": "FAILED", "why": "Job failed (FAILED)"}, Job.FAILED, None, None),
        ({"status": "FAILED_NO_RESOURCE", "schedule": "DONE"}, Job.FAILED, None, False),
        ({"status": "FAILED_CONTROLLER", "schedule": "DONE"}, Job.FAILED, None, None),
    ],
)
def test_controller_states_map_to_job_states_and_meters(
    changes: dict[str, Any], state: Job, code: int | None, meter: bool | None
) -> None:
    seen = observation(job(**changes))
    assert (seen.state, seen.exit_code, seen.meter, seen.attempt) == (state, code, meter, 2)


def test_an_unknown_state_is_rejected() -> None:
    with pytest.raises(BadReply, match="WAITING_FOR_GODOT"):
        observation(job(status="WAITING_FOR_GODOT"))


class Queue(SkyClient):
    """A controller that returns the given queues one after the other and refuses a cancel with `error` if set."""

    def __init__(self, looks: list[tuple[ManagedJob, ...]], error: WardenError | None = None) -> None:
        super().__init__({})
        self.looks, self.error = looks, error

    async def ask(self, shape: type[Any], ask: str, *, timeout_s: float | None = None, **request: Any) -> Any:
        if ask == "cancel_managed" and self.error is not None:
            raise self.error
        return Done(done=True) if shape is Done else ManagedQueue(rows=self.looks.pop(0), sent=(), failed={})


STOPPED_CONTROLLER = Conflict("ClusterNotUpError: the jobs controller is not up")


@pytest.mark.parametrize("error", [None, NotFound("no managed job 3"), STOPPED_CONTROLLER])
async def test_a_job_that_left_the_queue_while_it_was_stopped_is_gone(error: WardenError | None) -> None:
    backend = SkyJobsBackend(SystemClock(), Queue([(job(),), ()], error))
    assert await backend.stop(backend._handle(PLACE, "t")) is StopResult.GONE


async def test_a_refused_cancel_raises_only_while_the_job_is_active() -> None:
    backend = SkyJobsBackend(SystemClock(), Queue([(job(),), (job(),)], STOPPED_CONTROLLER))
    with pytest.raises(Conflict, match="not up"):
        await backend.stop(backend._handle(PLACE, "t"))
    over = job(status="SUCCEEDED", schedule="DONE", ended_at=2.0)
    backend = SkyJobsBackend(SystemClock(), Queue([(job(),), (over,)], STOPPED_CONTROLLER))
    assert await backend.stop(backend._handle(PLACE, "t")) is StopResult.GONE


@pytest.mark.prove
def test_our_states_and_fields_match_skypilots_own_type(sky_server: SkyServer) -> None:
    ask = (
        "from sky.schemas.api.responses import ManagedJobRecord as R; from sky.jobs import ManagedJobStatus as S\n"
        "import json; print(json.dumps([[s.value for s in S], [s.value for s in S if s.is_terminal()], "
        "sorted(R.model_fields)]))"
    )
    env = sky_env(sky_server.folder, sky_server.url)
    said = subprocess.run([env["GPUWARDEN_SKY_PYTHON"], "-c", ask], env=env, capture_output=True, check=True).stdout
    states, final, fields = json.loads(said.splitlines()[-1])
    assert set(STATES) == set(states)
    assert {name for name in states if job(status=name).over} == set(final)
    assert set(FarManaged(1, "x", {}, Path("/nowhere")).row()) <= set(fields)


def test_the_managed_option_selects_the_managed_jobs_platform() -> None:
    spec = JobSpec(platform="sky/aws", command=("true",), options={"managed": True, "cpus": "4+"})
    found = SkyJobsBackend(SystemClock()).settle(SkyBackend(SystemClock()).settle(spec))
    assert (found.platform, found.options) == ("sky-jobs/aws", {"cpus": "4+"})
    assert SkyBackend(SystemClock()).settle(spec.model_copy(update={"options": {}})).platform == "sky/aws"
    with pytest.raises(BadRequest, match="partition"):
        SkyJobsBackend(SystemClock()).settle(spec.model_copy(update={"options": {"partition": "low"}}))


def test_the_name_has_the_reservation_and_the_attempt() -> None:
    assert stem_of(PLACE.model_copy(update={"instance_id": "j1-i2"}), "j1") == "gw-j1-i2"
    assert stem_of(PLACE.model_copy(update={"instance_id": "other-i2"}), "j1") == stem_of(PLACE, "j1") == "gw-j1"
    assert named("gw-j1-i2-a12") == ("gw-j1-i2", 12)
    assert {named(name) for name in ("gw-j1", "gw-j1-a0", "x-a1", "", "gw-j1-a1\n")} == {("", 0)}


def test_a_command_with_a_store_starts_only_with_an_uploader(tmp_path: Path, wording: Wording) -> None:
    spec = JobSpec(platform="sky-jobs/aws", command=("true",), outputs=("out",), artifact_store="s3://runs/team")
    text = command(spec, PLACE, "m-client", 1)
    bare = tmp_path / "bin"
    bare.mkdir()
    for program in ("bash", "mkdir", "base64", "tar", "gzip", "sed"):
        (bare / program).symlink_to(Path("/usr/bin") / program)
    (bare / "python3").write_text("#!/bin/bash\nexit 1\n")
    (bare / "python3").chmod(0o755)
    done = subprocess.run(
        ["bash", "-s"],
        input=text,
        env={"PATH": str(bare), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 69
    wording(done.stdout, "uv", "boto3")


def test_a_recovered_jobs_uploader_expects_earlier_uploads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = JobSpec(platform="sky-jobs/aws", command=("true",), outputs=("out",), artifact_store="s3://runs/team")
    packed = max(re.findall(r"(?:[A-Za-z0-9+/=]+\n)+", command(spec, PLACE, "m-again", 1)), key=len)
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(packed))) as tar:
        file = tar.extractfile("order.1.json")
        assert file
        sent = json.loads(file.read())
    pipe = io.BytesIO()
    process = SimpleNamespace(stdin=SimpleNamespace(fileno=lambda: 7))
    monkeypatch.setattr(subprocess, "Popen", lambda *given, **how: process)
    monkeypatch.setattr(upload_process, "write_all", lambda fd, data: pipe.write(data))
    assert upload_process.start_uploader(str(tmp_path), sent["spec"], sent, {}, "") is process
    order = json.loads(pipe.getvalue())
    assert order["recovers"] and len(ArtifactUploader(str(tmp_path), order).first) == 8


def test_an_oversized_script_is_refused_before_anything_is_sent(wording: Wording) -> None:
    letters = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=1_040_000))
    with pytest.raises(BadRequest) as refused:
        command(JobSpec(platform="sky-jobs/aws", script=f"x = '{letters}'"), PLACE, "m-long", 1)
    wording(refused)
