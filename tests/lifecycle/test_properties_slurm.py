"""Jobs on an engine that loses replies and requeues or forgets jobs, while gpuwarden dies at any commit or call.

Hypothesis draws the agents' calls, Slurm's actions, and the point at which the process dies. After every step the
ledger is compared with Slurm's own queue: no job is submitted twice, and none that can still run is believed ended.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fakes import FakeClock
from gpuwarden.core.errors import WardenError
from gpuwarden.core.models import JobSpec
from gpuwarden.core.policy import Local
from gpuwarden.core.states import TERMINAL_JOBS, Job
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.execution.advance import advance
from gpuwarden.lifecycle.monitoring.check import cancel, check
from gpuwarden.lifecycle.monitoring.inventory import reconcile
from gpuwarden.lifecycle.records import read_job
from gpuwarden.lifecycle.submission.submit import submit
from lifecycle_kit import WEALTHY, moves_along_the_tables, story
from mortal_kit import Died, Fuse, Mortal, MortalLedger
from pretend_queue import PretendQueue
from real_parts import amount

PLATFORM = "slurm/local"
POLICY = WEALTHY.model_copy(update={"local": Local(unsandboxed=True)})

nth = st.integers(0, 3)
dies = st.one_of(st.none(), st.none(), st.integers(0, 20))
luck = st.lists(st.sampled_from(("", "lost_request", "lost_reply", "bad_reply")), max_size=4)


class MortalEngine(Mortal):
    """An engine backend whose caller may die before or after each awaited call."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        return super().__getattr__(name) if iscoroutinefunction(found) else found


class Engine(RuleBasedStateMachine):
    """Agents, a process that dies, and a queue that goes silent, requeues jobs and forgets them."""

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="gpuwarden-queue-"))
        self.clock, self.fuse = FakeClock(), Fuse()
        self.queue = PretendQueue(self.clock)
        self.queue.confine(lambda: POLICY.local, ())
        self.receipts: dict[str, JobSpec] = {}
        self.open()

    def open(self) -> None:
        self.fuse.left = None
        ledger = MortalLedger(self.home / "ledger.db", self.clock, "test")
        ledger.fuse = self.fuse
        self.ctx = Context(ledger, POLICY, self.clock, self.home, env={})
        self.ctx._backends["slurm"] = MortalEngine(self.queue, self.fuse)  # type: ignore[assignment]

    def do(self, use: Any, *args: Any, dies: int | None = None, **kwargs: Any) -> Any:
        """Run a use case. Return None if it refused or died."""
        self.fuse.left = dies
        try:
            return anyio.run(partial(use, self.ctx, *args, **kwargs))
        except WardenError as error:
            note(f"  {use.__name__}: {error.code}: {error.message}")
            return None
        except Died:
            note(f"  {use.__name__} died")
            self.ctx.ledger.close()
            self.open()
            return None
        finally:
            self.fuse.left = None

    @initialize(jobs=st.integers(1, 3), started=st.booleans(), luck=luck, dies=dies)
    def begin(self, jobs: int, started: bool, luck: list[str], dies: int | None) -> None:
        """Start with jobs in the queue, some of which had trouble during submission."""
        for n in range(jobs):
            self.quote(n, None)
            self.queue.weather = list(luck)
            self.launch(n, dies)
            self.launch(n, None)
        for row in self.queue.rows if started else ():
            self.queue.start(row)

    # -- agents

    @rule(n=st.integers(0, 2), dies=dies)
    def quote(self, n: int, dies: int | None) -> None:
        values = {"name": f"job{n}", "platform": PLATFORM, "command": ("train", str(n)), "outputs": ("out",)}
        spec = JobSpec.model_validate({**values, "timeout_s": 3600, "max_restarts": 1})
        done = self.do(submit, spec, dry_run=True, dies=dies)
        if done is not None and done.receipt:
            self.receipts[done.receipt] = spec

    @precondition(lambda self: self.receipts)
    @rule(n=nth, dies=dies)
    def launch(self, n: int, dies: int | None) -> None:
        receipt = list(self.receipts)[n % len(self.receipts)]
        self.do(submit, self.receipts[receipt], receipt=receipt, dies=dies)

    def jobs(self) -> list[str]:
        return [e.subject.removeprefix("job/") for e in self.ctx.ledger.events(kind="job.accepted")]

    some_job = precondition(lambda self: self.jobs())

    @some_job
    @rule(n=nth, dies=dies, use=st.sampled_from((check, check, advance, cancel)))
    def look_after(self, n: int, dies: int | None, use: Any) -> None:
        jobs = self.jobs()
        self.do(use, jobs[n % len(jobs)], dies=dies)

    @rule(dies=dies)
    def look_around(self, dies: int | None) -> None:
        self.do(reconcile, dies=dies)

    # -- the engine

    some_row = precondition(lambda self: self.queue.rows)

    @some_row
    @rule(n=nth, what=st.sampled_from(("start", "start", "COMPLETED", "COMPLETED", "FAILED", "requeue")))
    def queue_moves(self, n: int, what: str) -> None:
        row = self.queue.rows[n % len(self.queue.rows)]
        if what == "start":
            self.queue.start(row)
        elif what == "requeue":
            self.queue.requeue(row)
        else:
            self.queue.end(row, what)

    @rule()
    def queue_forgets(self) -> None:
        self.queue.purge()

    @rule(luck=luck, down=st.booleans())
    def weather(self, luck: list[str], down: bool) -> None:
        self.queue.weather, self.queue.down = list(luck), down

    @rule(seconds=st.sampled_from((1.0, 31.0, 1000.0)))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    # -- invariants

    @invariant()
    def submits_nothing_twice_and_loses_nothing(self) -> None:
        wrong = [*moves_along_the_tables(self.ctx.ledger), *self.doubled(), *self.lost()]
        assert not wrong, f"{wrong}\n{self.queue.rows}\n{story(self.ctx.ledger.events())}"

    def doubled(self) -> Iterator[str]:
        for name, times in self.queue.sbatches.items():
            if times > 1:
                yield f"{name} was submitted {times} times"
        for row in (*self.queue.rows, *self.queue.purged):
            if self.ctx.ledger.last(f"job/{row['token']}", "submit.intent") is None:
                yield f"{row['name']} was submitted without an intent"

    def lost(self) -> Iterator[str]:
        """Yield jobs that Slurm still has but the ledger believes ended, and successes that it believes failed."""
        for job_id in self.jobs():
            state, row = read_job(self.ctx.ledger, job_id).state, self.queue.row(f"gw-{job_id}")
            said = row["job_state"][0] if row else None
            if said in {"PENDING", "RUNNING"} and state in TERMINAL_JOBS:
                yield f"{job_id} is {said} at Slurm and {state} in the ledger"
            if said == "COMPLETED" and state in {Job.FAILED, Job.CANCELED, Job.PREEMPTED}:
                yield f"{job_id} has succeeded at Slurm and is {state} in the ledger"
            if state is Job.SUCCEEDED and said != "COMPLETED":
                yield f"{job_id} is believed to have succeeded, and Slurm says {said}"

    def teardown(self) -> None:
        """Check that, in calm weather, everything comes to rest and one list answers for all jobs of the cluster."""
        try:
            self.queue.weather, self.queue.down = [], False
            for _ in range(4):
                self.clock.advance(61.0)
                self.do(reconcile)
                for row in self.queue.rows:
                    self.queue.start(row)
                self.do(reconcile)
                live = [j for j in self.jobs() if read_job(self.ctx.ledger, j).state not in TERMINAL_JOBS]
                before = self.queue.asked["jobs"]
                self.do(reconcile)
                assert self.queue.asked["jobs"] - before <= bool(live), "one list for all jobs"
                for row in self.queue.rows:
                    self.queue.end(row)
                self.do(reconcile)
            states = {job: read_job(self.ctx.ledger, job).state for job in self.jobs()}
            assert set(states.values()) <= TERMINAL_JOBS, f"{states}\n{story(self.ctx.ledger.events())}"
            self.submits_nothing_twice_and_loses_nothing()
        finally:
            self.ctx.ledger.close()
            shutil.rmtree(self.home, ignore_errors=True)


_COMMON: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}


@pytest.mark.slow
class TestQuick(Engine.TestCase):  # type: ignore[misc, name-defined]
    """A few walks, always the same ones."""

    settings = settings(
        max_examples=8, stateful_step_count=25, derandomize=True, database=None, phases=(Phase.generate,), **_COMMON
    )


@pytest.mark.prove
@pytest.mark.endurance
class TestThorough(Engine.TestCase):  # type: ignore[misc, name-defined]
    """More walks, different each time."""

    settings = settings(max_examples=amount(15, 40), stateful_step_count=40, **_COMMON)
