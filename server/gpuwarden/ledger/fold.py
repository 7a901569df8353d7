"""Combine the events of jobs, leases, teardowns and receipts into records. All functions are pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from gpuwarden.core.guidance import NextStep, read_steps
from gpuwarden.core.models import Account, Choice, Handle, InputFile, Instance, JobSpec, Place, Verb
from gpuwarden.core.reasons import Code, because
from gpuwarden.core.rules import Finding
from gpuwarden.core.states import Job, Lease, Teardown
from gpuwarden.ledger.event import Event
from gpuwarden.ledger.events import (
    ApprovalGranted,
    Body,
    CancelRequested,
    CreateDoubted,
    HostTrusted,
    JobAccepted,
    JobFailed,
    JobMovedOn,
    JobPaused,
    JobPreempted,
    JobProvisioning,
    JobSubmitted,
    JobSubmitting,
    Judged,
    LeaseAccount,
    LeaseBody,
    LeaseEnded,
    LeaseOpened,
    LeaseStopping,
    OutputsDeclared,
    PauseRequested,
    ReceiptIssued,
    ResumeRequested,
    SubmitIntent,
    TeardownRequested,
    VerbSent,
)
from gpuwarden.people import user_of

Events = Sequence[Event[Any]]
MOST_DROPPED: Final = 20
"""Number of drops from an engine's queue that don't count as restarts: five hours with Ray's default timeout."""
B = TypeVar("B", bound=Body)


@dataclass(frozen=True)
class JobRecord:
    """One job. `attempt` counts launches from 0. `lease` is the id of the instance's lease; None if it has none.

    `price` is the price in US dollars per hour at the time of the check; None if unknown.
    """

    id: str
    state: Job
    since: float
    accepted_at: float
    spec: JobSpec
    worst_cost: float | None
    price: float | None
    why: str
    attempt: int
    generation: int
    lease: str | None
    place: Place | None
    handle: Handle | None
    cancel_requested: bool
    inputs: tuple[InputFile, ...] = ()
    declared: tuple[str, ...] = ()
    """The outputs that were declared after the submission."""
    reason: Code | None = None
    """The code of `why`; None if an older version did not record it."""
    next_steps: tuple[NextStep, ...] = ()
    """The next steps suggested by the error that ended the job."""
    pausing: bool = False
    """True if a pause has been requested and has not taken effect yet."""
    resume_requested: bool = False
    """True if a resume was requested after the last pause and no teardown of the machine has started since."""
    resumed: int = 0
    """The number of attempts that resumed the job after a pause. These attempts do not count as restarts."""
    dropped: int = 0
    """The number of attempts that an engine dropped from its queue before they started, at most `MOST_DROPPED`."""
    limit_s: int | None = None
    """The time limit of the current attempt in seconds; None if the spec's limit applies."""
    person: str = ""
    """The user who submitted the job; empty if an older version did not record it."""
    array: str = ""
    """The token of the array in which the current attempt is launched; empty if it is launched separately."""
    choices: tuple[Choice, ...] = ()
    """The job's platforms in the order given; empty for a job with one platform. `spec` is the spec for
    `choices[choice]`.
    """
    choice: int = 0
    given_up: str = ""
    """The lease of the last rental that was abandoned for the next platform or offer."""
    given_up_generation: int = 0

    @property
    def subject(self) -> str:
        """Return the job's subject in the ledger."""
        return f"job/{self.id}"

    @property
    def restarts(self) -> int:
        """Return the number of attempts that count against the restart limit once the current one is interrupted."""
        return self.attempt - self.resumed - self.dropped

    @property
    def outputs(self) -> tuple[str, ...]:
        """Return all declared outputs: those in the spec, then those declared later."""
        return (*self.spec.outputs, *self.declared)


@dataclass(frozen=True)
class LeaseRecord:
    """The known facts about one instance's billing. `answers` lists the provider's responses, each with its time.

    `account` is the account that rented the instance; None if an older version did not record it. `cost` is an upper
    bound on the instance's cost in US dollars up to the time specified when the record was read; None if no time was
    specified. `estimated` is true if the cost is not the provider's bill.
    """

    id: str
    job_id: str
    platform: str
    state: Lease
    since: float
    opened_at: float
    instance_id: str | None
    answers: tuple[tuple[float, Instance], ...] = ()
    fingerprint: str | None = None
    """The fingerprint of the machine's host key at the first connection."""
    account: Account | None = None
    cost: float | None = None
    estimated: bool = False

    @property
    def subject(self) -> str:
        """Return the lease's subject in the ledger."""
        return f"lease/{self.id}"

    @property
    def instance(self) -> Instance | None:
        """Return the instance in the provider's last response."""
        return self.answers[-1][1] if self.answers else None

    @property
    def billed(self) -> float | None:
        """Return the cost in the provider's last response, in US dollars. This cost may be out of date."""
        return self.instance.cost_usd if self.instance else None

    @property
    def price(self) -> float | None:
        """Return the last hourly price that the provider reported, in US dollars. Prices of zero count as unknown."""
        prices = (seen.price_usd_per_hour for _, seen in reversed(self.answers))
        return next((price for price in prices if price is not None and price > 0), None)

    def cost_by(self, until: float, price: float | None = None) -> float | None:
        """Return an upper bound on the cost up to a time, in US dollars; None if neither a price nor a cost is known.

        The bound is the cost in the provider's last response plus the price for the time since then. While the machine
        may be billed, the bound never decreases, even if the provider reports less. Once the machine is off, its bill
        replaces the bound. The time is counted from the rental request, because the machine may be found much later.
        `price` is used until the provider reports a price.
        """
        if not price:
            named = (seen.price_usd_per_hour for _, seen in self.answers)
            price = next((value for value in named if value is not None and value > 0), None)
        total, rate, at = 0.0, price or 0.0, self.opened_at
        for when, seen in self.answers:
            total, bill = total + rate * max(0.0, when - at) / 3600, seen.cost_usd or 0.0
            total = bill if seen.meter is False and bill > 0 else max(total, bill)
            if seen.price_usd_per_hour is not None and seen.price_usd_per_hour > 0:
                price = seen.price_usd_per_hour
            rate = max(0.0, (seen.stopped_usd_per_hour if seen.meter is False else price) or 0.0)
            at = when
        if price is None and self.billed is None:
            return None
        return total + rate * max(0.0, until - at) / 3600


@dataclass(frozen=True)
class TeardownRecord:
    """One request to stop or terminate a machine. `digest` is the digest of the facts that the user approves."""

    id: str
    state: Teardown
    since: float
    job_id: str
    lease: str
    verb: Verb
    digest: str | None
    expires_at: float | None
    findings: tuple[Finding, ...]
    without_proof: bool

    @property
    def subject(self) -> str:
        """Return the teardown's subject in the ledger."""
        return f"teardown/{self.id}"


@dataclass(frozen=True)
class ReceiptRecord:
    """One receipt, or one ticket about a machine's higher price. `approval` is the spending approval."""

    id: str
    issued: ReceiptIssued
    approval: ApprovalGranted | None

    @property
    def subject(self) -> str:
        """Return the receipt's subject in the ledger."""
        return f"receipt/{self.id}"

    def approved_at(self, now: float) -> bool:
        """Return whether the spending is approved at `now`, in seconds since the epoch."""
        return self.approval is not None and self.approval.holds_at(now)


def latest(events: Events, kind: type[B]) -> B | None:
    """Return the body of the last event of a kind, or None. A base class selects all of its kinds."""
    return next((e.data for e in reversed(events) if isinstance(e.data, kind)), None)


def _moved(events: Events) -> list[Event[Any]]:
    return [e for e in events if e.state is not None]


def fold_job(job_id: str, events: Events, lease_events: Events) -> JobRecord | None:
    """Combine the events of a job and its machine's lease into a record; None if the job has not been accepted."""
    accepted = next((e for e in reversed(events) if isinstance(e.data, JobAccepted)), None)
    if accepted is None:
        return None
    spec: JobAccepted = accepted.data
    moved_on = latest(events, JobMovedOn)
    intent, rented = latest(events, SubmitIntent), latest(events, JobProvisioning)
    choice = moved_on.choice if moved_on else 0
    if moved_on and rented and rented.lease == moved_on.lease and answers(lease_events):
        choice -= 1  # The abandoned machine exists after all, and no other machine has been requested yet.
    here_now = spec.choices[choice] if spec.choices else Choice(platform="", price=spec.price)
    moved = _moved(events)[-1]
    declared, announced = latest(events, OutputsDeclared), latest(events, JobSubmitting)
    pause = _at(events, PauseRequested)
    here = events[max(0, _at(events, JobProvisioning)) :]  # launches on earlier machines are ignored
    submitted = latest(here, JobSubmitted)
    handle = submitted.handle if submitted else None
    doubt = _unresolved_refusal(lease_events) if moved.state == Job.PROVISIONING else None
    refused = because(Code.REFUSAL_UNSETTLED, message=doubt.why) if doubt else None
    places = (e.data.place for e in reversed(here) if isinstance(e.data, JobSubmitting))
    place = next((place for place in places if place is not None), None)
    if handle is not None:
        later = declared.outputs if declared else ()
        handle = handle.model_copy(update={"place": _readdressed(handle.place, lease_events), "declared": later})
    return JobRecord(
        id=job_id,
        state=Job(moved.state or ""),
        since=moved.at,
        accepted_at=accepted.at,
        spec=spec.spec.at(here_now.platform, here_now.gpu) if spec.choices else spec.spec,
        worst_cost=_worst(spec, choice, rented=bool(answers(lease_events))),
        price=here_now.price,
        why=refused.text if refused else moved.data.why,
        reason=refused.code if refused else moved.data.reason_code,
        next_steps=read_steps(moved.data.following) if isinstance(moved.data, JobFailed) else (),
        attempt=intent.attempt if intent else 0,
        generation=rented.generation if rented else 0,
        lease=rented.lease if rented else None,
        place=_readdressed(place, lease_events),
        handle=handle,
        cancel_requested=latest(events, CancelRequested) is not None,
        inputs=spec.inputs,
        declared=declared.outputs if declared else (),
        pausing=pause > max(_at(events, JobPaused), _at(events, JobSubmitting), _at(events, JobProvisioning)),
        resume_requested=_at(events, ResumeRequested) > pause and not _stopped_since(events, lease_events),
        resumed=sum(e.data.reason_code is Code.RESUMED for e in events if isinstance(e.data, JobSubmitting)),
        dropped=min(
            MOST_DROPPED,
            sum(isinstance(e.data, JobPreempted) and e.data.reason_code is Code.ENGINE_DROPPED for e in events),
        ),
        limit_s=announced.timeout_s if announced else None,
        array=announced.array if announced else "",
        person=user_of(accepted.actor),
        choices=spec.choices,
        choice=choice,
        given_up=moved_on.lease if moved_on else "",
        given_up_generation=moved_on.generation if moved_on else 0,
    )


def _worst(accepted: JobAccepted, choice: int, *, rented: bool) -> float | None:
    """Return the maximum cost of a job: on the rented machine, or on any remaining choice if none is rented."""
    if not accepted.choices:
        return accepted.worst_cost
    costs = [c.worst_cost for c in accepted.choices[choice : choice + 1 if rented else None]]
    return None if None in costs else max(cost for cost in costs if cost is not None)


def _stopped_since(events: Events, lease_events: Events) -> bool:
    """Return whether a later teardown request overrides the job's last resume request."""
    asked = next((e.seq for e in reversed(events) if isinstance(e.data, ResumeRequested)), 0)
    return any(e.seq > asked for e in lease_events if isinstance(e.data, (LeaseStopping, VerbSent)))


def _at(events: Events, kind: type[Body]) -> int:
    """Return the index of the last event of a kind, or -1 if no such event exists."""
    return next((n for n in reversed(range(len(events))) if isinstance(events[n].data, kind)), -1)


def _unresolved_refusal(lease_events: Events) -> CreateDoubted | None:
    """Return the event that records the platform's refusal, if it is not yet known whether a machine exists."""
    moves = _moved(lease_events)
    open_still = bool(moves) and moves[-1].state == Lease.UNVERIFIED and not answers(lease_events)
    return latest(lease_events, CreateDoubted) if open_still else None


def _readdressed(place: Place | None, lease_events: Events) -> Place | None:
    """Return the place with the machine's last reported address. Its host key stays unchanged."""
    if place is None or place.host is None:
        return place
    now = next((i.place for _, i in reversed(answers(lease_events)) if i.place), None)
    return place if now is None else place.model_copy(update={"host": now.host, "port": now.port, "user": now.user})


def fold_lease(lease_id: str, events: Events) -> LeaseRecord | None:
    """Combine a lease's events into a record; None if the lease was never opened."""
    moves = _moved(events)
    if not moves:
        return None
    opened = moves[0].data
    if not isinstance(opened, LeaseOpened):
        raise ValueError("the first event does not open a lease")
    seen = answers(events)
    trusted = next((e.data for e in events if isinstance(e.data, HostTrusted)), None)
    bound = latest(events, LeaseAccount)
    return LeaseRecord(
        id=lease_id,
        job_id=opened.job,
        platform=opened.platform,
        state=Lease(moves[-1].state or ""),
        since=moves[-1].at,
        opened_at=moves[0].at,
        instance_id=seen[-1][1].id if seen else None,
        answers=tuple(seen),
        fingerprint=trusted.fingerprint if trusted else None,
        account=bound.account if bound else opened.account,
    )


def answers(lease_events: Events) -> list[tuple[float, Instance]]:
    """Return the provider's recorded responses about a machine, each with its time."""
    return [
        (e.at, e.data.instance) for e in lease_events if isinstance(e.data, LeaseBody) and e.data.instance is not None
    ]


def ended_as(lease_events: Events) -> str | None:
    """Return the confirmed state of an ended lease's machine: `gone`, `stopped` (with its disk), or None."""
    moves = _moved(lease_events)
    state = moves[-1].state if moves else None
    if state == Lease.NONE:
        return "gone"
    last = latest(lease_events, LeaseEnded)
    return last.saw if last is not None and state == Lease.STOPPED else None


def fold_teardown(teardown_id: str, events: Events) -> TeardownRecord | None:
    """Combine a teardown's events into a record; None if the teardown was never requested."""
    moves = _moved(events)
    if not moves:
        return None
    asked = moves[0].data
    if not isinstance(asked, TeardownRequested) or asked.job is None or asked.lease is None or asked.verb is None:
        raise ValueError("the first event does not name the machine to tear down")
    judged = next((e.data for e in reversed(events) if isinstance(e.data, Judged) and e.data.digest), Judged())
    return TeardownRecord(
        id=teardown_id,
        state=Teardown(moves[-1].state or ""),
        since=moves[-1].at,
        job_id=asked.job,
        lease=asked.lease,
        verb=asked.verb,
        digest=judged.digest,
        expires_at=judged.expires_at,
        findings=judged.findings,
        without_proof=judged.without_proof,
    )


def fold_receipt(receipt_id: str, events: Events) -> ReceiptRecord | None:
    """Combine a receipt's events into a record; None if the receipt was never issued."""
    issued = latest(events, ReceiptIssued)
    return None if issued is None else ReceiptRecord(receipt_id, issued, latest(events, ApprovalGranted))
