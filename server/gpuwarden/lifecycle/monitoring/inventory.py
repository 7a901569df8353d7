"""Every machine of every platform in use: ours and not ours, what it costs, and what could not be seen."""

from __future__ import annotations

import logging
from collections.abc import Container
from dataclasses import dataclass

import anyio

from gpuwarden.core.deadlines import Deadline, Funds
from gpuwarden.core.errors import Internal, in_our_words
from gpuwarden.core.models import Instance, InstanceState, Unknown
from gpuwarden.core.states import LIVE_LEASES, OPEN_TEARDOWNS, TERMINAL_JOBS, Lease
from gpuwarden.core.task_groups import first_error
from gpuwarden.lifecycle import timeouts
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.ending.teardown import proceed
from gpuwarden.lifecycle.execution.advance import advance_locked
from gpuwarden.lifecycle.execution.provisioning import record_extra, tend
from gpuwarden.lifecycle.monitoring.balances import known_funds, look_at_funds
from gpuwarden.lifecycle.monitoring.expirations import clocks_of, stopped_at
from gpuwarden.lifecycle.monitoring.meter import believed, lease_now
from gpuwarden.lifecycle.records import JobRecord, LeaseRecord, job_ids, lease_ids, read_job, read_lease, read_teardown
from gpuwarden.lifecycle.timeouts import in_time

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Row:
    """One machine. `lease` is None for one that is not ours; `billing` None means nobody knows, which counts as yes.

    `since` is when it was rented, `stopped_at` when it was first seen off, `stopped_usd_per_hour` what bills then.
    """

    platform: str
    instance_id: str | None
    state: str
    billing: bool | None
    price_usd_per_hour: float | None
    cost_usd: float | None
    lease: LeaseRecord | None
    job: JobRecord | None
    since: float | None
    note: str = ""
    stopped_usd_per_hour: float | None = None
    stopped_at: float | None = None
    clocks: tuple[Deadline, ...] = ()

    @property
    def ours(self) -> bool:
        """Return whether gpuwarden rented it."""
        return self.lease is not None


@dataclass(frozen=True)
class Inventory:
    """All rows, the unmetered jobs that run, and the platforms whose list could not be read."""

    rows: tuple[Row, ...]
    jobs: tuple[JobRecord, ...]
    unknown: dict[str, str]
    accounts: tuple[Funds, ...] = ()


async def reconcile(ctx: Context, skip: Container[str] = ()) -> dict[str, str]:
    """Move every job, lease and teardown on as far as it goes. Returns what could not be moved, and why.

    Jobs in `skip` are left alone this time: their platform or machine did not answer lately.
    """
    trouble: dict[str, str] = {}
    slow: set[str] = set()
    for job_id in unsettled(ctx):
        platform = read_job(ctx.ledger, job_id).spec.platform
        if job_id in skip:
            continue
        if platform in slow:
            trouble[job_id] = f"not looked at this time: {platform} answers slowly"
            continue
        begun = anyio.current_time()
        try:
            async with ctx.lock(job_id, patience_s=1.0):
                job = await advance_locked(ctx, job_id)
                for lease_id in leases_of(ctx, job):
                    await tend(ctx, lease_id)
        except Exception as error:
            trouble[job_id] = what_went_wrong(error)
        if anyio.current_time() - begun > timeouts.ASK_S and ctx.profile(platform).meter.metered:
            slow.add(platform)  # its other jobs would each take as long, and everybody waits
    for subject in ctx.ledger.subjects("teardown", *OPEN_TEARDOWNS):
        record = read_teardown(ctx.ledger, subject.removeprefix("teardown/"))
        if record.state in {"approved", "executing", "needs_human"}:
            try:
                await proceed(ctx, record.id)
            except Exception as error:
                trouble[record.id] = what_went_wrong(error)
    return trouble


def what_went_wrong(error: Exception) -> str:
    """Return the message for a failed step. An unforeseen failure must not stop the look at other machines."""
    known = in_our_words(error)
    if isinstance(known, Internal):
        logger.error("a step failed in a way that nobody foresaw: %r", error)
        logger.debug("its traceback", exc_info=error)
    return known.message


def unsettled(ctx: Context) -> list[str]:
    """Return the jobs that are not over, or whose machine may bill."""
    live = {read_lease(ctx.ledger, lease).job_id for lease in lease_ids(ctx.ledger, *LIVE_LEASES)}
    return [j for j in job_ids(ctx.ledger) if j in live or read_job(ctx.ledger, j).state not in TERMINAL_JOBS]


def leases_of(ctx: Context, job: JobRecord) -> list[str]:
    """Return the live leases of a job."""
    return [name for name in lease_ids(ctx.ledger, *LIVE_LEASES) if read_lease(ctx.ledger, name).job_id == job.id]


async def list_instances(ctx: Context) -> Inventory:
    """Reconcile, then list every machine of every platform that was used from here or has an account's key."""
    trouble = await reconcile(ctx)
    listed, unread = await sweep(ctx)
    leases = [read_lease(ctx.ledger, name) for name in lease_ids(ctx.ledger)]
    rows: list[Row] = []
    for platform, machines in listed.items():
        rows += _rows(ctx, platform, [lease for lease in leases if lease.platform == platform], machines)
    running = [read_job(ctx.ledger, j) for j in job_ids(ctx.ledger)]
    unmetered = tuple(j for j in running if j.lease is None and j.state not in TERMINAL_JOBS)
    return Inventory(tuple(rows), unmetered, trouble | unread, tuple(known_funds(ctx)))


async def sweep(ctx: Context) -> tuple[dict[str, tuple[Instance, ...]], dict[str, str]]:
    """Read the list of every platform used or configured, and take machines back into sight that were believed ended.

    Returns what is listed, by platform, and what could not be read or taken back. An unread list is empty here.
    """
    leases = [read_lease(ctx.ledger, lease) for lease in lease_ids(ctx.ledger)]
    platforms = sorted({lease.platform for lease in leases} | set(ctx.configured()))
    found: dict[str, tuple[Instance, ...]] = dict.fromkeys(platforms, ())
    trouble: dict[str, str] = {}

    async def survey(platform: str) -> None:
        try:
            answer = await in_time(platform, ctx.provider(platform).list())
        except Exception as error:
            answer = Unknown(what_went_wrong(error))
        if isinstance(answer, Unknown):
            trouble[platform] = answer.why
            return
        found[platform] = answer.value
        mine = [lease for lease in leases if lease.platform == platform]
        trouble.update(await _reopen(ctx, mine, answer.value))
        await look_at_funds(ctx, platform, answer.value, mine)

    with first_error():
        async with anyio.create_task_group() as together:  # a slow platform delays no other
            for platform in platforms:
                together.start_soon(survey, platform)
    return found, trouble


async def _reopen(ctx: Context, mine: list[LeaseRecord], listed: tuple[Instance, ...]) -> dict[str, str]:
    """Track rented machines again that are listed although they were believed gone or never rented."""
    by_id = {lease.instance_id: lease for lease in mine if lease.instance_id}
    by_token = {lease.id: lease for lease in mine}
    trouble = {}
    for instance in listed:
        lease = by_id.get(instance.id) or by_token.get(instance.token)
        if lease is None or instance.state is InstanceState.GONE:
            continue
        try:
            async with ctx.lock(lease.job_id, patience_s=1.0):
                await _take_back(ctx, read_lease(ctx.ledger, lease.id), instance)
        except Exception as error:
            trouble[instance.id] = what_went_wrong(error)
    return trouble


async def _take_back(ctx: Context, lease: LeaseRecord, listed: Instance) -> None:
    body = {"instance": listed.model_dump(mode="json"), "why": "it is listed although it was believed gone"}
    if lease.instance_id == listed.id:
        if lease.state is Lease.STOPPED:
            await tend(ctx, lease.id)
    elif lease.instance_id is not None:
        record_extra(ctx, lease, listed)
    elif lease.state is Lease.NONE:
        with ctx.ledger.transaction():
            ctx.ledger.add(lease.subject, "lease.unverified", body, state=Lease.UNVERIFIED)
            ctx.ledger.add(lease.subject, "lease.adopted", body, state=Lease.METERING)
    else:
        await tend(ctx, lease.id)


def _rows(ctx: Context, platform: str, mine: list[LeaseRecord], listed: tuple[Instance, ...]) -> list[Row]:
    # A stopped machine is not forgotten: its disk may bill for as long as it exists.
    there = [lease for lease in mine if lease.state in LIVE_LEASES or believed(ctx, lease.id) == "stopped"]
    shown = {lease.instance_id for lease in there}
    ended = {lease.instance_id: lease for lease in mine}
    return [_ours(ctx, lease) for lease in there] + [
        _listed(ctx, platform, i, ended.get(i.id)) for i in listed if i.id not in shown
    ]


def _listed(ctx: Context, platform: str, seen: Instance, lease: LeaseRecord | None) -> Row:
    """Return a machine that only the platform's list speaks of: not ours, or ours and believed gone."""
    return Row(
        platform=platform,
        instance_id=seen.id,
        state=seen.state,
        billing=seen.meter,
        price_usd_per_hour=seen.price_usd_per_hour,
        cost_usd=seen.cost_usd,
        lease=lease,
        job=read_job(ctx.ledger, lease.job_id) if lease else None,
        since=seen.created_at,
        stopped_usd_per_hour=seen.stopped_usd_per_hour,
        note="listed although it was seen gone" if lease else "not rented by gpuwarden",
    )


def _ours(ctx: Context, lease: LeaseRecord) -> Row:
    job = read_job(ctx.ledger, lease.job_id)
    lease = lease_now(ctx, lease.id)
    seen = lease.instance
    doubt = lease.state is Lease.UNVERIFIED or seen is None
    notes = []
    if doubt:
        notes.append("unverified: counts as billing")
    if job.state in TERMINAL_JOBS:
        notes.append(f"the job {job.state.told}")
    if seen is not None and seen.state in {InstanceState.INTERRUPTED, InstanceState.STOPPED}:
        notes.append(f"{seen.state}; its disk may bill")
    return Row(
        platform=lease.platform,
        instance_id=lease.instance_id,
        state=seen.state if seen else "unknown",
        billing=None if doubt else seen.meter if seen else None,
        price_usd_per_hour=seen.price_usd_per_hour if seen else None,
        cost_usd=lease.cost,
        lease=lease,
        job=job,
        since=lease.opened_at,
        note="; ".join(notes),
        stopped_usd_per_hour=seen.stopped_usd_per_hour if seen else None,
        stopped_at=stopped_at(ctx, lease),
        clocks=clocks_of(ctx, lease, job),
    )
