"""Measure how the watch's costs grow with the number of jobs, at ten jobs for each machine.

The complete life of every job is simulated with a fake clock: its machine is rented, boots, is interrupted in waves,
runs the job, and is terminated after an approval. The platform limits the calls per minute and is unreachable for some
minutes. The ledger, the use cases, the watch and the rehearsal cloud's API with its verbs, transitions, billing and
faults are real. The cloud's files and the processes on its machines are emulated. Times are CPU time.

    python bench/scale.py [--jobs 300,1000]
"""

from __future__ import annotations

import heapq
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench._figures import arguments, figure
from bench.ledger import HandClock

from gpuwarden.core.errors import Unreachable, WardenError
from gpuwarden.core.models import (
    Answer,
    Disclosure,
    Handle,
    InstanceState,
    JobSpec,
    Known,
    Manifest,
    Observation,
    Place,
    StopResult,
)
from gpuwarden.core.policy import Caps, Policy
from gpuwarden.core.reasons import Code
from gpuwarden.core.rules import Finding
from gpuwarden.core.states import LIVE_LEASES, Job
from gpuwarden.ledger import events as ev
from gpuwarden.ledger.store import Ledger
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.monitoring.inventory import OPEN_JOBS
from gpuwarden.lifecycle.monitoring.watch import Watcher
from gpuwarden.lifecycle.records import job_ids, lease_ids, read_job
from gpuwarden.lifecycle.teardown.gate import approve, request
from gpuwarden.providers.rehearsal import RehearsalProvider
from gpuwarden.rehearsal.cloud import Cloud, Session
from gpuwarden.rehearsal.model import Call, Fault, Faults, Record, Settings, State
from gpuwarden.rehearsal.store import Config

PLATFORM = "rehearsal/vastai"
EVERY_S = 60.0
LENGTH_S = 480.0
RICH = Policy(rehearsal_caps=Caps(per_job_usd=1e6, per_day_usd=1e6, per_instance_usd=1e6))
VERBS: tuple[Call, ...] = ("quote", "create", "find", "get", "list", "start", "stop", "terminate")


class Records(dict[str, Record]):
    """A cloud's records, with the records that are due or have changed since the last call of `ripe`."""

    def __init__(self) -> None:
        super().__init__()
        self.changed: set[str] = set()
        self.due: list[tuple[float, str]] = []

    def __setitem__(self, ident: str, record: Record) -> None:
        super().__setitem__(ident, record)
        self.changed.add(ident)
        if record.due is not None:
            heapq.heappush(self.due, (record.due, ident))

    def ripe(self, now: float) -> set[str]:
        """Return the due and changed records, each once."""
        ripe, self.changed = self.changed, set()
        while self.due and self.due[0][0] <= now:
            ripe.add(heapq.heappop(self.due)[1])
        return ripe


class MemoryStore:
    """A cloud's configuration and state in memory."""

    begun = True

    def __init__(self) -> None:
        self._config: Config | None = None
        self._state = State.model_construct(nonce="scale", now=0.0, calls={}, records=Records(), minute=0, in_minute=0)

    @contextmanager
    def lock(self, *, make: bool = False) -> Iterator[None]:
        """Do nothing: only one process uses this cloud, one call at a time."""
        yield

    def config(self) -> Config | None:
        """Return the configuration."""
        return self._config

    def state(self) -> State:
        """Return the state, not a copy."""
        return self._state

    def save(self, model: Config | State) -> None:
        """Save a configuration; the state is already in memory."""
        if isinstance(model, Config):
            self._config = model


class Fleet(Cloud):
    """The rehearsal cloud without files. `Machines` emulates the processes on its machines."""

    def __init__(self, root: Path, profile: Any, clock: HandClock, settings: Settings, machines: Machines) -> None:
        self.machines = machines
        self.root, self.profile, self.clock, self.supervise = root, profile, clock, False
        self.store = MemoryStore()  # type: ignore[assignment]
        self.configure(settings, Faults(), make=True)

    def _tick(self, s: Session, only: str | None = None, *, hold: bool = True) -> None:
        """Apply the due transitions."""
        records = s.state.records
        assert isinstance(records, Records)
        while ripe := records.ripe(s.now):
            for ident in ripe:
                record = self._carry_out(s.engine.advance(self._carry_out(records[ident]), s.now))
                if record != records[ident]:
                    records[ident] = record

    def _carry_out(self, record: Record) -> Record:
        """Kill the jobs of a machine that stops."""
        for effect in record.pending:
            if effect in {"kill", "off", "erase"}:
                self.machines.power_off(record.id, erased=effect == "erase")
        return record.but(pending=()) if record.pending else record


class Counted(RehearsalProvider):
    """A provider that counts its calls."""

    def __init__(self, cloud: Fleet) -> None:
        super().__init__(cloud)
        self.calls: Counter[str] = Counter()

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in VERBS:
            return found

        async def call(*args: Any) -> Any:
            self.calls[name] += 1
            return await found(*args)

        return call


class Machines:
    """A backend that keeps its jobs in a dict."""

    name = "local"
    seals = False
    takes_inputs = True

    def __init__(self, clock: HandClock) -> None:
        self.clock = clock
        self.jobs: dict[str, dict[str, Any]] = {}
        self.there: dict[str, str] = {}
        self.boots: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.launched: Counter[tuple[str, int]] = Counter()

    def power_off(self, machine: str, *, erased: bool) -> None:
        """Kill the processes of a machine, and delete its disk if `erased`."""
        token = self.there.get(machine)
        self.boots[machine] += 1
        if token is not None and self.jobs[token]["state"] is Job.RUNNING:
            self.jobs[token]["alive"] = False
        if erased and token is not None:
            self.jobs[token]["erased"] = True

    async def check(self, place: Place) -> list[Finding]:
        """Return no findings."""
        return []

    async def submit(
        self,
        spec: JobSpec,
        place: Place,
        token: str,
        *,
        secrets: Mapping[str, str],
        attempt: int = 1,
        inputs: Mapping[str, Path] | None = None,
    ) -> Handle:
        """Start an attempt if it was not started before."""
        self.calls["submit"] += 1
        if self.jobs.get(token, {}).get("attempt", 0) < attempt:
            self.launched[token, attempt] += 1
            began = self.clock.now()
            self.jobs[token] = {"attempt": attempt, "state": Job.RUNNING, "alive": True, "began": began}
            self.there[str(place.instance_id)] = token
        return Handle(backend=self.name, token=token, run_dir=f"/w/gw-{token}", place=place)

    async def find(self, place: Place, token: str) -> Answer[Handle | None]:
        """Look for a job."""
        handle = Handle(backend=self.name, token=token, run_dir=f"/w/gw-{token}", place=place)
        return Known(handle if token in self.jobs else None)

    async def poll(self, handles: Sequence[Handle]) -> dict[str, Observation]:
        """Return the states of jobs."""
        self.calls["poll"] += 1
        return {handle.token: self._seen(handle) for handle in handles}

    def _seen(self, handle: Handle) -> Observation:
        job = self.jobs[handle.token]
        if job.get("erased"):
            raise Unreachable("the machine does not answer")
        if job["state"] is Job.RUNNING and job["alive"] and self.clock.now() - job["began"] >= LENGTH_S:
            job["state"] = Job.SUCCEEDED
        boot, attempt = f"boot-{self.boots[str(handle.place.instance_id)]}", job["attempt"]
        if job["state"] is Job.RUNNING and not job["alive"]:
            return Observation(state=Job.FAILED, why="gone", reason=Code.VANISHED, attempt=attempt, machine=boot)
        return Observation(state=job["state"], why=str(job["state"]), attempt=attempt, machine=boot)

    async def list_files(self, handle: Handle, paths: Sequence[str]) -> Manifest:
        """Return an empty manifest: other benchmarks measure outputs."""
        return Manifest(taken_at=self.clock.now(), files=(), missing=tuple(paths))

    manifest = list_files

    async def disclose(self, handle: Handle) -> Disclosure:
        """Return an empty disclosure."""
        return Disclosure()

    async def stop(self, handle: Handle, *, grace_s: float = 10.0) -> StopResult:
        """End a job."""
        return StopResult.GONE


@dataclass(frozen=True)
class Looked:
    """One round of the watch: CPU seconds, machines that may bill, calls to the provider, events, cached subjects."""

    took: float
    machines: int
    calls: Counter[str]
    events: int
    cached: int


@dataclass
class Scale:
    """One run of a number of jobs on a number of machines."""

    home: Path
    jobs: int
    machines: int
    calls_a_minute: int = 0
    rounds: list[Looked] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = HandClock()
        self.ledger = Ledger(self.home / "ledger.db", self.clock)
        self.ledger._db.connection.execute("PRAGMA synchronous = OFF")  # noqa: SLF001
        self.ctx = Context(self.ledger, RICH, self.clock, self.home, env={})
        self.backend = Machines(self.clock)
        most = self.calls_a_minute or 4 * self.machines + 60
        pace = Settings(boot_s=45, stop_s=5, resume_s=90, settle_s=30, capacity=self.machines, calls_per_minute=most)
        self.cloud = Fleet(self.home, self.ctx.profile(PLATFORM), self.clock, pace, self.backend)
        self.provider = Counted(self.cloud)
        self.ctx._providers[PLATFORM] = self.provider  # noqa: SLF001
        self.ctx._backends["local"] = self.backend  # type: ignore[assignment]  # noqa: SLF001
        self.watcher = Watcher(self.ctx, every_s=EVERY_S)
        self.accepted = 0
        self.ended: set[str] = set()
        self.waves = 0

    async def run(self) -> None:
        """Run rounds until every job's machine is gone."""
        most = 60 + 40 * (self.jobs // self.machines)
        while self.accepted < self.jobs or lease_ids(self.ledger, *LIVE_LEASES) or job_ids(self.ledger, *OPEN_JOBS):
            await self.round()
            assert len(self.rounds) < most, self.states()

    async def round(self) -> None:
        """Advance the clock by a minute, run one watch round, then approve teardowns and submit jobs."""
        self.clock.time += EVERY_S
        self.weather()
        there, seq, calls = (
            len(lease_ids(self.ledger, *LIVE_LEASES)),
            self.ledger.last_seq(),
            self.provider.calls.copy(),
        )
        begun = time.process_time()
        found = await self.watcher.round()
        took = time.process_time() - begun
        assert "watch" not in found.trouble, found.trouble
        events, cached = self.ledger.last_seq() - seq, len(self.ledger._known)  # noqa: SLF001
        self.rounds.append(Looked(took, there, self.provider.calls - calls, events, cached))
        await self.end_what_is_over()
        room = self.machines - len({*lease_ids(self.ledger, *LIVE_LEASES), *job_ids(self.ledger, Job.ACCEPTED)})
        for _ in range(min(room, self.jobs - self.accepted)):
            self.accept()

    def weather(self) -> None:
        """Make the platform unreachable for 3 of 40 minutes, and preempt a tenth of its machines every 20 minutes."""
        minute = len(self.rounds)
        if minute % 40 in (25, 28):
            silent = tuple(Fault(kind="lost_request", call=call, probability=1.0) for call in VERBS)
            self.cloud.configure(faults=Faults(faults=silent if minute % 40 == 25 else ()))
        if minute % 20 == 6:
            running = [r for r in self.cloud.store.state().records.values() if r.state is InstanceState.RUNNING]
            for record in running[::10]:
                self.cloud.preempt(record.id)
                self.waves += 1

    def accept(self) -> None:
        """Record a job as the submit gate does."""
        self.accepted += 1
        job, spec = f"j{self.accepted:06}", self.spec(self.accepted)
        receipt = ev.ReceiptIssued(spec_digest=spec.digest, facts_digest="d" * 71, expires_at=1.0, name=spec.name)
        accepted = ev.JobAccepted(spec=spec, spec_digest=spec.digest, receipt=f"r{job}", worst_cost=1.0, price=5.0)
        with self.ledger.transaction():
            self.ledger.add(f"receipt/r{job}", receipt)
            self.ledger.add(f"job/{job}", accepted, token=f"r{job}")

    def spec(self, n: int) -> JobSpec:
        """Describe the n-th job."""
        return JobSpec(
            name=f"train-{n}",
            platform=PLATFORM,
            command=("train", str(n)),
            outputs=("out",),
            timeout_s=3600,
            max_cost_usd=50.0,
            interruptible=True,
            max_restarts=5,
        )

    async def end_what_is_over(self) -> None:
        """Approve the teardown of machines whose jobs have ended, and accept losing unverified outputs."""
        for job_id in job_ids(self.ledger, Job.SUCCEEDED, Job.FAILED):
            if job_id in self.ended:
                continue
            job = read_job(self.ledger, job_id)
            try:
                view = await request(self.ctx, job_id, "terminate")
                await approve(
                    self.ctx, view.record.id, str(view.record.digest), channel="terminal", by="user", loss=job.spec.name
                )
            except WardenError:
                continue  # the platform is unreachable or limits calls; the next round retries
            self.ended.add(job_id)

    def states(self) -> dict[str, int]:
        """Count the jobs by state."""
        return Counter(str(self.ledger.state(f"job/{j}")) for j in job_ids(self.ledger))

    def figures(self) -> dict[str, float]:
        """Return the figures of a finished run."""
        full = sorted(look.took for look in self.rounds if look.machines >= 0.9 * self.machines)
        middle = full[len(full) // 2] if full else 0.0
        calls = sum(self.provider.calls.values())
        unit = 1e6 if sys.platform == "darwin" else 1e3
        return {
            "rounds": len(self.rounds),
            "interruptions": self.waves,
            "attempts launched twice": sum(times > 1 for times in self.backend.launched.values()),
            "calls to the provider": calls,
            "calls per job": calls / self.jobs,
            "lists per round, most": max(look.calls["list"] for look in self.rounds),
            "a round with all machines, ms": 1e3 * middle,
            "the same per machine, ms": 1e3 * middle / self.machines,
            "events per job": self.ledger.count() / self.jobs,
            "ledger, kB per job": (self.home / "ledger.db").stat().st_size / 1e3 / self.jobs,
            "peak memory, MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit,
        }


def main() -> None:
    """Print the figures of every size, the smallest first: the peak memory is that of the whole process so far."""
    first: dict[str, float] = {}
    for jobs in sorted(map(int, arguments(__doc__, {"jobs": ("300,1000", "10,20")}).jobs.split(","))):
        with tempfile.TemporaryDirectory() as folder:
            run, begun = Scale(Path(folder), jobs, jobs // 10), time.process_time()
            anyio.run(run.run)
            print(f"{jobs:,} jobs on {jobs // 10:,} machines, {time.process_time() - begun:.0f} s of CPU time")
            print(f"  {dict(run.states())}, {dict(run.provider.calls)}, {dict(run.backend.calls)}")
            found = run.figures()
            first = first or found
            for what, value in found.items():
                peer = "" if found is first else f"the fewest jobs {first[what]:,.2f}"
                figure(f"{jobs:,} jobs: {what}", f"{value:,.2f}", peer, value / first[what] if peer and value else None)


if __name__ == "__main__":
    main()
