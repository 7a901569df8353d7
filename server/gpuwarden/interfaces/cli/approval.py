"""Saying yes as a person at a terminal.

The question goes to the terminal itself (`/dev/tty`), not to standard input, so a pipe can't answer it. A program with
a pseudo-terminal can: set a PIN (`gpuwarden approve --set-pin`) that only people know.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from anyio import to_thread

from gpuwarden.config import load_config
from gpuwarden.core.errors import BadRequest, Conflict, NotFound, Refused
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.models import Verb
from gpuwarden.core.money import at_most, usd, usd_per_hour
from gpuwarden.core.plural import counted
from gpuwarden.core.policy import hash_pin, pin_matches
from gpuwarden.core.sanitize import line, plain
from gpuwarden.core.states import Teardown
from gpuwarden.interfaces.cli.wording import in_commands
from gpuwarden.interfaces.results import Result, torn_down
from gpuwarden.ledger.event import Event
from gpuwarden.ledger.events import ApprovalGranted, JobAccepted, PinWrong, PolicyAllowed, ReceiptIssued
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.ending.teardown import TeardownView, approve, proceed
from gpuwarden.private import private_folder, write_private
from gpuwarden.remote.sandbox.detect import detect
from gpuwarden.remote.sandbox.words import Kind

PIN_TRIES = 5
PIN_WINDOW_S = 900
STOP_SEEN_S = 120.0
"""Seconds that an approval waits for the meter to stop; the ticket goes on without it."""
SHOWN = 20
"""Files that the question names, those without a copy first; the others are counted."""


class Terminal:
    """A person's terminal: what is asked and answered there."""

    def __init__(self, reader: TextIO, writer: TextIO) -> None:
        self.reader = reader
        self.writer = writer

    def say(self, text: str) -> None:
        """Show text; what others wrote can't move the cursor."""
        self.writer.write(plain(text) + "\n")
        self.writer.flush()

    def ask(self, prompt: str) -> str:
        """Read one line of answer."""
        self.writer.write(plain(prompt))
        self.writer.flush()
        return self.reader.readline().strip()

    def secret(self, prompt: str) -> str:
        """Read a PIN without echo."""
        return getpass.getpass(prompt, stream=self.writer)


@contextlib.contextmanager
def open_terminal() -> Iterator[Terminal]:
    """Yield the controlling terminal. Raises Refused where there is none: then no person is there to ask."""
    names = ("CONIN$", "CONOUT$") if os.name == "nt" else ("/dev/tty", "/dev/tty")
    with contextlib.ExitStack() as stack:
        try:
            if not sys.stdin.isatty():
                raise OSError("standard input is not a terminal")
            # A terminal can't seek, so no one file does both.
            reader = stack.enter_context(Path(names[0]).open("r", encoding="utf-8", errors="replace"))
            writer = stack.enter_context(Path(names[1]).open("w", encoding="utf-8", errors="replace"))
        except OSError as error:
            raise Refused(
                "an approval needs a person at a terminal, and there is none here",
                "Run gpuwarden approve yourself in a terminal window; no flag or variable replaces it.",
            ) from error
        yield Terminal(reader, writer)


def has_terminal() -> bool:
    """Return whether this process has a terminal at which a person can be asked."""
    try:
        with open_terminal():
            return True
    except Refused:
        return False


async def on_terminal(ctx: Context, ticket: str, *, without_proof: bool, order: Verb | None = None) -> Result:
    """Show what a ticket is about and ask. Raises NotFound, Conflict, or Refused when the answer is no."""
    if "terminal" not in ctx.policy.approval.channels:
        raise Refused("the policy takes no approval on a terminal", "See approval.channels in gpuwarden doctor.")
    with open_terminal() as terminal:
        return await ask(ctx, ticket, terminal, without_proof=without_proof, order=order)


async def ask(
    ctx: Context, ticket: str, terminal: Terminal, *, without_proof: bool = False, order: Verb | None = None
) -> Result:
    """Do the same on a given terminal."""
    if ticket.startswith("r"):
        return await ask_spending(ctx, ticket, terminal, order)
    if order is not None:
        raise BadRequest("a standing order belongs to a spending (r...)", "Leave --end-when-proven out.")
    view = await proceed(ctx, ticket)
    if view.record.state not in {Teardown.AWAITING_HUMAN, Teardown.BLOCKED}:
        return torn_down(view)
    show_request(ctx, view, terminal)
    blocked = view.record.state is Teardown.BLOCKED
    if blocked and not without_proof:
        raise Refused(
            f"ticket {ticket} is blocked: not everything is proven",
            "Do what the findings say. Only if you give those files up: gpuwarden approve --without-proof.",
            view.findings,
        )
    name = view.job.spec.name
    if blocked:
        terminal.say("What is not copied or not proven will be lost for good.")
    prompt = f"Type the job's name ({name}) to give it up: " if blocked else "Type yes to approve: "
    if terminal.ask(prompt) != (name if blocked else "yes"):
        raise Refused("not approved; nothing was touched")
    await check_pin(ctx, terminal)
    assert view.record.digest is not None
    view = await approve(ctx, ticket, view.record.digest, channel="terminal", by=user(), loss=name if blocked else None)
    until = ctx.clock.now() + STOP_SEEN_S
    if view.record.state is Teardown.EXECUTING:
        terminal.say("Approved. Waiting until the meter is seen to have stopped ...")
    while view.record.state is Teardown.EXECUTING and ctx.clock.now() < until:
        await ctx.clock.sleep(0.5)
        view = await proceed(ctx, view.record.id)
    return torn_down(view)


def _warn(ctx: Context, terminal: Terminal) -> None:
    for notice in ctx.notices:
        terminal.say(f"warning: {notice.text} {in_commands(notice.next_steps)}")


def show_request(ctx: Context, view: TeardownView, terminal: Terminal) -> None:
    """Show what a person is asked to approve: the machine, what dies with it, where copies are, and the findings."""
    lease = view.lease
    _warn(ctx, terminal)
    terminal.say(f"{view.record.verb} {lease.platform} instance {lease.instance_id} of job {view.job.spec.name}")
    terminal.say(f"  the job {view.job.state.told}; cost so far: {usd(lease.cost)}")
    terminal.say(f"  deletes {counted(len(view.dying), 'declared file')}, {sum(f.size for f in view.dying):,} bytes:")
    worst_first = sorted(view.dying, key=lambda f: (f.copied, f.stored))
    for file in worst_first[:SHOWN]:
        state = "copied" if file.copied else "in the kept store" if file.stored else "NOT COPIED"
        terminal.say(f"    {line(file.path)}  {file.size:,} bytes  {state}")
    if len(view.dying) > SHOWN:
        terminal.say(f"    and {len(view.dying) - SHOWN:,} more")
    if view.copy_at:
        terminal.say(f"  the copy is in {line(view.copy_at)}")
    for f in view.findings:
        terminal.say(f"  {f.severity} {f.rule}: {line(f.message, 600)}")


async def ask_spending(ctx: Context, receipt: str, terminal: Terminal, order: Verb | None = None) -> Result:
    """Ask about the price of a job that is not launched yet, and about a standing order for it.

    Raises NotFound, Conflict or Refused.
    """
    found = ctx.ledger.last(f"receipt/{receipt}", ReceiptIssued)
    if found is None:
        raise NotFound(f"there is no receipt {receipt!r} in this ledger", "gpuwarden submit prints it.")
    issued = found.data
    if not issued.ask and order is None:
        return Result(
            message="This spending is inside the caps; it needs no approval.",
            next=(do(Action.SUBMIT, receipt=receipt),),
        )
    if ctx.clock.now() > issued.expires_at:
        raise Conflict("the receipt has expired", "Submit again for a fresh one.")
    if order is not None and (issued.job is not None or ctx.ledger.used(JobAccepted, receipt) is not None):
        raise Conflict("the job is under way, and what ends it was decided before", "Leave --end-when-proven out.")
    _warn(ctx, terminal)
    price = usd_per_hour(issued.price)
    terminal.say(f"job {issued.name} on {issued.platform}: price {price}, timeout {issued.timeout_s} s")
    if issued.worst_cost is not None:
        terminal.say(f"  {at_most(issued.worst_cost)}")
    if issued.ask:
        terminal.say(f"  {issued.ask}")
    if order is not None:
        minutes = ctx.policy.ending.grace_minutes
        terminal.say(f"  Once it has succeeded and all that it saved is proven here, {order} its machine without a")
        terminal.say(f"  further question, {minutes} minutes after an alert. gpuwarden keep JOB takes that back.")
    if terminal.ask("Type yes to approve: ") != "yes":
        raise Refused("not approved; nothing was launched")
    await check_pin(ctx, terminal)
    grant_spending(ctx, found, "terminal", user(), order)
    resume = do(Action.CHECK, "to launch it", job_id=issued.job) if issued.job else do(Action.SUBMIT, receipt=receipt)
    return Result(code="approved", message="Approved.", next=(resume,))


def grant_spending(
    ctx: Context, issued: Event[ReceiptIssued], channel: str, by: str, order: Verb | None = None
) -> None:
    """Record a person's yes to one receipt's spending, and the standing order that came with it."""
    granted = ApprovalGranted(
        digest=issued.data.facts_digest,
        channel=channel,
        by=by,
        policy=ctx.policy_digest,
        expires_at=issued.data.expires_at,
    )
    if order is not None:
        granted = granted.model_copy(update={"end_when_proven": order})
    ctx.ledger.add(issued.subject, granted)


def kept(job_id: str, *, voided: bool) -> Result:
    """Return the reply to an objection."""
    if not voided:
        return Result(message=f"No standing order would end the machine of {job_id}; it ends when a person approves.")
    again = do(Action.TEARDOWN, "to be asked about its end", job_id=job_id)
    return Result(message=f"The machine of {job_id} stays, and bills, until a person approves its end.", next=(again,))


async def check_pin(ctx: Context, terminal: Terminal) -> None:
    """Ask for the PIN where one is set."""
    pin_hash = ctx.policy.approval.pin_hash
    if pin_hash is not None:
        await _try_pin(ctx, terminal.secret("PIN: "), pin_hash)


async def _try_pin(ctx: Context, pin: str, pin_hash: str) -> None:
    """Compare, and count wrong ones so that the PIN can't be tried out. One at a time, or many could try at once."""
    async with ctx.lock("pin"):
        recent = ctx.ledger.recent(PinWrong, ctx.clock.now() - PIN_WINDOW_S)
        if len(recent) >= PIN_TRIES:
            raise Refused(f"{len(recent)} wrong PINs in the last {PIN_WINDOW_S // 60} minutes", "Wait, then try again.")
        if not pin_matches(pin, pin_hash):
            ctx.ledger.add("approval/pin", PinWrong(by=user()))
            raise Refused("that is not the PIN; nothing was changed")


async def choose_pin(ctx: Context) -> Result:
    """Ask for a new PIN and put its hash into the policy file, keeping everything else in it."""
    config = load_config()
    with open_terminal() as terminal:
        if config.policy.approval.pin_hash:
            await _try_pin(ctx, terminal.secret("Old PIN: "), config.policy.approval.pin_hash)
        pin = terminal.secret("New PIN: ")
        if len(pin) < 4 or pin != terminal.secret("Again: "):
            raise BadRequest("the two differ, or the PIN has fewer than 4 characters", "Try again.")
    _set_in_policy(config.policy_file, "approval", "pin_hash", hash_pin(pin))
    return Result(message=f"Every approval on a terminal now asks for the PIN ({config.policy_file}).")


async def allow_local(ctx: Context, terminal: Terminal | None = None) -> Result:
    """Let jobs run on this machine without a sandbox, once a person at a terminal said yes; it stays in the policy."""
    found = await to_thread.run_sync(detect)
    if found.kind is not Kind.NONE:
        return Result(message=f"Nothing to allow: jobs on this machine run in a sandbox ({found.kind}).")
    config = load_config()
    with contextlib.nullcontext(terminal) if terminal else open_terminal() as asked:
        asked.say(f"No sandbox works on this machine: {found.why}.")
        asked.say("Whoever submits a job to `local` or to a rehearsal then has a shell under your account: it can read")
        asked.say("your keys and files, change gpuwarden's policy, and approve in your name.")
        if asked.ask("Type yes to allow it: ") != "yes":
            raise Refused("not allowed; nothing was changed")
        await check_pin(ctx, asked)
    _set_in_policy(config.policy_file, "local", "unsandboxed", True)
    ctx.ledger.add("policy/local", PolicyAllowed(what="local.unsandboxed", channel="terminal", by=user()))
    return Result(
        message=f"Jobs on this machine may run without a sandbox ({config.policy_file}).",
        hint="A server that runs already reads this when it is started again. Take it back by removing the line.",
    )


def _set_in_policy(file: Path, table: str, key: str, value: str | bool) -> None:
    """Set one value in the policy file, keeping everything else in it."""
    import tomlkit

    document = tomlkit.parse(file.read_text("utf-8") if file.exists() else "")
    document.setdefault(table, tomlkit.table())[key] = value
    private_folder(file.parent)
    write_private(file, tomlkit.dumps(document))


def user() -> str:
    """Return the name of the terminal's user."""
    try:
        return f"user {getpass.getuser()}"
    except (KeyError, OSError):
        return "user unknown"
