"""Compare what jobs have cost and may still cost with the user's caps."""

from __future__ import annotations

from typing import Final

from gpuwarden.core.models import InputFile, JobSpec
from gpuwarden.core.money import usd
from gpuwarden.core.states import LIVE_LEASES, TERMINAL_JOBS, Job
from gpuwarden.ledger.events import ApprovalGranted, ReceiptIssued
from gpuwarden.lifecycle.context import REHEARSAL, Context
from gpuwarden.lifecycle.monitoring.meter import lease_now, price_of, spent
from gpuwarden.lifecycle.records import JobRecord, LeaseRecord, job_ids, lease_ids_of, read_job
from gpuwarden.rules.facts import SubmitFacts

DAY_S = 86_400
OPEN_JOBS: Final = tuple(s for s in Job if s not in TERMINAL_JOBS)
IDLE_H: Final = 1.0
"""How many hours a machine whose job has ended is taken to bill on."""


def spending_question(ctx: Context, facts: SubmitFacts) -> str:
    """Return why a person has to be asked about this cost; empty when it is inside the user's caps."""
    if not facts.metered:
        return ""
    questions = [notice.question for notice in ctx.notices]
    doubt = ctx.ledger.trouble()
    if facts.worst_cost is None:
        questions.append("its price is unknown")
    elif doubt is not None and doubt.incomplete:
        questions.append(f"what was spent today is unknown, because {doubt.message}")
    elif over := over_caps(ctx, facts.spec.platform, facts.worst_cost):
        questions.append(over)
    else:
        wanted = _work(facts.spec, facts.inputs)
        live = (read_job(ctx.ledger, job_id) for job_id in job_ids(ctx.ledger, *OPEN_JOBS))
        paid = (job for job in live if ctx.profile(job.spec.platform).meter.metered)
        twin = next((job for job in paid if _work(job.spec, job.inputs) == wanted), None)
        if twin is not None:
            questions.append(f"job {twin.id} does the same work and has not ended, so it would be paid for twice")
    return "; ".join(filter(None, questions))


def over_caps(ctx: Context, platform: str, worst: float, *, of: str = "") -> str:
    """Return the first cap that a cost would break; empty when none. `of` is its job, where it is known."""
    caps = ctx.policy.caps_for(platform)
    today = spent_today(ctx, pretend=platform.startswith(REHEARSAL), without=of)
    for name, total, cap in (
        ("per_job_usd", worst, caps.per_job_usd),
        ("per_instance_usd", worst, caps.per_instance_usd),
        ("per_day_usd", today + worst, caps.per_day_usd),
    ):
        if total > cap:
            return f"it may come to {usd(total)}, above {name} of {usd(cap)}"
    return ""


def _work(spec: JobSpec, inputs: tuple[InputFile, ...]) -> tuple[object, ...]:
    """Return the program, arguments and inputs, which make the same work whatever its name, limits or machine."""
    return spec.platform.startswith(REHEARSAL), spec.script, spec.command, spec.args, spec.env, inputs


def spent_today(ctx: Context, *, pretend: bool, without: str = "") -> float:
    """Return what the last day's jobs cost or may still cost, and what older machines billed in it.

    Pretend money apart.
    """
    day, total = ctx.clock.now() - DAY_S, 0.0
    # what can have cost anything since then: the open jobs, and those whose machines bill or did
    billed = (*ctx.ledger.jobs_with_leases(*LIVE_LEASES), *ctx.ledger.jobs_with_leases(since=day))
    costing = dict.fromkeys((*job_ids(ctx.ledger, *OPEN_JOBS), *billed))
    for job in (read_job(ctx.ledger, job_id) for job_id in costing if job_id != without):
        mine = [lease_now(ctx, name) for name in lease_ids_of(ctx.ledger, job.id)]
        if job.spec.platform.startswith(REHEARSAL) is not pretend:
            continue
        if job.accepted_at > day:
            total += _committed(ctx, job, mine)
        else:
            total += sum(_billed(ctx, job, lease, day) for lease in mine)
    return total


def _committed(ctx: Context, job: JobRecord, leases: list[LeaseRecord]) -> float:
    """Return what a job of the last day has cost and may still cost, in US dollars."""
    live = [lease for lease in leases if lease.state in LIVE_LEASES]
    costs = {lease.id: max(spent(ctx, lease.id) or 0.0, _billed(ctx, job, lease, lease.opened_at)) for lease in leases}
    cost, before = sum(costs.values()), sum(costs[lease.id] for lease in leases if lease not in live)
    if job.state in TERMINAL_JOBS:
        if not live:
            return cost
        # An ended job's machines bill until a person may have released them; else short jobs would cost nothing.
        cost += sum((price_of(ctx, lease) or job.price or 0.0) * IDLE_H for lease in live)
    expected = job.spec.max_cost_usd if job.worst_cost is None else job.worst_cost
    dearest = max((price_of(ctx, lease) or 0.0 for lease in leases), default=0.0)
    times = max(1.0, dearest / job.price) if job.price else 1.0
    # a relaunch may cost as much again as the job was to cost on the machine that was taken
    return (before if live else 0.0) + max((expected or 0.0) * times, cost - (before if live else 0.0))


def _billed(ctx: Context, job: JobRecord, lease: LeaseRecord, since: float) -> float:
    """Return what a machine that may be billing has cost since then, by its price: it bills on after its job ended.

    Where no price is reported any more, the last one counts, or the one that was checked.
    """
    price = price_of(ctx, lease) or job.price
    if lease.state not in LIVE_LEASES or price is None:
        return 0.0
    return price * (ctx.clock.now() - max(since, lease.opened_at)) / 3600


TRUSTED: Final = frozenset({"terminal"})
"""Channels of a spending approval that may carry a person's further decisions about the job."""


def carried(ctx: Context, receipt: str) -> ApprovalGranted | None:
    """Return the approval of a receipt's spending where what a person decided with it is good now."""
    granted = ctx.ledger.last(f"receipt/{receipt}", ApprovalGranted)
    issued = ctx.ledger.last(f"receipt/{receipt}", ReceiptIssued)
    if granted is None or issued is None or granted.data.channel not in TRUSTED:
        return None
    same = granted.data.digest == issued.data.facts_digest
    return granted.data if same and granted.data.holds_at(ctx.clock.now()) else None


def spending_approved(ctx: Context, receipt: str) -> bool:
    """Return whether a person approved this receipt's spending, and the approval has not expired."""
    granted = ctx.ledger.last(f"receipt/{receipt}", ApprovalGranted)
    return granted is not None and granted.data.holds_at(ctx.clock.now())
