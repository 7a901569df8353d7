"""Ask the user at a terminal for approval.

The answer is read from the terminal itself (`/dev/tty`), not from standard input, so a pipe can't supply it. A program
with a pseudo-terminal can answer the prompt, so set a PIN (`gpuwarden approve --set-pin`) that no program knows.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TextIO

from anyio import to_thread
from filelock import FileLock

from gpuwarden.config import load_config
from gpuwarden.core.clock import ShiftedClock
from gpuwarden.core.errors import BadRequest, Conflict, DiskError, NotFound, Refused
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.models import JobSpec, Verb, digest
from gpuwarden.core.money import at_most, bills_on, usd, usd_per_hour
from gpuwarden.core.plural import counted
from gpuwarden.core.policy import hash_pin, pin_matches
from gpuwarden.core.sanitize import line, plain
from gpuwarden.core.states import Teardown
from gpuwarden.interfaces.cli.wording import in_commands
from gpuwarden.interfaces.results import Result, torn_down
from gpuwarden.ledger.event import Event
from gpuwarden.ledger.events import ApprovalGranted, PinWrong, PolicyAllowed, ReceiptIssued
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.fan_out.limits import LimitIncrease
from gpuwarden.lifecycle.leases.auto_teardown import order_for
from gpuwarden.lifecycle.leases.budgets import spending_approved
from gpuwarden.lifecycle.records import receipt_used
from gpuwarden.lifecycle.submission.rehearsing import (
    NeedsConsent,
    allow,
    allowed,
    permit,
    question_for,
    question_script,
)
from gpuwarden.lifecycle.team import check_approver
from gpuwarden.lifecycle.teardown.gate import TeardownView, approve, proceed
from gpuwarden.lifecycle.teardown.orders import HoldOutcome
from gpuwarden.people import current_user
from gpuwarden.policy_record import WRONG_PINS
from gpuwarden.private import private_folder, write_private
from gpuwarden.remote.sandbox.detect import detect
from gpuwarden.remote.sandbox.words import Kind

PIN_TRIES = 5
PIN_WINDOW_S = 900
STOP_SEEN_S = 120.0
"""Maximum seconds that the approval command waits for confirmation that billing has stopped."""
SHOWN = 20
"""Maximum number of files that the prompt lists, files without a copy first. The other files are only counted."""


class Terminal:
    """The user's terminal, for prompts and answers."""

    def __init__(self, reader: TextIO, writer: TextIO) -> None:
        self.reader = reader
        self.writer = writer

    def say(self, text: str) -> None:
        """Print text without control sequences, so that text from other programs can't move the cursor."""
        self.writer.write(plain(text) + "\n")
        self.writer.flush()

    def ask(self, prompt: str) -> str:
        """Print a prompt and read one line."""
        self.writer.write(plain(prompt))
        self.writer.flush()
        return self.reader.readline().strip()

    def secret(self, prompt: str) -> str:
        """Read a PIN without echo."""
        return getpass.getpass(prompt, stream=self.writer)


@contextlib.contextmanager
def open_terminal() -> Iterator[Terminal]:
    """Yield the controlling terminal. Raises Refused if this process has no terminal to ask the user."""
    names = ("CONIN$", "CONOUT$") if os.name == "nt" else ("/dev/tty", "/dev/tty")
    with contextlib.ExitStack() as stack:
        try:
            if not sys.stdin.isatty():
                raise OSError("standard input is not a terminal")
            # A terminal is not seekable, so reading and writing need separate file objects.
            reader = stack.enter_context(Path(names[0]).open("r", encoding="utf-8", errors="replace"))
            writer = stack.enter_context(Path(names[1]).open("w", encoding="utf-8", errors="replace"))
        except OSError as error:
            raise Refused(
                "this command needs a user at a terminal, and this process has no terminal",
                "Run the command yourself in a terminal window; no flag or variable can replace this.",
            ) from error
        yield Terminal(reader, writer)


def has_terminal() -> bool:
    """Return whether this process has a terminal at which it can ask the user."""
    try:
        with open_terminal():
            return True
    except Refused:
        return False


@dataclass(frozen=True)
class ApprovalDecisions:
    """The user's decisions about one job, made when its spending is approved: automatic teardown and relaunch budget.

    `relaunch_usd` is the budget in US dollars for further machines after interruptions.
    """

    order: Verb | None = None
    relaunch_usd: float | None = None


NOTHING: Final = ApprovalDecisions()


async def on_terminal(
    ctx: Context, ticket: str, *, without_proof: bool, decided: ApprovalDecisions = NOTHING
) -> Result:
    """Show a ticket's details and ask for approval. Raises NotFound, Conflict, or Refused if the answer is no."""
    _check_channel(ctx)
    with open_terminal() as terminal:
        return await ask(ctx, ticket, terminal, without_proof=without_proof, decided=decided)


def _check_channel(ctx: Context) -> None:
    """Raise Refused unless the active policy allows approval at a terminal."""
    if "terminal" not in ctx.policy.approval.channels:
        raise Refused("the policy does not allow approval at a terminal", "See approval.channels in gpuwarden doctor.")


async def ask(
    ctx: Context, ticket: str, terminal: Terminal, *, without_proof: bool = False, decided: ApprovalDecisions = NOTHING
) -> Result:
    """Show a ticket's details on a given terminal and ask for approval."""
    if ticket.startswith("s"):
        return await ask_script(ctx, ticket, terminal)
    if ticket.startswith("r"):
        return await ask_spending(ctx, ticket, terminal, decided)
    if decided != NOTHING:
        given = "--auto-teardown" if decided.order else "--relaunch-budget"
        raise BadRequest("teardown and relaunch decisions apply only to a receipt (r...)", f"Leave {given} out.")
    view = await proceed(ctx, ticket)
    if view.record.state not in {Teardown.AWAITING_HUMAN, Teardown.BLOCKED}:
        return torn_down(view)
    show_request(ctx, view, terminal)
    blocked = view.record.state is Teardown.BLOCKED
    if blocked and not without_proof:
        raise Refused(
            f"ticket {ticket} is blocked: some outputs are not proven",
            "Fix the findings. To accept losing the unverified files: gpuwarden approve --without-proof.",
            view.findings,
        )
    name = view.job.spec.name
    if blocked:
        terminal.say("Files that are not copied or not proven will be lost permanently.")
    prompt = f"Type the job's name ({name}) to accept losing them: " if blocked else "Type yes to approve: "
    if terminal.ask(prompt) != (name if blocked else "yes"):
        raise Refused("not approved; nothing was changed")
    await check_pin(ctx, terminal)
    assert view.record.digest is not None
    view = await approve(ctx, ticket, view.record.digest, channel="terminal", by=user(), loss=name if blocked else None)
    until = ctx.clock.now() + STOP_SEEN_S
    if view.record.state is Teardown.EXECUTING:
        terminal.say("Approved. Waiting until billing is confirmed stopped ...")
    while view.record.state is Teardown.EXECUTING and ctx.clock.now() < until:
        await ctx.clock.sleep(0.5)
        view = await proceed(ctx, view.record.id)
    return torn_down(view)


def warn(ctx: Context, terminal: Terminal) -> None:
    """Show the warnings about this installation before the user decides."""
    for notice in ctx.notices:
        terminal.say(f"warning: {notice.text} {in_commands(notice.next_steps)}")


def show_request(ctx: Context, view: TeardownView, terminal: Terminal) -> None:
    """Show a teardown's details: the machine, the files that it deletes, their copies, and the findings."""
    warn(ctx, terminal)
    for text in request_facts(view):
        terminal.say(text)


def request_facts(view: TeardownView) -> list[str]:
    """Return a teardown's details, one per line. The browser page shows the same details."""
    lease = view.lease
    worst_first = sorted(view.dying, key=lambda f: (f.copied, f.stored))
    found = [
        f"{view.record.verb} {lease.platform} instance {lease.instance_id} of job {view.job.spec.name}",
        f"  the job {view.job.state.phrase}; cost so far: {usd(lease.cost, lease.estimated)}",
        f"  deletes {counted(len(view.dying), 'declared file')}, {sum(f.size for f in view.dying):,} bytes:",
    ]
    for file in worst_first[:SHOWN]:
        state = "copied" if file.copied else "in the artifact store" if file.stored else "NOT COPIED"
        found.append(f"    {line(file.path)}  {file.size:,} bytes  {state}")
    found += [f"    and {len(view.dying) - SHOWN:,} more"] if len(view.dying) > SHOWN else []
    found += [f"  the copy is in {line(view.copy_at)}"] if view.copy_at else []
    return [*found, *(f"  {f.severity} {f.rule}: {line(f.message, 600)}" for f in view.findings)]


def open_spending(ctx: Context, receipt: str) -> Event[ReceiptIssued]:
    """Return a receipt whose spending can be approved. Raises NotFound, or Conflict if the receipt has expired."""
    found = ctx.ledger.last(f"receipt/{receipt}", ReceiptIssued)
    if found is None:
        raise NotFound(f"this ledger has no receipt {receipt!r}", "gpuwarden submit prints the receipt.")
    if ctx.clock.now() > found.data.expires_at:
        raise Conflict("the receipt has expired", "Submit the job again to get a new receipt.")
    return found


def ordered_by(ctx: Context, receipt: str) -> Verb | None:
    """Return the verb for the job's automatic teardown (stop or terminate); None without automatic teardown."""
    present = order_for(ctx, receipt)
    return present.verb if present else None


def spending_facts(issued: ReceiptIssued, order: Verb | None) -> list[str]:
    """Return a spending request's details, one per line. The browser page shows the same details."""
    price = usd_per_hour(issued.price)
    limit = "no timeout" if issued.timeout_s is None else f"timeout {issued.timeout_s} s"
    what = f"{issued.fan_out or 'fan-out'} {issued.name}" if issued.cells else f"job {issued.name}"
    found = [f"{what} on {issued.platform}: price {price}, {limit}"]
    if issued.choices:
        found.append("  runs on the first of these with capacity; the price above is the highest:")
        each = (
            f"{c.platform} {line(c.gpu or '', 64)}".strip() + f" at {usd_per_hour(c.price)}" for c in issued.choices
        )
        found += [f"    {n}. {text}" for n, text in enumerate(each, 1)]
    if issued.cells:
        machines = counted(issued.machines, "machine")
        found.append(f"  {counted(issued.cells, 'cell')} on at most {machines} at a time; the timeout is per cell")
    if issued.worst_cost is not None:
        most = at_most(issued.worst_cost, order)
        found.append(f"  {most.replace('for the job', 'in all', 1) if issued.cells else most}")
    stays = bills_on(issued.storage, issued.storage_usd_per_hour)
    found += [f"  {text}" for text in (stays, issued.ask) if text]
    return [*found, *([f"  Its outputs are uploaded to {issued.artifact_store}."] if issued.artifact_store else [])]


def awaits_approval(ctx: Context, issued: Event[ReceiptIssued]) -> bool:
    """Return whether a receipt's spending waits for approval.

    A second approval would replace the decisions of the first, so approved spending does not wait.
    """
    receipt = issued.subject.removeprefix("receipt/")
    return bool(issued.data.ask) and not receipt_used(ctx.ledger, receipt) and not spending_approved(ctx, receipt)


def spending_digest(issued: Event[ReceiptIssued], facts: Sequence[str]) -> str:
    """Return the digest of a spending request and of the facts shown for it.

    The receipt's own digest does not include automatic teardown or a later price increase.
    """
    return digest([issued.subject.removeprefix("receipt/"), issued.data.facts_digest, *facts])


async def ask_spending(ctx: Context, receipt: str, terminal: Terminal, decided: ApprovalDecisions = NOTHING) -> Result:
    """Ask for approval of a job's price before its launch, and of the given automatic teardown and relaunch budget.

    Raises NotFound, Conflict or Refused.
    """
    found = open_spending(ctx, receipt)
    issued, order, budget = found.data, decided.order, decided.relaunch_usd
    if not issued.ask and decided == NOTHING:
        return Result(
            message="This spending is within the caps and needs no approval.",
            next=(do(Action.SUBMIT, receipt=receipt),),
        )
    if budget is not None and issued.cells:
        raise BadRequest("a fan-out rents further machines within its own budget", "Leave --relaunch-budget out.")
    if decided != NOTHING and (issued.job is not None or receipt_used(ctx.ledger, receipt)):
        given = "--auto-teardown" if order else "--relaunch-budget"
        raise Conflict(
            "the job has already been accepted, so its teardown and relaunch can't be set now", f"Leave {given} out."
        )
    if budget is not None and (issued.worst_cost is None or budget < issued.worst_cost):
        worst = usd(issued.worst_cost)
        raise BadRequest(
            f"one relaunch may cost {worst}, so a budget of {usd(budget)} is too small", f"Pass {worst} or more."
        )
    warn(ctx, terminal)
    for text in spending_facts(issued, order or ordered_by(ctx, receipt)):
        terminal.say(text)
    if order is not None:
        minutes = ctx.policy.teardown.grace_minutes
        terminal.say(f"  After the job has succeeded and all its outputs are proven here, {order} its machine without")
        terminal.say(f"  asking again, {minutes} minutes after an alert. gpuwarden hold JOB cancels this.")
    if budget is not None:
        terminal.say("  If the platform permanently reclaims the machine, rent another at this price or below without")
        terminal.say(
            f"  asking again, and resume from the proven copy: {usd(budget)} in all, on top of the cost above."
        )
    if terminal.ask("Type yes to approve: ") != "yes":
        raise Refused("not approved; nothing was launched")
    _check_channel(ctx)  # the policy may have changed since the prompt
    await check_pin(ctx, terminal)
    grant_spending(ctx, found, "terminal", user(), order, budget)
    resume = do(Action.SUBMIT, receipt=receipt)
    if issued.job:
        resume = do(Action.CHECK, "to launch it", job_id=issued.job)
    elif issued.fan_out:
        resume = LimitIncrease(issued.fan_out, receipt, issued).next_steps[-1]
    elif issued.cells:
        resume = do(Action.MANUAL, text=f"Repeat the call that checked the fan-out, with receipt {receipt}.")
    return Result(code="approved", message="Approved.", next=(resume,))


def grant_spending(
    ctx: Context,
    issued: Event[ReceiptIssued],
    channel: str,
    by: str,
    order: Verb | None = None,
    relaunch_usd: float | None = None,
) -> None:
    """Record the approval of one receipt's spending, with its automatic teardown and relaunch budget."""
    check_approver(ctx)
    granted = ApprovalGranted(
        digest=issued.data.facts_digest,
        channel=channel,
        by=by,
        policy=ctx.active_policy.digest,
        expires_at=issued.data.expires_at,
    )
    if order is not None:
        granted = granted.model_copy(update={"auto_teardown": order})
    if relaunch_usd is not None:
        granted = granted.model_copy(update={"relaunch_budget_usd": relaunch_usd})
    ctx.ledger.add(issued.subject, granted)


async def ask_script(ctx: Context, ticket: str, terminal: Terminal) -> Result:
    """Ask the user whether a script may be rehearsed on this machine.

    Raises NotFound, or Refused if the answer is no.
    """
    asked = question_for(ctx, ticket)
    if allowed(ctx, asked.digest):
        return Result(message="The rehearsal of this script is already allowed.", next=(do(Action.REHEARSE),))
    warn(ctx, terminal)
    terminal.say(
        f"rehearse the script {asked.name} on this machine: {asked.script_bytes:,} bytes, {asked.script_digest}"
    )
    terminal.say(f"  arguments: {' '.join(asked.args) or 'none'}")
    terminal.say(f"  packages: {', '.join(asked.packages) or 'those installed here'}")
    for what, listed in (("files", asked.inputs), ("variables", asked.variables)):
        if listed:
            terminal.say(f"  {what} passed to it: {', '.join(listed)}")
    for text in asked.start.splitlines():
        terminal.say(f"  | {text}")
    terminal.say("  It runs in the sandbox for local jobs: no network, no secrets, only its own files.")
    script = question_script(ctx, asked)
    answer = terminal.ask("Type yes to run it: " if script is None else "Type yes to run it, or all to read it first: ")
    if answer == "all" and script is not None:
        for number, text in enumerate(script.splitlines(), 1):
            terminal.say(f"{number:>5} | {text}")
        answer = terminal.ask("Type yes to run it: ")
    if answer != "yes":
        raise Refused("not allowed; nothing was run")
    _check_channel(ctx)
    await check_pin(ctx, terminal)
    allow(ctx, asked, "terminal", user())
    return Result(code="approved", message="Allowed for this script only.", next=(do(Action.REHEARSE),))


async def ask_consent(ctx: Context, spec: JobSpec) -> None:
    """Ask for the consent that a rehearsal needs, if there is a terminal. Without consent, the rehearsal is refused."""
    if "terminal" not in ctx.policy.approval.channels or not has_terminal():
        return
    try:
        await permit(ctx, spec)
    except NeedsConsent as asked:
        with open_terminal() as terminal:
            await ask_script(ctx, asked.ticket, terminal)


def held(job_id: str, effect: HoldOutcome) -> Result:
    """Return the reply to a hold request."""
    if effect is HoldOutcome.NOT_ORDERED:
        message = f"Automatic teardown does not apply to {job_id}; a teardown needs the user's approval."
        return Result(code=effect, message=message)
    if effect is HoldOutcome.TOO_LATE:
        message = f"Too late: the teardown of {job_id}'s machine has already been approved or sent to the platform. "
        message += "Automatic teardown sends no further call."
        follow = do(Action.CHECK, "to see whether the platform accepted it", job_id=job_id)
        return Result(ok=False, code=effect, message=message, next=(follow,))
    again = do(Action.TEARDOWN, "to request its teardown", job_id=job_id)
    message = f"The machine of {job_id} keeps running, and is billed, until the user approves its teardown."
    return Result(code=effect, message=message, next=(again,))


async def check_pin(ctx: Context, terminal: Terminal) -> None:
    """Ask for the PIN if one is set. Raises Refused if it is wrong."""
    pin_hash = ctx.policy.approval.pin_hash
    if pin_hash is not None:
        await _try_pin(ctx, terminal.secret("PIN: "), pin_hash)


async def _try_pin(ctx: Context, pin: str, pin_hash: str) -> None:
    """Check a PIN, and limit wrong attempts so that the PIN can't be guessed.

    The locks serialize attempts, so that parallel processes can't exceed the limit. A rehearsal's clock is not used,
    because an environment variable can shift it.
    """
    file = ctx.active_policy.file
    async with ctx.lock("pin"):
        with _wrong_pins(file.with_name(WRONG_PINS) if file else None) as everywhere:
            now = time.time() if isinstance(ctx.clock, ShiftedClock) else ctx.clock.now()
            here = [event.data.tried_at or event.at for event in ctx.ledger.events("approval/pin", kind=PinWrong)]
            recent = max(sum(1 for at in wrong if 0 <= now - at < PIN_WINDOW_S) for wrong in (here, everywhere))
            if recent >= PIN_TRIES:
                raise Refused(f"{recent} wrong PINs in the last {PIN_WINDOW_S // 60} minutes", "Wait, then try again.")
            if not pin_matches(pin, pin_hash):
                everywhere.append(now)
                ctx.ledger.add("approval/pin", PinWrong(by=user(), tried_at=now))
                raise Refused("the PIN is wrong; nothing was changed")


@contextlib.contextmanager
def _wrong_pins(file: Path | None) -> Iterator[list[float]]:
    """Lock the list of times at which a wrong PIN was entered, yield it, and store it if it changed. Raises DiskError.

    The list is stored next to the policy file, which contains the PIN's hash, because an environment variable can
    select a new ledger. If the user can't write there, for example because root created the list, only the wrong PINs
    in the ledger count.
    """
    lock = file.with_suffix(".lock") if file else None
    if file is None or lock is None or not all(os.access(p, os.W_OK) for p in (file.parent, file, lock) if p.exists()):
        yield []
        return
    try:
        with FileLock(lock, mode=0o600, timeout=30):
            before: list[float] = []
            if file.exists():
                words = file.read_text("utf-8", "replace").split()
                valid = words and all(re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,17})?", word) for word in words)
                # A damaged list counts as full, with the time of its last change.
                before = [float(word) for word in words] if valid else [file.stat().st_mtime] * PIN_TRIES
            times = [*before]
            try:
                yield times
            finally:
                if times != before:
                    write_private(file, "\n".join(map(str, times[-PIN_TRIES:])))
    except OSError as error:
        raise DiskError(f"the wrong PINs in {file} can't be counted", "Check that file, then try again.") from error


async def choose_pin(ctx: Context) -> Result:
    """Ask for a new PIN and write its hash to the policy file; the rest of the file is unchanged."""
    config = load_config()
    with open_terminal() as terminal:
        if config.policy.approval.pin_hash:
            await _try_pin(ctx, terminal.secret("Old PIN: "), config.policy.approval.pin_hash)
        pin = terminal.secret("New PIN: ")
        if len(pin) < 4 or pin != terminal.secret("Again: "):
            raise BadRequest("the two PINs differ, or the PIN has fewer than 4 characters", "Try again.")
    _set_in_policy(config.policy_file, "approval", "pin_hash", hash_pin(pin))
    return Result(message=f"Every approval at a terminal now requires the PIN ({config.policy_file}).")


async def allow_local(ctx: Context) -> Result:
    """Ask the user at a terminal whether jobs may run on this machine without a sandbox, and record the answer in the
    policy.
    """
    found = await to_thread.run_sync(detect)
    if found.kind is not Kind.NONE:
        return Result(message=f"Nothing to allow: jobs on this machine already run in a sandbox ({found.kind}).")
    check_approver(ctx)
    config = load_config()
    with open_terminal() as asked:
        asked.say(f"No sandbox works on this machine: {found.why}.")
        asked.say("Any job on `local` or in a rehearsal then runs with your account's rights: it can read your")
        asked.say("keys and files, change gpuwarden's policy, and approve on your behalf.")
        if asked.ask("Type yes to allow it: ") != "yes":
            raise Refused("not allowed; nothing was changed")
        await check_pin(ctx, asked)
    _set_in_policy(config.policy_file, "local", "unsandboxed", True)
    ctx.ledger.add("policy/local", PolicyAllowed(what="local.unsandboxed", channel="terminal", by=user()))
    return Result(
        message=f"Jobs on this machine may run without a sandbox ({config.policy_file}).",
        hint="To revoke this, remove local.unsandboxed from that file.",
    )


def _set_in_policy(file: Path, table: str, key: str, value: str | bool) -> None:
    """Set one value in the policy file; the rest of the file is unchanged."""
    text = file.read_text("utf-8") if file.exists() else ""
    private_folder(file.parent)
    write_private(file.resolve(), with_values(text, {f"{table}.{key}": value}))


def with_values(text: str, values: Mapping[str, object]) -> str:
    """Return a policy file's text with changed values (`table.key`); the rest, including comments, is unchanged."""
    import tomlkit

    document = tomlkit.parse(text)
    for path, value in values.items():
        table, key = path.split(".")
        document.setdefault(table, tomlkit.table())[key] = value
    return tomlkit.dumps(document)


def user() -> str:
    """Return the name of the user at the terminal."""
    return f"user {current_user()}"
