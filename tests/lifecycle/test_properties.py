"""The three state machines against a cloud that loses requests and replies, lags, lies and takes machines back.

Hypothesis draws the calls of agents and users, the cloud's faults, and the ledger commit or network call at which the
process dies. After every step the ledger is compared with the cloud's own records; at the end, everything must come to
rest.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import anyio
import pytest
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fakes import FakeClock
from faulty_backend import lossy
from gpuwarden.core.errors import NotFound, WardenError
from gpuwarden.core.models import InstanceState, JobSpec
from gpuwarden.core.states import LIVE_LEASES, TERMINAL_JOBS, Teardown
from gpuwarden.lifecycle.artifacts.pull import pull
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.execution.advance import advance
from gpuwarden.lifecycle.monitoring.check import cancel, check, pause, resume
from gpuwarden.lifecycle.monitoring.inventory import list_instances, reconcile
from gpuwarden.lifecycle.records import lease_ids, read_job, read_lease, read_teardown
from gpuwarden.lifecycle.submission.submit import submit
from gpuwarden.lifecycle.teardown.gate import approve, proceed, request, withdraw
from gpuwarden.providers.rehearsal import RehearsalProvider
from gpuwarden.rehearsal.cloud import Cloud
from gpuwarden.rehearsal.model import Fault, Faults, Truth
from lifecycle_kit import WEALTHY, promises, prove, records, stopped_leases, story
from mortal_kit import PACE, SETTLE_S, Died, Fuse, Mortal, MortalLedger
from pretend_machines import PretendBackend, Processes
from real_parts import amount

PLATFORMS = ("vastai", "runpod", "lambda")


nth = st.integers(0, 3)
lost = st.sampled_from(("lost_request", "lost_reply", "bad_reply"))
calls = st.sampled_from(("create", "find", "get", "list", "start", "stop", "terminate", "submit", "quote"))

refusals = st.sampled_from(("no_capacity", "false_refusal"))
faults = st.lists(
    st.one_of(
        st.tuples(lost, calls, st.integers(1, 3)),
        st.tuples(lost, calls, st.integers(1, 3)),
        st.tuples(refusals, st.just("create"), st.integers(1, 2)),
    ),
    max_size=3,
)


class Lifecycle(RuleBasedStateMachine):
    """Agents, users, a process that dies, a cloud that lies, and a clock that is advanced by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="gpuwarden-properties-"))
        self.clock, self.fuse, self.processes = FakeClock(), Fuse(), Processes()
        self.patches = [
            patch(f"gpuwarden.rehearsal.processes.{name}", getattr(self.processes, name))
            for name in ("of", "terminate", "kill", "held")
        ]
        for each in self.patches:
            each.start()
        self.backend = PretendBackend(self.processes)
        self.receipts: dict[str, JobSpec] = {}
        self.shown: dict[str, str] = {}
        self.yes: Counter[tuple[str, str]] = Counter()
        self.excused: set[str] = set()
        self.believed: set[str] = set()
        self.beyond = False

    @initialize(
        platform=st.sampled_from(PLATFORMS),
        spot=st.booleans(),
        stage=st.sampled_from(range(7)),
        faults=faults,
        lag=st.sampled_from((0, 0, 20)),
    )
    def open(self, platform: str, spot: bool, stage: int, faults: list[tuple[Any, Any, int]], lag: int) -> None:
        """Open an installation with a first job, usually advanced to this stage."""
        self.platform = f"rehearsal/{platform}"
        self.reopen(first=True)
        self.quote(0, spot, 900.0, None)
        self.weather(faults, lag)
        if stage >= 1:
            (receipt, spec), *_ = self.receipts.items()
            self.do(submit, spec, receipt=receipt)
        if not self.jobs():
            return
        if stage >= 2:
            self.live_on(0, 2, 11.0, None)
        if stage >= 3:
            self.something_writes(0, "a", b"first")
            self.job_ends(0, "succeeded")
            self.live_on(0, 1, 1.0, None)
        if stage >= 4:
            self.look_after(0, None, pull)
            self.look_after(0, None, prove)
        if stage >= 5:
            self.ask_for_teardown(0, "terminate", None)
        if stage >= 6 and self.shown:
            self.say_yes(0, False, None)

    def reopen(self, *, first: bool = False) -> None:
        """Start a new process over the same state folder and cloud."""
        if not first:
            self.ctx.ledger.close()
        self.fuse.left = None
        ledger = MortalLedger(self.home / "ledger.db", self.clock, "test")
        ledger.fuse = self.fuse
        self.ctx = Context(ledger, WEALTHY, self.clock, self.home, env={})
        profile = self.ctx.profile(self.platform)
        if first:
            self.cloud = Cloud(self.home / "cloud", profile, self.clock, settings=PACE, supervise=False)
        provider: Any = Mortal(RehearsalProvider(self.cloud), self.fuse)
        self.ctx._providers[self.platform] = provider
        self.ctx._backends["local"] = Mortal(lossy(self.backend, self.cloud), self.fuse)  # type: ignore[assignment]

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
            self.reopen()
            return None
        finally:
            self.fuse.left = None

    dies = st.one_of(st.none(), st.none(), st.integers(0, 30))

    # -- agents

    @rule(n=st.integers(0, 1), spot=st.booleans(), cap=st.sampled_from((2.0, 900.0)), dies=dies)
    def quote(self, n: int, spot: bool, cap: float, dies: int | None) -> None:
        spot = spot and self.platform.endswith("vastai")
        spec = JobSpec.model_validate(
            {
                "name": f"job{n}", "platform": self.platform, "command": ("train",), "outputs": ("out",),
                "timeout_s": 3600, "max_cost_usd": cap, "interruptible": spot, "max_restarts": 1,
            }
        )  # fmt: skip
        done = self.do(submit, spec, dies=dies)
        if done is not None and done.receipt:
            self.receipts[done.receipt] = spec

    @precondition(lambda self: self.receipts)
    @rule(n=nth, dies=dies)
    def launch(self, n: int, dies: int | None) -> None:
        receipt = list(self.receipts)[n % len(self.receipts)]
        self.do(submit, self.receipts[receipt], receipt=receipt, dies=dies)

    def jobs(self) -> list[str]:
        return [e.subject.removeprefix("job/") for e in self.ctx.ledger.events(kind="job.accepted")]

    def job(self, n: int) -> str:
        jobs = self.jobs()
        return jobs[n % len(jobs)]

    some_job = precondition(lambda self: self.jobs())

    @some_job
    @rule(n=nth, rounds=st.integers(1, 3), seconds=st.sampled_from((1.0, 11.0, 31.0)), dies=dies)
    def live_on(self, n: int, rounds: int, seconds: float, dies: int | None) -> None:
        """Let time pass, with an occasional poll."""
        for left in reversed(range(rounds)):
            self.clock.advance(seconds)
            self.do(check, self.job(n), dies=None if left else dies)

    @some_job
    @rule(n=nth, dies=dies, use=st.sampled_from((check, advance, pull, prove)))
    def look_after(self, n: int, dies: int | None, use: Any) -> None:
        self.do(use, self.job(n), dies=dies)

    @some_job
    @rule(n=nth, dies=dies)
    def cancel(self, n: int, dies: int | None) -> None:
        self.do(cancel, self.job(n), dies=dies)

    @some_job
    @rule(n=nth, use=st.sampled_from((pause, pause, resume)), dies=dies)
    def pauses_or_resumes(self, n: int, use: Any, dies: int | None) -> None:
        self.do(use, self.job(n), dies=dies)

    @some_job
    @rule(n=nth, verb=st.sampled_from(("terminate", "terminate", "stop")), dies=dies)
    def ask_for_teardown(self, n: int, verb: str, dies: int | None) -> None:
        self.remember(self.do(request, self.job(n), verb, dies=dies))

    @rule(dies=dies, use=st.sampled_from((list_instances, reconcile)))
    def look_around(self, dies: int | None, use: Any) -> None:
        self.do(use, dies=dies)

    # -- users

    def remember(self, view: Any) -> None:
        if view is not None and view.record.digest is not None:
            self.shown[view.record.id] = view.record.digest

    @precondition(lambda self: self.shown)
    @rule(n=nth, gives_up=st.booleans(), dies=dies)
    def say_yes(self, n: int, gives_up: bool, dies: int | None) -> None:
        ticket = list(self.shown)[n % len(self.shown)]
        digest = self.shown[ticket]
        self.yes[ticket, digest] += 1
        loss = read_job(self.ctx.ledger, read_teardown(self.ctx.ledger, ticket).job_id).spec.name if gives_up else None
        self.do(approve, ticket, digest, channel="terminal", by="somebody", loss=loss, dies=dies)

    @precondition(lambda self: self.shown)
    @rule(n=nth, dies=dies, back=st.integers(0, 9))
    def look_at_ticket(self, n: int, dies: int | None, back: int) -> None:
        ticket = list(self.shown)[n % len(self.shown)]
        if back == 0:
            self.do(withdraw, ticket, "changed my mind", dies=dies)
        else:
            self.remember(self.do(proceed, ticket, dies=dies))

    # -- the world

    @rule(seconds=st.sampled_from((1.0, 6.0, 11.0, 31.0, 31.0, 61.0, 1000.0)))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(faults=faults, lag=st.sampled_from((0, 20, 20, 90)))
    def weather(self, faults: list[tuple[Any, Any, int]], lag: int) -> None:
        drawn = [Fault(kind=kind, call=call, count=count) for kind, call, count in faults]
        if lag:
            drawn += [Fault(kind="stale", call=call, count=2, seconds=lag) for call in ("find", "get", "list")]
        self.beyond = self.beyond or lag > SETTLE_S
        self.cloud.configure(faults=Faults(faults=tuple(drawn)))

    @rule(silent=st.booleans())
    def network(self, silent: bool) -> None:
        self.backend.silent = silent

    def machines(self, *states: InstanceState) -> list[str]:
        return [r.id for r in records(self.cloud) if r.state in states]

    @precondition(lambda self: self.machines(*set(InstanceState) - {InstanceState.GONE}))
    @rule(n=nth, fault=st.sampled_from(("preempt", "vanish", "comes_back", "bills_when_stopped", "failed_boot")))
    def misfortune(self, n: int, fault: Any) -> None:
        there = self.machines(*set(InstanceState) - {InstanceState.GONE})
        machine = there[n % len(there)]
        with suppress(NotFound):  # it is gone since the last call: the cloud's clock has advanced
            self.cloud.inject(machine, Fault(kind=fault, seconds=40.0))
        if fault == "comes_back":
            self.excused.add(machine)

    @precondition(lambda self: self.machines(InstanceState.STOPPED))
    @rule(n=nth)
    def somebody_starts_it_in_the_console(self, n: int) -> None:
        there = self.machines(InstanceState.STOPPED)
        machine = there[n % len(there)]
        with patch.object(self.cloud, "_strikes", return_value=set()):
            try:
                self.cloud.start(machine)
            except WardenError:
                return
        self.excused.add(machine)

    @some_job
    @rule(n=nth, state=st.sampled_from(("succeeded", "succeeded", "failed")))
    def job_ends(self, n: int, state: str) -> None:
        handle = read_job(self.ctx.ledger, self.job(n)).handle
        if handle is not None:
            self.backend.end(handle, state)

    @some_job
    @rule(n=nth, name=st.sampled_from("ab"), content=st.binary(min_size=1, max_size=3))
    def something_writes(self, n: int, name: str, content: bytes) -> None:
        handle = read_job(self.ctx.ledger, self.job(n)).handle
        if handle is not None:
            self.backend.write(handle, name, content)

    # -- invariants

    @invariant()
    def keeps_its_promises(self) -> None:
        if not hasattr(self, "ctx"):
            return
        truths = self.cloud.truths()
        wrong = promises(self.ctx.ledger, self.cloud, self.pardoned(), truths)
        wrong += [*self.false_beliefs(truths), *self.twins(), *self.unasked(), *self.pauses()]
        assert not wrong, f"{wrong}\n{story(self.ctx.ledger.events())}"

    def pardoned(self) -> set[str]:
        """Return machines that may be billed unnoticed until the next list: they came back, or a list lagged."""
        return {r.id for r in records(self.cloud)} if self.beyond else self.excused

    def false_beliefs(self, truths: dict[str, Truth]) -> Iterator[str]:
        """Yield leases newly believed stopped whose machine is billed; older ones may have come back since."""
        stopped = stopped_leases(self.ctx.ledger)
        for lease in set(stopped) - self.believed:
            if truths[stopped[lease]].meter and not self.beyond:
                yield f"{lease} is believed stopped and bills"
        self.believed = set(stopped)

    def twins(self) -> Iterator[str]:
        """Yield jobs with several live machines, unless the cloud hid one for too long, and repeated launches."""
        alive = Counter(r.token.partition("-")[0] for r in records(self.cloud) if r.state != InstanceState.GONE)
        alive.subtract(r.token.partition("-")[0] for r in records(self.cloud) if r.id in self.excused)
        if not self.beyond:
            yield from (f"{job} has {n} machines" for job, n in alive.items() if n > 1)
        yield from (f"launched twice: {once}" for once, n in Counter(self.backend.launched).items() if n > 1)

    def pauses(self) -> Iterator[str]:
        """Yield paused jobs that have a process, or were launched when resume was not the last request."""
        for job_id in self.jobs():
            rests, asked = False, ""
            for event in self.ctx.ledger.history(f"job/{job_id}"):
                asked = event.kind if event.kind in {"pause.requested", "resume.requested"} else asked
                if event.kind == "job.submitting" and rests and asked != "resume.requested":
                    yield f"{job_id} was launched again (event {event.seq}) and nobody asked for that"
                rests = event.kind == "job.paused" or (rests and event.state is None)
            handle = read_job(self.ctx.ledger, job_id).handle
            if rests and handle is not None and self.backend._alive(handle):
                yield f"{job_id} is paused and its process lives"

    def unasked(self) -> Iterator[str]:
        """Yield executions without an approval of the same facts, and approvals used twice."""
        used = Counter(
            (e.subject.removeprefix("teardown/"), e.body["digest"])
            for e in self.ctx.ledger.events(kind="approval.used")
        )
        for key, n in used.items():
            if n > self.yes[key]:
                yield f"{key} was carried out {n} times on {self.yes[key]} yes"

    # -- the end

    def teardown(self) -> None:
        try:
            if hasattr(self, "ctx"):
                self.comes_to_rest()
        finally:
            if hasattr(self, "ctx"):
                self.ctx.ledger.close()
            for each in self.patches:
                each.stop()
            shutil.rmtree(self.home)

    def comes_to_rest(self) -> None:
        """Check that, in good weather, everything billed is visible and users can end all of it."""
        self.backend.silent = False
        self.cloud.configure(faults=Faults())
        self.clock.advance(1000)
        self.do(list_instances)
        self.clock.advance(SETTLE_S + 1)
        inventory = self.do(list_instances)
        self.in_sight(inventory)
        for _ in range(30):
            for job_id in self.jobs():
                self.do(cancel, job_id)
                self.end(job_id)
            self.clock.advance(SETTLE_S + 5)
            inventory = self.do(list_instances)
            if not inventory.rows and not any(t.meter for t in self.cloud.truths().values()):
                break
        wrong = [f"{machine} bills at the end" for machine, truth in self.cloud.truths().items() if truth.meter]
        wrong += [f"{j} is {read_job(self.ctx.ledger, j).state}" for j in self.jobs() if self.unended(j)]
        wrong += [f"lease {x} is still live" for x in lease_ids(self.ctx.ledger, *LIVE_LEASES)]
        wrong += promises(self.ctx.ledger, self.cloud)
        assert not wrong, f"{wrong}\n{story(self.ctx.ledger.events())}"

    def unended(self, job_id: str) -> bool:
        return read_job(self.ctx.ledger, job_id).state not in TERMINAL_JOBS

    def in_sight(self, inventory: Any) -> None:
        assert inventory is not None and not inventory.unknown, inventory
        shown = {row.instance_id for row in inventory.rows if row.ours and row.billing is not False}
        unseen = {machine for machine, truth in self.cloud.truths().items() if truth.meter} - shown
        assert not unseen, f"{unseen} bill and are not shown\n{story(self.ctx.ledger.events())}"

    def end(self, job_id: str) -> None:
        """End a job as a user who accepts all losses by typing its name."""
        if not any(read_lease(self.ctx.ledger, x).job_id == job_id for x in lease_ids(self.ctx.ledger, *LIVE_LEASES)):
            return
        view = self.do(request, job_id, "terminate")
        if view is None or view.record.state not in {Teardown.AWAITING_HUMAN, Teardown.BLOCKED}:
            return
        loss = view.job.spec.name if view.record.state is Teardown.BLOCKED else None
        self.yes[view.record.id, view.record.digest] += 1
        self.do(approve, view.record.id, view.record.digest, channel="terminal", by="somebody", loss=loss)


_COMMON: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "print_blob": True,
}


@pytest.mark.slow
class TestQuick(Lifecycle.TestCase):  # type: ignore[misc, name-defined]
    """A few walks, always the same ones."""

    settings = settings(
        max_examples=10, stateful_step_count=30, derandomize=True, database=None, phases=(Phase.generate,), **_COMMON
    )


@pytest.mark.long
@pytest.mark.prove
@pytest.mark.endurance
class TestThorough(Lifecycle.TestCase):  # type: ignore[misc, name-defined]
    """Many more walks, different each time."""

    settings = settings(max_examples=amount(40, 200), stateful_step_count=50, **_COMMON)
