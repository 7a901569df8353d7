"""The three state machines as tables, and the function that enforces them.

A transition that a table does not list raises `Conflict`; the message names the legal transitions. Staying in a state
is not a transition; callers that may get the same observation twice must check first.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, TypeVar

from gpuwarden.core.errors import Conflict
from gpuwarden.core.guidance import Action, do


class Job(StrEnum):
    """The state of a training job."""

    DRAFT = "draft"
    ACCEPTED = "accepted"
    PROVISIONING = "provisioning"
    SUBMITTING = "submitting"
    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELED = "canceled"
    PREEMPTED = "preempted"
    PAUSED = "paused"
    REFUSED = "refused"
    UNKNOWN = "unknown"

    @property
    def phrase(self) -> str:
        """Return the state as a verb phrase for a sentence, such as `has succeeded`."""
        return _PHRASES.get(self, f"is {self.value}")


_PHRASES: Final = {
    Job.PROVISIONING: "is waiting for its machine",
    Job.SUBMITTING: "is being started",
    Job.SUCCEEDED: "has succeeded",
    Job.FAILED: "has failed",
    Job.CANCELED: "was canceled",
    Job.PREEMPTED: "was interrupted",
    Job.REFUSED: "was refused",
    Job.UNKNOWN: "is in an unknown state",
}


class Lease(StrEnum):
    """The billing state of an instance, as far as it is known. Only an observation leads to STOPPED."""

    NONE = "none"
    METERING = "metering"
    STOPPING = "stopping"
    STOPPED = "stopped"
    UNVERIFIED = "unverified"


class Teardown(StrEnum):
    """The state of a request to stop or terminate an instance."""

    REQUESTED = "requested"
    BLOCKED = "blocked"
    AWAITING_HUMAN = "awaiting_human"
    APPROVED = "approved"
    EXECUTING = "executing"
    VERIFIED_STOPPED = "verified_stopped"
    WITHDRAWN = "withdrawn"
    NEEDS_HUMAN = "needs_human"


S = TypeVar("S", Job, Lease, Teardown)

_J, _L, _T = Job, Lease, Teardown

JOB: Final[dict[Job, frozenset[Job]]] = {
    _J.DRAFT: frozenset({_J.ACCEPTED, _J.REFUSED}),
    _J.ACCEPTED: frozenset({_J.PROVISIONING, _J.SUBMITTING, _J.CANCELED, _J.FAILED}),
    _J.PROVISIONING: frozenset({_J.SUBMITTING, _J.FAILED, _J.CANCELED, _J.UNKNOWN}),
    _J.SUBMITTING: frozenset({_J.QUEUED, _J.RUNNING, _J.SUCCEEDED, _J.FAILED, _J.CANCELED, _J.PREEMPTED, _J.UNKNOWN}),
    _J.QUEUED: frozenset({_J.RUNNING, _J.SUCCEEDED, _J.FAILED, _J.CANCELED, _J.PREEMPTED, _J.PAUSED, _J.UNKNOWN}),
    _J.RUNNING: frozenset({_J.SUCCEEDED, _J.FAILED, _J.CANCELED, _J.PREEMPTED, _J.PAUSED, _J.UNKNOWN, _J.QUEUED}),
    # A preempted job is relaunched from its checkpoint, or it fails or is canceled.
    _J.PREEMPTED: frozenset(
        {_J.PROVISIONING, _J.SUBMITTING, _J.QUEUED, _J.RUNNING, _J.FAILED, _J.CANCELED, _J.PAUSED, _J.UNKNOWN}
    ),
    # A paused job has no process, and is relaunched from its checkpoint only on request.
    _J.PAUSED: frozenset({_J.PROVISIONING, _J.SUBMITTING, _J.FAILED, _J.CANCELED}),
    # UNKNOWN means that gpuwarden does not know the job's state, so any state may be observed next.
    _J.UNKNOWN: frozenset(
        {
            _J.PROVISIONING,
            _J.SUBMITTING,
            _J.QUEUED,
            _J.RUNNING,
            _J.SUCCEEDED,
            _J.FAILED,
            _J.CANCELED,
            _J.PREEMPTED,
            _J.PAUSED,
        }
    ),
    _J.SUCCEEDED: frozenset(),
    _J.FAILED: frozenset(),
    _J.CANCELED: frozenset(),
    _J.REFUSED: frozenset(),
}

LEASE: Final[dict[Lease, frozenset[Lease]]] = {
    # The intent to rent is recorded first: from then on a machine may be billed.
    _L.NONE: frozenset({_L.UNVERIFIED}),
    _L.UNVERIFIED: frozenset({_L.METERING, _L.STOPPING, _L.STOPPED, _L.NONE}),
    _L.METERING: frozenset({_L.UNVERIFIED, _L.STOPPING, _L.STOPPED}),
    _L.STOPPING: frozenset({_L.STOPPED, _L.METERING, _L.UNVERIFIED}),
    # Platforms sometimes list an instance again after it has disappeared. A stopped instance can be started again, or
    # released before it has run a job.
    _L.STOPPED: frozenset({_L.METERING, _L.UNVERIFIED, _L.STOPPING}),
}

TEARDOWN: Final[dict[Teardown, frozenset[Teardown]]] = {
    _T.REQUESTED: frozenset({_T.BLOCKED, _T.AWAITING_HUMAN, _T.WITHDRAWN}),
    _T.BLOCKED: frozenset({_T.REQUESTED, _T.AWAITING_HUMAN, _T.WITHDRAWN}),
    # Any change to the facts returns a request to an earlier state; only an approval advances it.
    _T.AWAITING_HUMAN: frozenset({_T.APPROVED, _T.BLOCKED, _T.REQUESTED, _T.WITHDRAWN}),
    _T.APPROVED: frozenset({_T.EXECUTING, _T.REQUESTED, _T.BLOCKED, _T.WITHDRAWN}),
    _T.EXECUTING: frozenset({_T.VERIFIED_STOPPED, _T.NEEDS_HUMAN}),
    _T.NEEDS_HUMAN: frozenset({_T.VERIFIED_STOPPED, _T.REQUESTED}),
    _T.VERIFIED_STOPPED: frozenset(),
    _T.WITHDRAWN: frozenset(),
}

TERMINAL_JOBS: Final = frozenset(s for s, nexts in JOB.items() if not nexts)
AT_REST: Final = TERMINAL_JOBS | {Job.PAUSED}
"""States in which a job has no process that could still write files."""
LIVE_LEASES: Final = frozenset({Lease.METERING, Lease.STOPPING, Lease.UNVERIFIED})
OPEN_TEARDOWNS: Final = frozenset(s for s, nexts in TEARDOWN.items() if nexts)

_TABLES: Final[dict[type, dict]] = {Job: JOB, Lease: LEASE, Teardown: TEARDOWN}  # type: ignore[type-arg]


def legal(state: S) -> frozenset[S]:
    """Return the states that may follow `state`."""
    moves: frozenset[S] = _TABLES[type(state)][state]
    return moves


def check_move(subject: str, old: S, new: S) -> None:
    """Raise `Conflict`, naming the legal transitions, unless `new` may follow `old`."""
    moves = legal(old)
    if new in moves:
        return
    listed = ", ".join(sorted(moves)) or "none (final state)"
    raise Conflict(
        f"{type(old).__name__.lower()} {subject} can't go from {old} to {new}; legal from {old}: {listed}",
        (do(Action.LIST_INSTANCES), "Another call may have changed it already."),
    )
