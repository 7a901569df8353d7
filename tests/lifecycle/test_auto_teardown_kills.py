"""Random kills and cuts during automatic teardown: nothing unproven is lost, and no billing goes unnoticed.

The provider lies as well: it accepts calls without effect, hides machines, refuses calls that it carries out, claims a
stop while billing continues, shows old lists, and brings ended machines back. The alert channel fails now and then,
and the user may object at any moment, even between two writes of the watch. `HITS` is the minimum number of kills and
cuts, `KILLS` the minimum number of kills; the GPUWARDEN_KILLS variable sets the latter.
"""

from __future__ import annotations

import os
import random
import shutil
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from copy import copy
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import anyio
import pytest

from fakes import FakeClock
from faulty_backend import lossy
from gpuwarden.core.errors import Unreachable, WardenError
from gpuwarden.core.models import Answer, Artifact, Handle, Instance, InstanceState, JobSpec, Known, Observation, Place
from gpuwarden.core.policy import TeardownPolicy
from gpuwarden.core.states import LIVE_LEASES, OPEN_TEARDOWNS, TERMINAL_JOBS, Job, Lease
from gpuwarden.ledger.event import Event
from gpuwarden.ledger.events import AlertRaised, ApprovalGranted, AutoTeardownAnnounced, LeaseStopping, VerbIntent
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.leases.auto_teardown import automatic_teardown
from gpuwarden.lifecycle.monitoring.alert_conditions import ORDER_LATE_S
from gpuwarden.lifecycle.monitoring.check import check
from gpuwarden.lifecycle.monitoring.watch import SWEEP_S, Round, Watcher
from gpuwarden.lifecycle.notify import ENDING_SOON
from gpuwarden.lifecycle.records import read_job, read_lease
from gpuwarden.lifecycle.submission.submit import submit
from gpuwarden.lifecycle.teardown.gate import PATIENCE_S
from gpuwarden.lifecycle.teardown.orders import HoldOutcome, hold_machine
from gpuwarden.providers.rehearsal import RehearsalProvider
from gpuwarden.rehearsal.cloud import Cloud
from gpuwarden.rehearsal.model import Fault, Faults
from lifecycle_kit import WEALTHY, open_house, promises, records, story, weights
from mortal_kit import PACE, SETTLE_S, Died, Fuse, Mortal, MortalLedger
from orders_kit import CALLED, Phone
from pretend_machines import PretendBackend, Processes, remembered
from real_parts import amount

HITS = amount(15, 60)
KILLS = int(os.environ.get("GPUWARDEN_KILLS") or amount(30, 300))
PLATFORM = "rehearsal/vastai"
STANDING = frozenset({"finished_billing", "unknown"})
"""Alerts that report a billed machine for as long as it is billed."""
REPEATED = frozenset({"approval", "unseen_end", "came_back"})
"""Alerts about items that wait for the user."""


class CutLine(PretendBackend):
    """Machines whose connection is cut at one in `one_in` answers, even in the middle of a file."""

    def __init__(self, processes: Processes, draw: random.Random) -> None:
        super().__init__(processes)
        self.draw, self.one_in, self.cuts = draw, 0, 0

    def _cut(self) -> bool:
        cut = self.one_in > 0 and self.draw.randrange(self.one_in) == 0
        self.cuts += cut
        return cut

    def _reach(self, place: Place) -> None:
        super()._reach(place)
        if self._cut():
            raise Unreachable("the line was cut")

    async def poll(self, handles: Sequence[Handle]) -> dict[str, Observation]:
        if self._cut():
            raise Unreachable("the line was cut")
        return await super().poll(handles)

    async def read(self, handle: Handle, artifact: Artifact, offset: int = 0) -> AsyncIterator[bytes]:
        async for block in super().read(handle, artifact, offset):
            if self._cut():
                yield block[: len(block) // 2]
                raise Unreachable("the line was cut")
            yield block


class Liar:
    """A provider whose calls have no effect until `idle_until` and whose machines are hidden until `hides_until`."""

    def __init__(self, real: Any, clock: FakeClock) -> None:
        self.real, self.clock = real, clock
        self.idle_until, self.hides_until = 0.0, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def _now(self, until: float) -> bool:
        return self.clock.now() < until

    async def stop(self, id: str) -> Answer[None]:
        return Known(None) if self._now(self.idle_until) else await self.real.stop(id)

    async def terminate(self, id: str) -> Answer[None]:
        return Known(None) if self._now(self.idle_until) else await self.real.terminate(id)

    async def get(self, id: str) -> Answer[Instance | None]:
        return Known(None) if self._now(self.hides_until) else await self.real.get(id)

    async def find(self, token: str) -> Answer[tuple[Instance, ...]]:
        return Known(()) if self._now(self.hides_until) else await self.real.find(token)

    async def list(self) -> Answer[tuple[Instance, ...]]:
        return Known(()) if self._now(self.hides_until) else await self.real.list()


class Night:
    """One job that succeeds unattended, with a watch that dies now and then and an unreliable network."""

    def __init__(self, home: Path, seed: int, phone: Phone) -> None:
        self.home, self.random, self.phone = home, random.Random(seed), phone
        self.clock, self.fuse, self.processes = FakeClock(), Fuse(), Processes()
        self.backend, self.content = CutLine(self.processes, self.random), weights()
        order = TeardownPolicy(automatic=self.random.choice(("terminate", "stop")))
        self.policy = WEALTHY.model_copy(update={"teardown": order, "watch": CALLED})
        self.cloud: Cloud | None = None
        self.deaths, self.lies = 0, Counter[str]()
        self.effect: HoldOutcome | None = None
        self.calls_before = 0
        """Number of calls sent before the user objected."""
        self.excused_until = 0.0
        self.open()

    @property
    def held(self) -> bool:
        """Whether the user was told that the machine stays."""
        return self.effect is HoldOutcome.HELD

    def calls(self) -> list[Event[VerbIntent]]:
        return self.ctx.ledger.events(f"lease/{self.job}-i1", kind=VerbIntent)

    def objects(self) -> None:
        """Object from another process, at whatever point this one has reached."""
        other = open_house(self.home, self.clock, policy=self.policy)
        if self.effect is None and automatic_teardown(other, self.job):
            self.effect = hold_machine(other, self.job, "command line", "test")
            self.calls_before = len(self.calls())
        other.ledger.close()

    def open(self) -> None:
        """Start a new process over the same state folder and cloud."""
        self.fuse.left = None
        ledger = MortalLedger(self.home / "ledger.db", self.clock, "watch")
        ledger.fuse = self.fuse
        self.ctx = Context(ledger, self.policy, self.clock, self.home, env={})
        if self.cloud is None:
            profile = self.ctx.profile(PLATFORM)
            self.cloud = Cloud(self.home / "cloud", profile, self.clock, settings=PACE, supervise=False)
            self.liar = Liar(RehearsalProvider(self.cloud), self.clock)
        self.ctx._providers[PLATFORM] = Mortal(self.liar, self.fuse)  # type: ignore[assignment]
        self.ctx._backends["local"] = Mortal(lossy(self.backend, self.cloud), self.fuse)  # type: ignore[assignment]
        self.watcher = Watcher(self.ctx)

    def do(self, use: Any, *args: Any, dies: int | None = None, **kwargs: Any) -> Any:
        self.fuse.left = dies
        try:
            return anyio.run(partial(use, *args, **kwargs))
        except WardenError:
            return None
        except Died:
            self.deaths += 1
            self.ctx.ledger.close()
            self.open()
            return None
        finally:
            self.fuse.left = None

    def begin(self, *, lies: bool = True) -> None:
        spec = JobSpec(platform=PLATFORM, command=("train",), outputs=("out",), timeout_s=3600, max_cost_usd=900)
        checked = self.do(submit, self.ctx, spec)
        self.job = self.do(submit, self.ctx, spec, receipt=checked.receipt).job.id
        self.clock.advance(11)
        self.do(check, self.ctx, self.job)
        handle = read_job(self.ctx.ledger, self.job).handle
        assert handle is not None and self.cloud is not None
        self.handle = handle
        self.backend.write(handle, "model.safetensors", self.content)
        self.backend.end(handle)
        lie = self.random.choice(("bills_when_stopped", "comes_back", *[None] * 6))
        if lies and lie is not None:
            self.lies[lie] += 1
            self.cloud.inject(records(self.cloud)[0].id, Fault(kind=lie, seconds=self.random.choice((40.0, 400.0))))

    def bills(self) -> bool:
        assert self.cloud is not None
        return any(truth.meter for truth in self.cloud.truths().values())

    def there(self) -> bytes | None:
        """Return the files on the machine's disk, or None once it is gone."""
        file = Path(self.handle.run_dir) / "work" / "out" / "model.safetensors"
        return file.read_bytes() if file.exists() else None

    def here(self) -> set[bytes]:
        found = (self.home / "artifacts").rglob("model.safetensors")
        return {file.read_bytes() for file in found}

    def something_happens(self) -> None:
        """Inject a cut, a lost reply, a lie, a late write, a damaged copy or an objection, each of them rarely."""
        waits = self.bills() and read_lease(self.ctx.ledger, f"{self.job}-i1").state is Lease.METERING
        match self.random.randrange(18):
            case 0:
                self.backend.silent = True
            case 1 | 2:
                self.backend.silent = False
            case 3:
                self.network_fails(("lost_request", "lost_reply", "bad_reply"), ("get", "stop", "terminate", "list"))
            case 4 if waits and self.random.random() < 0.3:
                self.content = weights()[:-4] + bytes([self.random.randrange(1, 5), 0, 0, 0])
                self.backend.write(self.handle, "model.safetensors", self.content)
            case 5 if self.random.random() < 0.3:
                for copy in (self.home / "artifacts").rglob("model.safetensors"):
                    copy.write_bytes(b"damaged")
            case 6 | 17 if self.random.random() < (0.8 if self.phone.notices() else 0.1):
                self.fuse.errand = (self.random.randint(0, 60), self.objects)
            case 14:
                self.phone.down = True
            case 15 | 16:
                self.phone.down = False
            case 7 | 8:
                self.backend.one_in = self.random.choice((0, 3, 10))
            case 9:
                self.network_fails(("false_refusal",), ("stop", "terminate"))
            case 10:
                self.network_fails(("stale",), ("get", "list", "find"))
            case 11:
                self.lies["idle"] += 1
                self.liar.idle_until = self.clock.now() + self.random.choice((30.0, 300.0))
            case 12 | 13 if self.random.random() < 0.5:
                self.hides()

    def network_fails(self, kinds: Sequence[str], calls: Sequence[str]) -> None:
        assert self.cloud is not None
        kind, call = self.random.choice(kinds), self.random.choice(calls)
        self.lies[kind] += 1
        fault = {"kind": kind, "call": call, "count": self.random.randint(1, 3), "seconds": 60.0}
        self.cloud.configure(faults=Faults(faults=(Fault.model_validate(fault),)))

    def hides(self) -> None:
        """Hide the machine, usually too briefly for two polls to confirm it gone.

        If it is hidden for longer, or twice without a poll in between, the next list shows it again.
        """
        seconds, looked = self.random.choice((SETTLE_S - 5, SETTLE_S - 5, 200.0)), self.liar.hides_until + 200.0
        beyond = seconds > SETTLE_S or self.clock.now() < looked
        self.lies["hidden long" if beyond else "hidden"] += 1
        self.liar.hides_until = self.clock.now() + seconds
        if beyond:
            self.excused_until = self.liar.hides_until + SWEEP_S + 600.0  # allows for lost lists

    def look(self, *, mortal: bool) -> bool:
        """Let the watch copy, poll and tear down, then check both of its promises against the cloud's own records.

        Return whether the machine is still billed.
        """
        before, effect = self.there() if self.bills() else None, self.effect
        uses: tuple[Callable[[], Any], ...] = (lambda: self.watcher.copier.round(), lambda: self.watcher.round())
        for use in uses:
            dies = self.random.randint(0, 25) if mortal and self.random.random() < 0.5 else None
            found = self.do(use, dies=dies)
        bills = self.bills()
        if before is not None and not bills:
            assert not self.held, f"the user was told that it stays\n{self.story()}"
            assert before in self.here(), f"the only copy was on it\n{self.story()}"
        if self.effect is not None:
            assert len(self.calls()) == self.calls_before, f"a call was sent after the objection\n{self.story()}"
        for call in self.calls()[:1]:
            grace_s = self.policy.teardown.grace_minutes * 60.0
            assert any(at + grace_s <= call.at for at in self.phone.notices()), f"no notice came\n{self.story()}"
        if isinstance(found, Round):
            assert "watch" not in found.trouble, found.trouble
        if isinstance(found, Round) and effect is self.effect:  # otherwise the next round sees this objection
            assert not bills or self.told(found), f"it bills past its grace unseen\n{self.story()}"
        return bills

    def told(self, found: Round) -> bool:
        """Return whether an alert reports the machine's billing, or it is still within its grace period."""
        ledger, job, now = self.ctx.ledger, read_job(self.ctx.ledger, self.job), self.clock.now()
        if {alert.kind for alert in found.standing} & STANDING or now < self.excused_until:
            return True
        waiting = {*ledger.subjects("teardown", *OPEN_TEARDOWNS), *ledger.subjects("lease", *LIVE_LEASES)}
        raised = ledger.events(kind=AlertRaised)
        if any(event.data.condition in REPEATED and event.subject in waiting for event in raised):
            return True
        watch = self.policy.watch
        if job.state not in TERMINAL_JOBS:
            return now - job.since <= watch.unknown_minutes * 60
        said = ledger.last(job.subject, AutoTeardownAnnounced)
        announced = said is not None and automatic_teardown(self.ctx, job.id) is not None
        if announced and said is not None and now <= said.data.ends_at + ORDER_LATE_S:
            return ledger.alert(job.subject, ENDING_SOON, str(said.seq)) is not None
        stopping = ledger.last(f"lease/{job.lease}", LeaseStopping)
        if stopping is not None and now - stopping.at <= PATIENCE_S:
            return True
        return now - job.since <= watch.finished_minutes * 60

    def story(self) -> str:
        return story(self.ctx.ledger.events())

    def comes_to_rest(self) -> None:
        """Check that, in good weather, the machine ends within its grace period or an alert explains its billing."""
        assert self.cloud is not None
        self.backend.silent, self.backend.one_in, self.phone.down = False, 0, False
        self.liar.idle_until = self.liar.hides_until = 0.0
        self.cloud.configure(faults=Faults())
        for _ in range(30):
            self.clock.advance(120)
            bills = self.look(mortal=False)
            if not bills and self.clock.now() > self.excused_until:
                break
        lied = {"bills_when_stopped", "comes_back"} & set(self.lies)
        assert self.effect or lied or not self.bills(), f"it could have ended\n{self.story()}"
        assert not self.bills() or self.told(self.do(self.watcher.round)), f"it bills unseen\n{self.story()}"
        assert read_job(self.ctx.ledger, self.job).state is Job.SUCCEEDED
        wrong = promises(self.ctx.ledger, self.cloud)
        assert not wrong, f"{wrong}\n{self.story()}"


@pytest.fixture
def pretended() -> Iterator[None]:
    made = Processes()
    names = ("of", "terminate", "kill", "held")
    patches = [patch(f"gpuwarden.rehearsal.processes.{name}", getattr(made, name)) for name in names]
    patches.append(patch("os.fsync"))  # the host itself never crashes here
    patches.append(patch("gpuwarden.checkpoints.load.run_child", remembered))
    for each in patches:
        each.start()
    yield
    for each in patches:
        each.stop()


@pytest.mark.slow
@pytest.mark.endurance
@pytest.mark.attack("ending", "kills the watch and cuts its lines while machines end by an order and the provider lies")
@pytest.mark.usefixtures("pretended")
def test_kills_and_cuts_never_lose_a_checkpoint_or_hide_a_meter(
    tmp_path: Path, phone: Phone, record_property: Callable[[str, object], None]
) -> None:
    _nights(tmp_path, phone, record_property, lambda deaths, cuts: deaths + cuts >= HITS)


@pytest.mark.prove
@pytest.mark.endurance
@pytest.mark.attack("ending", "kills the watch again and again while the user objects to automatic teardown")
@pytest.mark.usefixtures("pretended")
def test_a_kill_never_breaks_the_promise_that_a_machine_stays(
    tmp_path: Path, phone: Phone, record_property: Callable[[str, object], None]
) -> None:
    """No machine ends after "stays" or without a delivered notice, and none is billed without an alert."""
    _nights(tmp_path, phone, record_property, lambda deaths, cuts: deaths >= KILLS)


def _nights(
    tmp_path: Path, phone: Phone, record_property: Callable[[str, object], None], enough: Callable[[int, int], bool]
) -> None:
    deaths, cuts, nights, ended = 0, 0, 0, 0
    lies, answers = Counter[str](), Counter[str]()
    while not enough(deaths, cuts):
        phone.taken.clear()
        phone.at.clear()
        night = Night(tmp_path / f"night-{nights}", nights, phone)
        night.begin()
        for _ in range(25):
            night.clock.advance(night.random.choice((15.0, 60.0, 120.0)))
            night.something_happens()
            if not night.look(mortal=True):
                break
        night.comes_to_rest()
        assert night.cloud is not None
        ended += records(night.cloud)[0].state in {InstanceState.GONE, InstanceState.STOPPED}
        deaths, cuts, nights = deaths + night.deaths, cuts + night.backend.cuts, nights + 1
        lies += night.lies
        answers.update([str(night.effect)] if night.effect else [])
        night.ctx.ledger.close()
        shutil.rmtree(night.home)
    figure = f"{deaths} kills and {cuts} cuts in {nights} nights: {ended} machines ended, {dict(answers)}; {dict(lies)}"
    print(figure)
    record_property("figure", figure)
    assert deaths and cuts and ended and lies, "the nights were too quiet to show anything"


# ------------------------------------------------------------------------- an objection at every point of the teardown


class Due:
    """A machine whose announced teardown is due in the watch's next round. It is copied for every try."""

    def __init__(self, home: Path, phone: Phone) -> None:
        self.night = Night(home, 1, phone)
        self.night.begin(lies=False)
        while not phone.notices():
            self.night.do(self.night.watcher.copier.round)
            self.night.do(self.night.watcher.round)
        for _ in range(2 * self.night.policy.teardown.grace_minutes - 1):
            self.night.clock.advance(30)
            self.night.do(self.night.watcher.round)
            assert not self.night.calls()
        self.night.ctx.ledger.close()

    def copy(self, home: Path) -> Night:
        """Copy the night, right before the round that ends the machine, into another folder."""
        shutil.copytree(self.night.home, home)
        night = copy(self.night)
        night.home, night.fuse, night.cloud, night.effect, night.deaths = home, Fuse(), None, None, 0
        night.clock = FakeClock(self.night.clock.now())
        night.open()
        return night


async def _later(night: Night) -> None:
    """Run the watch for longer than it waits for a call to take effect."""
    for _ in range(8):
        night.clock.advance(100)
        await night.watcher.round()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "meanwhile"])
@pytest.mark.attack("ending", "objects at every write and call of an automatic teardown, with a kill there or without")
@pytest.mark.usefixtures("pretended")
def test_an_objection_gets_a_true_answer_at_every_point(tmp_path: Path, phone: Phone, how: str) -> None:
    due, answers = Due(tmp_path / "due", phone), Counter[str]()

    def approved(point: int) -> bool:
        night = due.copy(tmp_path / f"approved-{point}")
        night.clock.advance(30)
        night.do(night.watcher.round, dies=point)
        granted = night.ctx.ledger.events(kind=ApprovalGranted)
        night.ctx.ledger.close()
        return any(event.subject.startswith("teardown/") for event in granted)

    for point in count(bisect_left(range(100), True, key=approved) - 1):  # earlier points precede the teardown
        night = due.copy(tmp_path / f"{how}-{point}")
        if how == "meanwhile":
            night.fuse.errand = (point, night.objects)
        night.clock.advance(30)
        night.do(night.watcher.round, dies=point if how == "killed" else None)
        over = night.deaths == 0 if how == "killed" else night.fuse.errand is not None
        night.fuse.errand = None
        night.objects()
        night.do(_later, night)
        answers[str(night.effect)] += 1
        assert night.bills() or night.effect is HoldOutcome.TOO_LATE, night.story()
        assert len(night.calls()) == night.calls_before, night.story()
        assert not night.bills() or night.ctx.ledger.standing_alerts(), f"it bills unseen\n{night.story()}"
        assert not promises(night.ctx.ledger, night.cloud), night.story()  # type: ignore[arg-type]
        night.ctx.ledger.close()
        if over:
            break
    assert answers["held"] >= 3 and answers["too_late"] >= 3, answers
