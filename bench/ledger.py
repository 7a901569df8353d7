"""Measure how the ledger's costs grow with the ended jobs: 100, 1,000, and 10,000, rented and local.

Each figure is a ratio: to the same figure at the smallest size, and to one bare insert or select of sqlite3 on the same
disk in the same run. The jobs end one a minute, each with the events of a complete life; two live jobs are watched. The
loop's figure is the longest time during a watch round in which the event loop ran no other task. Times are CPU time.

    python bench/ledger.py [--jobs 100,1000,10000]
"""

from __future__ import annotations

import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench._figures import arguments, figure

from gpuwarden.core.models import (
    Handle,
    Instance,
    InstanceState,
    JobSpec,
    Known,
    Level,
    Observation,
    Place,
    Verdict,
)
from gpuwarden.core.policy import Caps, Policy
from gpuwarden.core.states import Job
from gpuwarden.ledger import events as ev
from gpuwarden.ledger.chain import COLUMNS, link
from gpuwarden.ledger.store import Ledger
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.leases.budgets import spent_today
from gpuwarden.lifecycle.leases.meter import confirmed_end, lease_now, spent
from gpuwarden.lifecycle.monitoring.alert_conditions import DAY_S
from gpuwarden.lifecycle.monitoring.watch import Watcher
from gpuwarden.lifecycle.records import read_job

MINUTE = 60.0
LIVE = ("jlive0", "jlive1")
RICH = Policy(caps=Caps(per_job_usd=1e6, per_day_usd=1e6, per_instance_usd=1e6))


class HandClock:
    """A clock that does not run: `sleep` and the benchmark advance it."""

    def __init__(self) -> None:
        self.time = 1_700_000_000.0

    def now(self) -> float:
        """Return the seconds since the epoch."""
        return self.time

    async def sleep(self, seconds: float) -> None:
        """Advance the clock."""
        self.time += seconds


class Cloud:
    """A provider that answers immediately, so that only the ledger is measured."""

    settle_s = 1.0

    def key_digest(self, salt: str) -> str:
        """Return a constant digest."""
        return salt

    async def account_id(self) -> Known[str]:
        """Return a constant account."""
        return Known("one")

    async def get(self, id: str) -> Known[Instance]:  # noqa: A002
        """Return the running machine of a job."""
        return Known(machine(id.removeprefix("m-")))

    async def list(self) -> Known[tuple[Instance, ...]]:
        """Return no machines."""
        return Known(())


class Runs:
    """A backend that reports every job as running."""

    seals = False

    async def poll(self, handles: list[Handle]) -> dict[str, Observation]:
        """Return a running observation for each handle."""
        return {h.token: Observation(state=Job.RUNNING, why="running", machine="boot-1/9") for h in handles}


def machine(job: str, state: InstanceState = InstanceState.RUNNING) -> Instance:
    """Return a rented machine as its provider reports it."""
    place = Place(platform="vastai", instance_id=f"m-{job}", host="203.0.113.7", port=22, user="root", run_root="/w")
    return Instance(
        id=f"m-{job}", token=f"{job}-i1", state=state, place=place, meter=True, price_usd_per_hour=2.0, cost_usd=1.5
    )


def begins(job: str, platform: str) -> Iterator[tuple[str, ev.Body]]:
    """Yield the events of a job from its receipt until it runs."""
    spec = JobSpec(name="train", platform=platform, command=("train",), outputs=("out",), timeout_s=3600)
    place = machine(job).place if platform == "vastai" else Place(platform=platform, run_root="/w")
    assert place is not None
    yield f"receipt/r{job}", ev.ReceiptIssued(spec_digest="d" * 71, facts_digest="d" * 71, expires_at=1.0, name="train")
    yield f"job/{job}", ev.JobAccepted(spec=spec, spec_digest="d" * 71, receipt=f"r{job}", worst_cost=2.0, price=2.0)
    if platform == "vastai":
        yield f"lease/{job}-i1", ev.CreateIntent(job=job, platform=platform, generation=1)
        yield f"job/{job}", ev.JobProvisioning(lease=f"{job}-i1", generation=1)
        yield f"lease/{job}-i1", ev.LeaseCreated(instance=machine(job, InstanceState.BOOTING))
        yield f"lease/{job}-i1", ev.LeaseObserved(instance=machine(job))
    yield f"job/{job}", ev.JobSubmitting(place=place)
    yield f"job/{job}", ev.SubmitIntent(attempt=1)
    handle = Handle(backend="local", token=job, run_dir=f"/w/gw-{job}", place=place)
    yield f"job/{job}", ev.JobSubmitted(handle=handle, attempt=1)
    yield f"job/{job}", ev.MachineIdentified(machine="boot-1/9")


def ends(job: str, platform: str) -> Iterator[tuple[str, ev.Body]]:
    """Yield the events of a job that succeeds, is proven, and whose machine is terminated."""
    yield f"job/{job}", ev.JobSucceeded(why="succeeded", observation={"state": "succeeded", "why": "succeeded"})
    yield f"job/{job}", ev.ArtifactsPulled(record="p.json", digest="d" * 71, dest="/home/user/out", files=3, bytes=9)
    yield f"job/{job}", ev.ArtifactsVerified(verdict=Verdict.PROVEN, level=Level.LOAD, pull="d" * 71, seal="s" * 71)
    if platform != "vastai":
        return
    lease, ticket = f"lease/{job}-i1", f"teardown/t{job}"
    yield ticket, ev.TeardownRequested(job=job, lease=f"{job}-i1", verb="terminate")
    yield ticket, ev.TeardownAwaitingHuman(digest="d" * 71, expires_at=1.0)
    yield ticket, ev.ApprovalGranted(digest="d" * 71, channel="terminal", by="user", expires_at=1.0)
    yield ticket, ev.ApprovalUsed(digest="d" * 71, channel="terminal", verb="terminate")
    yield lease, ev.LeaseStopping(ticket=f"t{job}", verb="terminate")
    yield lease, ev.VerbSent(verb="terminate", taken=True)
    yield lease, ev.LeaseLook(saw="gone", cost=1.5)
    yield lease, ev.LeaseStopped(saw="gone", cost_usd=1.5)
    yield ticket, ev.TeardownVerifiedStopped(cost_usd=1.5)


@dataclass
class House:
    """A ledger that grows, with the context that uses it."""

    folder: Path
    platform: str

    def __post_init__(self) -> None:
        self.clock = HandClock()
        self.ledger = Ledger(self.folder / "ledger.db", self.clock)
        self.ctx = Context(self.ledger, RICH, self.clock, self.folder, env={})
        self.ctx._providers["vastai"] = Cloud()  # type: ignore[assignment]  # noqa: SLF001
        self.ctx._backends |= {"local": Runs(), "ssh": Runs()}  # type: ignore[dict-item]  # noqa: SLF001
        self.jobs = 0
        self.model: list[tuple[Any, ...]] = []
        for job in LIVE:
            self.write(begins(job, self.platform))

    def write(self, life: Iterator[tuple[str, ev.Body]]) -> None:
        """Record events."""
        for subject, body in life:
            self.ledger.add(subject, body)

    def grow(self, jobs: int) -> None:
        """Add ended jobs, one a minute, so that most of them ended long ago."""
        if not self.jobs:
            self.end_one("jmodel")
        while self.jobs < jobs:
            until = min(jobs, self.jobs + 500)
            self.repeat(f"j{n}x" for n in range(self.jobs, until))
            self.jobs = until
        self.clock.time += DAY_S / 2

    def end_one(self, job: str) -> None:
        """Record the complete life of one job; its rows are the model of all other jobs."""
        first = self.ledger.count()
        self.write(begins(job, self.platform))
        self.write(ends(job, self.platform))
        self.model = [row[2:] for row in self.rows(first)]

    def rows(self, after: int) -> list[tuple[Any, ...]]:
        """Return the stored rows of the events after a sequence number."""
        sql = f"SELECT {COLUMNS} FROM events WHERE seq > ? ORDER BY seq"  # noqa: S608
        return self.ledger._db.rows(sql, after)  # noqa: SLF001

    def repeat(self, jobs: Iterable[str]) -> None:
        """Insert the model's rows for other jobs, with valid hash chaining."""
        db = self.ledger._db  # noqa: SLF001
        with self.ledger.transaction():
            ((seq, before),) = db.rows("SELECT seq, hash FROM events ORDER BY seq DESC LIMIT 1")
            for job in jobs:
                self.clock.time += MINUTE
                for columns in self.model:
                    texts = (c.replace("jmodel", job) if isinstance(c, str) else c for c in columns)
                    seq += 1
                    row = (seq, self.clock.time, *texts)
                    before = link(before, row)
                    db.insert((*row, before))


def p99(work: Callable[[int], object], times: int = 500, clock: Callable[[], float] = time.process_time) -> float:
    """Return the 99th percentile of `times` runs in seconds. CPU time excludes the load of other processes."""
    took = []
    for n in range(times):
        begun = clock()
        work(n)
        took.append(clock() - begun)
    return statistics.quantiles(took, n=100)[98]


def reads_of_check(house: House) -> Callable[[int], object]:
    """Return a function that does the reads of check_job with an empty cache."""

    def work(n: int) -> object:
        house.ledger._known.clear()  # noqa: SLF001
        job = read_job(house.ledger, LIVE[n % 2])
        for _ in range(6):
            read_job(house.ledger, job.id)
        if job.lease:
            return lease_now(house.ctx, job.lease), spent(house.ctx, job.lease), confirmed_end(house.ctx, job.lease)
        return job

    return work


def figures(house: House) -> dict[str, float]:
    """Return the seconds of each operation at the current size."""
    watcher = Watcher(house.ctx)
    watcher._next_sweep = float("inf")  # noqa: SLF001
    for _ in range(2):  # the first round of a process fills the caches
        anyio.run(longest_wait, watcher)
    rounds = []
    loop = 0.0
    for _ in range(20):
        house.clock.time += 15
        begun = time.process_time()
        loop = max(loop, anyio.run(longest_wait, watcher))
        rounds.append(time.process_time() - begun)
    return {
        "check_job's reads, p99": p99(reads_of_check(house)),
        "a state write, p99": p99(lambda n: house.ledger.add(f"job/w{house.jobs}-{n}", ev.JobRefused(name="x"))),
        "a page of 50 jobs, p99": p99(lambda n: house.ledger.page("job", *(Job.SUCCEEDED,) * (n % 2), limit=50)),
        "the day's spending, p99": p99(lambda _: spent_today(house.ctx, pretend=False), 5),
        "a watch round, median": statistics.median(rounds),
        "the loop's longest wait": loop,
    }


async def longest_wait(watcher: Watcher) -> float:
    """Return the longest time between two turns of another task during one round, in seconds of CPU time."""
    longest, last = 0.0, time.process_time()
    async with anyio.create_task_group() as together:

        async def tick() -> None:
            nonlocal longest, last
            while True:
                await anyio.lowlevel.checkpoint()
                now = time.process_time()
                longest, last = max(longest, now - last), now

        together.start_soon(tick)
        await watcher.round()
        together.cancel_scope.cancel()
    return longest


def bare(folder: Path) -> tuple[float, float]:
    """Return the p99 of a committed insert and of a select by key in plain sqlite3, with the ledger's settings."""
    db = sqlite3.connect(folder / "bare.db", isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("CREATE TABLE t (seq INTEGER PRIMARY KEY, body TEXT)")
    body = "x" * 500
    insert = p99(lambda _: db.execute("INSERT INTO t (body) VALUES (?)", (body,)))
    select = p99(lambda n: db.execute("SELECT body FROM t WHERE seq = ?", (n + 1,)).fetchone())
    db.close()
    return insert, select


def show(name: str, first: dict[str, float], now: dict[str, float], bares: tuple[float, float], jobs: int) -> None:
    """Print the cost of each operation, as ratios to sqlite3 and to the smallest ledger."""
    for what, took in now.items():
        peer, which = (bares[0], "insert") if "write" in what else (bares[1], "select")
        row = f"{name}, {jobs:,} jobs: {what}", f"{took * 1e3:.2f} ms"
        figure(*row, f"bare {which} {peer * 1e3:.3f} ms", took / peer)
        if now is not first:
            figure(*row, f"smallest ledger {first[what] * 1e3:.2f} ms", took / first[what])


def main() -> None:
    """Print the figures of both kinds of jobs at every size."""
    sizes = arguments(__doc__, {"jobs": ("100,1000,10000", "5,10")}).jobs
    for name, platform in (("local", "local"), ("rented", "vastai")):
        with tempfile.TemporaryDirectory() as folder:
            house, first = House(Path(folder) / "home", platform), dict[str, Any]()
            bares = bare(Path(folder))
            for jobs in map(int, sizes.split(",")):
                house.grow(jobs)
                now = figures(house)
                first = first or now
                show(name, first, now, bares, jobs)


if __name__ == "__main__":
    main()
