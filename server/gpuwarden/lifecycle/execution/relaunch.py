"""Rent another machine for a job whose machine is permanently lost, and resume the job there from its proven copy.

The watch or a pull first copies the files from the artifact store to the local disk and verifies them, so that the next
machine gets the newest proven checkpoint.

The user allows relaunches at a terminal, for one job and up to a budget, when approving the job's spending. The next
machine costs at most the checked price, and every cap applies. A job without a proven copy is not relaunched, because
its work would have to be paid for again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpuwarden.core.errors import BadRequest
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.models import Verdict
from gpuwarden.core.money import usd
from gpuwarden.core.next_step import Copy
from gpuwarden.core.states import LIVE_LEASES, Lease
from gpuwarden.ledger.events import (
    ArtifactsPulled,
    ArtifactsVerified,
    JobPreempted,
    JobSubmitted,
    RelaunchAllowed,
    RelaunchIntent,
    VerbSent,
)
from gpuwarden.lifecycle.artifacts.local_copies import Pulled, copy_state, read_pull, record_name, verified_now
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.leases.budgets import caps_on, carried
from gpuwarden.lifecycle.leases.meter import spent
from gpuwarden.lifecycle.records import JobRecord, lease_ids_of

STORE_PATIENCE_S: Final = 3600.0
"""Seconds that a relaunch waits for an artifact store. Meanwhile, no machine is billed."""


@dataclass(frozen=True)
class Relaunch:
    """A relaunch within the budget: the copy to resume from, the maximum cost, and the budget that would be left, both
    in USD.
    """

    copy: Pulled
    record: str
    worst_cost: float
    left: float


def relaunch_for(ctx: Context, receipt: str) -> RelaunchAllowed | None:
    """Return the relaunch budget that the user approved with this receipt; None without such an approval."""
    order = carried(ctx, receipt)
    if order is None or order.relaunch_budget_usd is None:
        return None
    return RelaunchAllowed(budget_usd=order.relaunch_budget_usd, receipt=receipt, by=order.by, policy=order.policy)


def may_relaunch(ctx: Context, job_id: str) -> bool:
    """Return whether the user has approved a relaunch budget for a job."""
    return ctx.ledger.last(f"job/{job_id}", RelaunchAllowed) is not None


def was_interrupted(ctx: Context, job: JobRecord) -> bool:
    """Return whether a job ran on its machine and gpuwarden did not ask to stop or terminate that machine."""
    if job.lease is None or job.handle is None or ctx.ledger.last(job.subject, JobSubmitted) is None:
        return False
    return ctx.ledger.last(f"lease/{job.lease}", VerbSent) is None


def awaits_store(ctx: Context, job: JobRecord) -> bool:
    """Return whether a job that lost its machine is waiting for a proven copy of the files in its artifact store."""
    lost, pulled = ctx.ledger.last(job.subject, JobPreempted), ctx.ledger.last(job.subject, ArtifactsPulled)
    if (
        not job.spec.artifact_store
        or ctx.policy.teardown.background_gb <= 0
        or lost is None
        or not may_relaunch(ctx, job.id)
    ):
        return False
    if ctx.clock.now() - lost.at > STORE_PATIENCE_S:
        return False
    asked = pulled is not None and pulled.seq > lost.seq and (bool(pulled.data.store) or pulled.data.unsettled)
    return not asked or copy_state(ctx, job.id) is Copy.UNVERIFIED


def proven_copy(ctx: Context, job: JobRecord) -> tuple[Pulled, str] | None:
    """Return a job's newest local copy whose proof is still valid, and the name of the copy's record."""
    proofs = ctx.ledger.events(job.subject, kind=ArtifactsVerified)
    for name in dict.fromkeys(event.data.pull for event in reversed(proofs) if event.data.verdict is Verdict.PROVEN):
        pulled = read_pull(ctx, record_name(job.id, name), name)
        if pulled is not None and pulled.places and verified_now(ctx, job.id, pulled).verdict is Verdict.PROVEN:
            return pulled, record_name(job.id, name)
    return None


def next_machine(ctx: Context, job: JobRecord) -> Relaunch | str:
    """Return the terms of a relaunch for a job whose machine is lost, or the reason why it is not relaunched."""
    allowed = ctx.ledger.last(job.subject, RelaunchAllowed)
    if allowed is None:
        return "the user has not allowed it"
    if not was_interrupted(ctx, job):
        return "a request to stop or terminate its machine was made"
    worst, leases = job.worst_cost, lease_ids_of(ctx.ledger, job.id, *(set(Lease) - {Lease.NONE}))
    if worst is None or job.price is None:
        return "its maximum cost is unknown"
    if lease_ids_of(ctx.ledger, job.id, *LIVE_LEASES):
        return "another machine for the job may still be billed"
    costs = [spent(ctx, name) for name in leases]
    if None in costs:
        return "its cost so far is unknown"
    total = sum(cost or 0.0 for cost in costs)
    first = next((event for event in ctx.ledger.events(job.subject, kind=RelaunchIntent)), None)
    before = job.generation if first is None else first.data.generation  # the last machine before the first relaunch
    used = sum(cost or 0.0 for name, cost in zip(leases, costs, strict=True) if generation_of(name) > before)
    left = allowed.data.budget_usd - used
    if worst > left:
        return f"the budget has {usd(max(0.0, left))} left, but another run may cost {usd(worst)}"
    caps = caps_on(ctx, job.spec, total + worst, job.person, machine=worst, of=(job.id,))
    # A cap of zero requires the user's approval, which this budget already has.
    if over := next((cap.broken for cap in caps if 0 < cap.limit < cap.cost), ""):
        return over
    proven = proven_copy(ctx, job)
    if proven is None:
        return "it has no proven copy to resume from"
    copy, record = proven
    if outside := [path for path in copy.places if path.startswith("/")]:
        return f"{outside[0]} is outside the working folder and can't be restored"
    return Relaunch(copy, record, worst, left - worst)


def generation_of(lease: str) -> int:
    """Return the number of a lease: 1 for the job's first machine, 2 for its second machine, and so on."""
    return int("".join(filter(str.isdigit, lease.rpartition("-i")[2].partition("-")[0])) or 0)


def resumed_from(ctx: Context, job: JobRecord) -> dict[str, Path]:
    """Return the files in the proven copy that a relaunched job resumes from, by path in the working folder.

    Raises BadRequest if the copy is no longer proven.
    """
    intent = ctx.ledger.last(job.subject, RelaunchIntent)
    if intent is None or intent.data.generation >= job.generation:
        return {}
    copy = read_pull(ctx, intent.data.record, intent.data.pull)
    if copy is None or verified_now(ctx, job.id, copy).verdict is not Verdict.PROVEN:
        raise BadRequest(f"the copy of job {job.id} has changed since it was proven", do(Action.VERIFY, job_id=job.id))
    return {path: Path(place) for path, place in copy.places.items()}
