"""A job can write its status file and its log. Neither gets it marked preempted, relaunched or recovered."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from gpuwarden.core.models import Handle, Instance, InstanceState, Known, Observation, Place
from gpuwarden.core.reasons import Code
from gpuwarden.core.states import Job
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.execution.recovery_advice import NOT_RENTED_AGAIN
from gpuwarden.lifecycle.execution.running import INTERRUPTION_S, judge
from gpuwarden.lifecycle.monitoring.check import CheckedJob, check
from gpuwarden.lifecycle.records import JobRecord
from gpuwarden.remote.launch import observation
from gpuwarden.remote.runner.command import OF_INTENT, Reason
from gpuwarden.remote.sandbox.words import Kind, Sandbox
from lifecycle_kit import clock_of_today, launch, open_house, records, rent_cloud, training
from waiting import soon

pytestmark = pytest.mark.anyio

LINES = (
    "died: it ended without a final status (killed, or the machine restarted)",
    "the machine was started anew and came back without the job's run folder, seen twice: its process is dead",
    "the machine was taken back in the middle of the run",
)
FORGE = """
import json, os, signal, sys, time
said, lies, lines, then, turns = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4], 120
folder = os.environ["GPUWARDEN_RUN_DIR"]
file = folder + "/status.json"
with open(said, "a") as out:
    out.write("launched\\n")
if then == "stay" and open(said).read().count("launched") == 1:
    turns = 120_000
print(*lines, sep="\\n", flush=True)
real = json.load(open(file))
if then == "kill":
    os.kill(real["pid"], signal.SIGKILL)
    turns = 1
for _ in range(turns):
    for lie in lies:
        with open(file + ".x", "w") as out:
            json.dump({**real, **lie}, out)
        os.rename(file + ".x", file)
    time.sleep(0.005)
"""
GONE = {"pid": 4_000_000, "child_pid": 4_000_001}
LIES = {
    "preempted": {"state": "preempted", "reason": "terminated", "why": LINES[2]},
    "died": {"state": "failed", "reason": "vanished", "why": LINES[0]},
    "came back": {"state": "failed", "reason": "came_back_empty", "why": LINES[1]},
    "no folder": {"state": "missing", "folder": "missing", "machine": "another/1"},
    "other process": {"state": "running", **GONE},
    "rebooted": {"state": "running", "boot_id": "another", "machine": "another/1"},
}


@pytest.fixture(autouse=True)
def _no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the sandbox: a rented machine has none that keeps a job out of its run folder."""
    monkeypatch.setattr("gpuwarden.backends.local.detect", lambda: Sandbox(Kind.NONE))


class House:
    """An installation with a spot machine on an emulated cloud, the real runner and real processes."""

    def __init__(self, folder: Path) -> None:
        self.said, self.clock = folder / "said", clock_of_today()
        self.ctx: Context = open_house(folder / "home", self.clock)
        self.cloud = rent_cloud(self.ctx)
        self.states: set[Job] = set()

    async def start(self, *lies: dict[str, object], then: str = "") -> str:
        import json

        words = (json.dumps(lies), json.dumps(LINES), then)
        command = (sys.executable, "-I", "-S", "-c", FORGE, str(self.said), *words)
        job = await launch(self.ctx, training(self.said, command=command, interruptible=True, timeout_s=600))
        self.clock.advance(1)  # time for the machine to boot
        return job

    async def until(self, job: str, good: Callable[[CheckedJob], object]) -> CheckedJob:
        async def look() -> CheckedJob | None:
            seen = await check(self.ctx, job)
            self.states.add(seen.job.state)
            return seen if good(seen) else None

        seen = await soon(look)
        assert seen
        return seen

    @property
    def launches(self) -> int:
        return self.said.read_text().count("launched")


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    made = House(tmp_path)
    yield made
    for record in records(made.cloud):
        made.cloud.terminate(record.id)
    made.clock.time += 60
    made.cloud.list()


@pytest.mark.slow
@pytest.mark.attack("ending", "has a running job called finished by its status file")
async def test_a_forged_status_does_not_end_a_running_job(house: House) -> None:
    job = await house.start(*LIES.values())
    seen = await house.until(job, lambda c: c.job.state in {Job.SUCCEEDED, Job.FAILED, Job.PREEMPTED})
    assert seen.job.state is Job.SUCCEEDED and seen.job.reason is Code.EXITED
    assert not house.states & {Job.PREEMPTED, Job.FAILED, Job.UNKNOWN} and house.launches == 1
    assert house.ctx.ledger.last(seen.job.subject, "folder.gone") is None


@pytest.mark.slow
@pytest.mark.attack("spending", "kills its supervisor to be relaunched")
@pytest.mark.parametrize("lie", ["preempted", "other process", "rebooted"])
async def test_a_job_that_kills_its_supervisor_is_not_relaunched(house: House, lie: str) -> None:
    job = await house.start(LIES[lie], then="kill")
    seen = await house.until(job, lambda c: c.job.state is Job.UNKNOWN)
    assert seen.job.reason is Code.INTERRUPTION_UNSEEN, "the platform has a while to show that it took the machine"
    house.clock.time += INTERRUPTION_S + 1
    seen = await house.until(job, lambda c: c.job.state is not Job.UNKNOWN)
    assert seen.job.state is Job.FAILED and seen.job.reason in {Code.NOT_INTERRUPTED, Code.VANISHED}
    assert Job.PREEMPTED not in house.states and house.launches == 1


@pytest.mark.slow
@pytest.mark.attack("spending", "writes a reason into its status that only an observer may give")
@pytest.mark.parametrize("lie", ["died", "came back"])
async def test_a_status_file_never_sets_an_observers_reason(house: House, lie: str) -> None:
    job = await house.start(LIES[lie], then="kill")
    seen = await house.until(job, lambda c: c.job.state is Job.FAILED)
    assert seen.job.reason is Code.EXITED and LIES[lie]["why"] in seen.job.why, "quoted, and decided nothing"
    assert not any(step.parameters.get("text") == NOT_RENTED_AGAIN for step in seen.next_steps)
    assert Job.PREEMPTED not in house.states and house.launches == 1


@pytest.mark.slow
async def test_a_preempted_job_is_relaunched_whatever_its_file_states(house: House) -> None:
    job = await house.start({"state": "running"}, then="stay")
    await house.until(job, lambda c: c.job.state is Job.RUNNING and house.said.exists())
    house.cloud.preempt(records(house.cloud)[0].id)
    house.clock.time += 60
    await house.until(job, lambda c: c.job.attempt == 2 or c.job.state is Job.SUCCEEDED)
    assert Job.PREEMPTED in house.states or house.launches == 2


# ------------------------------------------------------------------------------------------------ the decision itself


def seen(state: Job, reason: Code | None) -> Observation:
    return Observation(state=state, reason=reason, why="it says so")


def machine(state: InstanceState) -> Known[Instance | None]:
    return Known(Instance(id="m", state=state))


UP, OFF = machine(InstanceState.RUNNING), machine(InstanceState.INTERRUPTED)
DEAD, ENDED = seen(Job.FAILED, Code.VANISHED), seen(Job.PREEMPTED, Code.TERMINATED)


@pytest.mark.parametrize(
    ("observed", "under", "restarted", "spot", "state", "code"),
    [
        (DEAD, OFF, False, False, Job.PREEMPTED, Code.INTERRUPTED),
        (DEAD, UP, True, False, Job.PREEMPTED, Code.RESTARTED),
        (DEAD, UP, False, True, Job.UNKNOWN, Code.INTERRUPTION_UNSEEN),
        (DEAD, UP, False, False, Job.FAILED, Code.VANISHED),
        (DEAD, Known(None), False, True, Job.FAILED, Code.GONE),
        (DEAD, None, True, False, Job.PREEMPTED, Code.RESTARTED),
        (ENDED, OFF, False, False, Job.PREEMPTED, Code.INTERRUPTED),
        (ENDED, UP, False, True, Job.UNKNOWN, Code.INTERRUPTION_UNSEEN),
        (ENDED, None, False, False, Job.UNKNOWN, Code.INTERRUPTION_UNSEEN),
        (ENDED, None, True, False, Job.PREEMPTED, Code.RESTARTED),
        (seen(Job.PREEMPTED, None), UP, False, True, Job.PREEMPTED, Code.PLATFORM_REPORT),
        (seen(Job.FAILED, Code.EXITED), OFF, True, True, Job.FAILED, Code.EXITED),
        (seen(Job.RUNNING, Code.ALIVE), UP, True, True, Job.RUNNING, Code.ALIVE),
        (seen(Job.RUNNING, Code.ALIVE), OFF, False, True, Job.PREEMPTED, Code.INTERRUPTED),
        (None, UP, True, True, Job.UNKNOWN, Code.NO_ANSWER),
        (None, OFF, False, True, Job.PREEMPTED, Code.INTERRUPTED),
    ],
)  # fmt: skip
def test_the_machines_state_decides_the_verdict(
    observed: Observation | None,
    under: Known[Instance | None] | None,
    restarted: bool,
    spot: bool,
    state: Job,
    code: Code,
) -> None:
    spec = training(Path("/tmp/said"), interruptible=spot)
    place = Place(platform="rehearsal/vastai", run_root="/x")
    job = JobRecord(
        id="j1", state=Job.RUNNING, since=0, accepted_at=0, spec=spec, worst_cost=None, price=None, why="", attempt=1,
        generation=1, lease="j1-i1", place=place, handle=Handle(backend="local", token="t", run_dir="/x", place=place),
        cancel_requested=False,
    )  # fmt: skip
    found, reason = judge(job, observed, under, restarted)
    assert (found, reason.code) == (state, code)


def test_core_knows_every_code_that_the_runner_writes() -> None:
    written = {value for name, value in vars(Reason).items() if name.isupper()} | set(OF_INTENT.values())
    assert written <= set(Code)


@pytest.mark.parametrize(
    "code", [c for c in Code if c not in {Code.NOT_STARTED, Code.RESTARTS_USED, Code.KILLED_BY_SIGNAL}]
)
def test_a_code_that_a_status_file_may_not_set_becomes_exited(code: Code) -> None:
    status = {"state": "failed", "now": 1.0, "alive": False, "child_alive": False, "reason": str(code)}
    assert observation(status).reason is Code.EXITED
