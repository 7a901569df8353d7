"""Compare the past and possible future costs of jobs with the user's caps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gpuwarden.core.models import InputFile, JobSpec
from gpuwarden.core.money import usd
from gpuwarden.core.sanitize import line
from gpuwarden.core.states import LIVE_LEASES, TERMINAL_JOBS, Job
from gpuwarden.ledger.event import Event
from gpuwarden.ledger.events import ApprovalGranted, JobSubmitting, ReceiptIssued, RelaunchIntent, ResumeRequested
from gpuwarden.lifecycle.context import REHEARSAL, Context
from gpuwarden.lifecycle.leases.meter import lease_now
from gpuwarden.lifecycle.records import JobRecord, LeaseRecord, job_ids, lease_ids_of, read_job
from gpuwarden.lifecycle.team import acting_user, allowances, unlisted

if TYPE_CHECKING:
    from gpuwarden.rules.facts import SubmitFacts

DAY_S = 86_400
OPEN_JOBS: Final = tuple(s for s in Job if s not in TERMINAL_JOBS)
IDLE_H: Final = 1.0
"""Assumed number of billed hours between a job's end and its machine's teardown."""


def spending_question(ctx: Context, facts: SubmitFacts, worst: float | None = None, *, of: tuple[str, ...] = ()) -> str:
    """Return the reasons why the user must approve a job's cost; empty if no approval is needed.

    If several jobs like this one are submitted, `worst` is their maximum total cost in US dollars, and `of` lists those
    that are already accepted.
    """
    worst = facts.worst_cost if worst is None else worst
    if not facts.metered:
        return ""
    questions = [notice.question for notice in ctx.notices]
    questions.append(unlisted(ctx, facts.spec, acting_user(ctx)))
    if worst is None:
        questions.append("its price is unknown")
    elif over := over_caps(ctx, facts.spec, worst, acting_user(ctx), of=of):
        questions.append(over)
    else:
        wanted = _work(facts.spec, facts.inputs)
        live = (read_job(ctx.ledger, job_id) for job_id in job_ids(ctx.ledger, *OPEN_JOBS))
        paid = (job for job in live if ctx.profile(job.spec.platform).meter.metered)
        duplicate = next((job for job in paid if _work(job.spec, job.inputs) == wanted), None)
        if duplicate is not None:
            questions.append(
                f"job {duplicate.id} does the same work and has not ended, so the work would be paid for twice"
            )
    return "; ".join(filter(None, questions))


class Cap(NamedTuple):
    """One cap on a job, and the cost that the cap limits, in US dollars."""

    name: str
    cost: float
    limit: float

    @property
    def broken(self) -> str:
        """Describe how the cost exceeds the cap."""
        return f"the cost may reach {usd(self.cost)}, above {line(self.name, 160)} of {usd(self.limit)}"


def caps_on(
    ctx: Context,
    spec: JobSpec,
    worst: float,
    person: str,
    *,
    machine: float | None = None,
    of: tuple[str, ...] = (),
) -> Iterator[Cap]:
    """Yield every cap on a job: the general caps, then the caps for its user and its project.

    `worst` is the maximum cost of the entire job, `machine` that of one of its machines, in US dollars. `of` lists
    the job if it is already accepted, or all jobs of its fan-out.
    """
    caps, pretend = ctx.policy.caps_for(spec.platform), spec.platform.startswith(REHEARSAL)
    yield Cap("per_job_usd", worst, caps.per_job_usd)
    yield Cap("per_instance_usd", worst if machine is None else machine, caps.per_instance_usd)
    yield Cap("per_day_usd", spent_today(ctx, pretend=pretend, without=of) + worst, caps.per_day_usd)
    for name, allowed, counts in allowances(ctx, spec, person):
        if allowed.per_job_usd is not None:
            yield Cap(f"{name}.per_job_usd", worst, allowed.per_job_usd)
        if allowed.per_day_usd is not None:
            today = spent_today(ctx, pretend=pretend, without=of, counts=counts)
            yield Cap(f"{name}.per_day_usd", today + worst, allowed.per_day_usd)


def over_caps(ctx: Context, spec: JobSpec, worst: float, person: str, *, of: tuple[str, ...] = ()) -> str:
    """Return a description of the first cap that a cost would exceed; empty if none. For `of`, see `caps_on`.

    If the ledger has lost events, the past cost is unknown, so every cost counts as exceeding the caps.
    """
    doubt = ctx.ledger.trouble()
    if doubt is not None and doubt.incomplete:
        return f"today's spending is unknown, because {doubt.message}"
    return next((cap.broken for cap in caps_on(ctx, spec, worst, person, of=of) if cap.cost > cap.limit), "")


def _work(spec: JobSpec, inputs: tuple[InputFile, ...]) -> tuple[object, ...]:
    """Return a job's program, arguments, variables and inputs. Jobs with equal values do the same work."""
    return spec.platform.startswith(REHEARSAL), spec.script, spec.command, spec.args, spec.env, inputs


def spent_today(
    ctx: Context, *, pretend: bool, without: tuple[str, ...] = (), counts: Callable[[JobRecord], bool] = lambda _: True
) -> float:
    """Return the cost of the last 24 hours in US dollars.

    For a job accepted in that time, the result includes its past and maximum additional cost; for an older job, its
    cost in that time and the additional cost of a resume. `pretend` selects rehearsals instead of real jobs. Jobs are
    omitted if they are in `without`, or if `counts` returns false for them.
    """
    day, total = ctx.clock.now() - DAY_S, 0.0
    # Only open jobs, and jobs whose machines are billed or were billed in the last day, can incur costs.
    billed = (*ctx.ledger.jobs_with_leases(*LIVE_LEASES), *ctx.ledger.jobs_with_leases(since=day))
    costing = dict.fromkeys((*job_ids(ctx.ledger, *OPEN_JOBS), *billed))
    for job in filter(counts, (read_job(ctx.ledger, job_id) for job_id in costing if job_id not in without)):
        mine = [lease_now(ctx, name) for name in lease_ids_of(ctx.ledger, job.id)]
        if job.spec.platform.startswith(REHEARSAL) is not pretend:
            continue
        if job.accepted_at > day:
            total += committed(ctx, job, mine)
        else:
            total += sum(_billed(ctx, job, lease, day) for lease in mine) + _to_come(ctx, job, mine)
    return total


def _to_come(ctx: Context, job: JobRecord, leases: list[LeaseRecord]) -> float:
    """Return the maximum additional cost of a resumed or relaunched job, in US dollars; 0 for other jobs."""
    if job.state in TERMINAL_JOBS or (job.state is Job.PAUSED and not job.resume_requested):
        return 0.0
    kinds = (ResumeRequested, RelaunchIntent, JobSubmitting)
    found: list[Event[Any] | None] = [ctx.ledger.last(job.subject, kind) for kind in kinds]
    last = max((e for e in found if e and e.data.worst_cost is not None), key=lambda e: e.seq, default=None)
    if last is None:
        return 0.0
    worst: float = last.data.worst_cost
    # A relaunch's cost is for a machine that may not have been requested yet.
    before = isinstance(last.data, RelaunchIntent) and job.generation <= last.data.generation
    here = sum(lease.cost or 0.0 for lease in leases if lease.id == job.lease and not before)
    return max(0.0, worst - here)


def committed(ctx: Context, job: JobRecord, leases: list[LeaseRecord]) -> float:
    """Return the sum of a job's past cost and its maximum additional cost, in US dollars."""
    live = [lease for lease in leases if lease.state in LIVE_LEASES]
    cost = sum(lease.cost or 0.0 for lease in leases)
    before = sum(lease.cost or 0.0 for lease in leases if lease not in live)
    if job.state in TERMINAL_JOBS:
        if not live:
            return cost
        # An ended job's machines are billed until they are torn down. Without this, short jobs would seem free.
        cost += sum((lease.price or job.price or 0.0) * IDLE_H for lease in live)
    expected = job.spec.max_cost_usd if job.worst_cost is None else job.worst_cost
    dearest = max((lease.price or 0.0 for lease in leases), default=0.0)
    times = max(1.0, dearest / job.price) if job.price else 1.0
    # After a relaunch, the new machine may cost as much as the lost one was expected to cost.
    return (before if live else 0.0) + max(
        (expected or 0.0) * times, cost - (before if live else 0.0) + _to_come(ctx, job, leases)
    )


def _billed(ctx: Context, job: JobRecord, lease: LeaseRecord, since: float) -> float:
    """Return a machine's cost in US dollars since a time, computed from its price; 0 if the price is unknown.

    The price is the last one that the provider reported, or else the checked price.
    """
    price = lease.price or job.price
    until = ctx.clock.now() if lease.state in LIVE_LEASES else lease.since
    hours = max(0.0, until - max(since, lease.opened_at)) / 3600
    cost = 0.0 if price is None else price * hours
    return cost if lease.state in LIVE_LEASES or lease.cost is None else min(cost, lease.cost)


TRUSTED: Final = frozenset({"terminal"})
"""Channels through which an approval of a job's spending may also include other decisions about the job."""


def carried(ctx: Context, receipt: str, at: float | None = None) -> ApprovalGranted | None:
    """Return a receipt's spending approval if its decisions are valid at `at` (default: now), else None."""
    granted = ctx.ledger.last(f"receipt/{receipt}", ApprovalGranted)
    issued = ctx.ledger.last(f"receipt/{receipt}", ReceiptIssued)
    if granted is None or issued is None or granted.data.channel not in TRUSTED:
        return None
    same = granted.data.digest == issued.data.facts_digest
    return granted.data if same and granted.data.holds_at(ctx.clock.now() if at is None else at) else None


def spending_approved(ctx: Context, receipt: str) -> bool:
    """Return whether the user has approved this receipt's spending and the approval has not expired."""
    granted = ctx.ledger.last(f"receipt/{receipt}", ApprovalGranted)
    return granted is not None and granted.data.holds_at(ctx.clock.now())
