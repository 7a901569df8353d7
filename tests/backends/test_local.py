"""The local backend: the contract, and the promises that only it makes."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from contract_backend import BackendContract, ended, shell, until
from gpuwarden.backends.base import Backend, load_backend
from gpuwarden.core import processes
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import BadReply, BadRequest, Unreachable, WardenError
from gpuwarden.core.models import JobSpec, Place, Unknown
from gpuwarden.core.reasons import Code
from gpuwarden.core.states import Job
from gpuwarden.remote import launch
from gpuwarden.remote.host import interpreter
from wording import Wording

pytestmark = pytest.mark.anyio


@pytest.fixture
def backend() -> Backend:
    return load_backend("local", SystemClock())


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(
        platform="local", root=str(tmp_path), run_root="/runs", env={"GPUWARDEN_REHEARSAL_INSTANCE": tmp_path.name}
    )


@pytest.mark.slow
class TestLocal(BackendContract):
    pass


async def test_the_servers_own_keys_do_not_reach_the_job(
    backend: Backend, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "RUNPOD_API_KEY"):
        monkeypatch.setenv(name, "hunter2-hunter2")
    handle = await backend.submit(shell("env; cat /proc/$PPID/environ | tr '\\0' '\\n'"), place, "t-env", secrets={})
    await ended(backend, handle)
    log = (await backend.logs(handle)).text
    assert (
        "GPUWARDEN_JOB=t-env" in log
        and f"GPUWARDEN_REHEARSAL_INSTANCE={place.env['GPUWARDEN_REHEARSAL_INSTANCE']}" in log
    )
    assert "hunter2" not in log and "HF_TOKEN" not in log


@pytest.mark.slow
async def test_a_vanished_instance_is_not_recreated(backend: Backend, place: Place) -> None:
    handle = await backend.submit(shell("echo ready; sleep 60"), place, "t-gone", secrets={})
    await until(backend, handle, lambda o: o.log_bytes > 0)
    shutil.rmtree(place.root)
    with pytest.raises(Unreachable):
        await backend.submit(shell("true"), place, "t-new", secrets={})
    assert not Path(place.root).exists()
    assert isinstance(await backend.find(place, "t-gone"), Unknown)
    assert (await backend.poll([handle]))["t-gone"].state is Job.UNKNOWN


async def test_an_unwritable_folder_is_refused(backend: Backend, tmp_path: Path, wording: Wording) -> None:
    (tmp_path / "runs").write_text("a file")
    place = Place(platform="local", root=str(tmp_path), run_root="/runs")
    with pytest.raises(BadRequest) as refused:
        await backend.submit(shell("true"), place, "t", secrets={})
    wording(refused)
    assert [f.blocks for f in await backend.check(place)] == [True]


@pytest.mark.slow
async def test_home_is_expanded_and_hostile_tokens_stay_inside(backend: Backend, tmp_path: Path) -> None:
    place = Place(platform="local", run_root="~/runs", env={"HOME": str(tmp_path)})
    handle = await backend.submit(shell("true"), place, "../../evil", secrets={})
    assert Path(handle.run_dir).parent == tmp_path / "runs"
    await ended(backend, handle)


@pytest.mark.slow
async def test_an_unknown_process_with_the_instances_mark_is_disclosed(backend: Backend, place: Place) -> None:
    handle = await backend.submit(shell("sleep 60"), place, "t-job", secrets={})
    async with await processes.start(["sleep", "61"], env=place.env) as stranger:
        try:
            seen = await backend.disclose(handle)
        finally:
            stranger.kill()
    assert [p.partition(":")[0] for p in seen.processes] == [f"pid {stranger.pid}"]
    await backend.stop(handle, grace_s=1)


@pytest.mark.slow
async def test_metrics_reach_the_observation(backend: Backend, place: Place) -> None:
    lines = r'{"step": 3, "loss": 0.5}\n{"step": 4, "loss": NaN, "lr": 1e-3}\n'
    handle = await backend.submit(shell(f"printf '{lines}' >> $GPUWARDEN_METRICS; sleep 60"), place, "t-m", secrets={})
    seen = await until(backend, handle, lambda o: o.step == 4)
    assert seen.metrics == {"lr": 0.001}
    assert [(a.kind, a.subject, a.step) for a in seen.alerts] == [("nonfinite", "loss", 4)]
    assert seen.beat is not None and seen.beat.disk_free
    await backend.stop(handle, grace_s=1)


def header(*lines: str) -> str:
    return "\n".join(["# /// script", *(f"# {line}" for line in lines), "# ///", "print(1)", ""])


def test_a_satisfied_header_uses_our_own_interpreter() -> None:
    for text in ("print(1)", header('dependencies = ["pydantic>=2"]'), header('requires-python = ">=3.8"')):
        assert interpreter.interpreter_for(text) == (sys.executable,)
    skipped = header("dependencies = [\"no-such-thing; python_version < '3'\"]")
    assert interpreter.interpreter_for(skipped) == (sys.executable,)


@pytest.mark.parametrize("line", ['dependencies = ["no-such-thing>=1"]', 'requires-python = "<3"'])
def test_an_unmet_requirement_goes_to_uv_or_is_named(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: "/bin/uv")
    assert interpreter.interpreter_for(header(line)) == ("/bin/uv", "run", "--quiet", "--script")
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(BadRequest, match=r"no-such-thing>=1|Python <3"):
        interpreter.interpreter_for(header(line))


def test_an_unreadable_requirement_is_a_bad_request() -> None:
    with pytest.raises(BadRequest):
        interpreter.interpreter_for(header('dependencies = ["a b c"]'))


@pytest.mark.parametrize(
    ("status", "state", "reason"),
    [
        ({"state": "missing"}, Job.UNKNOWN, Code.NO_RUN_FOLDER),
        ({"state": "absent"}, Job.UNKNOWN, Code.NO_STATUS),
        ({"state": "unreadable", "why": "torn"}, Job.UNKNOWN, Code.UNKNOWN_STATE),
        ({"state": "running", "alive": True, "updated_at": 99}, Job.RUNNING, Code.ALIVE),
        ({"state": "running", "alive": None, "updated_at": 99}, Job.RUNNING, Code.LIVENESS_UNKNOWN),
        ({"state": "running", "alive": False, "child_alive": True}, Job.RUNNING, Code.UNWATCHED),
        ({"state": "running", "alive": False, "child_alive": False}, Job.FAILED, Code.VANISHED),
        ({"state": "timeout", "why": "the time limit"}, Job.FAILED, Code.TIME_LIMIT),
        ({"state": "preempted"}, Job.PREEMPTED, Code.TERMINATED),
        ({"state": "canceled"}, Job.CANCELED, Code.STOPPED),
        ({"state": "succeeded", "step": "many"}, Job.UNKNOWN, Code.BAD_STATUS),
        ({"state": "succeeded", "metrics": {"loss": float("nan")}}, Job.UNKNOWN, Code.BAD_STATUS),
        ({"state": "weird"}, Job.UNKNOWN, Code.UNKNOWN_STATE),
        ({}, Job.UNKNOWN, Code.BAD_STATUS),
        ({"state": ["succeeded"]}, Job.UNKNOWN, Code.BAD_STATUS),
        ({"state": "missing", "now": 10**400}, Job.UNKNOWN, Code.NO_RUN_FOLDER),
        ({"state": "absent", "now": float("inf")}, Job.UNKNOWN, Code.NO_STATUS),
    ],
)
def test_the_status_maps_to_a_state_and_a_reason(status: dict[str, object], state: Job, reason: Code) -> None:
    seen = launch.observation({"now": 100.0, **status})
    assert (seen.state, seen.reason) == (state, reason)


def test_a_silent_supervisor_is_stale() -> None:
    status = {"state": "running", "alive": True, "updated_at": 0.0, "now": 1000.0}
    assert launch.observation(status).stale


def test_a_truncated_manifest_is_rejected(wording: Wording) -> None:
    with pytest.raises(WardenError) as refused:
        launch.manifest([{"path": "a", "size": 1}])
    wording(refused)


@pytest.mark.parametrize(
    "lines",
    ['[{"path": "a", "size": 1}]', "", "{}", "[]", '[{"path": "a", "size": 1}]\n[]', '{"ok": true, "files": 1}',
     '[{"path": "a", "size": -1}]\nEND', '[{"path": "a", "size": 1, "x": 1}]\nEND', '{"path": "a", "size": 1}\nEND',
     '[{"path": "\\ud800", "size": 1}]\nEND', "[" * 9999 + "\nEND", "\n" + "[" * 9999],
)  # fmt: skip
def test_an_incomplete_or_malformed_fetched_manifest_is_rejected(lines: str) -> None:
    end = '{"ok": true, "taken_at": 1.0, "files": 1, "missing": [], "skipped": [], "more_skipped": 0}'
    rows = '[{"path": "a", "size": 1}]\n[{"path": "b", "size": 2}]\n'
    assert [f.path for f in launch.fetched_manifest((rows + end).encode()).files] == ["a", "b"]
    with pytest.raises(BadReply):
        launch.fetched_manifest(lines.replace("END", end).encode())


def test_a_script_is_stored_under_its_digest(tmp_path: Path) -> None:
    place = Place(platform="local", run_root="/runs")
    names = set()
    for text in ("print(1)", "print(2)", "print(1)"):
        ready = launch.prepare(JobSpec(platform="local", script=text), place, "/runs/x", ("python3",))
        names.add(Path(ready.spec["argv"][1]).name)
        assert Path(ready.spec["argv"][1]).name in ready.files
    assert len(names) == 2
