"""Views of jobs, leases and teardowns, folded from the ledger. Nothing here is stored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gpuwarden.core.errors import NotFound
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.models import Handle, InputFile, Instance, JobSpec, Place, Verb
from gpuwarden.core.reasons import Code, known_code
from gpuwarden.core.states import Job, Lease, Teardown
from gpuwarden.ledger.store import Event, Ledger, damaged


@dataclass(frozen=True)
class JobRecord:
    """One job. `attempt` counts launches, from 0; `lease` is the id of the instance's lease, None when unmetered.

    `price` is what an hour was to cost when the job was checked, in US dollars; None where it is unknown.
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
    reason: Code | None = None
    """The code of `why`; None in a ledger of an older version."""

    @property
    def subject(self) -> str:
        """Return the job's name in the ledger."""
        return f"job/{self.id}"


@dataclass(frozen=True)
class LeaseRecord:
    """One instance's meter as far as we know it. `instance` is the provider's last understood answer."""

    id: str
    job_id: str
    platform: str
    state: Lease
    since: float
    opened_at: float
    instance_id: str | None
    instance: Instance | None
    fingerprint: str | None = None
    """Of the host key that the machine showed at first contact."""

    @property
    def subject(self) -> str:
        """Return the lease's name in the ledger."""
        return f"lease/{self.id}"

    @property
    def cost(self) -> float | None:
        """Return the cost by the provider's last answer."""
        return self.instance.cost_usd if self.instance else None


@dataclass(frozen=True)
class TeardownRecord:
    """One request to stop or terminate. `digest` is of the facts that a person is asked about."""

    id: str
    state: Teardown
    since: float
    job_id: str
    lease: str
    verb: Verb
    digest: str | None
    expires_at: float | None
    findings: tuple[dict[str, str], ...]
    without_proof: bool

    @property
    def subject(self) -> str:
        """Return the teardown's name in the ledger."""
        return f"teardown/{self.id}"


@contextmanager
def _reading(subject: str) -> Iterator[None]:
    """Turn what can't be in an undamaged ledger into an error that says so."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise damaged(subject, type(error).__name__) from error


def read_job(ledger: Ledger, job_id: str) -> JobRecord:
    """Return the job with that id. Raises NotFound; a name is never an identity."""
    with _reading(f"job/{job_id}"):
        return _job(ledger, job_id)


def _job(ledger: Ledger, job_id: str) -> JobRecord:
    subject = f"job/{job_id}"
    accepted = ledger.last(subject, "job.accepted")
    if accepted is None:
        raise NotFound(f"there is no job {job_id!r} in this ledger", do(Action.LIST_INSTANCES, "to see its jobs"))
    events = ledger.events(subject)
    moved = [e for e in events if e.state is not None][-1]
    by_kind = {e.kind: e for e in events}
    intent, submitted, rented = (
        by_kind.get("submit.intent"),
        by_kind.get("job.submitted"),
        by_kind.get("job.provisioning"),
    )
    lease = str(rented.body["lease"]) if rented else None
    handle = Handle.model_validate(submitted.body["handle"]) if submitted else None
    if handle is not None:
        handle = handle.model_copy(update={"place": _readdressed(ledger, handle.place, lease)})
    return JobRecord(
        id=job_id,
        state=Job(moved.state or ""),
        since=moved.at,
        accepted_at=accepted.at,
        spec=JobSpec.model_validate(accepted.body["spec"]),
        worst_cost=accepted.body.get("worst_cost"),
        price=accepted.body.get("price"),
        why=str(moved.body.get("why", "")),
        reason=known_code((moved.body.get("reason") or {}).get("code")),
        attempt=int(intent.body["attempt"]) if intent else 0,
        generation=int(rented.body["generation"]) if rented else 0,
        lease=lease,
        place=_readdressed(ledger, _last_place(events), lease),
        handle=handle,
        cancel_requested="cancel.requested" in by_kind,
        inputs=tuple(InputFile.model_validate(row) for row in accepted.body.get("inputs", ())),
    )


def _last_place(events: list[Event]) -> Place | None:
    placed = [e for e in events if "place" in e.body]
    return Place.model_validate(placed[-1].body["place"]) if placed else None


def _readdressed(ledger: Ledger, place: Place | None, lease: str | None) -> Place | None:
    """Return a place at the address that its machine was last seen at; the host key stays that of first contact."""
    if place is None or place.host is None or lease is None:
        return place
    seen = [e for e in ledger.events(f"lease/{lease}") if (e.body.get("instance") or {}).get("place")]
    if not seen:
        return place
    now = Place.model_validate(seen[-1].body["instance"]["place"])
    return place.model_copy(update={"host": now.host, "port": now.port, "user": now.user})


def read_lease(ledger: Ledger, lease_id: str) -> LeaseRecord:
    """Return the lease with that id. Raises NotFound."""
    with _reading(f"lease/{lease_id}"):
        return _lease(ledger, lease_id)


def _lease(ledger: Ledger, lease_id: str) -> LeaseRecord:
    subject = f"lease/{lease_id}"
    events = ledger.events(subject)
    moves = [e for e in events if e.state is not None]
    if not moves:
        raise NotFound(f"there is no lease {lease_id!r} in this ledger")
    seen = [e for e in events if "instance" in e.body]
    instance = Instance.model_validate(seen[-1].body["instance"]) if seen else None
    return LeaseRecord(
        id=lease_id,
        job_id=str(moves[0].body["job"]),
        platform=str(moves[0].body["platform"]),
        state=Lease(moves[-1].state or ""),
        since=moves[-1].at,
        opened_at=moves[0].at,
        instance_id=instance.id if instance else None,
        instance=instance,
        fingerprint=next((e.body["fingerprint"] for e in events if e.kind == "host.trusted"), None),
    )


def read_teardown(ledger: Ledger, teardown_id: str) -> TeardownRecord:
    """Return the teardown with that id. Raises NotFound."""
    with _reading(f"teardown/{teardown_id}"):
        return _teardown(ledger, teardown_id)


def _teardown(ledger: Ledger, teardown_id: str) -> TeardownRecord:
    subject = f"teardown/{teardown_id}"
    events = ledger.events(subject)
    moves = [e for e in events if e.state is not None]
    if not moves:
        raise NotFound(f"there is no ticket {teardown_id!r} in this ledger", do(Action.TEARDOWN, "for a ticket"))
    judged = [e for e in events if "digest" in e.body]
    last = judged[-1].body if judged else {}
    return TeardownRecord(
        id=teardown_id,
        state=Teardown(moves[-1].state or ""),
        since=moves[-1].at,
        job_id=str(moves[0].body["job"]),
        lease=str(moves[0].body["lease"]),
        verb=moves[0].body["verb"],
        digest=last.get("digest"),
        expires_at=last.get("expires_at"),
        findings=tuple(last.get("findings", ())),
        without_proof=bool(last.get("without_proof", False)),
    )


def job_ids(ledger: Ledger, *states: Job) -> list[str]:
    """Return the ids of the accepted jobs, oldest move first."""
    found = ledger.subjects("job", *(states or tuple(s for s in Job if s is not Job.REFUSED)))
    return [s.removeprefix("job/") for s in found]


def lease_ids(ledger: Ledger, *states: Lease) -> list[str]:
    """Return the ids of the leases, oldest move first."""
    return [s.removeprefix("lease/") for s in ledger.subjects("lease", *states)]


def story(ledger: Ledger, name: str | None = None) -> list[Event]:
    """Return every event in order, or those of one job with its leases, teardowns and receipt, or of one of these."""
    events: list[Event] = []
    while page := ledger.events(after=events[-1].seq if events else 0):
        events += page
    if name is None:
        return events
    wanted = {name, *(f"{kind}/{name}" for kind in ("job", "lease", "teardown", "receipt"))}
    wanted |= {e.subject for e in events if e.body.get("job") == name}
    wanted |= {f"receipt/{e.body['receipt']}" for e in events if e.subject in wanted and "receipt" in e.body}
    return [e for e in events if e.subject in wanted]
