"""The demo of a night: a job under a standing order, and its twin without one, from 18:00 to 9:00 in pretend hours.

The hours are set forward in a file. The processes, files, proofs, notices and bills are real, through the use cases
that the tools and the watch call. The twin waits for its person until 9:00, so that both bills are measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

from rich.markup import escape
from rich.padding import Padding

from gpuwarden.core.clock import ShiftedClock, SystemClock
from gpuwarden.core.errors import WardenError
from gpuwarden.core.money import at_most, usd, usd_per_hour
from gpuwarden.core.next_step import Copy
from gpuwarden.core.policy import Approval, Caps, Ending, Local, Policy
from gpuwarden.core.states import TERMINAL_JOBS, Job, Lease, Teardown
from gpuwarden.interfaces.cli.demo import LOOK_S, PLATFORM, Stage, demo_spec, say_sandbox
from gpuwarden.interfaces.cli.drawing import local
from gpuwarden.interfaces.cli.screen import drawn
from gpuwarden.interfaces.results.overview import status_of
from gpuwarden.ledger.events import ApprovalGranted, EndingOrdered
from gpuwarden.ledger.store import Ledger
from gpuwarden.lifecycle.artifacts.local_copies import copy_state
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.ending.teardown import approve, proceed, request
from gpuwarden.lifecycle.monitoring.meter import lease_now
from gpuwarden.lifecycle.monitoring.overview import overview
from gpuwarden.lifecycle.monitoring.watch import Watcher
from gpuwarden.lifecycle.records import JobRecord, LeaseRecord, read_job
from gpuwarden.lifecycle.submission.submit import submit
from gpuwarden.rehearsal.cloud import Cloud
from gpuwarden.rehearsal.model import Settings

EVENING, MORNING, ASKED = 18, 8, 9
"""The hours at which the job is submitted, the laptop is opened, and the person is asked about the twin."""
TRAINING_S: Final = 19_800
STEPS, SAVE_EVERY = 120, 60
PACE_S: Final = "0.012"
STRIDE_S: Final = 240.0
"""The time between two looks while a notice is out: after a longer one the watch takes it that nobody could object, and
gives the notice again. Nothing changes at other times, so that longer strides are the same."""
IDLE_STRIDE_S: Final = 3600.0
TRAIN_LOOK_S: Final = 0.5
"""Real seconds between two looks while the jobs train."""
MOST_LOOKS: Final = 1_000


class SetForward(ShiftedClock):
    """A shifted clock whose file this process writes."""

    def advance(self, seconds: float) -> None:
        """Let time pass, for every process that reads the file."""
        past = float(self.file.read_text("ascii")) if self.file.exists() else 0.0
        fresh = self.file.with_suffix(".new")
        fresh.write_text(repr(past + max(0.0, seconds)), "ascii")
        fresh.replace(self.file)


@dataclass
class Night:
    """One night: its clock, the watch that goes on while the laptop is shut, and when each thing was seen first."""

    ctx: Context
    clock: SetForward
    stage: Stage
    watch: Watcher
    evening: datetime
    seen: dict[str, float] = field(default_factory=dict)

    def at(self, hour: int) -> float:
        """Return when the clock shows an hour next, after the evening."""
        return next_hour(self.evening, hour)

    async def look(self, stride_s: float) -> None:
        """Let time pass, and let the watch look once."""
        self.clock.advance(stride_s)
        done = await self.watch.once()
        for alert in done.news:
            if alert.raised:
                self.say(f"[yellow]alert[/] {escape(alert.text)}")

    def say(self, text: str) -> None:
        """Print a line with the hour."""
        self.stage.say(f"[bold]{local(self.clock.now(), '%H:%M')}[/] {text}")

    def first(self, what: str, text: str = "") -> None:
        """Note when something was seen first, and say it."""
        if what not in self.seen:
            self.seen[what] = self.clock.now()
            if text:
                self.say(text)


def next_hour(after: datetime, hour: int) -> float:
    """Return the next time after `after` at which a local clock shows an hour."""
    day = after.date() + timedelta(days=after.hour >= hour)
    return datetime(day.year, day.month, day.day, hour).astimezone().timestamp()


async def one_night(home: Path, stage: Stage) -> dict[str, Any]:
    """Play the night, and return what it cost with the order and without."""
    clock = SetForward(home / "clock")
    clock.advance(next_hour(datetime.fromtimestamp(SystemClock().now()).astimezone(), EVENING) - clock.now())
    caps = Caps(per_job_usd=60, per_day_usd=120, per_instance_usd=60)
    policy = Policy(
        platforms=("rehearsal/*",),
        approval=Approval(channels=("terminal", "rehearsal")),
        local=Local(unsandboxed=True),  # the script is part of gpuwarden
        rehearsal_caps=caps,
        ending=Ending(when_proven="terminate"),
    )
    ctx = Context(Ledger(home / "ledger.db", clock, "demo"), policy, clock, home, {})
    profile = ctx.profile(PLATFORM)
    settings = Settings(boot_s=0.2, stop_s=0.1, settle_s=0.1)
    Cloud(home / "providers" / "rehearsal" / profile.id, profile, clock, settings=settings)
    night = Night(ctx, clock, stage, Watcher(ctx), datetime.fromtimestamp(clock.now()).astimezone())
    stage.say(f"[dim]platform {PLATFORM}, pretend money and pretend hours: a night takes some seconds[/]")
    await say_sandbox(stage)
    ordered, twin = await _evening(night)
    await _sleep(night, ordered, twin)
    return await _morning(night, ordered, twin)


async def _evening(night: Night) -> tuple[JobRecord, JobRecord]:
    """Submit a job under the policy's order, and its twin under a policy that asks. Return both."""
    ctx, stage = night.ctx, night.stage
    stage.act("An agent submits a job in the evening, under a standing order")
    ordered = await _launched(night, "ordered")
    order = ctx.ledger.last(ordered.subject, EndingOrdered)
    assert order is not None
    minutes = order.data.grace_s / 60
    stage.say(
        f"its policy has a standing order: {order.data.verb} the machine without a question, {minutes:.0f} minutes "
        "after a notice, if the job has succeeded and every file is proven here. No tool can set that"
    )
    ctx.policy = ctx.policy.model_copy(update={"ending": Ending(when_proven="ask")})
    twin = await _launched(night, "asked")
    stage.say("for comparison the same job under when_proven = ask: its person will be asked")
    return ordered, twin


async def _launched(night: Night, name: str) -> JobRecord:
    good = demo_spec()
    changes = {"name": name, "interruptible": False, "gpu": "H100", "timeout_s": 28_800, "estimate_s": TRAINING_S}
    # The name is an argument too: the same work would be refused while the first job does it.
    more = {
        "max_cost_usd": 60.0,
        "env": {"PACE_S": PACE_S, "OMP_NUM_THREADS": "1"},
        "args": (str(STEPS), str(SAVE_EVERY), name),
    }
    spec = good.model_copy(update=changes | more)
    checked = await submit(night.ctx, spec)
    done = await submit(night.ctx, spec, receipt=checked.receipt)
    if done.job is None or checked.quote is None:
        raise WardenError("the demo's job was not accepted")
    price = usd_per_hour(checked.quote.price_usd_per_hour)
    night.say(f"[green]accepted[/] {name} as {done.job.id}: {price}, {at_most(checked.worst_cost_usd)}")
    return done.job


async def _sleep(night: Night, ordered: JobRecord, twin: JobRecord) -> None:
    """Let the night pass until the morning: training, the proofs, the notice and the end of one machine."""
    night.stage.act("The laptop is shut. The watch runs on, as a service of a host that stays on")
    started = night.clock.now()
    for _ in range(MOST_LOOKS):
        left = night.at(MORNING) - night.clock.now()
        if left <= 0:
            return
        await night.look(min(left, _stride(night, ordered, twin, started)))
        for job in (read_job(night.ctx.ledger, ordered.id), read_job(night.ctx.ledger, twin.id)):
            _tell(night, job)
            if job.state in TERMINAL_JOBS - {Job.SUCCEEDED}:
                raise WardenError(f"the demo's job ended as {job.state}: {job.why}")
        if read_job(night.ctx.ledger, ordered.id).state not in TERMINAL_JOBS:
            await night.clock.sleep(TRAIN_LOOK_S)
    raise WardenError("the demo's night has not ended: this machine is busy", "Run it once more.")


def _stride(night: Night, ordered: JobRecord, twin: JobRecord, started: float) -> float:
    """Return how much time passes before the next look: while it trains, as much as its steps stand for."""
    if f"{ordered.spec.name} off" in night.seen and f"{twin.spec.name} proven" in night.seen:
        return IDLE_STRIDE_S
    if f"{ordered.spec.name} succeeded" in night.seen:
        return STRIDE_S
    look = night.ctx.observed.get(ordered.id)
    trained = TRAINING_S * ((look.step or 0) if look else 0) / STEPS
    return min(IDLE_STRIDE_S, max(0.0, started + trained - night.clock.now()))


def _tell(night: Night, job: JobRecord) -> None:
    """Say what is true of a job for the first time."""
    name = job.spec.name
    if job.state in {Job.RUNNING, Job.SUCCEEDED}:
        night.first(f"{name} {job.state}", f"{name}: [green]{job.state}[/]")
    if copy_state(night.ctx, job.id) is Copy.PROVEN:
        night.first(f"{name} proven", f"{name}: everything that it saved is copied here and [green]proven[/]")
    if _machine(night, job).state is Lease.STOPPED:
        night.first(f"{name} off", f"{name}: its machine is [green]seen gone[/], its meter stopped")


def _machine(night: Night, job: JobRecord) -> LeaseRecord:
    """Return the lease of a job's machine."""
    lease = read_job(night.ctx.ledger, job.id).lease
    assert lease is not None
    return lease_now(night.ctx, lease)


async def _morning(night: Night, ordered: JobRecord, twin: JobRecord) -> dict[str, Any]:
    """Show the overview at 8:00, have the twin's person asked at 9:00, and return both bills."""
    ctx, stage = night.ctx, night.stage
    stage.act("In the morning the laptop is opened: gpuwarden status")
    if not stage.quiet:
        stage.console.print(Padding(drawn(status_of(await overview(ctx))), (0, 0, 0, 3)))
    stage.act("The twin's person is asked an hour later, and says yes")
    night.clock.advance(night.at(ASKED) - night.clock.now())
    view = await request(ctx, twin.id, "terminate")
    if view.record.state is not Teardown.AWAITING_HUMAN or view.record.digest is None:
        raise WardenError(f"the demo's teardown is {view.record.state}: {'; '.join(f.message for f in view.findings)}")
    await approve(ctx, view.record.id, view.record.digest, channel="rehearsal", by="the demo, at nine")
    night.say("recorded as channel rehearsal, which counts for pretend machines only")
    for _ in range(MOST_LOOKS):
        view = await proceed(ctx, view.record.id)
        if view.record.state is not Teardown.EXECUTING:
            break
        night.clock.advance(1.0)
        await night.clock.sleep(LOOK_S)
    _tell(night, read_job(ctx.ledger, twin.id))
    stage.act("The two bills")
    bills = [_bill(night, job) for job in (ordered, twin)]
    saved = bills[1]["cost_usd"] - bills[0]["cost_usd"]
    stage.say(f"[bold]{usd(saved)}[/] less of pretend money for the same proven files; {ctx.ledger.count()} events")
    granted = [e.data.channel for e in ctx.ledger.events(kind=ApprovalGranted) if e.subject.startswith("teardown/")]
    whole = all(b["proven"] and b["lease"] == Lease.STOPPED and b["job"] == Job.SUCCEEDED for b in bills)
    ok = whole and saved > 0 and granted == ["standing_order", "rehearsal"]
    return {"ok": ok, "ordered": bills[0], "asked": bills[1], "approvals": granted, "saved_usd": round(saved, 6)}


def _bill(night: Night, job: JobRecord) -> dict[str, Any]:
    """Print what a job's machine cost, and return it with how its files and machine are."""
    name, machine = job.spec.name, _machine(night, job)
    ended, off = night.seen[f"{name} succeeded"], night.seen.get(f"{name} off", night.clock.now())
    cost, idle_h = machine.cost or 0.0, (off - ended) / 3600
    by = {"ordered": "by the standing order", "asked": f"asked at {ASKED}:00"}[name]
    night.stage.say(
        f"{by:<22} {usd(cost):>7}   job ended {local(ended, '%H:%M')}, machine gone {local(off, '%H:%M')}, "
        f"{idle_h:.1f} h for nothing"
    )
    return {
        "job": str(read_job(night.ctx.ledger, job.id).state),
        "proven": copy_state(night.ctx, job.id) is Copy.PROVEN,
        "lease": str(machine.state),
        "cost_usd": round(cost, 6),
        "idle_hours": round(idle_h, 3),
        "gone_at": local(off, "%H:%M"),
    }
