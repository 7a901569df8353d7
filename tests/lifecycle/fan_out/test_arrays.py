"""Fan-outs on an in-memory engine with job arrays; gpuwarden dies at every write and every call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine_facts import QUEUE
from gpuwarden.backends.base import ArrayBackend, ArrayTask
from gpuwarden.core.clock import Clock
from gpuwarden.core.engine import EngineLimits, EngineRequest
from gpuwarden.core.errors import BadRequest, Conflict, Refused, Unreachable
from gpuwarden.core.fan_out import FanOutPlan, gridded
from gpuwarden.core.models import Answer, Handle, JobSpec, Known, Observation, Place, StopResult, Unknown
from gpuwarden.core.policy import Local, Policy
from gpuwarden.core.states import Job
from gpuwarden.ledger.events import ArrayIntent, JobAccepted
from gpuwarden.ledger.store import Ledger
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.fan_out.accepting import fan_out
from gpuwarden.lifecycle.fan_out.deciding import cancel_fan_out, end_fan_out, resume_fan_out
from gpuwarden.lifecycle.fan_out.launching import FanOutResult, Hold, advance_fan_out
from gpuwarden.lifecycle.fan_out.records import fan_out_ids
from gpuwarden.lifecycle.monitoring.check import cancel
from gpuwarden.lifecycle.monitoring.watch import Watcher
from gpuwarden.lifecycle.records import job_ids, read_job
from lifecycle_kit import clock_of_today, lock_held, moves_along_the_tables, open_house

pytestmark = pytest.mark.anyio


class Death(BaseException):
    """Simulated death of the process."""


class Playing:
    """An engine with arrays. With `die_before` or `die_after`, the process dies before or after a call takes effect."""

    name, takes_inputs, seals = "slurm", True, True

    def __init__(self) -> None:
        self.starts: Counter[tuple[str, int]] = Counter()
        self.arrays: dict[str, tuple[tuple[str, ...], int]] = {}
        self.state: dict[str, Job] = {}
        self.refuses = self.silent = self.die_before = self.die_after = False
        self.max_array = 1_001

    async def check(self, place: Place) -> list[Any]:
        return []

    async def limits(self, spec: JobSpec, place: Place) -> EngineLimits:
        return EngineLimits(
            engine="slurm", version="24.05", request=EngineRequest(), queues=(QUEUE,), max_array=self.max_array
        )

    def _start(self, token: str, attempt: int) -> None:
        if not self.starts[token, attempt]:
            self.starts[token, attempt] += 1
            self.state[token] = Job.RUNNING

    async def submit(
        self,
        spec: JobSpec,
        place: Place,
        token: str,
        *,
        secrets: Mapping[str, str],
        attempt: int = 1,
        inputs: Any = None,
    ) -> Handle:
        self._start(token, attempt)
        return self.handle(token, place)

    async def submit_array(
        self, tasks: Sequence[ArrayTask], place: Place, token: str, *, at_once: int
    ) -> dict[str, Handle]:
        if self.die_before:
            raise Death
        if self.refuses:
            raise BadRequest("Slurm refused the job: no")
        for task in tasks if token not in self.arrays else ():
            self._start(task.token, task.attempt)
        self.arrays.setdefault(token, (tuple(task.token for task in tasks), at_once))
        if self.die_after:
            raise Death
        if self.silent:
            raise Unreachable("the reply was lost")
        return {task.token: self.handle(task.token, place) for task in tasks}

    def handle(self, token: str, place: Place) -> Handle:
        return Handle(backend=self.name, token=token, run_dir=f"/runs/{token}", place=place)

    async def find(self, place: Place, token: str) -> Answer[Handle | None]:
        if self.silent:
            return Unknown("nobody answers")
        return Known(self.handle(token, place) if token in self.state else None)

    async def poll(self, handles: Sequence[Handle]) -> dict[str, Observation]:
        return {h.token: Observation(state=self.state[h.token], at=0.0, attempt=1) for h in handles}

    async def stop(self, handle: Handle, *, grace_s: float = 10.0) -> StopResult:
        self.state[handle.token] = Job.CANCELED
        return StopResult.STOPPED

    async def logs(self, *_: Any, **more: Any) -> Any:
        raise Unreachable("nobody can look at its files")

    list_files = manifest = read = disclose = logs


@dataclass
class Kill:
    """A process that dies at a ledger write or just before or after it sends an array; `died` is set once it has."""

    left: int
    died: bool = False

    def point(self) -> None:
        """Count one point; die if none are left."""
        self.left -= 1
        if self.left < 0:
            self.died = True
            raise Death


@contextmanager
def killed_at(point: int) -> Iterator[Kill]:
    """Kill the process at the given point, counted from 0."""
    kill, write, send = Kill(point), Ledger.append, Playing.submit_array

    def append(self: Ledger, *args: Any, **more: Any) -> Any:
        kill.point()
        return write(self, *args, **more)

    async def submit_array(self: Playing, *args: Any, **more: Any) -> Any:
        kill.point()
        found = await send(self, *args, **more)
        kill.point()
        return found

    with pytest.MonkeyPatch.context() as patch, suppress(Death):
        patch.setattr(Ledger, "append", append)
        patch.setattr(Playing, "submit_array", submit_array)
        yield kill


@pytest.fixture
def engine() -> Playing:
    return Playing()


@pytest.fixture
def clock() -> Clock:
    return clock_of_today()


def warden(home: Path, clock: Clock, engine: Playing) -> Context:
    """Open a new process over the same state folder."""
    ctx = open_house(home, clock, policy=Policy(local=Local(unsandboxed=True)))
    assert isinstance(engine, ArrayBackend)
    ctx._backends["slurm"] = engine  # type: ignore[assignment]
    return ctx


def plan(cells: int = 5, machines: int = 2) -> FanOutPlan:
    base = JobSpec(platform="slurm/local", script="print(1)\n", outputs=("out",), timeout_s=600, name="sweep")
    return gridded(base, {"lr": [str(n + 1) for n in range(cells)]}, 0, max_machines=machines)


async def settle(ctx: Context) -> FanOutResult:
    (fan_id,) = fan_out_ids(ctx.ledger)
    for _ in range(3):
        found = await advance_fan_out(ctx, fan_id)
    return found


def right(ctx: Context, engine: Playing, cells: int = 5) -> None:
    """Assert that every cell was started once, by one job of one array, and that the ledger records it."""
    assert set(engine.starts.values()) == {1} and len(engine.starts) == cells
    jobs = job_ids(ctx.ledger)
    assert {job for job, _ in engine.starts} == set(jobs)
    assert {read_job(ctx.ledger, job).state for job in jobs} == {Job.RUNNING}
    assert sorted(len(tokens) for tokens, _ in engine.arrays.values()) == [cells]
    assert list(moves_along_the_tables(ctx.ledger)) == []


async def test_waiting_cells_form_one_array_that_runs_one_cell_per_machine(
    tmp_path: Path, clock: Clock, engine: Playing
) -> None:
    ctx = warden(tmp_path, clock, engine)
    found = await fan_out(ctx, plan())
    right(ctx, engine)
    assert found.now is not None and found.now.busy == 2 and found.held is None
    assert [at_once for _, at_once in engine.arrays.values()] == [2]
    assert (await fan_out(ctx, plan())).adopted and len(engine.arrays) == 1


@pytest.mark.slow
async def test_death_at_any_write_or_call_sends_no_cell_twice_and_loses_none(tmp_path: Path, clock: Clock) -> None:
    deaths = 0
    for n in range(200):
        home, engine = tmp_path / str(n), Playing()
        ctx = warden(home, clock, engine)
        with killed_at(n) as kill:
            await fan_out(ctx, plan(3))
        ctx.ledger.close()
        ctx = warden(home, clock, engine)
        if fan_out_ids(ctx.ledger):
            await settle(ctx)
        else:
            await fan_out(ctx, plan(3))
        right(ctx, engine, 3)
        ctx.ledger.close()
        deaths += kill.died
        if not kill.died:
            break
    assert deaths > 10 and not kill.died


@pytest.mark.parametrize("when", ["die_before", "die_after", "silent"])
async def test_the_next_call_finds_or_sends_an_array_whose_reply_never_came(
    tmp_path: Path, clock: Clock, engine: Playing, when: str
) -> None:
    setattr(engine, when, True)
    ctx = warden(tmp_path, clock, engine)
    try:
        await fan_out(ctx, plan())
    except Death:
        ctx.ledger.close()
        ctx = warden(tmp_path, clock, engine)
    assert {read_job(ctx.ledger, job).state for job in job_ids(ctx.ledger)} == {Job.SUBMITTING}
    setattr(engine, when, False)
    await settle(ctx)
    right(ctx, engine)


@pytest.mark.parametrize("when", ["die_before", "die_after"])
async def test_a_cell_canceled_after_an_interrupted_launch_does_not_keep_running(
    tmp_path: Path, clock: Clock, engine: Playing, when: str
) -> None:
    setattr(engine, when, True)
    ctx = warden(tmp_path, clock, engine)
    with pytest.raises(Death):
        await fan_out(ctx, plan())
    setattr(engine, when, False)
    gone, *_ = jobs = job_ids(ctx.ledger)
    await cancel(ctx, gone)
    await settle(ctx)
    assert read_job(ctx.ledger, gone).state is Job.CANCELED
    assert engine.state.get(gone) in ({None} if when == "die_before" else {Job.CANCELED})
    assert all(read_job(ctx.ledger, job).state is Job.RUNNING for job in jobs if job != gone)


async def unsent(tmp_path: Path, clock: Clock, engine: Playing) -> tuple[Context, str]:
    """Decide on a fan-out's array and die before it is sent; return the ledger that records it and the fan-out's id."""
    engine.die_before = True
    ctx = warden(tmp_path, clock, engine)
    with pytest.raises(Death):
        await fan_out(ctx, plan())
    (fan_id,) = fan_out_ids(ctx.ledger)
    return ctx, fan_id


async def test_canceling_an_unsent_fan_out_sends_nothing(tmp_path: Path, clock: Clock, engine: Playing) -> None:
    ctx, fan_id = await unsent(tmp_path, clock, engine)
    engine.die_before = False
    found = await cancel_fan_out(ctx, fan_id, "a test")
    assert found.held is not None and found.held.by is Hold.ENDED
    assert {read_job(ctx.ledger, job).state for job in job_ids(ctx.ledger)} <= {Job.CANCELED}


async def test_a_fan_out_is_canceled_even_if_one_of_its_jobs_is_busy(
    tmp_path: Path, clock: Clock, engine: Playing, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = warden(tmp_path, clock, engine)
    await fan_out(ctx, plan())
    (fan_id,), (busy, *others) = fan_out_ids(ctx.ledger), job_ids(ctx.ledger)
    with lock_held(ctx, monkeypatch, busy), pytest.raises(Conflict):
        await cancel_fan_out(ctx, fan_id, "a test")
    assert others and {read_job(ctx.ledger, job).state for job in others} == {Job.CANCELED}
    await settle(ctx)
    assert read_job(ctx.ledger, busy).state is Job.CANCELED


def ending_is_kept(ctx: Context, engine: Playing, before: Counter[tuple[str, int]]) -> None:
    """Assert that nothing started since the end, that the engine's jobs still run and that the others are canceled."""
    assert engine.starts == before
    for job in job_ids(ctx.ledger):
        had = any(token == job for token, _ in before)
        assert read_job(ctx.ledger, job).state is (Job.RUNNING if had else Job.CANCELED)
    assert list(moves_along_the_tables(ctx.ledger)) == []


@pytest.mark.slow
async def test_ending_a_fan_out_after_a_death_at_any_point_sends_nothing_more(tmp_path: Path, clock: Clock) -> None:
    ends, recalled = Counter[bool](), 0
    for n in range(200):
        home, engine = tmp_path / str(n), Playing()
        ctx = warden(home, clock, engine)
        with killed_at(n) as kill:
            await fan_out(ctx, plan(3))
        ctx.ledger.close()
        ctx, before = warden(home, clock, engine), engine.starts.copy()
        for fan_id in fan_out_ids(ctx.ledger):
            recalled += bool(ctx.ledger.events(kind=ArrayIntent)) and not before
            end_fan_out(ctx, fan_id, "a test")
            await settle(ctx)
            await Watcher(ctx).round()
            ending_is_kept(ctx, engine, before)
            ends[bool(before)] += 1
        ctx.ledger.close()
        if not kill.died:
            break
    assert not kill.died and recalled and ends[False] and ends[True], ends


@pytest.mark.parametrize("when", ["die_before", "die_after", "silent"])
async def test_an_end_recalls_an_unsent_array_and_adopts_a_sent_array(
    tmp_path: Path, clock: Clock, engine: Playing, when: str
) -> None:
    setattr(engine, when, True)
    ctx = warden(tmp_path, clock, engine)
    with suppress(Death):
        await fan_out(ctx, plan())
    ctx.ledger.close()
    ctx, before = warden(tmp_path, clock, engine), engine.starts.copy()
    (fan_id,) = fan_out_ids(ctx.ledger)
    end_fan_out(ctx, fan_id, "a test")
    setattr(engine, when, False)
    found = await settle(ctx)
    ending_is_kept(ctx, engine, before)
    assert found.now is not None and found.now.over is (when == "die_before")
    resume_fan_out(ctx, fan_id, "a test")
    await settle(ctx)
    assert len(engine.starts) == 5 and set(engine.starts.values()) == {1}  # recalled cells are sent with the next array


async def test_while_the_engine_is_silent_an_ended_fan_out_sends_nothing(
    tmp_path: Path, clock: Clock, engine: Playing
) -> None:
    ctx, fan_id = await unsent(tmp_path, clock, engine)
    engine.die_before, engine.silent = False, True
    await cancel_fan_out(ctx, fan_id, "a test")
    assert not engine.arrays
    assert {read_job(ctx.ledger, job).state for job in job_ids(ctx.ledger)} == {Job.SUBMITTING}
    engine.silent = False
    await settle(ctx)
    ending_is_kept(ctx, engine, Counter())


async def test_resuming_an_ended_fan_out_sends_its_unsent_array_once(
    tmp_path: Path, clock: Clock, engine: Playing
) -> None:
    ctx, fan_id = await unsent(tmp_path, clock, engine)
    engine.die_before = False
    end_fan_out(ctx, fan_id, "a test")
    resume_fan_out(ctx, fan_id, "a test")
    await settle(ctx)
    right(ctx, engine)


async def test_a_refused_array_fails_every_cell(tmp_path: Path, clock: Clock, engine: Playing) -> None:
    engine.refuses = True
    ctx = warden(tmp_path, clock, engine)
    await fan_out(ctx, plan())
    jobs = [read_job(ctx.ledger, job) for job in job_ids(ctx.ledger)]
    assert {job.state for job in jobs} == {Job.FAILED} and "refused" in jobs[0].why and not engine.starts


async def test_too_many_cells_for_one_array_are_refused_before_anything_is_recorded(
    tmp_path: Path, clock: Clock, engine: Playing
) -> None:
    engine.max_array = 4
    ctx = warden(tmp_path, clock, engine)
    with pytest.raises(Refused, match="PF-ENG-008"):
        await fan_out(ctx, plan())
    assert not ctx.ledger.events(kind=JobAccepted) and not ctx.ledger.events(kind=ArrayIntent) and not engine.arrays
