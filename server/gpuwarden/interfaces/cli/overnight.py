"""The overnight demo: a laptop is closed at 18:00; after 8:00 a job's files are proven and its machine is terminated.

The job has automatic teardown, an artifact store and self-stop. A second job has none of these: the user is asked to
approve its teardown at 9:00, and the demo compares the two bills. The demo advances a simulated clock that all
processes read from a file. The processes, uploads, files, proofs, notices and bills are real: the demo calls the same
functions as the MCP tools and the watch. While the laptop is closed, the demo calls none of these functions. It reads
the simulated machines' state directly, which is impossible on a real cloud.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from gpuwarden.core.clock import ShiftedClock, SystemClock
from gpuwarden.core.errors import WardenError
from gpuwarden.core.models import InstanceState, JobSpec
from gpuwarden.core.money import usd, usd_per_hour
from gpuwarden.core.next_step import Copy
from gpuwarden.core.policy import Approval, ArtifactStores, Caps, Local, Policy, TeardownPolicy
from gpuwarden.core.states import TERMINAL_JOBS, Job, Lease, Teardown
from gpuwarden.interfaces.cli.demo import LOOK_S, PLATFORM, Stage, demo_spec, print_sandbox
from gpuwarden.interfaces.cli.drawing import auto_teardown_lines, local, span
from gpuwarden.interfaces.cli.screen import drawn
from gpuwarden.interfaces.results import base
from gpuwarden.interfaces.results.overview import status_of
from gpuwarden.ledger.events import ApprovalGranted, ArtifactsPulled, AutoTeardownAnnounced, ResumeIntent
from gpuwarden.ledger.store import Ledger
from gpuwarden.lifecycle.artifacts.local_copies import copy_state
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.execution.advance import advance
from gpuwarden.lifecycle.execution.situation import teardown_plan
from gpuwarden.lifecycle.leases.meter import confirmed_end, lease_now
from gpuwarden.lifecycle.monitoring.overview import overview
from gpuwarden.lifecycle.monitoring.watch import Watcher
from gpuwarden.lifecycle.records import JobRecord, LeaseRecord, read_job
from gpuwarden.lifecycle.submission.submit import submit
from gpuwarden.lifecycle.teardown.gate import approve, proceed, request
from gpuwarden.rehearsal.cloud import Cloud
from gpuwarden.rehearsal.hub.server import HubServer
from gpuwarden.rehearsal.model import Settings, Truth

EVENING, MORNING, ASKED = 18, 8, 9
"""The hours at which the job is submitted, the laptop is opened, and the user is asked about the second job."""
TRAINING_S: Final = 19_800
STEPS, SAVE_EVERY = 120, 60
PACE_S: Final = "0.08"
"""Seconds per training step, slow enough that both jobs are still training when the clock is advanced; otherwise an
idle machine would stop itself.
"""
REPO: Final = "you/night-run"
SELF_STOP_MINUTES: Final = 15
STRIDE_S: Final = 240.0
"""Seconds between two polls by the watch in the morning. After a longer gap, the watch announces the teardown again.
"""
LOOK_AGAIN: Final = 200
"""Number of polls after which the clock is advanced again, in case a machine started its timer after the first change.
"""
MOST_LOOKS: Final = 3000
"""Number of polls before the demo gives up. They take several minutes, to allow for a busy computer."""


class SetForward(ShiftedClock):
    """A shifted clock. This process advances it by writing the clock's file."""

    def advance(self, seconds: float) -> None:
        """Advance the clock by `seconds` for every process that reads the file."""
        past = float(self.file.read_text("ascii")) if self.file.exists() else 0.0
        fresh = self.file.with_suffix(".new")
        fresh.write_text(repr(past + max(0.0, seconds)), "ascii")
        fresh.replace(self.file)


@dataclass
class Night:
    """One night: its clock, simulated cloud and artifact store, and the time when each event was first observed."""

    ctx: Context
    clock: SetForward
    stage: Stage
    cloud: Cloud
    hub: HubServer
    evening: datetime
    seen: dict[str, float] = field(default_factory=dict)

    def until(self, hour: int) -> None:
        """Advance the clock to the next time after the evening at which it shows `hour`."""
        self.clock.advance(next_hour(self.evening, hour) - self.clock.now())

    def say(self, text: str) -> None:
        """Print a line with the hour."""
        self.stage.say(f"[bold]{local(self.clock.now(), '%H:%M')}[/] {text}")

    def first(self, what: str, text: str = "") -> None:
        """Record the time when `what` is first observed, and print `text` then."""
        if what not in self.seen:
            self.seen[what] = self.clock.now()
            if text:
                self.say(text)

    async def comes(self, true: Callable[[], bool], what: str, again_s: float = 0.0) -> None:
        """Wait in real time until `true()` holds. If that takes too long, advance the clock by `again_s` seconds.

        The clock is advanced at most once, so that the hours and the bill do not depend on this computer's load.
        """
        for look in range(1, MOST_LOOKS):
            if true():
                return
            await self.clock.sleep(LOOK_S)
            if look == LOOK_AGAIN:
                self.clock.advance(again_s)
        raise WardenError(f"the demo did not end in time ({what}) because this computer is busy", "Run the demo again.")

    def truth(self, job: JobRecord) -> Truth:
        """Return the true state of a job's machine, which only a simulated cloud can report."""
        machine = _machine(self, job).instance_id or ""
        return self.cloud.truths()[machine]


def next_hour(after: datetime, hour: int) -> float:
    """Return the next time after `after` when a local clock shows the given hour."""
    day = after.date() + timedelta(days=after.hour >= hour)
    return datetime(day.year, day.month, day.day, hour).astimezone().timestamp()


async def one_night(home: Path, stage: Stage) -> dict[str, Any]:
    """Simulate the night, and return its cost with and without automatic teardown."""
    clock = SetForward(home / "clock")
    clock.advance(next_hour(datetime.fromtimestamp(SystemClock().now()).astimezone(), EVENING) - clock.now())
    caps = Caps(per_job_usd=60, per_day_usd=120, per_instance_usd=60)
    policy = Policy(
        platforms=("rehearsal/*",),
        approval=Approval(channels=("terminal", "rehearsal")),
        local=Local(unsandboxed=True),  # the script is part of gpuwarden
        rehearsal_caps=caps,
        teardown=TeardownPolicy(automatic="terminate", self_stop_minutes=SELF_STOP_MINUTES),
        artifact_stores=ArtifactStores(allowed=(f"hf://{REPO}",)),
    )
    reads, writes = (f"hf_{secrets.token_hex(17)}" for _ in range(2))
    with HubServer(home / "hub", clock=clock) as hub:
        hub.store.add_user(reads, "you", role="read")
        hub.store.add_user(writes, "you")
        hub.store.create("model", REPO, private=True)
        env = {**hub.env, "HF_TOKEN": reads, "GPUWARDEN_STORE_HF_TOKEN": writes}
        ctx = Context(Ledger(home / "ledger.db", clock, "demo"), policy, clock, home, env)
        profile, root = ctx.profile(PLATFORM), home / "providers" / "rehearsal"
        cloud = Cloud(root / profile.id, profile, clock, settings=Settings(boot_s=0.2, stop_s=0.1, settle_s=0.1))
        night = Night(ctx, clock, stage, cloud, hub, datetime.fromtimestamp(clock.now()).astimezone())
        stage.say(f"[dim]platform {PLATFORM}, simulated costs and hours, a Hub on this computer[/]")
        stage.say("[dim]the processes, files, uploads and proofs are real[/]")
        await print_sandbox(stage)
        ordered, second = await _evening(night)
        await _sleep(night, ordered, second)
        await _morning(night, ordered, second)
        await _teardown_requested(night, second)
        return _bills(night, ordered, second)


# ------------------------------------------------------------------------------------------------------- the evening


async def _evening(night: Night) -> tuple[JobRecord, JobRecord]:
    """Submit a job with automatic teardown and a job whose teardown needs approval. Return both once
    they have been launched.
    """
    ctx, stage = night.ctx, night.stage
    stage.act(f"{EVENING}:00 An agent submits a job with automatic teardown")
    ordered = await _launched(night, "ordered", artifact_store=f"hf://{REPO}")
    decided = base.auto_teardown_reply(teardown_plan(ctx, ordered))
    assert decided is not None
    for text in auto_teardown_lines(decided):
        stage.say(escape(text))
    stage.say(f"artifact store: the machine uploads the job's outputs to hf://{REPO}")
    ordering, ctx.policy = ctx.policy, ctx.policy.model_copy(update={"teardown": TeardownPolicy()})
    second = await _launched(night, "asked")
    ctx.policy = ordering
    stage.say("the same job without any of these: the user will be asked to approve its teardown")
    return ordered, second


async def _launched(night: Night, name: str, **more: Any) -> JobRecord:
    """Submit a job, and return it once it has been launched."""
    # The name is also an argument, because a second job with identical arguments would be refused as a duplicate.
    changes = {
        "name": name,
        "interruptible": False,
        "gpu": "H100",
        "timeout_s": 28_800,
        "estimate_s": TRAINING_S,
        "max_cost_usd": 60.0,
        "env": {"PACE_S": PACE_S, "OMP_NUM_THREADS": "1"},
        "args": (str(STEPS), str(SAVE_EVERY), name),
    }
    spec: JobSpec = demo_spec().model_copy(update=changes | more)
    checked = await submit(night.ctx, spec)
    done = await submit(night.ctx, spec, receipt=checked.receipt)
    if done.job is None or checked.quote is None:
        raise WardenError("the demo's job was not accepted")
    price = usd_per_hour(checked.quote.price_usd_per_hour)
    night.say(f"[green]accepted[/] {name} as {done.job.id} at {price}")
    job = done.job
    for _ in range(MOST_LOOKS):
        if job.handle is not None:
            return job
        await night.clock.sleep(LOOK_S)
        job = await advance(night.ctx, job.id)
    raise WardenError(f"the demo's job is {job.state}: {job.why}")


# --------------------------------------------------------------------------------------------------------- the night


async def _sleep(night: Night, ordered: JobRecord, second: JobRecord) -> None:
    """Advance the clock through the night until the morning. Only the runners on the machines are active."""
    night.stage.act("The laptop is closed; nothing runs on it until the morning")
    night.stage.say("[dim]the following happens on the machines; only the demo observes it[/]")
    began, folder = night.clock.now(), _folder(ordered)
    for step in range(SAVE_EVERY, STEPS + 1, SAVE_EVERY):
        # Advance the clock before the step is reached. After the last step, the job has ended, and the machine would
        # count the advance towards its self-stop.
        night.clock.advance(began + TRAINING_S * step / STEPS - night.clock.now())
        saved = folder / "work" / "out" / f"checkpoint-{step}"
        await night.comes(saved.exists, f"step {step}")
        night.say(f"ordered saved checkpoint-{step}")
    for job in (ordered, second):
        await night.comes(lambda job=job: _succeeded(job), job.spec.name)  # type: ignore[misc]
        night.first(f"{job.spec.name} succeeded", f"{job.spec.name}: the job has [green]succeeded[/]")
    await night.comes(lambda: _reported(folder / "keep.json") == "done", "the upload")
    repo = night.hub.store.get("model", REPO)
    commit = repo.commit_of("main") if repo else None
    stored = [ref for path, ref in (commit.files if commit else {}).items() if f"/{ordered.id}/" in f"/{path}"]
    size = sum(ref.size for ref in stored)
    night.first("kept", f"ordered: uploaded {len(stored)} files, {size:,} bytes, the manifest last")
    night.clock.advance(SELF_STOP_MINUTES * 60 + 1)
    off = InstanceState.STOPPED
    await night.comes(lambda: night.truth(ordered).state is off, "the machine stops itself", SELF_STOP_MINUTES * 60.0)
    night.first(
        "ordered off", f"ordered: its machine [green]stopped itself[/]: {SELF_STOP_MINUTES} min without contact"
    )
    night.say(f"asked: its idle machine is still billed at {usd_per_hour(night.truth(second).usd_per_hour)}")
    night.until(MORNING)


def _folder(job: JobRecord) -> Path:
    """Return a job's folder on its machine, which is a local folder in a rehearsal."""
    assert job.handle is not None
    return Path(job.handle.run_dir)


def _reported(file: Path) -> str:
    """Return the state in a runner's status file; empty if the file does not exist yet."""
    try:
        return str(json.loads(file.read_bytes())["state"])
    except (OSError, ValueError, KeyError):
        return ""


def _succeeded(job: JobRecord) -> bool:
    """Return whether a job has succeeded, according to its runner. Raises WardenError if it ended in another state."""
    state = _reported(_folder(job) / "status.json")
    if state in TERMINAL_JOBS - {Job.SUCCEEDED}:
        raise WardenError(f"the demo's job ended as {state}")
    return state == Job.SUCCEEDED


# ------------------------------------------------------------------------------------------------------- the morning


async def _morning(night: Night, ordered: JobRecord, second: JobRecord) -> None:
    """Open the laptop, and run the watch until the first job's machine is gone.

    The watch also copies and proves the second job's files.
    """
    ctx, stage, watch = night.ctx, night.stage, Watcher(night.ctx)
    stage.act(f"{MORNING}:00 The laptop wakes, and the watch runs")
    for _ in range(MOST_LOOKS):
        raised = [alert for alert in (await watch.once()).news if alert.raised]
        for alert in raised:
            if alert.kind == "self_stopped":  # the self-stop precedes the copies
                night.say(f"[yellow]alert[/] {escape(alert.text)}")
        for job in (ordered, second):
            if copy_state(ctx, job.id) is Copy.PROVEN:
                night.first(
                    f"{job.spec.name} proven", f"{job.spec.name}: copied {_source(ctx, job)} and [green]proven[/]"
                )
        for alert in raised:
            if alert.kind != "self_stopped":
                night.say(f"[yellow]alert[/] {escape(alert.text)}")
        if confirmed_end(ctx, _machine(night, ordered).id) == "gone":
            night.first("ordered gone", "ordered: its machine is confirmed [green]gone[/], with its disk")
            break
        night.clock.advance(STRIDE_S)
        await night.clock.sleep(LOOK_S)
    else:
        raise WardenError("the demo's machine was not torn down because this computer is busy", "Run the demo again.")
    if not stage.quiet:
        stage.say("[bold]$ gpuwarden[/]")
        stage.console.print(Padding(drawn(status_of(await overview(ctx))), (0, 0, 0, 3)))


def _source(ctx: Context, job: JobRecord) -> str:
    """Return a phrase that names the source of a job's copy."""
    pulled, woken = ctx.ledger.last(job.subject, ArtifactsPulled), ctx.ledger.last(f"lease/{job.lease}", ResumeIntent)
    if pulled is not None and pulled.data.store:
        return f"from {escape(pulled.data.store)}, without starting the machine,"
    return "from its machine, which was started for the copy," if woken else "from its machine"


async def _teardown_requested(night: Night, second: JobRecord) -> None:
    """At nine, request and approve the teardown of the second job's machine."""
    ctx = night.ctx
    night.stage.act(f"{ASKED}:00 The user is asked to approve the second job's teardown, and approves it")
    night.until(ASKED)
    view = await request(ctx, second.id, "terminate")
    if view.record.state is not Teardown.AWAITING_HUMAN or view.record.digest is None:
        raise WardenError(f"the demo's teardown is {view.record.state}: {'; '.join(f.message for f in view.findings)}")
    await approve(ctx, view.record.id, view.record.digest, channel="rehearsal", by="the demo, at nine")
    night.stage.say("[dim]recorded with the channel rehearsal, which is valid only for simulated machines[/]")
    for _ in range(MOST_LOOKS):
        view = await proceed(ctx, view.record.id)
        if view.record.state is not Teardown.EXECUTING:
            break
        night.clock.advance(1.0)
        await night.clock.sleep(LOOK_S)
    night.first("asked off")
    night.first("asked gone", "asked: its machine is confirmed [green]gone[/]")


# --------------------------------------------------------------------------------------------------------- the bills


def _bills(night: Night, ordered: JobRecord, second: JobRecord) -> dict[str, Any]:
    """Print and return both bills; `ok` is true if every result is as expected."""
    ctx, stage = night.ctx, night.stage
    stage.act("The two bills")
    bills = {job.spec.name: _bill(night, job) for job in (ordered, second)}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in ("", "cost", "job ended", "GPU off", "gone", "GPU idle"):
        table.add_column(head, no_wrap=True, justify="right" if head else "left")
    for name, label in (("ordered", "automatic teardown"), ("asked", f"asked at {ASKED}:00")):
        row = bills[name]
        idle = span(row["idle_hours"] * 3600)
        table.add_row(label, usd(row["cost_usd"]), row["ended_at"], row["off_at"], row["gone_at"], idle)
    if not stage.quiet:
        stage.console.print(Padding(table, (0, 0, 0, 3)))
    saved = bills["asked"]["cost_usd"] - bills["ordered"]["cost_usd"]
    # On a busy computer, the night takes a few seconds longer and costs a few cents more.
    stage.say(
        f"[bold]{usd(round(saved))}[/] less in simulated costs for the same proven files; {ctx.ledger.count()} events"
    )
    granted = [e.data.channel for e in ctx.ledger.events(kind=ApprovalGranted) if e.subject.startswith("teardown/")]
    whole = all(b["proven"] and b["lease"] == Lease.STOPPED and b["job"] == Job.SUCCEEDED for b in bills.values())
    announced = ctx.ledger.last(ordered.subject, AutoTeardownAnnounced) is not None
    starts = night.cloud.store.state().calls.get("start", 0)
    ok = whole and announced and saved > 0 and granted == ["automatic_teardown", "rehearsal"]
    return {"ok": ok, **bills, "approvals": granted, "starts": starts, "saved_usd": round(saved, 6)}


def _bill(night: Night, job: JobRecord) -> dict[str, Any]:
    """Return the cost of a job's machine, and the state of that machine and its files."""
    name, machine = job.spec.name, _machine(night, job)
    ended, off, gone = (night.seen[f"{name} {what}"] for what in ("succeeded", "off", "gone"))
    pulled = night.ctx.ledger.last(job.subject, ArtifactsPulled)
    return {
        "job": str(read_job(night.ctx.ledger, job.id).state),
        "proven": copy_state(night.ctx, job.id) is Copy.PROVEN,
        "copied_from": (pulled.data.store if pulled else "") or "machine",
        "lease": str(machine.state),
        "cost_usd": round(machine.cost or 0.0, 6),
        "idle_hours": round((off - ended) / 3600, 3),
        "ended_at": local(ended, "%H:%M"),
        "off_at": local(off, "%H:%M"),
        "gone_at": local(gone, "%H:%M"),
    }


def _machine(night: Night, job: JobRecord) -> LeaseRecord:
    """Return the lease for a job's machine."""
    found = read_job(night.ctx.ledger, job.id).lease
    assert found is not None
    return lease_now(night.ctx, found)
