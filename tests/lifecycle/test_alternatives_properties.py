"""Ordered lists of platforms against full clouds, lost replies and crashes: never two machines for one job.

Hypothesis draws each cloud's response to a create request, and the commit or call at which the process dies. After
every step the ledger is compared with the records of all clouds.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import FakeClock
from gpuwarden.core.errors import WardenError
from gpuwarden.core.models import InstanceState, JobSpec
from gpuwarden.core.states import TERMINAL_JOBS, Job, Lease
from gpuwarden.ledger.events import CreateIntent, JobMovedOn
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.execution.provisioning import MAX_GENERATIONS
from gpuwarden.lifecycle.monitoring.check import cancel, check
from gpuwarden.lifecycle.monitoring.inventory import list_instances
from gpuwarden.lifecycle.records import lease_ids_of, read_job, read_lease
from gpuwarden.lifecycle.submission.submit import submit
from gpuwarden.providers.rehearsal import RehearsalProvider
from gpuwarden.rehearsal.cloud import Cloud
from gpuwarden.rehearsal.model import Fault, Faults
from lifecycle_kit import WEALTHY, promises, records, story
from mortal_kit import PACE, Died, Fuse, Mortal, MortalLedger
from pretend_machines import PretendBackend, Processes
from real_parts import amount

ORDER = ("rehearsal/runpod", "rehearsal/vastai", "rehearsal/lambda")


class World:
    """Three clouds, one state folder, and a process that may die."""

    def __init__(self, home: Path) -> None:
        self.home, self.clock, self.fuse, self.processes = home, FakeClock(), Fuse(), Processes()
        self.backend, self.clouds = PretendBackend(self.processes), dict[str, Cloud]()
        self.ctx: Context
        self.open()

    def open(self) -> None:
        """Start a new process over the same state folder and clouds."""
        self.fuse.left = None
        ledger = MortalLedger(self.home / "ledger.db", self.clock, "test")
        ledger.fuse = self.fuse
        self.ctx = Context(ledger, WEALTHY, self.clock, self.home, env={})
        for platform in ORDER:
            profile = self.ctx.profile(platform)
            if platform not in self.clouds:
                self.clouds[platform] = Cloud(
                    self.home / profile.id, profile, self.clock, settings=PACE, supervise=False
                )
            provider: Any = Mortal(RehearsalProvider(self.clouds[platform]), self.fuse)
            self.ctx._providers[platform] = provider
        self.ctx._backends["local"] = Mortal(self.backend, self.fuse)  # type: ignore[assignment]

    def do(self, use: Any, *args: Any, dies: int | None = None, **kwargs: Any) -> Any:
        self.fuse.left = dies
        try:
            return anyio.run(partial(use, self.ctx, *args, **kwargs))
        except WardenError:
            return None
        except Died:
            self.ctx.ledger.close()
            self.open()
            return None
        finally:
            self.fuse.left = None

    # -- invariants

    def hold(self) -> None:
        wrong = [f"{p}: {w}" for p, cloud in self.clouds.items() for w in promises(self.ctx.ledger, cloud)]
        wrong += [*self.twins(), *self.order(), *self.settled()]
        assert not wrong, f"{wrong}\n{story(self.ctx.ledger.events())}"

    def alive(self) -> list[tuple[str, str]]:
        return [
            (platform, r.token)
            for platform, cloud in self.clouds.items()
            for r in records(cloud)
            if r.state != InstanceState.GONE
        ]

    def twins(self) -> Iterator[str]:
        """Yield an error if the job has more than one live machine across all clouds."""
        if len(self.alive()) > 1:
            yield f"two machines live: {self.alive()}"

    def order(self) -> Iterator[str]:
        """Yield an error if the list is walked backwards, a token is reused or a platform is tried too often."""
        intents = [(e.subject, e.data.platform) for e in self.ctx.ledger.events(kind=CreateIntent)]
        places = [ORDER.index(platform) for _, platform in intents]
        if places != sorted(places):
            yield f"the list was not walked in its order: {intents}"
        if max(Counter(subject for subject, _ in intents).values(), default=0) > 1:
            yield f"a token was used twice: {intents}"
        if max(Counter(places).values(), default=0) > MAX_GENERATIONS:
            yield f"a platform was asked too often: {intents}"

    def settled(self) -> Iterator[str]:
        """Yield an error if an attempt begins before the previous one is known to have rented nothing."""
        ledger = self.ctx.ledger
        for moved in ledger.events(kind=JobMovedOn):
            known = [e.seq for e in ledger.history(f"lease/{moved.data.lease}") if e.state == Lease.NONE]
            if not known or known[0] > moved.seq:
                yield f"{moved.data.lease} was given up before it was settled"


refusals = st.sampled_from(("no_capacity", "no_capacity", "no_capacity", "false_refusal"))
creates = st.one_of(
    st.just(()),
    st.tuples(st.tuples(refusals, st.integers(1, 2), st.integers(1, 3))),
    st.tuples(st.tuples(st.sampled_from(("lost_request", "lost_reply", "bad_reply")), st.just(1), st.integers(1, 2))),
    st.tuples(
        st.tuples(st.sampled_from(("lost_request", "lost_reply")), st.just(1), st.just(1)),
        st.tuples(refusals, st.just(2), st.integers(1, 2)),
    ),
)
deaths = st.lists(st.one_of(st.none(), st.integers(0, 24)), min_size=14, max_size=14)


Weather = tuple[tuple[tuple[Any, int, int], ...], ...]


@pytest.mark.prove
@pytest.mark.endurance
@settings(deadline=None, max_examples=amount(30, 100))
@given(
    weather=st.tuples(creates, creates, creates),
    lag=st.sampled_from((0.0, 20.0)),
    deaths=deaths,
    pace=st.sampled_from((1.0, 11.0, 31.0)),
    cancels=st.sampled_from((None, None, None, 2, 5)),
)
def test_a_list_never_gets_two_machines(
    weather: Weather, lag: float, deaths: list[int | None], pace: float, cancels: int | None
) -> None:
    live(weather, deaths, lag, pace, cancels)


NONE_LEFT, LOST = (("no_capacity", 1, 99),), (("lost_reply", 1, 1),)
GONE = (("lost_request", 1, 1), ("no_capacity", 2, 99))


@pytest.mark.prove
@pytest.mark.parametrize(
    ("weather", "dies", "runs"),
    [
        (((), (), ()), None, 0),
        ((NONE_LEFT, (), ()), None, 1),
        ((NONE_LEFT, NONE_LEFT, ()), None, 2),
        ((NONE_LEFT, NONE_LEFT, NONE_LEFT), None, None),  # attempts are bounded; then the job fails with a reason
        ((LOST, (), ()), None, 0),  # the first attempt's machine is found; no second one is rented
        (((("false_refusal", 1, 1),), (), ()), None, 0),  # refused, but created all the same
        ((GONE, LOST, ()), None, 1),
        ((NONE_LEFT, LOST, ()), 3, 1),
        ((NONE_LEFT, LOST, ()), 8, 1),
        ((GONE, NONE_LEFT, LOST), 13, 2),
        ((NONE_LEFT, LOST, ()), 18, 1),
        ((NONE_LEFT, NONE_LEFT, LOST), 23, 2),
    ],
)
def test_the_next_alternative_waits_until_the_previous_is_settled(
    weather: Weather, dies: int | None, runs: int | None
) -> None:
    assert live(weather, [dies] * 4 + [None] * 10, pace=31.0) == runs


def live(
    weather: Weather, deaths: list[int | None], lag: float = 0.0, pace: float = 11.0, cancels: int | None = None
) -> int | None:
    """Run one job in this weather. Return its final position in the list, or None if it does not run."""
    home = Path(tempfile.mkdtemp(prefix="gpuwarden-alternatives-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, home)
        world = World(home)
        stack.callback(lambda: world.ctx.ledger.close())
        for name in ("of", "terminate", "kill", "held"):
            stack.enter_context(patch(f"gpuwarden.rehearsal.processes.{name}", getattr(world.processes, name)))
        spec = JobSpec(
            platform=ORDER[0], command=("train",), outputs=("out",), timeout_s=3600, max_cost_usd=900,
            alternatives=ORDER[1:],
        )  # fmt: skip
        receipt = world.do(submit, spec).receipt
        for platform, faults in zip(ORDER, weather, strict=True):
            drawn = [Fault(kind=kind, call="create", at=at, count=count) for kind, at, count in faults]
            if lag:
                drawn += [Fault(kind="stale", call=call, count=2, seconds=lag) for call in ("find", "get", "list")]
            world.clouds[platform].configure(faults=Faults(faults=tuple(drawn)))
        for n, dies in enumerate(deaths):
            accepted = world.ctx.ledger.events(kind="job.accepted")
            job_id = accepted[0].subject.removeprefix("job/") if accepted else ""
            if not accepted:
                world.do(submit, spec, receipt=receipt, dies=dies)
            else:
                world.do(cancel if n == cancels else check, job_id, dies=dies)
            world.clock.advance(pace)
            world.hold()
        return comes_to_rest(world, spec, receipt)


def comes_to_rest(world: World, spec: JobSpec, receipt: str) -> int | None:
    """Check that, in good weather, the job runs on one machine, or has none and a reason."""
    for cloud in world.clouds.values():
        cloud.configure(faults=Faults())
    world.do(submit, spec, receipt=receipt)
    [accepted] = world.ctx.ledger.events(kind="job.accepted")
    job_id = accepted.subject.removeprefix("job/")
    for _ in range(12):
        world.clock.advance(400)
        world.do(check, job_id)
        world.hold()
    world.do(list_instances)
    job, alive = read_job(world.ctx.ledger, job_id), world.alive()
    told = story(world.ctx.ledger.events())
    if job.state in TERMINAL_JOBS:
        billing = list(lease_ids_of(world.ctx.ledger, job_id, Lease.METERING, Lease.UNVERIFIED))
        assert len(alive) == len(billing), told
        return None
    assert job.state is Job.RUNNING and job.lease is not None, told
    lease = read_lease(world.ctx.ledger, job.lease)
    assert alive == [(lease.platform, lease.id)] and job.spec.platform == lease.platform, told
    assert job.price is not None and job.worst_cost == pytest.approx(job.price), told
    return ORDER.index(lease.platform)
