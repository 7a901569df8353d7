"""Fixtures for the use-case tests: a home folder, a rehearsal cloud, a tiny job, and the invariants."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fakes import FakeClock
from gpuwarden.core.clock import Clock
from gpuwarden.core.models import InstanceState, JobSpec, Level, Report, Verdict
from gpuwarden.core.policy import Caps, Local, Policy
from gpuwarden.core.states import JOB, LEASE, LIVE_LEASES, TEARDOWN, TERMINAL_JOBS, Job, Lease, Teardown
from gpuwarden.ledger.event import Event
from gpuwarden.ledger.events import Body
from gpuwarden.ledger.store import Ledger
from gpuwarden.lifecycle import context
from gpuwarden.lifecycle.artifacts import local_copies
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.monitoring.check import CheckedJob, check
from gpuwarden.lifecycle.records import read_job
from gpuwarden.lifecycle.submission.submit import submit
from gpuwarden.providers.rehearsal import RehearsalProvider
from gpuwarden.rehearsal.cloud import Cloud
from gpuwarden.rehearsal.model import Fault, Faults, Record, Settings, Truth
from waiting import real_time, soon

PLATFORM = "rehearsal/vastai"
WEALTHY = Policy(rehearsal_caps=Caps(per_job_usd=1_000, per_day_usd=100_000, per_instance_usd=1_000))
FAST = Settings(boot_s=0.05, stop_s=0.02, resume_s=0.05, settle_s=0.05)


def clock_of_today() -> FakeClock:
    """Return a fake clock set to the real time, because real processes and browsers compare their clocks with it."""
    return FakeClock(real_time())


# A job that records its start as a line in a file outside the machine, works for a while, and saves a checkpoint.
TRAIN = """
import json, os, struct, sys, time
said, seconds = sys.argv[1], float(sys.argv[2])
line = "%s %s %d\\n" % (os.environ["GPUWARDEN_JOB"], os.environ["GPUWARDEN_ATTEMPT"], os.getpid())
fd = os.open(said, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
os.write(fd, line.encode())
print("training", flush=True)
time.sleep(seconds)
os.makedirs("out", exist_ok=True)
head = json.dumps({"w": {"dtype": "F32", "shape": [256], "data_offsets": [0, 1024]}}).encode()
head += b" " * (-len(head) % 8)
with open("out/model.tmp", "wb") as file:
    file.write(struct.pack("<Q", len(head)) + head + struct.pack("<256f", *range(256)))
os.rename("out/model.tmp", "out/model.safetensors")
"""


def training(said: Path, seconds: float = 0.1, **changes: object) -> JobSpec:
    """Return the spec of a job that runs `TRAIN`; `said` collects one line per launch."""
    values: dict[str, object] = {
        "name": "train",
        "platform": PLATFORM,
        "command": (sys.executable, "-I", "-S", "-c", TRAIN, str(said), str(seconds)),
        "outputs": ("out",),
        "timeout_s": 600,
        "max_cost_usd": 5.0,
    }
    return JobSpec.model_validate(values | changes)


def open_house(home: Path, clock: Clock, *, policy: Policy = WEALTHY, actor: str = "cli") -> Context:
    """Return a context for a home folder; several may be open at once. Its jobs may write next to that folder."""
    policy = policy.model_copy(update={"local": Local(unsandboxed=True, paths=(str(home.parent),))})
    return Context(Ledger(home / "ledger.db", clock, actor), policy, clock, home, env={})


def rent_cloud(
    ctx: Context, *faults: Fault, platform: str = PLATFORM, settings: Settings = FAST, seed: int = 0
) -> Cloud:
    """Set up the cloud of a context's provider for `platform`. Its state changes only when it is polled."""
    profile = ctx.profile(platform)
    root = ctx.home / "providers" / "rehearsal" / profile.id
    cloud = Cloud(root, profile, ctx.clock, settings=settings, faults=Faults(seed=seed, faults=faults), supervise=False)
    ctx._providers[platform] = RehearsalProvider(cloud)
    return cloud


async def launch(ctx: Context, spec: JobSpec) -> str:
    """Submit twice, the second time with the receipt; return the job's id."""
    first = await submit(ctx, spec)
    done = await submit(ctx, spec, receipt=first.receipt)
    assert done.job is not None
    return done.job.id


def over(seen: CheckedJob) -> bool:
    """Return whether the job has ended."""
    return seen.job.state in TERMINAL_JOBS


async def until(ctx: Context, job_id: str, good: Callable[[CheckedJob], object] = over) -> CheckedJob:
    """Poll a job with real processes until `good` accepts it. The clock does not advance meanwhile."""
    return await soon(lambda: check(ctx, job_id), every=0.1, good=good)


def moves_on(cloud: Cloud, seconds: float) -> None:
    """Advance a cloud's clock if a machine is booting or no process is running: real processes take real time."""
    assert isinstance(cloud.clock, FakeClock)
    truths = cloud.truths().values()
    if any(truth.state is InstanceState.BOOTING for truth in truths) or not any(truth.processes for truth in truths):
        cloud.clock.advance(seconds)


async def prove(ctx: Context, job_id: str) -> Report | None:
    """Record that the pulled copies are proven, without reading them as a verification would."""
    job, pulled = read_job(ctx.ledger, job_id), local_copies.last_pull(ctx, job_id)
    if pulled is None:
        return None
    report = Report(path=pulled.dest, level=Level.LOAD, verdict=Verdict.PROVEN, files=())
    local_copies.save_verified(ctx, job, pulled, local_copies.seal(pulled), report)
    return report


def records(cloud: Cloud) -> list[Record]:
    """Return every instance that the cloud ever rented, from the cloud's state."""
    return list(cloud.store.state().records.values())


# ----------------------------------------------------------------------------------------------------- invariants

_TABLES = {"job": (Job, JOB), "lease": (Lease, LEASE), "teardown": (Teardown, TEARDOWN)}
_FIRST = {"job": {Job.ACCEPTED, Job.REFUSED}, "lease": {Lease.UNVERIFIED}, "teardown": {Teardown.REQUESTED}}


def promises(
    ledger: Ledger, cloud: Cloud, excused: AbstractSet[str] = frozenset(), truths: Mapping[str, Truth] | None = None
) -> list[str]:
    """Update the cloud and return all violated invariants. Machines in `excused` may bill without a lease."""
    truths = cloud.truths() if truths is None else truths
    return [
        *moves_along_the_tables(ledger),
        *no_end_without_approval(ledger, cloud),
        *(
            f"{machine} bills and no live lease knows it"
            for machine, truth in truths.items()
            if truth.meter and machine not in excused and not _in_sight(ledger, cloud.store.state().records[machine])
        ),
    ]


def moves_along_the_tables(ledger: Ledger) -> Iterator[str]:
    """Yield each recorded transition that its state machine does not allow."""
    at: dict[str, object] = {}
    for event in ledger.events(limit=1_000_000):
        if event.state is None:
            continue
        machine = event.subject.partition("/")[0]
        states, table = _TABLES[machine]
        new, old = states(event.state), at.get(event.subject)
        allowed = _FIRST[machine] if old is None else table[old]  # type: ignore[index]
        if new not in allowed:
            yield f"{event.subject} went from {old} to {new} (event {event.seq})"
        at[event.subject] = new


def no_end_without_approval(ledger: Ledger, cloud: Cloud) -> Iterator[str]:
    """Yield each stop or termination at the cloud that lacks exactly one approval of its facts."""
    used = ledger.events(kind="approval.used")
    for event in used:
        granted = [e for e in ledger.events(event.subject, kind="approval.granted") if e.seq < event.seq]
        if not granted or granted[-1].body["digest"] != event.body["digest"]:
            yield f"{event.subject} executed without an approval of its facts"
        elif judged(ledger, granted[-1]) != event.body["digest"]:
            yield f"{event.subject} executed on a yes to facts that had changed"
        elif event.at > granted[-1].body["expires_at"]:
            yield f"{event.subject} executed on an expired approval"
    if len({e.token for e in used}) != len(used):
        yield "an approval was used twice"
    approved = {ledger.events(e.subject, kind="teardown.requested")[0].body["lease"] for e in used}
    given_back = {e.subject.removeprefix("lease/") for e in ledger.events(kind="abandon.intent")}
    for job in {e.subject.removeprefix("job/") for e in ledger.events(kind="submit.intent")}:
        rented = ledger.last(f"job/{job}", "job.provisioning")
        if rented is not None and rented.body["lease"] in given_back:
            yield f"{job} was given back although something was launched there"
    leave = {e.subject.removeprefix("job/") for e in ledger.events(kind="parking.ordered")}
    for record in records(cloud):
        facts = cloud.profile.unattended
        dated = facts is not None and facts.end_date != "none"
        if record.by_itself and (dated or record.token.rpartition("-i")[0] in leave):
            continue  # at the date given to the platform, or as the policy allows
        if record.cause in {"stop", "terminate"} and not {
            lease for lease, machine in leases(ledger).items() if machine == record.id
        } & (approved | given_back):
            yield f"{record.id} was ended ({record.why}) and nobody approved that"


def judged(ledger: Ledger, granted: Event) -> str | None:
    """Return the digest of the facts from the last check before an approval was recorded."""
    looks = ("teardown.awaiting_human", "teardown.blocked")
    before = [e for e in ledger.events(granted.subject) if e.kind in looks and e.seq < granted.seq]
    return next((str(e.body["digest"]) for e in reversed(before) if not e.body.get("without_proof")), None)


def leases(ledger: Ledger) -> dict[str, str | None]:
    """Return each lease's instance id; None if unknown."""
    found: dict[str, str | None] = {}
    for subject in ledger.subjects("lease"):
        known = [e for e in ledger.events(subject) if "instance" in e.body]
        found[subject.removeprefix("lease/")] = known[-1].body["instance"]["id"] if known else None
    return found


def _in_sight(ledger: Ledger, record: Record) -> bool:
    """Return whether a live lease covers an instance: by its id, or by its token if no id is known yet."""
    return any(
        ledger.state(f"lease/{lease}") in LIVE_LEASES
        and (machine == record.id or (machine is None and lease == record.token))
        for lease, machine in leases(ledger).items()
    )


def stopped_leases(ledger: Ledger) -> dict[str, str]:
    """Return the stopped leases in the ledger, with their instances."""
    return {
        lease: machine
        for lease, machine in leases(ledger).items()
        if machine is not None and ledger.state(f"lease/{lease}") == Lease.STOPPED
    }


def launches(said: Path) -> list[tuple[str, int]]:
    """Return the job and attempt of every launch that the jobs recorded."""
    lines = said.read_text().splitlines() if said.exists() else []
    return [(line.split()[0], int(line.split()[1])) for line in lines]


def under_caps_lock(ctx: Context, patch: pytest.MonkeyPatch, *kinds: type[Body]) -> list[tuple[type[Body], bool]]:
    """Record, for each later event of these kinds, whether the caps lock was held when it was added."""
    plain, found = ctx.ledger.add, list[tuple[type[Body], bool]]()

    def add(subject: str, body: Body, **more: Any) -> Any:
        if isinstance(body, kinds):
            free = ctx.ledger.lock(context.CAPS)
            found.append((type(body), free is None))
            if free is not None:
                free.release()
        return plain(subject, body, **more)

    patch.setattr(ctx.ledger, "add", add)
    return found


@contextmanager
def lock_held(ctx: Context, patch: pytest.MonkeyPatch, name: str = context.CAPS) -> Iterator[FakeClock]:
    """Hold a lock, as another process would. Waiting for a lock advances only the yielded clock."""
    clock, held = FakeClock(0.0), ctx.ledger.lock(name)
    assert held is not None
    with patch.context() as patched:
        patched.setattr(context, "anyio", SimpleNamespace(sleep=clock.sleep, current_time=clock.now))
        try:
            yield clock
        finally:
            held.release()


def story(events: list[Event]) -> str:
    """Return a ledger's events, one per line, for the message of a failed test."""
    return "\n".join(
        f"{e.seq:4} {e.subject:32} {e.kind:26} {e.state or '':16} {json.dumps(e.body)[:160]}" for e in events
    )


def weights() -> bytes:
    head = json.dumps({"w": {"dtype": "F32", "shape": [256], "data_offsets": [0, 1024]}}).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + struct.pack("<256f", *range(256))


def work(name: str, project: str = "") -> JobSpec:
    return JobSpec(
        platform=PLATFORM, command=("true", name), name=name, project=project, outputs=("out",), timeout_s=3600
    )
