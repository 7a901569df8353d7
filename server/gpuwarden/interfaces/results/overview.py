"""Replies to the status, jobs and costs commands, and the list of decisions that wait for the user."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from pydantic import BaseModel, Field

from gpuwarden.core.guidance import Action, do
from gpuwarden.core.plural import counted
from gpuwarden.core.policy import Team
from gpuwarden.core.sanitize import named, quoted
from gpuwarden.core.states import TERMINAL_JOBS
from gpuwarden.interfaces.results.base import AutoTeardownReply, Result, WarnedReply, WithNextSteps, auto_teardown_reply
from gpuwarden.interfaces.results.inventory import (
    AccountReply,
    ClockReply,
    InstanceReply,
    account_reply,
    clock_reply,
    instance_reply,
)
from gpuwarden.lifecycle.context import REHEARSAL
from gpuwarden.lifecycle.monitoring.overview import JobLine, JobPage, Overview
from gpuwarden.lifecycle.monitoring.spending import Charge, total
from gpuwarden.lifecycle.monitoring.waiting import Kind, Waiting

SHOWN = 100
NOBODY: Final = Team()


class WaitingReply(WithNextSteps):
    """One decision that waits for the user. `hint` contains the commands for it; `cost_usd` is the machine's cost so
    far or the job's maximum cost.
    """

    ticket: str
    kind: Kind
    text: str
    since: float
    job_id: str | None = None
    name: str = ""
    platform: str = ""
    cost_usd: float | None = None
    cost_estimated: bool = False
    price_usd_per_hour: float | None = None
    expires_at: float | None = None
    hint: str = ""


class JobLineReply(WithNextSteps):
    """One job in a list."""

    job_id: str
    name: str
    platform: str
    state: str
    since: float
    project: str = ""
    person: str = ""
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    remaining_s: float | None = None
    gpu_percent: float | None = None
    cost_usd: float | None = None
    cost_estimated: bool = False
    price_usd_per_hour: float | None = None
    billing: bool = False
    clocks: list[ClockReply] = Field(default_factory=list)
    ending: AutoTeardownReply | None = None
    storage: list[str] = Field(default_factory=list)
    """Storage that is still billed although its machine is gone."""

    @property
    def pretend(self) -> bool:
        """Return whether the job's costs are simulated by a rehearsal."""
        return self.platform.startswith(REHEARSAL)


class SpendingReply(BaseModel):
    """US dollars spent today and this month (in local time), the current hourly rate, and the daily cap."""

    today_usd: float
    month_usd: float
    usd_per_hour: float
    per_day_cap_usd: float
    rehearsed_today_usd: float = 0.0


class StatusReply(WarnedReply):
    """The overview: jobs, decisions that wait for the user, other machines and spending.

    `unknown` maps a machine's name to the reason why its state could not be read; such a machine may be billed.
    """

    at: float
    running: list[JobLineReply] = Field(default_factory=list)
    waiting: list[WaitingReply] = Field(default_factory=list)
    ended: list[JobLineReply] = Field(default_factory=list)
    spending: SpendingReply
    others: list[InstanceReply] = Field(default_factory=list)
    """Machines that a platform lists but that no job in this ledger uses."""
    accounts: list[AccountReply] = Field(default_factory=list)
    alerts: list[str] = Field(default_factory=list)
    unknown: dict[str, str] = Field(default_factory=dict)


class JobsReply(Result):
    """A page of jobs, latest transition first. The next page starts after the job `after`."""

    jobs: list[JobLineReply] = Field(default_factory=list)
    after: str | None = None


class CostReply(BaseModel):
    """The costs of one group, in US dollars. `unknown` counts the machines whose cost is unknown."""

    key: str
    usd: float
    machines: int
    unknown: int = 0
    per_day_cap_usd: float | None = None
    """Daily cap for a team member or a project, from the policy."""


class CostsReply(WarnedReply):
    """Costs in a period, grouped by day, platform, project, person or job.

    The total excludes the simulated costs of rehearsals.
    """

    since: float
    by: str
    rows: list[CostReply] = Field(default_factory=list)
    total_usd: float = 0.0


class WaitsReply(Result):
    """The decisions that wait for the user."""

    waiting: list[WaitingReply] = Field(default_factory=list)


def status_of(seen: Overview) -> StatusReply:
    """Return the reply to the status command."""
    unknown = {named(k, 80): quoted(v) for k, v in seen.unknown.items()}
    spent = seen.spending
    return StatusReply(
        code="unknown" if unknown else "ok",
        message=""
        if seen.running or seen.ended or seen.waiting
        else "No job is running, nothing is waiting for you, and no machine is billed.",
        at=seen.at,
        running=[job_line(line) for line in seen.running[:SHOWN]],
        waiting=[waiting_reply(w) for w in seen.waiting],
        ended=[job_line(line) for line in seen.ended[:SHOWN]],
        spending=SpendingReply(
            today_usd=round(spent.today, 4),
            month_usd=round(spent.month, 4),
            usd_per_hour=round(spent.per_hour, 4),
            per_day_cap_usd=spent.day_cap,
            rehearsed_today_usd=round(spent.pretend_today, 4),
        ),
        others=[instance_reply(row) for row in seen.others[:SHOWN]],
        accounts=[account_reply(funds) for funds in seen.accounts],
        alerts=[quoted(alert.text, 300) for alert in seen.alerts],
        unknown=unknown,
    )


def job_line(line: JobLine) -> JobLineReply:
    """Return one job for a list."""
    job, seen = line.job, line.seen
    losses = [v for k, v in seen.metrics.items() if k in ("loss", "train_loss", "train/loss")] if seen else []
    return JobLineReply(
        job_id=job.id,
        name=job.spec.name,
        platform=job.spec.platform,
        state=job.state,
        since=job.since,
        project=job.spec.project,
        person=job.person,
        step=seen.step if seen else None,
        total_steps=seen.total_steps if seen else None,
        loss=losses[0] if losses else None,
        remaining_s=max(0.0, seen.eta_at - seen.at) if seen and seen.eta_at else None,
        gpu_percent=seen.beat.gpu_util if seen and seen.beat else None,
        cost_usd=line.cost_usd,
        cost_estimated=line.estimated,
        price_usd_per_hour=line.price_usd_per_hour,
        billing=line.billing,
        clocks=[clock_reply(clock) for clock in line.clocks],
        ending=auto_teardown_reply(line.ending),
        storage=list(line.storage),
        next=(do(Action.CHECK, job_id=job.id),) if line.billing and job.state in TERMINAL_JOBS else (),
    )


def waiting_reply(waiting: Waiting) -> WaitingReply:
    """Return one decision that waits for the user."""
    return WaitingReply(
        ticket=waiting.ticket,
        kind=waiting.kind,
        text=quoted(waiting.text, 400),
        since=waiting.since,
        job_id=waiting.job_id,
        name=waiting.name,
        platform=waiting.platform,
        cost_usd=waiting.cost_usd,
        cost_estimated=waiting.estimated,
        price_usd_per_hour=waiting.price_usd_per_hour,
        expires_at=waiting.expires_at,
        next=waiting.next_steps,
    )


def waits(found: Sequence[Waiting]) -> WaitsReply:
    """Return the reply to `approve` without a ticket."""
    ordered = sum(w.kind == "ordered" for w in found)
    asked = len(found) - ordered
    ends = f" {counted(ordered, 'machine').capitalize()} will be torn down automatically." if ordered else ""
    return WaitsReply(
        message=f"{counted(asked, 'approval').capitalize()} {'is' if asked < 2 else 'are'} waiting for you.{ends}",
        waiting=[waiting_reply(w) for w in found],
    )


def jobs_of(page: JobPage) -> JobsReply:
    """Return the reply to the jobs command."""
    return JobsReply(
        message="" if page.lines else "No job matches.",
        jobs=[job_line(line) for line in page.lines],
        after=page.after,
    )


def costs_of(found: Sequence[Charge], since: float, by: str, team: Team = NOBODY) -> CostsReply:
    """Return the reply to the costs command, grouped by `day`, `platform`, `project`, `person` or `job`."""
    caps = {"person": team.people, "project": team.projects}.get(by, {})
    groups: dict[str, list[Charge]] = defaultdict(list)
    for charge in found if by == "platform" else (c for c in found if not c.pretend):
        groups[charge.job_id if by == "job" else getattr(charge, by)].append(charge)
    rows = [
        CostReply(
            key=named(key, 80) if key else "(none)",
            usd=round(sum(c.usd or 0.0 for c in mine), 4),
            machines=len({c.job_id for c in mine}),
            unknown=len({c.job_id for c in mine if c.usd is None}),
            per_day_cap_usd=caps[key].per_day_usd if key in caps else None,
        )
        for key, mine in sorted(groups.items())
    ]
    return CostsReply(since=since, by=by, rows=rows, total_usd=round(total(found), 4))
