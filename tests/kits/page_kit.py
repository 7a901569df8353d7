"""The ledger of a busy week, and machines that answer immediately, for tests of the page."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path

from bench.ledger import begins, ends

from fakes import FakeClock
from gpuwarden.core.models import (
    Account,
    Answer,
    Balance,
    Handle,
    Heartbeat,
    Instance,
    InstanceState,
    JobSpec,
    Known,
    LogChunk,
    Manifest,
    Observation,
    Place,
    RunnerAlert,
)
from gpuwarden.core.policy import Caps, Policy
from gpuwarden.core.reasons import Code
from gpuwarden.core.states import Job
from gpuwarden.ledger import events as ev
from gpuwarden.ledger.store import Ledger
from gpuwarden.lifecycle.context import Context
from gpuwarden.metrics.points import PostedPoints, Row
from gpuwarden.metrics.store import Batch, MetricStore

HOUR = 3_600.0
EVIL = "<script>document.title='evil'</script><img src=x onerror=alert(1)>\"'`${1}{{1301*7}}"
"""Markup of each kind that an attacker could inject."""
PRICE = 2.49


class Machines:
    """A provider whose machines are running."""

    settle_s = 1.0

    def __init__(self) -> None:
        self.rented: dict[str, Instance] = {}

    def key_digest(self, salt: str) -> str:
        return "sha256:key"

    async def account_id(self) -> Answer[str]:
        return Known("account")

    async def get(self, id: str) -> Answer[Instance | None]:
        return Known(self.rented.get(id))

    async def list(self) -> Answer[tuple[Instance, ...]]:
        return Known(tuple(self.rented.values()))

    async def balance(self) -> Answer[Balance]:
        return Known(Balance(amount=41.20, currency="USD"))


class Runs:
    """A backend that returns the observations in `seen` and the logs in `logs`."""

    seals = False

    def __init__(self) -> None:
        self.seen: dict[str, Observation] = {}
        self.logs_of: dict[str, str] = {}

    async def poll(self, handles: list[Handle]) -> dict[str, Observation]:
        return {h.token: self.seen[h.token] for h in handles if h.token in self.seen}

    async def logs(self, handle: Handle, cursor: int, limit: int) -> LogChunk:
        text = self.logs_of.get(handle.token, "").encode()
        begin = max(0, len(text) + cursor) if cursor < 0 else min(cursor, len(text))
        piece = text[begin : begin + limit]
        return LogChunk(text=piece.decode("utf-8", "replace"), next=begin + len(piece), size=len(text))

    async def list_files(self, handle: Handle, outputs: object) -> Manifest:
        return Manifest(taken_at=0.0, files=())


def loss(step: int) -> float:
    """Return a typical loss."""
    return 0.42 + 2.1 * math.exp(-step / 900) + 0.05 * math.sin(step / 40)


@dataclass
class World:
    """A context over such a ledger, with its emulated machines."""

    ctx: Context
    clock: FakeClock
    machines: dict[str, Machines]
    runs: Runs

    def add(self, subject: str, body: ev.Body) -> None:
        self.ctx.ledger.add(subject, body)

    def rent(self, job: str, name: str, *, platform: str = "vastai", price: float = PRICE, hours: float = 2.0) -> None:
        """Record a job that began `hours` ago, on a machine that has been billed since."""
        present = self.clock.time
        self.clock.time -= hours * HOUR
        now = self.clock.now()
        place = Place(
            platform=platform, instance_id=f"m-{job}", host="203.0.113.7", port=22, user="root", run_root="/w"
        )
        spec = JobSpec(
            name=name, platform=platform, command=("python", "train.py"), outputs=("out",), timeout_s=6 * 3_600,
            project="nightly",
        )  # fmt: skip
        account = Account(salt="s", key="sha256:key")
        machine = Instance(
            id=f"m-{job}", token=f"{job}-i1", state=InstanceState.RUNNING, place=place, meter=True,
            price_usd_per_hour=price, cost_usd=None, created_at=now,
        )  # fmt: skip
        self.machines[platform].rented[machine.id] = machine
        issued = ev.ReceiptIssued(spec_digest="d" * 71, facts_digest="d" * 71, expires_at=now + HOUR, name=name)
        self.add(f"receipt/r{job}", issued)
        accepted = ev.JobAccepted(spec=spec, spec_digest="d" * 71, receipt=f"r{job}", worst_cost=15.2, price=price)
        self.add(f"job/{job}", accepted)
        self.add(f"lease/{job}-i1", ev.CreateIntent(job=job, platform=platform, generation=1, account=account))
        self.add(f"job/{job}", ev.JobProvisioning(lease=f"{job}-i1", generation=1))
        self.clock.advance(40)
        self.add(f"lease/{job}-i1", ev.LeaseCreated(instance=machine))
        self.add(f"job/{job}", ev.JobSubmitting(place=place))
        self.add(f"job/{job}", ev.SubmitIntent(attempt=1))
        handle = Handle(backend="local", token=job, run_dir=f"/w/gw-{job}", place=place)
        self.add(f"job/{job}", ev.JobSubmitted(handle=handle, attempt=1))
        self.add(f"job/{job}", ev.MachineIdentified(machine="boot-1/9"))
        self.clock.time = present

    def run(self, job: str, step: int, total: int, *, log: str = "", **more: object) -> None:
        """Record an observation of a job at a step."""
        now = self.clock.now()
        points = tuple((n, loss(n)) for n in range(0, step + 1, max(1, step // 60)))
        gib = 1 << 30
        values: dict[str, object] = {
            "state": Job.RUNNING, "why": "running", "at": now, "step": step, "total_steps": total,
            "metrics": {"loss": loss(step), "learning_rate": 1.8e-4, "grad_norm": 0.71}, "curve": points,
            "source": "metrics", "machine": "boot-1/9", "started_at": now - 1.9 * HOUR, "eta_at": now + 1.2 * HOUR,
            "last_beat_at": now - 3,
            "beat": Heartbeat(
                gpu_util=97.0, gpu_mem_used=61 * gib, mem_used=38 * gib, mem_limit=117 * gib, disk_free=9 * gib,
                disk_total=200 * gib, inodes_free=12_000_000, inodes_total=13_000_000,
            ),
        }  # fmt: skip
        self.runs.seen[job] = Observation.model_validate(values | more)
        self.runs.logs_of[job] = log or "".join(f"step {n} loss {loss(n):.4f}\n" for n in range(0, step, 2))


def open_world(home: Path, clock: FakeClock | None = None) -> World:
    """Return a context over an empty ledger, with a provider and a backend that answer immediately."""
    clock, machines, runs = clock or FakeClock(), {"vastai": Machines(), "runpod": Machines()}, Runs()
    policy = Policy(caps=Caps(per_job_usd=100, per_day_usd=60, per_instance_usd=200))
    home.mkdir(parents=True, exist_ok=True)
    ctx = Context(Ledger(home / "ledger.db", clock, "agent"), policy, clock, home, env={})
    ctx._providers.update(machines)  # type: ignore[arg-type]
    ctx._backends |= {"local": runs, "ssh": runs}  # type: ignore[dict-item]
    return World(ctx, clock, machines, runs)


def busy_world(home: Path, clock: FakeClock | None = None) -> World:
    """Return a world after a busy week: running jobs, a failed job, a teardown and a price to approve, and old jobs."""
    world = open_world(home, clock)
    present = world.clock.time
    for n, (hours, name) in enumerate([(150, "llama-8b-sft"), (100, "whisper-ft"), (75, "llama-8b-dpo"), (28, "vit")]):
        job = f"jpast{n}"
        world.clock.time = present - hours * HOUR
        for subject, body in begins(job, "vastai"):
            world.add(subject, _named(body, name))
        world.clock.time = present - (hours - 3 - n) * HOUR
        for subject, body in ends(job, "vastai"):
            cost = 4.31 * (n + 1)
            if isinstance(body, ev.LeaseStopped):
                body = body.model_copy(update={"cost_usd": cost})
            world.add(subject, body.model_copy(update={"cost": cost}) if isinstance(body, ev.LeaseLook) else body)
    world.clock.time = present
    world.rent("jlive", "llama-8b-lora", hours=2.1)
    world.run("jlive", 2_310, 5_000)
    world.rent("jtwin", "llama-8b-lora-b", platform="runpod", price=1.89, hours=0.8)
    world.run("jtwin", 1_150, 5_000)
    world.rent("jfail", "qwen-7b-full", platform="runpod", price=3.29, hours=5.0)
    world.run(
        "jfail", 12, 800, state=Job.FAILED, why="the command ended with exit code 1", reason=Code.EXITED,
        exit_code=1, ended_at=world.clock.now() - HOUR, eta_at=None,
        log="loading weights\nstep 11 loss 2.31\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate "
        "2.00 GiB. GPU 0 has a total capacity of 79.25 GiB of which 1.12 GiB is free.\n",
    )  # fmt: skip
    world.rent("jdone", "embed-ft", price=0.74, hours=4.0)
    world.run(
        "jdone", 600, 600, state=Job.SUCCEEDED, why="the command ended with exit code 0", exit_code=0, eta_at=None
    )
    world.add("job/jdone", ev.JobSucceeded(why="the command ended with exit code 0"))
    ticket = "teardown/t4kz9q"
    world.add(ticket, ev.TeardownRequested(job="jdone", lease="jdone-i1", verb="terminate"))
    world.add(ticket, ev.TeardownAwaitingHuman(digest="d" * 71, expires_at=world.clock.now() + HOUR))
    ask = ev.ReceiptIssued(
        spec_digest="e" * 71, facts_digest="e" * 71, expires_at=world.clock.now() + HOUR, name="mixtral-sft",
        platform="runpod", price=23.92, worst_cost=287.0, ask="above the cap of $100.00 for a job",
    )  # fmt: skip
    world.add("receipt/r7mixt", ask)
    world.add(
        "job/jlive",
        ev.AutoTeardownOrdered(verb="terminate", grace_s=900, through="approval", receipt="r0live", by="me"),
    )
    report(world, "jlive", 2_310, seed=1)
    report(world, "jtwin", 1_150, seed=2)
    stray = Instance(id="pod-81c2", state=InstanceState.RUNNING, meter=True, price_usd_per_hour=0.44)
    world.machines["runpod"].rented["stray"] = stray
    return world


def report(world: World, job: str, steps: int, seed: int) -> None:
    """Post a run's points as its trainer would; one of them is not finite."""
    noise = random.Random(seed)
    rows = []
    for n in range(steps):
        value = math.nan if n == steps // 3 else loss(n) * (0.85 + 0.1 * seed) + noise.gauss(0, 0.03)
        rows += [Row("loss", n, 0, value), Row("learning_rate", n, 0, 2e-4 * (1 - n / 5_000))]
        rows += [Row("eval_loss", n, 0, loss(n) * 1.08)] if n % 100 == 0 else []
    MetricStore(world.ctx.home).write(Batch(posts=[PostedPoints(job, tuple(rows))]))


def hostile_world(home: Path) -> World:
    """Return a world with a job that has markup in every text that an attacker controls."""
    world = open_world(home)
    world.rent("jevil", "evil")
    alert = RunnerAlert(kind="nonfinite", text=EVIL, subject=EVIL)
    world.run("jevil", 10, 20, why=EVIL, metrics={EVIL: 1.0, "loss": 2.0}, alerts=(alert,), log=f"{EVIL}\n" * 3)
    stray = Instance(id=EVIL, token="x", state=InstanceState.RUNNING, meter=True, why=EVIL)
    world.machines["runpod"].rented["stray"] = stray
    ask = ev.ReceiptIssued(
        spec_digest="e" * 71, facts_digest="e" * 71, expires_at=world.clock.now() + HOUR, name=EVIL, platform="runpod",
        price=1.0, ask=EVIL,
    )  # fmt: skip
    world.add("receipt/revil", ask)
    world.add("job/jevil", ev.JobUnknown(why=EVIL, observation={"state": "unknown", "why": EVIL}))
    return world


def _named(body: ev.Body, name: str) -> ev.Body:
    if isinstance(body, ev.JobAccepted):
        return body.model_copy(update={"spec": body.spec.model_copy(update={"name": name, "project": "nightly"})})
    return body
