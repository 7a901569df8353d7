"""The demo: one training job from submission to teardown, in a rehearsal of a rented platform.

The processes, files, digests and refusals are real: the demo calls the same use cases as the tools and commands. Only
the costs are simulated. The demo uses a separate folder, policy and ledger.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyio import to_thread
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import Refused, WardenError
from gpuwarden.core.models import JobSpec, Level, Report
from gpuwarden.core.money import at_most, usd, usd_per_hour
from gpuwarden.core.policy import Approval, Channel, Local, Policy
from gpuwarden.core.states import TERMINAL_JOBS, Job, Lease, Teardown
from gpuwarden.data import data_dir
from gpuwarden.interfaces.cli.approval import ask, has_terminal, open_terminal
from gpuwarden.interfaces.cli.console import colored, when
from gpuwarden.interfaces.cli.wording import in_commands
from gpuwarden.interfaces.results import error_reply, worded
from gpuwarden.ledger.events import ArtifactsPulled, ArtifactsVerified, JobPreempted
from gpuwarden.ledger.store import Ledger
from gpuwarden.lifecycle.artifacts.pull import PullResult, pull
from gpuwarden.lifecycle.artifacts.verify import verify_job
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.leases.meter import lease_now
from gpuwarden.lifecycle.monitoring.check import check
from gpuwarden.lifecycle.records import JobRecord, read_job
from gpuwarden.lifecycle.submission.submit import submit
from gpuwarden.lifecycle.teardown.gate import TeardownView, approve, proceed, request
from gpuwarden.rehearsal.cloud import Cloud
from gpuwarden.rehearsal.model import Fault, Faults, Settings
from gpuwarden.remote.sandbox.detect import detect
from gpuwarden.remote.sandbox.words import Kind

PLATFORM = "rehearsal/vastai"
STEPS, SAVE_EVERY, INTERRUPTED_AT = 240, 30, 100
PACE_S = "0.012"
MINUTES_PER_SECOND = 10
LOOK_S = 0.15
PATIENCE_S = 180.0


@dataclass
class Stage:
    """Prints the demo's steps, or nothing if `quiet`."""

    console: Console
    quiet: bool
    acts: int = 0

    def act(self, title: str) -> None:
        """Begin the next part, and print its title."""
        self.acts += 1
        if not self.quiet:
            self.console.print(f"\n[bold cyan]{self.acts}. {escape(title)}[/]")

    def say(self, text: str) -> None:
        """Print one line, which may contain markup."""
        if not self.quiet:
            self.console.print(Padding(text, (0, 0, 0, 3), expand=False))


Story = Callable[[Path, Stage], Awaitable[dict[str, Any]]]
"""A function that plays the demo in a folder. It returns the results; `ok` is true if they are as expected."""


async def play(story: Story, *, as_json: bool, keep: Path | None) -> int:
    """Play the full demo and return the exit code. With `as_json` the last line is one JSON object."""
    stage = Stage(Console(highlight=False, stderr=as_json), quiet=as_json and not os.isatty(2))
    with _folder(keep) as home:
        try:
            result = await story(home, stage)
        except WardenError as error:
            if not as_json:
                raise
            result = worded(error_reply(error), in_commands).model_dump(mode="json")
        if as_json:
            print(json.dumps(result))
        elif keep:
            stage.console.print(f"\nAll files are kept in {escape(str(home))}.")
    return 0 if result["ok"] else 1


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="gpuwarden-demo-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


async def one_life(home: Path, stage: Stage, *, yes: bool) -> dict[str, Any]:
    """Play a job's full life, from a refused submission to an approved teardown."""
    # The demo's script is part of gpuwarden, so it may run without a sandbox. The demo prints whether one is used.
    channels = Approval(channels=("terminal", "rehearsal"))
    policy = Policy(platforms=("rehearsal/*",), approval=channels, local=Local(unsandboxed=True))
    clock = SystemClock()
    ctx = Context(Ledger(home / "ledger.db", clock, "demo"), policy, clock, home, {})
    # The simulated cloud follows the platform's profile, and interrupts the machine at a known step.
    settings = Settings(boot_s=0.8, stop_s=0.3, resume_s=1.0, time_scale=60 * MINUTES_PER_SECOND, settle_s=0.3)
    faults = Faults(faults=(Fault(kind="preempt", step=INTERRUPTED_AT),))
    profile = ctx.profile(PLATFORM)
    Cloud(home / "providers" / "rehearsal" / profile.id, profile, clock, settings=settings, faults=faults)
    stage.say(f"[dim]platform {PLATFORM}, simulated costs: 1 s of real time is billed as {MINUTES_PER_SECOND} min[/]")
    await print_sandbox(stage)
    refused, job = await _submit_jobs(ctx, stage)
    job = await _watch_training(ctx, stage, job)
    blocked = await _claim_done(ctx, stage, job)
    pulled, caught, report = await _prove_copies(ctx, stage, job)
    view, channel = await _approve(ctx, stage, job, yes=yes)
    _bill(ctx, stage, job, view)
    return _result(ctx, job, refused, blocked, pulled, caught, report, view, channel)


async def print_sandbox(stage: Stage) -> None:
    """Print whether the demo's script runs in a sandbox on this machine."""
    sandbox = await to_thread.run_sync(detect)
    if sandbox.kind is not Kind.NONE:
        stage.say(f"[dim]jobs run in a sandbox on this machine: {escape(sandbox.kind)}[/]")
    else:
        stage.say(
            "[dim]no sandbox works on this machine: the demo's own script runs without one, but an agent's job would "
            "be refused[/]"
        )


# -------------------------------------------------------------------------------------------------------- acts


async def _submit_jobs(ctx: Context, stage: Stage) -> tuple[list[str], JobRecord]:
    """Submit a bad job and a good one. Return the rules that refused the bad job, and the record of the good one."""
    stage.act("An agent submits a job in a hurry")
    fake = "hf_" + "x" * 34  # formatted like a token, but not valid
    spec = JobSpec(name="hurry", platform=PLATFORM, script="import torch\nprint('training')\n", env={"HF_TOKEN": fake})
    try:
        await submit(ctx, spec)
    except Refused as no:
        blocking = [f for f in no.findings if f.blocks]
    else:
        raise WardenError("the demo's bad job was not refused")
    stage.say("[red]refused[/]; nothing was rented")
    for f in blocking:
        stage.say(f"  [bold]{f.rule}[/] {escape(f.message)}")

    stage.act("The agent submits a complete job")
    spec = demo_spec()
    checked = await submit(ctx, spec)
    for f in checked.findings:
        stage.say(f"{colored(f.severity)} [bold]{f.rule}[/] {escape(f.message)}")
    price = checked.quote.price_usd_per_hour if checked.quote else None
    stage.say(f"quote {usd_per_hour(price)}, {at_most(checked.worst_cost_usd)}; receipt {checked.receipt}")
    launched = await submit(ctx, spec, receipt=checked.receipt)
    again = await submit(ctx, spec, receipt=checked.receipt)
    assert launched.job is not None and again.job is not None
    same = "the same job" if again.job.id == launched.job.id else "TWO JOBS"
    stage.say(f"[green]accepted[/] as {launched.job.id}; submitted twice by mistake: {same}")
    return sorted({f.rule for f in blocking}), launched.job


def demo_spec() -> JobSpec:
    """Return the good job: a character model that trains on the bundled profile pages."""
    text = "\n".join(f.read_text("utf-8") for f in sorted(data_dir("profiles").glob("*.md")))
    script = (data_dir("skills") / "gpu-training" / "examples" / "train_char_model.py").read_text("utf-8")
    return JobSpec(
        name="char-model",
        platform=PLATFORM,
        script=script.replace('TEXT = ""', f"TEXT = {text!r}"),
        args=(str(STEPS), str(SAVE_EVERY)),
        env={"PACE_S": PACE_S},
        outputs=("out",),
        timeout_s=7200,
        estimate_s=3600,
        max_cost_usd=5,
        gpu="RTX 4090",
        interruptible=True,
    )


async def _watch_training(ctx: Context, stage: Stage, job: JobRecord) -> JobRecord:
    stage.act("The job trains, is interrupted in the same way as on the real platform, and resumes")
    deadline = ctx.clock.now() + PATIENCE_S
    state = job.state
    with _bar(stage) as show:
        while state not in TERMINAL_JOBS and ctx.clock.now() < deadline:
            await ctx.clock.sleep(LOOK_S)
            seen = await check(ctx, job.id, limit=400)
            if seen.job.state is not state:
                state = seen.job.state
                if state is Job.PREEMPTED:
                    why = escape(seen.job.why)
                    stage.say(f"[yellow]interrupted[/]: {why}; the disk is kept, but the process has ended")
                elif state is Job.RUNNING:
                    again = f", attempt {seen.job.attempt}, with the identical command" if seen.job.attempt > 1 else ""
                    stage.say(f"[green]running[/]{again}")
                elif state is Job.SUCCEEDED:
                    stage.say("[green]succeeded[/]")
            cost = seen.lease.cost if seen.lease else None
            step = seen.observation.step if seen.observation else None
            loss = seen.observation.metrics.get("loss") if seen.observation else None
            show(step, loss, cost, str(state))
    job = read_job(ctx.ledger, job.id)
    if job.state not in TERMINAL_JOBS:
        raise WardenError(
            f"the demo's job has not ended within {PATIENCE_S:g} s, because this computer is busy",
            "Run the demo again.",
        )
    if job.state is not Job.SUCCEEDED:
        raise WardenError(f"the demo's job ended as {job.state}: {job.why}")
    return job


@contextlib.contextmanager
def _bar(stage: Stage) -> Iterator[Callable[[int | None, float | None, float | None, str], None]]:
    """Show a bar with step, loss and cost, if the output is a terminal."""
    if stage.quiet or not stage.console.is_terminal:
        yield lambda step, loss, cost, state: None
        return
    columns = (
        TextColumn("   {task.description:<12}"),
        BarColumn(30),
        TextColumn("{task.fields[info]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=stage.console, transient=True) as bar:
        task = bar.add_task("provisioning", total=STEPS, info="")

        def show(step: int | None, loss: float | None, cost: float | None, state: str) -> None:
            info = f"step {step or 0}/{STEPS}  loss {'-' if loss is None else f'{loss:.3f}'}  cost {usd(cost)}"
            bar.update(task, completed=step or 0, description=state, info=info)

        yield show


async def _claim_done(ctx: Context, stage: Stage, job: JobRecord) -> list[str]:
    stage.act('"Done. I will delete the machine." The agent asks for teardown')
    view = await request(ctx, job.id, "terminate")
    if view.record.state is not Teardown.BLOCKED:
        raise WardenError("the demo's early teardown was not refused")
    stage.say("[red]refused[/]; the machine is still running and still billed")
    for f in (f for f in view.findings if f.blocks):
        stage.say(f"  [bold]{f.rule}[/] {escape(f.message)}")
    return sorted({f.rule for f in view.findings if f.blocks})


async def _prove_copies(ctx: Context, stage: Stage, job: JobRecord) -> tuple[PullResult, bool, Report]:
    """Pull the outputs, damage a copy, and pull again.

    Return the first pull, whether the damage was detected, and the last report.
    """
    stage.act("The agent pulls the artifacts; every copy is compared by sha256 with a manifest made on the machine")
    pulled = await pull(ctx, job.id)
    size = sum(f.size for f in pulled.received.files)
    stage.say(f"{len(pulled.received.files)} files, {size:,} bytes, manifest {pulled.manifest.digest[:19]}")
    stage.say(f"the pulled log shows that the job resumed at step {', '.join(map(str, _resumed(pulled)))}")

    stage.act("One bit in the local copy is flipped")
    victim = max((f for f in pulled.received.files if f.path.endswith("model.safetensors")), key=lambda f: f.path)
    _flip(Path(victim.local))
    report = await verify_job(ctx, job.id, Level.LOAD)
    _show_report(stage, report)
    view = await request(ctx, job.id, "terminate")
    stage.say(f"teardown: [red]{view.record.state}[/] by {', '.join(f.rule for f in view.findings if f.blocks)}")
    caught = report.verdict == "refuted" and view.record.state is Teardown.BLOCKED

    stage.act("The agent pulls again, which transfers only the damaged file, then verifies")
    again = await pull(ctx, job.id)
    stage.say(f"{again.received.bytes_sent:,} bytes transferred, {again.received.bytes_skipped:,} already identical")
    report = await verify_job(ctx, job.id, Level.LOAD)
    _show_report(stage, report)
    return pulled, caught, report


def _flip(file: Path) -> None:
    """Flip one bit inside a tensor; sizes and headers stay the same."""
    content = bytearray(file.read_bytes())
    content[len(content) * 3 // 4] ^= 0x10
    file.write_bytes(content)


def _show_report(stage: Stage, report: Report) -> None:
    bad = next((p for f in report.files for p in f.problems), "") or next(iter(report.problems), "")
    step = f", newest step {report.step}" if report.step is not None else ""
    stage.say(
        f"verify: {colored(str(report.verdict))}, {len(report.files)} files{step}{': ' + escape(bad) if bad else ''}"
    )


async def _approve(ctx: Context, stage: Stage, job: JobRecord, *, yes: bool) -> tuple[TeardownView, str]:
    stage.act("The agent asks for teardown again; now the user is asked for approval")
    view = await request(ctx, job.id, "terminate")
    if view.record.state is not Teardown.AWAITING_HUMAN or view.record.digest is None:
        raise WardenError(f"the demo's teardown is {view.record.state}: {'; '.join(f.message for f in view.findings)}")
    channel: Channel = "terminal" if has_terminal() and not yes else "rehearsal"
    if channel == "terminal":
        with open_terminal() as terminal:
            await ask(ctx, view.record.id, terminal)
    else:
        why = "--yes was given" if yes else "no terminal is available to ask the user"
        stage.say(f"[yellow]{why}[/]: the demo approves the teardown itself")
        stage.say("recorded with the channel rehearsal, which is valid only for simulated machines")
        by = "the flag --yes" if yes else "the demo, without a terminal"
        await approve(ctx, view.record.id, view.record.digest, channel=channel, by=by)

    deadline = ctx.clock.now() + PATIENCE_S
    view = await proceed(ctx, view.record.id)
    while view.record.state is Teardown.EXECUTING and ctx.clock.now() < deadline:
        await ctx.clock.sleep(LOOK_S)
        view = await proceed(ctx, view.record.id)
    if view.record.state is not Teardown.VERIFIED_STOPPED:
        raise WardenError(f"the teardown of the demo's machine was not confirmed: {view.record.state}")
    stage.say("[green]verified stopped[/]: two polls of the platform confirm that the machine is gone")
    return view, channel


def _bill(ctx: Context, stage: Stage, job: JobRecord, view: TeardownView) -> None:
    stage.act("The bill and the ledger")
    stage.say(f"simulated cost {usd(view.lease.cost)} for the machine from start to end; {ctx.ledger.count()} events")
    if stage.quiet:
        return
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 3))
    for event in ctx.ledger.events():
        if event.state is not None or isinstance(event.data, ArtifactsPulled | ArtifactsVerified):
            note = event.data.gist
            subject = event.subject.replace(job.id, "..")
            table.add_row(when(event.at)[11:], escape(subject), event.kind, f"[dim]{escape(note[:60])}[/]")
    stage.console.print(table)


def _resumed(pulled: PullResult) -> list[int]:
    """Return the steps at which the training script logged that it resumed."""
    log = pulled.log.read_text("utf-8") if pulled.log else ""
    return [int(n) for n in re.findall(r"^resumed at step (\d+)$", log, re.MULTILINE)]


def _result(
    ctx: Context,
    job: JobRecord,
    refused: list[str],
    blocked: list[str],
    pulled: PullResult,
    caught: bool,
    report: Report,
    view: TeardownView,
    channel: str,
) -> dict[str, Any]:
    """Return the results, read from the ledger, the log and the files."""
    preemptions = len(ctx.ledger.events(job.subject, kind=JobPreempted))
    resumed = _resumed(pulled)
    lease = lease_now(ctx, view.lease.id)
    proven = report.verdict == "proven"
    ok = bool(
        refused and blocked and caught and proven and preemptions == 1 and resumed and lease.state is Lease.STOPPED
    )
    return {
        "ok": ok,
        "job": {
            "state": str(job.state),
            "preemptions": preemptions,
            "resumed_from_step": resumed[0] if resumed else None,
            "final_step": report.step,
        },
        "refused_submit_rules": refused,
        "teardown_refused_rules": blocked,
        "corruption_caught": caught,
        "checkpoint": {"verified": proven, "files": len(report.files), "bytes": report.bytes},
        "approval": {"channel": channel},
        "lease": {"state": str(lease.state)},
        "cost_usd": round(lease.cost or 0.0, 6),
        "events": ctx.ledger.count(),
    }
