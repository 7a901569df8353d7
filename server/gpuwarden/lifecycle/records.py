"""Read the current jobs, leases, teardowns and receipts from the ledger."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gpuwarden.core.errors import NotFound
from gpuwarden.core.guidance import Action, Hint, do
from gpuwarden.core.states import Job, Lease
from gpuwarden.ledger.event import Event
from gpuwarden.ledger.events import (
    FanOutAccepted,
    FanOutEnded,
    FanOutLimited,
    FanOutResumed,
    JobAccepted,
    JobProvisioning,
    JobRested,
    PriceAsk,
    QueueIntent,
)
from gpuwarden.ledger.failures import damaged
from gpuwarden.ledger.fold import (
    JobRecord,
    LeaseRecord,
    ReceiptRecord,
    TeardownRecord,
    fold_job,
    fold_lease,
    fold_receipt,
    fold_teardown,
)
from gpuwarden.ledger.store import Ledger


@contextmanager
def _reading(subject: str) -> Iterator[None]:
    """Convert errors that only a damaged ledger can cause into an error about the damaged record."""
    try:
        yield
    except UnicodeEncodeError:  # the caller passed an invalid id
        raise NotFound("the id is not valid text, so this ledger can't contain it") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise damaged(subject, type(error).__name__) from error


def read_job(ledger: Ledger, job_id: str) -> JobRecord:
    """Return the job with this id; a job's name is not accepted. Raises NotFound."""
    subject = f"job/{job_id}"
    with _reading(subject):
        rented = ledger.last(subject, JobProvisioning)
        machine = ledger.history(f"lease/{rented.data.lease}") if rented else ()
        found = fold_job(job_id, ledger.history(subject), machine)
    if found is None:
        doubt = ledger.trouble()
        lost = f"{doubt.message[:1].upper()}{doubt.message[1:]}. {doubt.hint}" if doubt and doubt.incomplete else ""
        hint: Hint = lost or do(Action.LIST_INSTANCES, "to see its jobs")
        raise NotFound(f"this ledger has no job {job_id!r}", hint)
    return found


def at_rest(ledger: Ledger, job_id: str) -> Event[JobRested] | None:
    """Return the event after which none of a job's processes can write files; None if one may still be running."""
    rested = ledger.last(f"job/{job_id}", JobRested)
    return rested if rested is not None and ledger.state(f"job/{job_id}") == rested.state else None


def recalled(ledger: Ledger, job_id: str) -> bool:
    """Return whether a job must not be launched because its fan-out was ended."""
    accepted = ledger.last(f"job/{job_id}", JobAccepted)
    queue = ledger.used(QueueIntent, accepted.token) if accepted and accepted.token else None
    if queue is None:
        return False
    ended, resumed = ledger.last(queue.subject, FanOutEnded), ledger.last(queue.subject, FanOutResumed)
    return ended is not None and (resumed is None or resumed.seq < ended.seq)


def read_lease(ledger: Ledger, lease_id: str) -> LeaseRecord:
    """Return the lease with this id. Raises NotFound."""
    subject = f"lease/{lease_id}"
    with _reading(subject):
        found = fold_lease(lease_id, ledger.history(subject))
    if found is None:
        raise NotFound(f"this ledger has no lease {lease_id!r}")
    return found


def read_teardown(ledger: Ledger, teardown_id: str) -> TeardownRecord:
    """Return the teardown with this id. Raises NotFound."""
    subject = f"teardown/{teardown_id}"
    with _reading(subject):
        found = fold_teardown(teardown_id, ledger.history(subject))
    if found is None:
        raise NotFound(f"this ledger has no ticket {teardown_id!r}", do(Action.TEARDOWN, "to get a ticket"))
    return found


def read_receipt(ledger: Ledger, receipt_id: str) -> ReceiptRecord:
    """Return the receipt with this id. Raises NotFound."""
    subject = f"receipt/{receipt_id}"
    with _reading(subject):
        found = fold_receipt(receipt_id, ledger.history(subject))
    if found is None:
        again = do(Action.SUBMIT, "to get a receipt", receipt="")
        raise NotFound(f"this ledger has no receipt {receipt_id!r}", again)
    return found


def receipt_used(ledger: Ledger, receipt_id: str) -> bool:
    """Return whether a job, a fan-out or new limits for a fan-out were accepted with this receipt."""
    return any(ledger.used(kind, receipt_id) for kind in (JobAccepted, FanOutAccepted, FanOutLimited))


def job_ids(ledger: Ledger, *states: Job) -> list[str]:
    """Return the ids of the jobs in these states, least recently changed first; without states, all accepted jobs."""
    found = ledger.subjects("job", *(states or tuple(s for s in Job if s is not Job.REFUSED)))
    return [s.removeprefix("job/") for s in found]


def lease_ids(ledger: Ledger, *states: Lease) -> list[str]:
    """Return the ids of the leases in these states, least recently changed first."""
    return [s.removeprefix("lease/") for s in ledger.subjects("lease", *states)]


def lease_ids_of(ledger: Ledger, job_id: str, *states: Lease) -> list[str]:
    """Return the ids of a job's leases in these states, least recently changed first."""
    return [s.removeprefix("lease/") for s in ledger.subjects("lease", *states, job=job_id)]


def story(ledger: Ledger, name: str | None = None) -> list[Event[Any]]:
    """Return all events in order, or those of one subject; for a job, include its leases, teardowns and receipts."""
    if name is None:
        events: list[Event[Any]] = []
        while page := ledger.events(after=events[-1].seq if events else 0):
            events += page
        return events
    wanted = {name, *(f"{kind}/{name}" for kind in ("job", "lease", "teardown", "receipt"))}
    wanted |= {s for kind in ("lease", "teardown") for s in ledger.subjects(kind, job=name)}
    found = {e.seq: e for subject in wanted for e in ledger.history(subject)}
    bodies = [event.data for event in found.values()]
    receipts = {body.receipt for body in bodies if isinstance(body, JobAccepted)}
    receipts |= {body.ticket for body in bodies if isinstance(body, PriceAsk)}
    found |= {e.seq: e for receipt in receipts for e in ledger.history(f"receipt/{receipt}")}
    return [found[seq] for seq in sorted(found)]


__all__ = [
    "JobRecord",
    "LeaseRecord",
    "ReceiptRecord",
    "TeardownRecord",
    "at_rest",
    "job_ids",
    "lease_ids",
    "lease_ids_of",
    "read_job",
    "read_lease",
    "read_receipt",
    "read_teardown",
    "recalled",
    "story",
]
