"""Add up the cost of machines by day, platform, project and user, using only the ledger.

A machine's cost is distributed evenly over the time from its rental to its end, so that each day of a long run gets its
share. One query reads the machines that ended in the requested period; machines that ended earlier are not read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from gpuwarden.core.states import LIVE_LEASES
from gpuwarden.lifecycle.context import REHEARSAL, Context
from gpuwarden.lifecycle.leases.meter import lease_now, spent
from gpuwarden.lifecycle.records import lease_ids, read_job
from gpuwarden.people import user_of

MAX_DAYS = 400


@dataclass(frozen=True)
class Charge:
    """The part of one machine's cost that falls on one local day. `usd` is None if it is unknown."""

    day: str
    platform: str
    project: str
    job_id: str
    usd: float | None
    person: str = ""

    @property
    def pretend(self) -> bool:
        """Return whether this is the simulated cost of a rehearsal."""
        return self.platform.startswith(REHEARSAL)


@dataclass(frozen=True)
class _Bill:
    job_id: str
    platform: str
    project: str
    begun: float
    ended: float
    usd: float | None
    person: str


def charges(ctx: Context, since: float) -> list[Charge]:
    """Return the costs since a time (in seconds since the epoch), oldest day first."""
    until, days = ctx.clock.now(), _Days()
    found = [
        charge
        for bill in bills_since(ctx, since)
        for charge in split_by_day(bill, max(since, until - MAX_DAYS * 86_400), until, days)
    ]
    return sorted(found, key=lambda c: (c.day, c.platform, c.job_id))


def total(found: Iterable[Charge], *, pretend: bool = False) -> float:
    """Return the sum of the known costs, excluding rehearsals; if `pretend` is true, the sum for rehearsals only."""
    return sum(c.usd or 0.0 for c in found if c.pretend is pretend)


def day_start(at: float, days_before: int = 0) -> float:
    """Return the start of the local day that contains a time, or of an earlier day. Days may have 23 or 25 hours."""
    day = datetime.fromtimestamp(at).astimezone().date() - timedelta(days=days_before)
    return datetime(day.year, day.month, day.day).astimezone().timestamp()


def month_start(at: float) -> float:
    """Return the start of the local month that contains a time."""
    day = datetime.fromtimestamp(day_start(at)).astimezone().replace(day=1)
    return datetime(day.year, day.month, 1).astimezone().timestamp()


class _Days:
    """Computes local days. The last day is cached, because many bills are for the same day."""

    def __init__(self) -> None:
        self._last = (0.0, 0.0, "")

    def of(self, at: float) -> tuple[float, str]:
        """Return the end and the date of the local day that contains a time."""
        start, stop, date = self._last
        if not start <= at < stop:
            start = day_start(at)
            # The three extra hours are needed because a local day may have 25 hours.
            stop = day_start((datetime.fromtimestamp(start).astimezone() + timedelta(days=1, hours=3)).timestamp())
            date = datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d")
            self._last = start, stop, date
        return stop, date


def bills_since(ctx: Context, since: float) -> Iterator[_Bill]:
    """Yield a bill for every machine that may have incurred costs since a time."""
    now = ctx.clock.now()
    for ended in ctx.ledger.ended_leases(since):
        cost = ended.cost if ended.cost is not None else spent(ctx, ended.lease)
        yield _Bill(ended.job, ended.platform, ended.project, ended.opened, ended.since, cost, user_of(ended.actor))
    resting = [name.removeprefix("lease/") for name in ctx.ledger.resting()]
    for lease_id in (*lease_ids(ctx.ledger, *LIVE_LEASES), *resting):
        lease = lease_now(ctx, lease_id)
        job = read_job(ctx.ledger, lease.job_id)
        yield _Bill(job.id, lease.platform, job.spec.project, lease.opened_at, now, lease.cost, job.person)


def split_by_day(bill: _Bill, since: float, until: float, days: _Days) -> Iterator[Charge]:
    """Split one machine's cost at each local midnight, and yield the parts in the requested period."""
    whole = max(bill.ended - bill.begun, 1e-9)
    at = max(bill.begun, since)
    end = max(min(bill.ended, until), at)
    while True:
        midnight, day = days.of(at)
        stop = min(end, midnight)
        share = None if bill.usd is None else bill.usd * ((stop - at) / whole if bill.ended > bill.begun else 1.0)
        yield Charge(day, bill.platform, bill.project, bill.job_id, share, bill.person)
        at = stop
        if at >= end:
            return
