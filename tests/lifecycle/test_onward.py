"""Jobs whose machine is gone, or came back without their work: a state by evidence, and the exact next call."""

from __future__ import annotations

import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from clouds_house import House
from fakes import FakeClock
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.models import Handle, JobSpec, LogChunk, Observation, Place, StopResult
from gpuwarden.core.next_step import stopped_machine
from gpuwarden.core.reasons import Code
from gpuwarden.core.states import Job, Lease
from gpuwarden.interfaces import results
from gpuwarden.interfaces.cli.wording import in_commands
from gpuwarden.interfaces.mcp.wording import in_calls
from gpuwarden.lifecycle.artifacts.local_copies import last_pull
from gpuwarden.lifecycle.artifacts.pull import pull
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.execution.recovery_advice import NOT_RENTED_AGAIN, name_below_cwd
from gpuwarden.lifecycle.monitoring.check import CheckedJob, cancel, check
from gpuwarden.lifecycle.monitoring.watch import Watcher
from gpuwarden.lifecycle.records import read_job
from gpuwarden.rehearsal.model import Fault, Settings
from lifecycle_kit import TRAIN, launch, open_house, prove, records, rent_cloud, training, until
from wording import Wording

pytestmark = pytest.mark.anyio
MISSING = Observation(state=Job.UNKNOWN, why="the run folder is not on the machine", machine="boot-2/9", lost=True)

SAVES = TRAIN + "print('saved', flush=True)\ntime.sleep(600)\n"


def hint_of(seen: CheckedJob) -> str:
    """Return the text that an agent reads."""
    return results.worded(results.checked(seen), in_calls).hint


class Machine:
    """A backend whose machine gives the test's answers, since tests can't reboot a real one."""

    seals = False
    takes_inputs = True

    def __init__(self) -> None:
        self.answer = Observation(state=Job.RUNNING, machine="boot-1/9")

    async def submit(self, spec: JobSpec, place: Place, token: str, **_: object) -> Handle:
        return Handle(backend="local", token=token, run_dir="/x", place=place)

    async def find(self, place: Place, token: str) -> None:
        return None

    async def poll(self, handles: list[Handle]) -> dict[str, Observation]:
        return {h.token: self.answer for h in handles}

    async def logs(self, handle: Handle, cursor: int, limit: int) -> LogChunk:
        return LogChunk(text="", next=0, size=0)

    async def stop(self, handle: Handle, *, grace_s: float) -> StopResult:
        return StopResult.GONE


class Rig:
    """An installation with one job running on such a machine."""

    def __init__(self, tmp_path: Path) -> None:
        self.clock, self.machine = FakeClock(), Machine()
        self.ctx: Context = open_house(tmp_path / "home", self.clock)
        rent_cloud(self.ctx, settings=Settings(boot_s=0, stop_s=0, settle_s=0))
        self.ctx._backends["local"] = self.machine  # type: ignore[assignment]
        self.spec, self.job = training(tmp_path / "said"), ""

    async def state(self, seconds: float = 0) -> tuple[Job, Code | None]:
        self.clock.advance(seconds)
        for _ in range(4):
            await check(self.ctx, self.job)
        job = read_job(self.ctx.ledger, self.job)
        return job.state, job.reason


@pytest.fixture
async def rig(tmp_path: Path) -> Rig:
    rig = Rig(tmp_path)
    rig.job = await launch(rig.ctx, rig.spec)
    assert (await rig.state())[0] is Job.RUNNING
    return rig


async def test_a_restarted_machine_without_the_run_folder_fails_the_job(rig: Rig, wording: Wording) -> None:
    rig.machine.answer = MISSING
    assert await rig.state() == (Job.UNKNOWN, Code.FOLDER_LATE)
    assert (await rig.state(30))[0] is Job.UNKNOWN
    assert await rig.state(31) == (Job.FAILED, Code.CAME_BACK_EMPTY)
    seen = await check(rig.ctx, rig.job)
    wording(hint_of(seen), rig.job, NOT_RENTED_AGAIN, "submit_job")


async def test_a_run_folder_that_appears_late_keeps_the_job_running(rig: Rig) -> None:
    rig.machine.answer = MISSING
    assert (await rig.state())[0] is Job.UNKNOWN
    rig.machine.answer = Observation(state=Job.RUNNING, machine="boot-2/9")
    assert (await rig.state(10))[0] is Job.RUNNING
    rig.machine.answer = MISSING.model_copy(update={"machine": "boot-3/9"})
    assert (await rig.state(300))[0] is Job.UNKNOWN, "the look of before the folder came up proves nothing now"
    assert (await rig.state(61))[0] is Job.FAILED


@pytest.mark.parametrize(
    ("machine", "reason"), [("boot-1/9", Code.FOLDER_REMOVED), ("", Code.FOLDER_UNEXPLAINED)], ids=["same", "unknown"]
)
async def test_a_missing_folder_without_a_restart_keeps_the_job_unknown(rig: Rig, machine: str, reason: Code) -> None:
    rig.machine.answer = MISSING.model_copy(update={"machine": machine})
    for _ in range(5):
        assert await rig.state(1000) == (Job.UNKNOWN, reason)
    assert (await cancel(rig.ctx, rig.job)).job.state is Job.CANCELED


async def test_a_job_that_was_never_seen_running_is_not_declared_dead(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.machine.answer = MISSING
    rig.job = await launch(rig.ctx, rig.spec)
    for _ in range(4):
        assert (await rig.state(1000))[0] is not Job.FAILED


# -------------------------------------------------------------------------------------------------- a real machine


@pytest.mark.slow
async def test_a_real_machine_that_lost_its_disk_between_polls_fails_the_job(cloud_house: House) -> None:
    """The machine was stopped and started unnoticed: a new start and port, and no run folder."""
    job = await cloud_house.launch(cloud_house.spec("wait"))
    await cloud_house.running(job)
    await cloud_house.reached(job, 3)
    cloud, ident = cloud_house.account.cloud, cloud_house.machine()
    cloud.stop(ident)
    cloud_house.clock.time += 10
    cloud_house.machines.follow(ident)
    seen = read_job(cloud_house.ctx.ledger, job)
    assert seen.handle is not None
    (folder,) = cloud.root.rglob(Path(seen.handle.run_dir).name)
    shutil.rmtree(folder)
    cloud.start(ident)
    cloud_house.account.booted(ident)
    cloud_house.clock.time += 60
    last = await cloud_house.until(job, lambda c: c.job.state is Job.FAILED, jump_s=20)
    assert last.job.reason is Code.CAME_BACK_EMPTY, cloud_house.story()
    assert "submit_job" in hint_of(last) and cloud_house.billing() == [ident]


# ------------------------------------------------------------------------------------------------ gone for good


class Taken:
    """A job that has saved a checkpoint and keeps running, on a machine that its platform will take for good."""

    def __init__(self, tmp_path: Path) -> None:
        self.clock, self.cwd = FakeClock(), tmp_path / "project"
        self.cwd.mkdir()
        self.ctx: Context = open_house(tmp_path / "home", self.clock)
        self.ctx.cwd = self.cwd
        self.cloud = rent_cloud(self.ctx, settings=Settings(boot_s=0, stop_s=0, settle_s=3))
        command = (sys.executable, "-I", "-S", "-c", SAVES, str(tmp_path / "said"), "0")
        self.spec = training(tmp_path / "said", command=command)
        self.job = ""

    async def saved(self) -> Taken:
        self.job = await launch(self.ctx, self.spec)
        await until(self.ctx, self.job, lambda seen: seen.log and "saved" in seen.log.text)
        return self

    async def lost(self) -> CheckedJob:
        """Let the platform take the machine, and poll until it was reported gone twice."""
        self.cloud.inject(records(self.cloud)[0].id, Fault(kind="vanish"))
        for _ in range(4):
            self.clock.advance(5)
            seen = await check(self.ctx, self.job)
        assert seen.job.state is Job.FAILED and seen.lease and seen.lease.state is Lease.STOPPED, seen
        return seen


@pytest.fixture
async def taken(tmp_path: Path) -> AsyncIterator[Taken]:
    made = await Taken(tmp_path).saved()
    yield made
    for record in records(made.cloud):
        made.cloud.terminate(record.id)
    made.clock.advance(60)
    made.cloud.list()


@pytest.mark.slow
async def test_a_lost_job_without_a_copy_is_reported_to_start_over(taken: Taken, wording: Wording) -> None:
    seen = await taken.lost()
    wording(hint_of(seen), NOT_RENTED_AGAIN, "submit_job")
    news = (await Watcher(taken.ctx).round()).news
    (failed,) = [a for a in news if a.kind == "failed"]
    assert do(Action.MANUAL, text=NOT_RENTED_AGAIN) in failed.next_steps
    assert "gpuwarden submit" in in_commands(failed.next_steps)
    assert len(records(taken.cloud)) == 1


@pytest.mark.slow
async def test_an_unverified_copy_needs_verification_before_a_resume(taken: Taken, wording: Wording) -> None:
    pulled = await pull(taken.ctx, taken.job, taken.cwd / "kept")
    seen = await taken.lost()
    wording(hint_of(seen), pulled.dest, f"verify_checkpoint with job_id={taken.job}")


@pytest.mark.slow
async def test_the_suggested_call_resumes_from_the_verified_copy(taken: Taken) -> None:
    await pull(taken.ctx, taken.job, taken.cwd / "kept copy")
    await prove(taken.ctx, taken.job)
    seen = await taken.lost()
    assert 'inputs=["kept copy"]' in hint_of(seen) and "--input 'kept copy'" in in_commands(seen.next_steps)
    script = "import os; print('resumes from', os.path.getsize('kept copy/out/model.safetensors'), flush=True)"
    spec = taken.spec.model_copy(update={"command": (sys.executable, "-c", script), "inputs": ("kept copy",)})
    again = await launch(taken.ctx, spec)
    last = await until(taken.ctx, again)
    assert last.log and "resumes from" in last.log.text, last


@pytest.mark.slow
async def test_a_copy_elsewhere_must_move_below_the_working_directory(taken: Taken) -> None:
    pulled = await pull(taken.ctx, taken.job)
    await prove(taken.ctx, taken.job)
    seen = await taken.lost()
    assert str(pulled.dest) in hint_of(seen)
    assert "--input resume" in in_commands(seen.next_steps)
    hidden = taken.cwd / ".kept"
    assert onward_of(taken, hidden) is None and onward_of(taken, taken.cwd) is None
    assert onward_of(taken, taken.cwd / "a" / "b") == "a/b"


def onward_of(taken: Taken, dest: Path) -> str | None:
    pulled = last_pull(taken.ctx, taken.job)
    assert pulled is not None
    return name_below_cwd(taken.ctx, pulled.model_copy(update={"dest": str(dest)}))


@pytest.mark.slow
async def test_the_advice_for_a_copy_too_large_for_an_input_is_to_use_the_hub(
    taken: Taken, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    pulled = await pull(taken.ctx, taken.job, taken.cwd / "kept")
    await prove(taken.ctx, taken.job)
    monkeypatch.setattr("gpuwarden.lifecycle.execution.recovery_advice.MAX_INPUT_BYTES", 100)
    seen = await taken.lost()
    wording(hint_of(seen), pulled.dest)


@pytest.mark.slow
async def test_a_stopped_machine_is_reported_as_waiting_for_the_user(cloud_house: House) -> None:
    job = await cloud_house.launch(cloud_house.spec("wait"))
    await cloud_house.running(job)
    await cloud_house.reached(job, 3)
    cloud_house.take()
    seen = await cloud_house.until(job, lambda c: c.job.state is Job.PREEMPTED, jump_s=5)
    waits = stopped_machine(job)
    assert {s.action for s in waits} == {Action.MANUAL, Action.CHECK, Action.CANCEL}
    assert all(step in seen.next_steps for step in waits)
    news = (await Watcher(cloud_house.ctx).round()).news
    assert any(all(step in a.next_steps for step in waits) for a in news)


async def test_a_running_or_successful_job_gets_no_relaunch_advice(rig: Rig) -> None:
    assert NOT_RENTED_AGAIN not in hint_of(await check(rig.ctx, rig.job))
    rig.machine.answer = Observation(state=Job.SUCCEEDED, machine="boot-1/9")
    assert (await rig.state())[0] is Job.SUCCEEDED
    assert NOT_RENTED_AGAIN not in hint_of(await check(rig.ctx, rig.job))
