"""Derive a job's remaining steps from the states of the job, its machine, copy, proof and ticket.

One pure function, `plan`, decides for every use case and interface. It returns the next step first. That step advances
the job, or waits if waiting causes no avoidable cost.
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
    """The states of a job's machine that affect the job's next step.

    UNSEEN: it is unknown whether a machine was rented.
    """

    NONE = "none"
    UNSEEN = "unseen"
    BILLING = "billing"
    OFF = "off"
    GONE = "gone"


class Copy(StrEnum):
    """The best copy of a job's outputs outside its machine.

    STALE: made before the job ended, or before another output was declared. FROM_STORE: from the artifact store, while
    the machine still exists and may have more outputs. PARTIAL: some files could not be copied. BROKEN: the copy equals
    the machine's files, but they are broken or can't be verified. DAMAGED: the copy differs from the machine's files.
    EMPTY: the machine has none of the outputs.
    """

    NONE = "none"
    STALE = "stale"
    FROM_STORE = "from_store"
    PARTIAL = "partial"
    EMPTY = "empty"
    UNVERIFIED = "unverified"
    DAMAGED = "damaged"
    BROKEN = "broken"
    PROVEN = "proven"


@dataclass(frozen=True)
class Situation:
    """All inputs to the decision about a job's next step.

    - `launched`: a process was started on the machine, so the machine's files can be read.
    - `given_back`: gpuwarden itself terminates the machine because no process ever ran on it.
    - `announced`: automatic teardown ends the machine after a grace period that begins when its notice is delivered.
      `ends_at` is the end of this period, in seconds since the epoch; None before the delivery.
    - `settles_at`: when a second check can confirm whether a refused request rented a machine; None if confirmed.
    - `self_stopped`: the machine is off because it stopped itself, and a pull starts it.
    - `artifact_store`: the address of the artifact store; empty if there is none.
    - `watched`: a watch ran recently. Only a watch carries out automatic teardown.
    - `resuming`: a resume was requested.
    - `stoppable`: stopping a paused job's machine ends its billing and keeps the files from which the job resumes.
    - `storage`: storage that is still billed although the machine is gone.
    """

    job_id: str
    job: Job
    now: float
    machine: Machine = Machine.NONE
    self_stopped: bool = False
    artifact_store: str = ""
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
        """Return whether another copy or verification would give no new information about the outputs."""
        if not self.launched or self.copy in {Copy.PROVEN, Copy.BROKEN, Copy.EMPTY}:
            return True
        return self.copy is Copy.NONE and not self.outputs


SELF_STOPPED: Final = "The machine stopped itself. Its disk is kept and may be billed. A pull starts the machine again."
SELF_STOPPED_WITH_STORE: Final = (
    "The machine stopped itself. Its disk may be billed. A pull copies the outputs from the artifact store, {store}, "
    "and starts the machine only if the store is not confirmed complete."
)
UNWATCHED: Final = "Automatic teardown ends the machine after a notice, but no watch is running to carry it out."
UNDELIVERED: Final = (
    "Automatic teardown ends the machine after a grace period, which begins when its notice is delivered. No channel "
    "has accepted the notice yet; the watch sends it again."
)
REFUSED: Final = (
    "The platform refused the request, but its list of machines may be out of date. Until a second check, a machine "
    "may be billed. If you submit the same work elsewhere, you may pay twice."
)
ENDED: Final = "The job has ended and has no billing instance."
REMAINS: Final = "The job has ended and its machine is gone. {storage} is billed until you delete it in the console."
UNDER_WAY: Final = frozenset({Teardown.APPROVED, Teardown.EXECUTING, Teardown.NEEDS_HUMAN})


def plan(now: Situation) -> tuple[NextStep, ...]:
    """Return the remaining steps, the next one first; a MANUAL step before it is a note for the user."""
    if now.job is Job.PAUSED:
        return _paused(now)
    if now.job not in TERMINAL_JOBS:
        if now.price_ticket:
            launch = do(Action.CHECK, "to launch the job after the approval", job_id=now.job_id)
            return steps((approval(now.price_ticket), launch))
        if now.self_stopped:
            why = "to see how the job ended and copy its outputs"
            pull = do(
                Action.PULL, why if now.artifact_store else f"to start it, {why.removeprefix('to ')}", job_id=now.job_id
            )
            return steps(
                (_self_stopped(now), pull, do(Action.CANCEL, "to give up the job", alternative=True, job_id=now.job_id))
            )
        if now.job is Job.PREEMPTED and now.machine is Machine.OFF:
            return stopped_machine(now.job_id)
        if now.settles_at is not None:
            left = max(0.0, now.settles_at - now.now)
            when = f"in {left:.0f} s" if left else "again"
            look = do(Action.CHECK, f"{when}, to find out", job_id=now.job_id)
            return steps((REFUSED, look))
        return steps(do(Action.CHECK, "again later; you don't need to wait here", job_id=now.job_id))
    if now.machine is Machine.NONE:
        rest = _copying(now)
        return steps(("The job has no billing instance.", *rest) if rest else ENDED)
    if now.machine is Machine.GONE:
        # Only the artifact store can still have outputs.
        rest = (
            _copying(now)
            if now.artifact_store and now.copy in {Copy.NONE, Copy.STALE, Copy.FROM_STORE, Copy.UNVERIFIED}
            else ()
        )
        bills = f"{' and '.join(now.storage)} is still billed." if now.storage else "The job has no billing instance."
        there = f"{bills} The job's remaining outputs are in its artifact store, {now.artifact_store}."
        ended = REMAINS.format(storage=" and ".join(now.storage)) if now.storage else ENDED
        return steps((there, *rest) if rest else ended)
    if now.machine is Machine.UNSEEN or now.given_back:
        return steps(do(Action.CHECK, "again until billing is confirmed stopped", job_id=now.job_id))
    if now.ticket_state in OPEN_TEARDOWNS and now.ticket_state in {*UNDER_WAY, Teardown.AWAITING_HUMAN}:
        return steps(_ticket(now))
    return _off(now) if now.machine is Machine.OFF else steps(_billing(now))


def _paused(now: Situation) -> tuple[NextStep, ...]:
    """Return the steps for a paused job. Its machine is billed until it is stopped."""
    resume = do(Action.RESUME, "to continue", job_id=now.job_id)
    look = do(Action.CHECK, "later", job_id=now.job_id)
    if now.resuming or now.machine is Machine.UNSEEN:
        return steps(("The job continues as soon as its machine is running.", look) if now.resuming else look)
    if now.machine is Machine.GONE:
        return steps(("Its machine is gone.", look))
    if now.machine is Machine.NONE:
        return steps(("The job has no billing instance.", resume))
    if now.machine is Machine.OFF:
        start = do(Action.RESUME, "to start it and continue", job_id=now.job_id)
        end = do(Action.TEARDOWN, "to give it up", alternative=True, job_id=now.job_id, verb="terminate")
        return steps(("Its machine is stopped. Its disk may be billed.", start, end))
    if now.ticket_state in UNDER_WAY:
        return steps(_ticket(now))
    goes_on = do(Action.RESUME, "to continue", alternative=True, job_id=now.job_id)
    if now.ticket_state is Teardown.AWAITING_HUMAN:
        return steps((approval(now.ticket), _end(now, "after that"), goes_on))
    rest, verb = _copying(now), "stop" if now.stoppable else "terminate"
    note = "The process is paused. The machine is billed until it is stopped, which requires the user's approval."
    if not now.stoppable:
        note = "The process is paused and the machine is still billed. The platform can't stop the machine, or "
        note += "stopping it would lose files. Resume the job, or copy everything and terminate the machine."
    end = do(Action.TEARDOWN, "after that" if rest else "to stop billing", job_id=now.job_id, verb=verb)
    return steps((note, *rest, end, goes_on))


def _off(now: Situation) -> tuple[NextStep, ...]:
    """Return the steps for a stopped machine. Its disk may be billed until it is deleted."""
    if now.settled:
        end = do(Action.TEARDOWN, "once you no longer need its files", job_id=now.job_id, verb="terminate")
        return steps(("The machine is stopped. Its disk may be billed.", end))
    start = "The machine is stopped and has the outputs. Start it in the platform's console to copy them."
    if now.artifact_store:
        start = (
            f"The machine is stopped. A pull copies the outputs that are in its artifact store, {now.artifact_store}."
        )
    if now.artifact_store and now.copy is Copy.PARTIAL:
        start = (
            f"The machine is stopped, and {now.artifact_store} lacks some outputs. Start the machine in the platform's "
            "console."
        )
    if now.copy is Copy.FROM_STORE:
        start = (
            f"The copy from {now.artifact_store} is not confirmed complete, and the machine is stopped. Start it in "
            "the platform's console to copy the rest, or ask the user whether the copy is enough."
        )
    start = _self_stopped(now) if now.self_stopped else start
    end = do(Action.TEARDOWN, "after that", job_id=now.job_id, verb="terminate")
    return steps((start, *_copying(now), end))


def _self_stopped(now: Situation) -> str:
    """Return the note about a machine that stopped itself."""
    return SELF_STOPPED_WITH_STORE.format(store=now.artifact_store) if now.artifact_store else SELF_STOPPED


def stopped_machine(job_id: str) -> tuple[NextStep, ...]:
    """Return the steps for an interrupted job whose machine is stopped. Only the user can start it."""
    return steps(
        (
            "Its machine is stopped and has the outputs; gpuwarden does not start it.",
            "To continue, start it in the platform's console.",
            do(Action.CHECK, "to relaunch the job there", job_id=job_id),
            do(Action.CANCEL, "to give up the job", alternative=True, job_id=job_id),
        )
    )


def _copying(now: Situation) -> tuple[NextStep, ...]:
    """Return the steps that lead to a proven copy of the existing outputs."""
    if now.settled:
        return ()
    verify = do(Action.VERIFY, job_id=now.job_id)
    if now.copy is Copy.UNVERIFIED:
        return (verify,)
    again = {
        Copy.NONE: "" if now.job is Job.SUCCEEDED else "to copy the existing outputs",
        Copy.STALE: "again, because the job kept writing after the last copy",
        Copy.FROM_STORE: "again, from the machine itself",
    }
    return do(Action.PULL, again.get(now.copy, "again; files already copied are kept"), job_id=now.job_id), verify


def _end(now: Situation, purpose: str = "") -> NextStep:
    return do(Action.TEARDOWN, purpose, job_id=now.job_id, verb=now.verb)


def _ticket(now: Situation) -> Hint:
    """Return the steps for a teardown request that waits for approval or is in progress."""
    if now.ticket_state is Teardown.AWAITING_HUMAN:
        announced = now.announced or now.ends_at is not None
        if announced and not now.watched:
            return _unwatched(now)
        if announced:
            ending = UNDELIVERED
            if now.ends_at is not None:
                left = counted(max(1, math.ceil((now.ends_at - now.now) / 60)), "minute")
                ending = f"Automatic teardown ends the machine in {left} ({now.ordered}); all outputs are proven."
            objection = do(Action.HOLD, "to object", alternative=True, job_id=now.job_id)
            return ending, do(Action.CHECK, "after that", job_id=now.job_id), objection
        return approval(now.ticket), _end(now, "after that")
    follow = _end(now, "again, to follow it until billing is confirmed stopped")
    if now.ticket_state is Teardown.NEEDS_HUMAN:
        return "It is not confirmed that the machine has stopped. Check the platform's console.", follow
    return follow


def _unwatched(now: Situation) -> Hint:
    """Return the steps if automatic teardown can't proceed because no watch is running."""
    return (
        UNWATCHED,
        do(Action.WATCH, "to carry it out", install=True),
        do(Action.TEARDOWN, "to end it with your approval", alternative=True, job_id=now.job_id, verb=now.verb),
    )


def _billing(now: Situation) -> Hint:
    """Return the steps that end billing without losing work."""
    rest = _copying(now)
    note = "The machine is still billed."
    if now.job is Job.FAILED:
        note += " Read the log."
    if rest:
        return (note, *rest, _end(now, "after that"))
    if now.ordered is not None and now.copy is Copy.PROVEN and now.ticket_state is not Teardown.BLOCKED:
        if not now.watched:
            return _unwatched(now)
        watched = "Automatic teardown ends the machine after a notice, if a watch is running."
        return (
            watched,
            do(Action.CHECK, "later", job_id=now.job_id),
            do(Action.TEARDOWN, "without waiting for that", alternative=True, job_id=now.job_id, verb=now.verb),
        )
    if now.ticket_state is not Teardown.BLOCKED:
        return note, _end(now)
    # Another copy or request would not change the finding. Only the user can accept the loss.
    give_up = do(Action.APPROVE, "if the user accepts losing unverified outputs", ticket=now.ticket, without_proof=True)
    blocked = f"{note} The request is blocked: apply the fix for each finding."
    return blocked, give_up, _end(now, "after that, to check the machine again")
