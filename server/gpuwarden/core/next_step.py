"""Derive what remains to do for a job from the states of its job, machine, copy, proof and ticket.

One pure function, `plan`, decides for every use case and interface. Its first step is the next one. Obeying it moves
the job on, or waits where waiting costs nothing that could be saved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from gpuwarden.core.guidance import Action, Hint, NextStep, approval, do, steps
from gpuwarden.core.models import Verb
from gpuwarden.core.plural import counted
from gpuwarden.core.states import OPEN_TEARDOWNS, TERMINAL_JOBS, Job, Teardown


class Machine(StrEnum):
    """The machine of a job, as far as its next step depends on it. UNSEEN: whether one was rented is not known yet."""

    NONE = "none"
    UNSEEN = "unseen"
    BILLING = "billing"
    OFF = "off"
    GONE = "gone"


class Copy(StrEnum):
    """The best copy of a job's outputs outside of its machine.

    STALE: made before the job ended. KEPT: from the artifact store, which is not shown to have everything that a
    machine which still exists has. PARTIAL: some files could not be copied. BROKEN: it equals the machine's files,
    which are broken or can't be judged. DAMAGED: it differs from them. EMPTY: the machine has none of the outputs.
    """

    NONE = "none"
    STALE = "stale"
    KEPT = "kept"
    PARTIAL = "partial"
    EMPTY = "empty"
    UNVERIFIED = "unverified"
    DAMAGED = "damaged"
    BROKEN = "broken"
    PROVEN = "proven"


@dataclass(frozen=True)
class Situation:
    """Everything that a job's next step depends on.

    `launched`: something was started on the machine and its files can be asked for. `given_back`: gpuwarden itself ends
    a machine that never ran anything. `announced`: automatic teardown ends the machine a grace after its notice is
    delivered, at `ends_at`, in seconds since the epoch; None before the delivery. `settles_at` is when a second look
    settles whether a refused request rented a machine; None where that is not open. `parked`: the machine that is off
    stopped itself, and a pull starts it. `kept` is the address of the artifact store, empty without one. `watched`: a
    watch, which alone carries out automatic teardown, went round lately. `resuming`: a resume was asked for.
    `stoppable`: a stop ends the meter of a paused job's machine and keeps what the job resumes from. `storage` names
    what bills on although the machine is gone.
    """

    job_id: str
    job: Job
    now: float
    machine: Machine = Machine.NONE
    parked: bool = False
    kept: str = ""
    launched: bool = True
    outputs: bool = True
    copy: Copy = Copy.NONE
    verb: Verb = "terminate"
    given_back: bool = False
    price_ticket: str = ""
    ticket: str = ""
    ticket_state: Teardown | None = None
    ordered: Verb | None = None
    watched: bool = True
    resuming: bool = False
    stoppable: bool = False
    announced: bool = False
    ends_at: float | None = None
    settles_at: float | None = None
    storage: tuple[str, ...] = ()

    @property
    def settled(self) -> bool:
        """Return whether no further copy or verification can change what is known of the outputs."""
        if not self.launched or self.copy in {Copy.PROVEN, Copy.BROKEN, Copy.EMPTY}:
            return True
        return self.copy is Copy.NONE and not self.outputs


PARKED: Final = "The machine stopped itself and keeps what was saved; its disk may bill. A copy starts it again."
PARKED_KEPT: Final = (
    "The machine stopped itself; its disk may bill. A copy comes from its artifact store, {kept}, and starts the "
    "machine only where that store is not shown to have everything."
)
UNWATCHED: Final = "Automatic teardown ends the machine after a notice, but no watch runs that would carry it out."
UNDELIVERED: Final = (
    "Automatic teardown ends the machine a grace after its notice is delivered. No channel took the notice so far; the "
    "watch sends it again."
)
REFUSED: Final = (
    "The platform's list may be older than its refusal: until a second look a machine may bill, and the same work "
    "submitted elsewhere may be paid for twice."
)
ENDED: Final = "The job has ended and nothing of it is billing."
REMAINS: Final = "The job has ended and its machine is gone. {storage} bills on until you delete it in the console."
UNDER_WAY: Final = frozenset({Teardown.APPROVED, Teardown.EXECUTING, Teardown.NEEDS_HUMAN})


def plan(now: Situation) -> tuple[NextStep, ...]:
    """Return the remaining steps, the next one first; a MANUAL step before it is for a person to read."""
    if now.job is Job.PAUSED:
        return _paused(now)
    if now.job not in TERMINAL_JOBS:
        if now.price_ticket:
            launch = do(Action.CHECK, "to launch the job after the approval", job_id=now.job_id)
            return steps((approval(now.price_ticket), launch))
        if now.parked:
            why = "to see how the job ended and copy what it saved"
            pull = do(Action.PULL, why if now.kept else f"to start it, {why.removeprefix('to ')}", job_id=now.job_id)
            return steps(
                (_parked(now), pull, do(Action.CANCEL, "to give the job up", alternative=True, job_id=now.job_id))
            )
        if now.job is Job.PREEMPTED and now.machine is Machine.OFF:
            return stopped_machine(now.job_id)
        if now.settles_at is not None:
            left = max(0.0, now.settles_at - now.now)
            when = f"in {left:.0f} s" if left else "again"
            look = do(Action.CHECK, f"{when}, which settles that", job_id=now.job_id)
            return steps((REFUSED, look))
        return steps(do(Action.CHECK, "again later; nothing has to wait here", job_id=now.job_id))
    if now.machine is Machine.NONE:
        rest = _copying(now)
        return steps(("Nothing of it bills.", *rest) if rest else ENDED)
    if now.machine is Machine.GONE:
        # Only its artifact store may have something.
        rest = _copying(now) if now.kept and now.copy in {Copy.NONE, Copy.STALE, Copy.KEPT, Copy.UNVERIFIED} else ()
        bills = f"{' and '.join(now.storage)} bills on." if now.storage else "Nothing of it bills."
        there = f"{bills} What is left of what it saved is in its artifact store, {now.kept}."
        ended = REMAINS.format(storage=" and ".join(now.storage)) if now.storage else ENDED
        return steps((there, *rest) if rest else ended)
    if now.machine is Machine.UNSEEN or now.given_back:
        return steps(do(Action.CHECK, "again until its meter is seen to have stopped", job_id=now.job_id))
    if now.ticket_state in OPEN_TEARDOWNS and now.ticket_state in {*UNDER_WAY, Teardown.AWAITING_HUMAN}:
        return steps(_ticket(now))
    return _off(now) if now.machine is Machine.OFF else steps(_billing(now))


def _paused(now: Situation) -> tuple[NextStep, ...]:
    """Return the steps for a paused job: its machine bills on until somebody stops it, or the job goes on."""
    resume = do(Action.RESUME, "to go on", job_id=now.job_id)
    look = do(Action.CHECK, "later", job_id=now.job_id)
    if now.resuming or now.machine is Machine.UNSEEN:
        return steps(("The job goes on as soon as its machine runs.", look) if now.resuming else look)
    if now.machine is Machine.GONE:
        return steps(("Its machine is gone.", look))
    if now.machine is Machine.NONE:
        return steps(("Nothing of it bills.", resume))
    if now.machine is Machine.OFF:
        start = do(Action.RESUME, "to start it and go on", job_id=now.job_id)
        end = do(Action.TEARDOWN, "to give it up", alternative=True, job_id=now.job_id, verb="terminate")
        return steps(("Its machine is stopped; its disk may bill.", start, end))
    if now.ticket_state in UNDER_WAY:
        return steps(_ticket(now))
    goes_on = do(Action.RESUME, "to go on", alternative=True, job_id=now.job_id)
    if now.ticket_state is Teardown.AWAITING_HUMAN:
        return steps((approval(now.ticket), _end(now, "after that"), goes_on))
    rest, verb = _copying(now), "stop" if now.stoppable else "terminate"
    note = "The process is paused and the machine bills on, until a person approves its stop or the job goes on."
    if not now.stoppable:
        note = "The process is paused and the machine bills on. A stop would lose files here, or is not sold: resume, "
        note += "or copy everything and end the machine."
    end = do(Action.TEARDOWN, "after that" if rest else "to stop the meter", job_id=now.job_id, verb=verb)
    return steps((note, *rest, end, goes_on))


def _off(now: Situation) -> tuple[NextStep, ...]:
    """Return the steps for a machine that is stopped: its disk may bill for as long as it exists."""
    if now.settled:
        end = do(Action.TEARDOWN, "once nobody needs what is there", job_id=now.job_id, verb="terminate")
        return steps(("The machine is stopped; its disk may bill.", end))
    start = "The machine is stopped and has what was saved. Start it in the platform's console to copy that."
    if now.kept:
        start = f"The machine is stopped. A copy comes from its artifact store, {now.kept}, as far as that has it."
    if now.kept and now.copy is Copy.PARTIAL:
        start = f"The machine is stopped, and {now.kept} lacks some of it: start it in the platform's console."
    if now.copy is Copy.KEPT:
        start = (
            f"The copy from {now.kept} is not shown to have all that is on the machine, which is stopped. Start it in "
            "the platform's console to copy the rest, or let a person decide that the copy is enough."
        )
    start = _parked(now) if now.parked else start
    end = do(Action.TEARDOWN, "after that", job_id=now.job_id, verb="terminate")
    return steps((start, *_copying(now), end))


def _parked(now: Situation) -> str:
    """Return what is so of a machine that stopped itself."""
    return PARKED_KEPT.format(kept=now.kept) if now.kept else PARKED


def stopped_machine(job_id: str) -> tuple[NextStep, ...]:
    """Return the steps for an interrupted job whose machine is stopped: only a person can start it."""
    return steps(
        (
            "Its machine is stopped and has what was saved; gpuwarden does not start it.",
            "To go on, start it in the platform's console.",
            do(Action.CHECK, "to relaunch the job there", job_id=job_id),
            do(Action.CANCEL, "to give the job up", alternative=True, job_id=job_id),
        )
    )


def _copying(now: Situation) -> tuple[NextStep, ...]:
    """Return the steps that make a proven copy from what exists now."""
    if now.settled:
        return ()
    verify = do(Action.VERIFY, job_id=now.job_id)
    if now.copy is Copy.UNVERIFIED:
        return (verify,)
    again = {
        Copy.NONE: "" if now.job is Job.SUCCEEDED else "to copy what exists",
        Copy.STALE: "again: the job wrote on after the last copy",
        Copy.KEPT: "again, from the machine itself",
    }
    return do(Action.PULL, again.get(now.copy, "again; what arrived is kept"), job_id=now.job_id), verify


def _end(now: Situation, purpose: str = "") -> NextStep:
    return do(Action.TEARDOWN, purpose, job_id=now.job_id, verb=now.verb)


def _ticket(now: Situation) -> Hint:
    """Return the steps for a request that waits for a person, or is under way."""
    if now.ticket_state is Teardown.AWAITING_HUMAN:
        announced = now.announced or now.ends_at is not None
        if announced and not now.watched:
            return _unwatched(now)
        if announced:
            ending = UNDELIVERED
            if now.ends_at is not None:
                left = counted(max(1, math.ceil((now.ends_at - now.now) / 60)), "minute")
                ending = f"Automatic teardown ends the machine in {left} ({now.ordered}), everything being proven."
            objection = do(Action.HOLD, "to object", alternative=True, job_id=now.job_id)
            return ending, do(Action.CHECK, "after that", job_id=now.job_id), objection
        return approval(now.ticket), _end(now, "after that")
    follow = _end(now, "again, to follow it until the meter is seen to have stopped")
    if now.ticket_state is Teardown.NEEDS_HUMAN:
        return "Look at the platform's console: the machine is not seen to have stopped.", follow
    return follow


def _unwatched(now: Situation) -> Hint:
    """Return the steps where automatic teardown waits for a watch while the meter runs."""
    return (
        UNWATCHED,
        do(Action.WATCH, "to have it carried out", install=True),
        do(Action.TEARDOWN, "to be asked about its end", alternative=True, job_id=now.job_id, verb=now.verb),
    )


def _billing(now: Situation) -> Hint:
    """Return the steps that end a running meter without losing work."""
    rest = _copying(now)
    note = "The meter is still running."
    if now.job is Job.FAILED:
        note += " Read the log."
    if rest:
        return (note, *rest, _end(now, "after that"))
    if now.ordered is not None and now.copy is Copy.PROVEN and now.ticket_state is not Teardown.BLOCKED:
        if not now.watched:
            return _unwatched(now)
        watched = "Automatic teardown ends the machine after a notice, while a watch runs."
        return (
            watched,
            do(Action.CHECK, "later", job_id=now.job_id),
            do(Action.TEARDOWN, "without waiting for that", alternative=True, job_id=now.job_id, verb=now.verb),
        )
    if now.ticket_state is not Teardown.BLOCKED:
        return note, _end(now)
    # No copy changes that any more, however often the end is requested again: only the user can give it up.
    give_up = do(Action.APPROVE, "if the user gives up what is not proven", ticket=now.ticket, without_proof=True)
    blocked = f"{note} The request is blocked: do what each of its findings says."
    return blocked, give_up, _end(now, "after that, to look at it as it is then")
