"""The ray backend against a real head: the contract, and features that only Ray's Jobs API has."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from contract_backend import BackendContract, ended, until
from doors import TRAIN
from gpuwarden.backends._ray_api import submission_id
from gpuwarden.backends.ray import RayBackend
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.engine import UNLIMITED, EngineLimits
from gpuwarden.core.errors import Conflict, NoSandbox, NotSupported
from gpuwarden.core.guidance import manual_text
from gpuwarden.core.models import Handle, JobSpec, Known, Place, StopResult, Verdict
from gpuwarden.core.policy import Local, Policy
from gpuwarden.core.readiness import Needs
from gpuwarden.core.reasons import Code
from gpuwarden.core.rules import run_rules
from gpuwarden.core.states import TERMINAL_JOBS, Job
from gpuwarden.data import data_dir
from gpuwarden.ledger.events import JobPreempted
from gpuwarden.lifecycle.artifacts.pull import pull
from gpuwarden.lifecycle.artifacts.verify import verify_job
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.monitoring.check import CheckedJob, check
from gpuwarden.lifecycle.submission.facts import gather
from gpuwarden.lifecycle.submission.submit import submit
from gpuwarden.lifecycle.teardown.gate import request
from gpuwarden.rules import catalog
from lifecycle_kit import open_house
from ray_kit import Head, RayEngine, place_of
from waiting import soon

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.real,
    pytest.mark.prove,
    pytest.mark.usefixtures("patient_ray"),
]  # Ray takes several seconds for each job

# Counts its starts in a file, like a job that loads its checkpoint.
RESUMES = 'n=$(cat count 2>/dev/null || echo 0); echo "from $n"; echo $((n + 1)) > count; [ $n = 1 ] || sleep 3600'


@pytest.fixture
def backend() -> RayBackend:
    backend = RayBackend(SystemClock())
    backend.confine(lambda: Local(unsandboxed=True), [])
    return backend


@pytest.fixture
def place(head: Head, tmp_path: Path) -> Place:
    return place_of(head, tmp_path)


@pytest.fixture
def engine(head: Head) -> RayEngine:
    return RayEngine(head)


class TestRay(BackendContract):
    @pytest.fixture
    def engine(self, head: Head) -> RayEngine:
        return RayEngine(head)


async def limits(backend: RayBackend, spec: JobSpec, place: Place) -> EngineLimits:
    """Return the cluster's limits. Only several seconds after its start does Ray report that nothing adds nodes."""

    async def look() -> EngineLimits | None:
        found = await backend.limits(spec, place)
        return found if found.queue and found.queue.nodes else None

    found = await soon(look, 60, every=0.2)
    assert found is not None
    return found


async def test_the_cluster_reports_its_resources(backend: RayBackend, place: Place, engine: RayEngine) -> None:
    spec = engine.job("true", gpu="a100", gpu_count=2, options={"cpus": 2.5, "memory_gb": 3})
    found = await limits(backend, spec, place)
    assert found.engine == "ray" and found.version[:1].isdigit()
    assert (found.request.gpu, found.request.gpus, found.request.cpus, found.request.memory_mb) == ("a100", 2, 3, 3072)
    assert (found.queue.nodes, found.queue.cpus, found.queue.gpus, found.queue.max_s) == (1, 2, {}, UNLIMITED)


async def test_a_header_is_compared_with_the_clusters_python(backend: RayBackend, place: Place) -> None:
    async def unmet() -> bool:
        return bool((await backend.readiness(place, Needs("<3.8", ("torch",)))).unmet)

    await soon(unmet, 60, every=0.2)  # a node reports several seconds after its start
    lacks = await backend.readiness(place, Needs("<3.8", ("torch",)))
    assert lacks.unmet == ("Python <3.8",) and lacks.python.startswith("3.")
    assert not (await backend.readiness(place, Needs(f">={lacks.python}", ("torch",)))).unmet


async def test_a_node_failure_preempts_the_job_and_the_next_attempt_resumes(
    backend: RayBackend, place: Place, engine: RayEngine, head: Head
) -> None:
    handle = await backend.submit(engine.job(RESUMES), place, "r-kill", secrets={})
    await until(backend, handle, lambda o: o.log_bytes > 0)
    head.kill_supervisor(handle.run_dir)
    seen = await until(backend, handle, lambda o: o.state is Job.PREEMPTED)
    assert seen.reason is Code.ENGINE_TOOK and seen.meter is False
    await soon(lambda: not _alive(handle))
    await backend.submit(engine.job(RESUMES), place, "r-kill", secrets={})
    assert (await backend.poll([handle]))["r-kill"].state is Job.PREEMPTED, "a repetition starts nothing"
    await backend.submit(engine.job(RESUMES), place, "r-kill", secrets={}, attempt=2)
    again = await until(backend, handle, lambda o: o.attempt == 2 and o.state is Job.SUCCEEDED)
    assert again.exit_code == 0
    assert (await backend.logs(handle)).text == "from 0\nfrom 1\n"
    assert len(head.jobs("gw-r-kill-")) == 2


def _alive(handle: Handle) -> list[str]:
    """Return the pids of a job's processes, wherever they are in the process tree."""
    mark = f"GPUWARDEN_RUN_DIR={handle.run_dir}\0".encode()
    found = []
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdecimal() and mark in (path / "environ").read_bytes():
                found.append(path.name)
        except OSError:
            continue
    return found


async def test_a_script_gets_the_dependencies_in_its_header(backend: RayBackend, place: Place, tmp_path: Path) -> None:
    wheel = tmp_path / "tinydep-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("tinydep.py", "VALUE = 41\n")
        file.writestr("tinydep-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tinydep\nVersion: 1.0\n")
        file.writestr(
            "tinydep-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        file.writestr("tinydep-1.0.dist-info/RECORD", "")
    header = f'# /// script\n# dependencies = ["tinydep @ {wheel.as_uri()}"]\n# ///\n'
    spec = JobSpec(platform="ray/local", script=header + "import tinydep\nprint(tinydep.VALUE + 1)\n")
    handle = await backend.submit(spec, place, "r-deps", secrets={})
    seen = await until(backend, handle, lambda o: o.state not in {Job.QUEUED, Job.RUNNING})
    assert seen.state is Job.SUCCEEDED, seen
    assert (await backend.logs(handle)).text == "42\n"


async def test_a_queued_job_can_be_stopped(backend: RayBackend, place: Place, engine: RayEngine, head: Head) -> None:
    spec = engine.job("touch ran", options={"resources": {"nobody_has_it": 1}}, secrets=["TOKEN"])
    handle = await backend.submit(spec, place, "r-wait", secrets={"TOKEN": "hunter22-hunter22"})
    seen = (await backend.poll([handle]))["r-wait"]
    assert (seen.state, seen.reason, seen.meter) == (Job.QUEUED, Code.ENGINE_QUEUE, False)
    assert seen.allocation is not None and seen.allocation.why
    assert await backend.stop(handle, grace_s=1) in {StopResult.PENDING, StopResult.STOPPED}


async def test_ray_never_stores_or_shows_a_secret(
    backend: RayBackend, place: Place, engine: RayEngine, head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hunter2-of-the-server")
    spec = engine.job("env | cut -d= -f1 | sort; sleep 3600", secrets=["TOKEN"])
    handle = await backend.submit(spec, place, "r-secret", secrets={"TOKEN": "hunter22-hunter22"})
    await until(backend, handle, lambda o: o.log_bytes > 0)
    shown = json.dumps(head.jobs("gw-r-secret-"))
    written = b"".join(f.read_bytes() for f in Path(handle.run_dir).rglob("*") if f.is_file())
    names = (await backend.logs(handle)).text.split()
    await backend.stop(handle, grace_s=0.2)
    assert "hunter2" not in shown and b"hunter2" not in written
    assert "TOKEN" in names and not {"GPUWARDEN_ORDER", "HF_TOKEN"} & set(names)


async def test_another_job_of_the_same_name_is_not_ours(
    backend: RayBackend, place: Place, engine: RayEngine, head: Head
) -> None:
    ours = (await backend.handle_of(place, "r-name")).run_dir
    for folder in ("", "/elsewhere", ours):  # the last one is a copy, with an id that Ray chose
        marks = {"gpuwarden_job": "gw-r-name", "gpuwarden_folder": folder, "gpuwarden_attempt": "1"} if folder else {}
        body = {"entrypoint": "exit 5", "metadata": marks}
        assert head.ask("POST", "/api/jobs/", json.dumps(body).encode())[0] == 200
    assert await backend.find(place, "r-name") == Known(None)
    handle = await backend.submit(engine.job("echo ours"), place, "r-name", secrets={})
    assert (await ended(backend, handle)).state is Job.SUCCEEDED


async def test_an_id_that_another_tool_used_is_a_conflict(
    backend: RayBackend, place: Place, engine: RayEngine, head: Head
) -> None:
    ident = submission_id("gw-r-taken", 1, (await backend.handle_of(place, "r-taken")).run_dir)
    body = {"entrypoint": "sleep 3600", "submission_id": ident}
    assert head.ask("POST", "/api/jobs/", json.dumps(body).encode())[0] == 200
    assert await backend.find(place, "r-taken") == Known(None)
    with pytest.raises(Conflict, match=ident):
        await backend.submit(engine.job("touch ran"), place, "r-taken", secrets={})
    assert await backend.find(place, "r-taken") == Known(None)
    (theirs,) = head.jobs("gw-r-taken")
    assert theirs["status"] in {"PENDING", "RUNNING"}, "nobody ended what is not ours"


async def test_jobs_without_a_sandbox_are_refused_by_default(
    place: Place, engine: RayEngine, head: Head, tmp_path: Path
) -> None:
    closed = RayBackend(SystemClock())
    with pytest.raises(NoSandbox):
        await closed.admit(engine.job("true"), rehearsed=False)
    with pytest.raises(NoSandbox):
        await closed.submit(engine.job("true"), place, "r-closed", secrets={})
    closed.confine(Local, [tmp_path / "home"])
    with pytest.raises(NoSandbox):
        await closed.submit(engine.job("true"), place.model_copy(update={"host": "192.0.2.1"}), "r-home", secrets={})
    assert not head.jobs("gw-r-closed") and not head.jobs("gw-r-home")


# Saves a step and resumes from it; the first run never gets any further.
LOADS = TRAIN.replace(
    'os.makedirs("out", exist_ok=True)',
    """
os.makedirs("out", exist_ok=True)
start = int(open("out/step.json").read()) if os.path.exists("out/step.json") else 0
print("from step", start, flush=True)
if not start:
    with open("out/part", "w") as file:
        file.write("1")
    os.rename("out/part", "out/step.json")
    import time; time.sleep(3600)
""",
)


@pytest.fixture
def ctx(tmp_path: Path, head: Head) -> Context:
    """A context whose notes name the head and the path it shares, with unsandboxed jobs allowed on this machine."""
    profiles = tmp_path / "profiles"
    profiles.mkdir()
    text = (data_dir("profiles") / "ray.md").read_text("utf-8")
    (profiles / "ray.md").write_text(text.replace("path: /tmp", "path: /var/tmp"), "utf-8")  # tests are in /tmp
    ctx = open_house(tmp_path / "home", SystemClock(), policy=Policy(local=Local(unsandboxed=True)))
    ctx.own_profiles = profiles
    ctx.notes_file = tmp_path / "notes.toml"
    ctx.notes_file.write_text(f"[platforms.'ray/lab']\nhost = '{head.address}'\nscratch = '{tmp_path}/shared'\n")
    ctx.notes_file.chmod(0o600)
    return ctx


def train(**changes: object) -> JobSpec:
    given = {"platform": "ray/lab", "script": LOADS, "outputs": ("out",), "timeout_s": 7200, "name": "tiny"}
    return JobSpec.model_validate({**given, **changes})


async def checked(ctx: Context, job_id: str, good: Callable[[CheckedJob], bool]) -> CheckedJob:
    """Check a job until `good` accepts the result."""

    async def look() -> CheckedJob | None:
        seen = await check(ctx, job_id)
        assert good(seen) or seen.job.state not in TERMINAL_JOBS, seen
        return seen if good(seen) else None

    seen = await soon(look, 120, every=0.2)
    assert seen is not None
    return seen


async def test_the_whole_life_of_a_job_on_a_cluster(ctx: Context, head: Head, tmp_path: Path) -> None:
    done = await submit(ctx, train())
    assert done.job is not None and done.receipt and done.quote is None and not done.ask, "nothing is metered"
    name = done.job.id
    begun = "from step 0"  # the log is read after the state, so it may be ahead
    seen = await checked(ctx, name, lambda s: s.job.state is Job.RUNNING and bool(s.log and begun in s.log.text))
    assert seen.job.handle is not None and seen.lease is None
    assert seen.job.handle.run_dir.startswith(f"{tmp_path}/shared/")
    while not (Path(seen.job.handle.run_dir) / "work/out/step.json").exists():
        await anyio.sleep(0.05)
    head.kill_supervisor(seen.job.handle.run_dir)
    seen = await checked(ctx, name, lambda s: s.job.state is Job.SUCCEEDED)
    assert ctx.ledger.last(seen.job.subject, JobPreempted) is not None and seen.job.attempt == 2
    assert seen.log and "from step 1" in seen.log.text and "step 1 loss 0.5" in seen.log.text
    rows = head.jobs(f"gw-{name}-")
    assert sorted(str(row["status"]) for row in rows) == ["FAILED", "SUCCEEDED"], "one submission an attempt"
    await pull(ctx, name)
    assert (await verify_job(ctx, name)).verdict is Verdict.PROVEN
    with pytest.raises(NotSupported) as nothing:
        await request(ctx, name, "terminate")
    told = manual_text(nothing.value.next_steps)
    assert seen.job.handle is not None and f"rm -r -- {seen.job.handle.run_dir}" in told and "ssh" not in told


async def test_the_submit_gate_asks_the_cluster(ctx: Context, head: Head, engine: RayEngine) -> None:
    async def blocked(**given: object) -> set[str]:
        found = run_rules(catalog.rules_of("submit"), await gather(ctx, train(**given)))
        return {f.rule for f in found if f.blocks}

    place = ctx.owned_place("ray/lab")
    await limits(RayBackend(SystemClock()), train(), place)
    assert not await blocked()
    assert await blocked(gpu="a100") == {"PF-ENG-005"}
    assert await blocked(options={"cpus": 64}) == {"PF-ENG-005"}
    for trouble in (engine.down(), engine.odd()):
        with trouble:
            assert await blocked() == {"PF-ENG-001"}
