"""Collect jobs, decisions waiting for the user, billed machines, alerts and spending for one screen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from gpuwarden.core.deadlines import Deadline, Funds
from gpuwarden.core.models import Observation
from gpuwarden.core.states import LIVE_LEASES, TERMINAL_JOBS, Job
from gpuwarden.lifecycle.context import REHEARSAL, Context
from gpuwarden.lifecycle.execution.situation import TeardownPlan, remains, teardown_plan
from gpuwarden.lifecycle.leases.expirations import clocks_of
from gpuwarden.lifecycle.leases.meter import lease_now
from gpuwarden.lifecycle.monitoring.alert_conditions import raise_overdue, shown_alerts
from gpuwarden.lifecycle.monitoring.balances import known_funds
from gpuwarden.lifecycle.monitoring.inventory import OPEN_JOBS, list_instances
from gpuwarden.lifecycle.monitoring.inventory import Row as Machine
from gpuwarden.lifecycle.monitoring.spending import charges, month_start, total
from gpuwarden.lifecycle.monitoring.waiting import Waiting, what_waits
from gpuwarden.lifecycle.notify import Alert
from gpuwarden.lifecycle.posted import with_newest_step
from gpuwarden.lifecycle.records import JobRecord, job_ids, lease_ids_of, read_job

DAY_S = 86_400.0
ENDED_SHOWN = 5
MAX_SCANNED = 2_000
"""Maximum number of jobs scanned for one page of a filtered list. The next page continues after them."""


@dataclass(frozen=True)
class JobLine:
    """One job in a list. `cost_usd` is the cost of all its machines; None if unknown.

    `billing` is also true if it is unknown whether a machine is billed. `estimated` means that the cost is an upper
    bound instead of the platform's figure.
    """

    job: JobRecord
    cost_usd: float | None
    price_usd_per_hour: float | None
    billing: bool
    estimated: bool
    seen: Observation | None = None
    clocks: tuple[Deadline, ...] = ()
    ending: TeardownPlan | None = None
    storage: tuple[str, ...] = ()
    """Names of the storage that is still billed although the machine is gone."""


@dataclass(frozen=True)
class Spending:
    """Spending in US dollars for the current local day and for the current month, and the daily cap. Rehearsals are
    counted separately.
    """

    today: float
    month: float
    per_hour: float
    day_cap: float
    pretend_today: float


@dataclass(frozen=True)
class Overview:
    """Jobs, decisions waiting for the user, billed machines and spending. `unknown` contains the reasons for failed
    checks.
    """

    at: float
    running: tuple[JobLine, ...]
    waiting: tuple[Waiting, ...]
    ended: tuple[JobLine, ...]
    spending: Spending
    accounts: tuple[Funds, ...]
    alerts: tuple[Alert, ...]
    unknown: dict[str, str]
    others: tuple[Machine, ...] = ()
    """Machines listed by the platforms that do not belong to a job in this ledger."""


async def overview(ctx: Context, *, offline: bool = False) -> Overview:
    """Return the overview. Unless `offline`, first advance every job and query every platform in use."""
    if offline:
        return cached_overview(ctx, {})
    found = await list_instances(ctx)
    doubt = {"ledger": f"{found.ledger.message}. {found.ledger.hint}"} if found.ledger else {}
    others = tuple(row for row in found.rows if row.job is None and row.billing is not False)
    return replace(cached_overview(ctx, found.unknown | doubt), others=others)


def cached_overview(ctx: Context, unknown: dict[str, str]) -> Overview:
    """Return the overview from the ledger and this process's last observations, without any queries."""
    raise_overdue(ctx)
    now = ctx.clock.now()
    lines = {job_id: line_of(ctx, read_job(ctx.ledger, job_id)) for job_id in job_ids(ctx.ledger, *OPEN_JOBS)}
    for job_id in ctx.ledger.jobs_with_leases(*LIVE_LEASES):
        lines.setdefault(job_id, line_of(ctx, read_job(ctx.ledger, job_id)))
    recent = [row for row in ctx.ledger.page("job", *_ENDED, limit=ENDED_SHOWN) if row.since > now - DAY_S]
    fresh = [row.subject.removeprefix("job/") for row in recent if row.state != Job.REFUSED]
    ended = {j: lines.pop(j) if j in lines else line_of(ctx, read_job(ctx.ledger, j)) for j in fresh}
    old = {j: lines.pop(j) for j, line in list(lines.items()) if line.job.state in TERMINAL_JOBS}  # still billed
    every = (*lines.values(), *old.values(), *ended.values())
    waiting = what_waits(ctx)
    return Overview(
        at=now,
        running=tuple(lines.values()),
        waiting=tuple(waiting),
        ended=(*old.values(), *ended.values()),
        spending=_spending(ctx, now, every),
        accounts=tuple(known_funds(ctx)),
        alerts=tuple(shown_alerts(ctx, waiting)),
        unknown=unknown,
    )


_ENDED = tuple(sorted(TERMINAL_JOBS - {Job.REFUSED}))


def line_of(ctx: Context, job: JobRecord) -> JobLine:
    """Return a job with its costs and billing status."""
    leases = [lease_now(ctx, name) for name in lease_ids_of(ctx.ledger, job.id)]
    live = [lease for lease in leases if lease.state in LIVE_LEASES]
    known = [lease.cost for lease in leases]
    prices = [lease.price for lease in live if lease.price is not None]
    return JobLine(
        job,
        cost_usd=None if None in known else sum(cost or 0.0 for cost in known),
        estimated=any(lease.estimated for lease in leases),
        price_usd_per_hour=sum(prices) if prices else None,
        billing=any(lease.instance is None or lease.instance.meter is not False for lease in live),
        seen=with_newest_step(ctx, job),
        clocks=tuple(clock for lease in live for clock in clocks_of(ctx, lease, job) if not clock.after_job),
        ending=teardown_plan(ctx, job) if live or job.state not in TERMINAL_JOBS else None,
        storage=() if live else remains(ctx, job),
    )


def _spending(ctx: Context, now: float, lines: tuple[JobLine, ...]) -> Spending:
    found = charges(ctx, month_start(now))
    day = datetime.fromtimestamp(now).astimezone().strftime("%Y-%m-%d")
    today = [c for c in found if c.day == day]
    real = (line for line in lines if line.billing and not line.job.spec.platform.startswith(REHEARSAL))
    return Spending(
        today=total(today),
        month=total(found),
        per_hour=sum(line.price_usd_per_hour or 0.0 for line in real),
        day_cap=ctx.policy.caps.per_day_usd,
        pretend_today=total(today, pretend=True),
    )


@dataclass(frozen=True)
class JobPage:
    """A page of jobs, most recently changed first. `after` is the id of the page's last job; None on the last page."""

    lines: tuple[JobLine, ...]
    after: str | None


def job_page(
    ctx: Context,
    *,
    states: tuple[Job, ...] = (),
    platform: str = "",
    project: str = "",
    name: str = "",
    limit: int = 20,
    after: str = "",
) -> JobPage:
    """Return a page of jobs, including ended ones. `name` matches any part of a job's name, ignoring case.

    `after` is the id of the previous page's last job.
    """
    before, found, scanned = None, list[JobLine](), 0
    if after:
        before = ctx.ledger.row(read_job(ctx.ledger, after).subject)  # raises NotFound for an unknown job
    wanted = states or tuple(state for state in Job if state is not Job.REFUSED)
    while scanned < MAX_SCANNED:
        rows = ctx.ledger.page("job", *wanted, limit=min(100, 2 * limit), before=before)
        for row in rows:
            before, scanned = row, scanned + 1
            if platform and row.platform != platform:
                continue
            job = read_job(ctx.ledger, row.subject.removeprefix("job/"))
            if (project and job.spec.project != project) or name.casefold() not in job.spec.name.casefold():
                continue
            found.append(line_of(ctx, job))
            if len(found) == limit:
                return JobPage(tuple(found), job.id)
        if not rows:
            return JobPage(tuple(found), None)
    return JobPage(tuple(found), before.subject.removeprefix("job/") if before else None)
