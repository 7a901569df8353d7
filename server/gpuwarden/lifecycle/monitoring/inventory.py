"""List all machines on the platforms in use, including those that gpuwarden did not rent, and report failed queries."""

from __future__ import annotations

import logging
from collections.abc import Container
from dataclasses import dataclass
from typing import Final

import anyio
from anyio.lowlevel import checkpoint

from gpuwarden.core.deadlines import Deadline, Funds
from gpuwarden.core.errors import Internal, as_warden_error
from gpuwarden.core.models import Instance, InstanceState, Unknown
from gpuwarden.core.sanitize import line
from gpuwarden.core.states import AT_REST, LIVE_LEASES, TERMINAL_JOBS, Job, Lease, Teardown
from gpuwarden.core.task_groups import first_error
from gpuwarden.ledger.events import LeaseAdopted, LeaseUnverified
from gpuwarden.ledger.trouble import Trouble
from gpuwarden.lifecycle import timeouts
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.leases.expirations import clocks_of, stopped_at
from gpuwarden.lifecycle.leases.meter import lease_now
from gpuwarden.lifecycle.leases.self_stopped import may_self_stop, self_stopped
from gpuwarden.lifecycle.leases.shared_answers import sharing
from gpuwarden.lifecycle.monitoring.balances import check_balance, known_funds
from gpuwarden.lifecycle.records import (
    JobRecord,
    LeaseRecord,
    job_ids,
    lease_ids,
    lease_ids_of,
    read_job,
    read_lease,
)
from gpuwarden.lifecycle.timeouts import in_time

logger = logging.getLogger(__name__)
OPEN_JOBS: Final = tuple(s for s in Job if s not in TERMINAL_JOBS)
UNDER_WAY: Final = (Teardown.APPROVED, Teardown.EXECUTING, Teardown.NEEDS_HUMAN)
"""States of teardowns that proceed without asking the user again."""
SUBJECTS_OF_A_JOB: Final = 4
"""Number of ledger subjects that one pass reads for most jobs: the job, its lease, its receipt and its teardown."""


@dataclass(frozen=True)
class Row:
    """One machine. `lease` is None if gpuwarden did not rent it. `billing` is None if it is unknown; the machine then
    counts as billed.

    `since` is the rental time, `stopped_at` is the time when the machine was first observed off, and
    `stopped_usd_per_hour` is its price while it is off.
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
        """Return whether gpuwarden rented the machine."""
        return self.lease is not None

    @classmethod
    def of_lease(cls, ctx: Context, lease: LeaseRecord) -> Row:
        """Return the row for a lease whose machine may be billed or is stopped."""
        job = read_job(ctx.ledger, lease.job_id)
        lease = lease_now(ctx, lease.id)
        seen = lease.instance
        unseen = ctx.unseen.get(lease.id, "")
        doubt = lease.state is Lease.UNVERIFIED or seen is None or bool(unseen)
        notes = []
        if doubt:
            notes.append("unverified: counts as billed" + (f" ({unseen})" if unseen else ""))
        if job.state in AT_REST:
            notes.append(f"the job {job.state.phrase}")
        if seen is not None and seen.state in {InstanceState.INTERRUPTED, InstanceState.STOPPED}:
            own = lease.id == job.lease and self_stopped(ctx, job)
            notes.append(f"{'it stopped itself' if own else seen.state}; its disk may be billed")
        return cls(
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

    @classmethod
    def of_listed(cls, ctx: Context, platform: str, seen: Instance) -> Row:
        """Return the row for a listed machine that gpuwarden did not rent, or that the ledger records as gone."""
        known = _lease_of(ctx, platform, seen)
        lease = known if known is not None and known.instance_id == seen.id else None
        # If a listed item is not a machine, such as a schedule, the provider describes it in `why`.
        note = f" ({line(seen.why, 120)})" if seen.why and seen.place is None else ""
        return cls(
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
            note="listed although it was recorded as gone" if lease else f"not rented by gpuwarden{note}",
        )


@dataclass(frozen=True)
class Inventory:
    """All rows, the running jobs without a lease, and the failed queries (`unknown`).

    If `ledger` is set, it describes a problem with the ledger, and machines may be missing from the ledger.
    """

    rows: tuple[Row, ...]
    jobs: tuple[JobRecord, ...]
    unknown: dict[str, str]
    accounts: tuple[Funds, ...] = ()
    ledger: Trouble | None = None


async def reconcile(ctx: Context, skip: Container[str] = ()) -> dict[str, str]:
    """Advance every job, lease and teardown as far as possible. Return the reasons for failures, by id.

    Jobs in `skip` are omitted, because their platform or machine has not responded recently.
    """
    trouble: dict[str, str] = {}
    names = [job_id for job_id in unsettled(ctx) if job_id not in skip]
    ctx.ledger.keep(SUBJECTS_OF_A_JOB * len(names))
    open_jobs: list[JobRecord] = []
    for job_id in names:
        await checkpoint()  # let other tasks run, because each read replays a job's history
        open_jobs.append(read_job(ctx.ledger, job_id))
    under_way = ctx.ledger.subjects("teardown", *UNDER_WAY)
    if not open_jobs and not under_way:
        return trouble
    # imported only here, because most calls have nothing to advance and this import is slow
    from gpuwarden.lifecycle.teardown.gate import proceed

    live: list[LeaseRecord] = []
    for name in lease_ids(ctx.ledger, *LIVE_LEASES):
        await checkpoint()
        live.append(read_lease(ctx.ledger, name))
    ids = frozenset(names)
    looked_at = [lease for lease in live if lease.job_id in ids or lease.state is Lease.STOPPING]
    with sharing(ctx, open_jobs, looked_at):
        trouble |= await _advance_all(ctx, open_jobs)
        for ticket in (s.removeprefix("teardown/") for s in ctx.ledger.subjects("teardown", *UNDER_WAY)):
            try:
                await proceed(ctx, ticket)
            except Exception as error:
                trouble[ticket] = error_message(error)
    return trouble


async def _advance_all(ctx: Context, jobs: list[JobRecord]) -> dict[str, str]:
    """Advance jobs and their leases. Return the reasons for failures, by job id."""
    from gpuwarden.lifecycle.execution.advance import advance_locked
    from gpuwarden.lifecycle.execution.provisioning import refresh_lease
    from gpuwarden.lifecycle.execution.running import observe

    trouble: dict[str, str] = {}
    slow: set[str] = set()
    for platform, job_id in ((job.spec.platform, job.id) for job in jobs):
        await checkpoint()  # without this, steps without network traffic would block all other tasks
        if platform in slow:
            trouble[job_id] = f"not checked in this round: {platform} responds slowly"
            continue
        begun = anyio.current_time()
        try:
            async with ctx.lock(job_id, patience_s=1.0):
                job = await advance_locked(ctx, job_id)
                for lease_id in leases_of(ctx, job):
                    await refresh_lease(ctx, lease_id)
                if job.state in TERMINAL_JOBS and (
                    may_self_stop(ctx, job) or (job.spec.artifact_store and leases_of(ctx, job))
                ):
                    await observe(ctx, job)  # the status reports a failed self-stop or upload
        except Exception as error:
            trouble[job_id] = error_message(error)
        if anyio.current_time() - begun > timeouts.ASK_S and ctx.profile(platform).meter.metered:
            slow.add(platform)  # the platform's other jobs would delay the round as well
    return trouble


def error_message(error: Exception) -> str:
    """Return the message of the error that a step raised. Unexpected errors are also logged."""
    known = as_warden_error(error)
    if isinstance(known, Internal):
        logger.error("a step failed unexpectedly: %r", error)
        logger.debug("its traceback", exc_info=error)
    return known.message


def unsettled(ctx: Context) -> list[str]:
    """Return the ids of the jobs that have not ended or whose machine may be billed."""
    return list(dict.fromkeys((*job_ids(ctx.ledger, *OPEN_JOBS), *ctx.ledger.jobs_with_leases(*LIVE_LEASES))))


def leases_of(ctx: Context, job: JobRecord) -> list[str]:
    """Return the ids of a job's live leases."""
    return lease_ids_of(ctx.ledger, job.id, *LIVE_LEASES)


async def list_instances(ctx: Context) -> Inventory:
    """Reconcile, then list all machines on every platform that this ledger has used or that has an API key."""
    trouble = await reconcile(ctx)
    listed, unread = await sweep(ctx)
    there = await _machine_leases(ctx)
    rows: list[Row] = []
    for platform, machines in listed.items():
        mine = [lease for lease in there if lease.platform == platform]
        shown = {lease.instance_id for lease in mine}
        rows += [Row.of_lease(ctx, lease) for lease in mine]
        # Stopped machines are listed as well, because a disk may be billed as long as it exists.
        rows += [Row.of_listed(ctx, platform, machine) for machine in machines if machine.id not in shown]
    running = [read_job(ctx.ledger, j) for j in job_ids(ctx.ledger, *OPEN_JOBS)]
    unmetered = tuple(j for j in running if j.lease is None)
    return Inventory(tuple(rows), unmetered, trouble | unread, tuple(known_funds(ctx)), ctx.ledger.trouble())


async def sweep(ctx: Context) -> tuple[dict[str, tuple[Instance, ...]], dict[str, str]]:
    """Read the machine lists of all used or configured platforms. A listed machine recorded as ended is tracked again.

    Return the listed machines and the reasons for failures, by platform. A list that can't be read is empty.
    """
    there = await _machine_leases(ctx)
    platforms = sorted({*ctx.ledger.platforms(), *ctx.configured()})
    found: dict[str, tuple[Instance, ...]] = dict.fromkeys(platforms, ())
    trouble: dict[str, str] = {}

    async def survey(platform: str) -> None:
        try:
            answer = await in_time(platform, ctx.provider(platform).list())
        except Exception as error:
            answer = Unknown(error_message(error))
        if isinstance(answer, Unknown):
            trouble[platform] = answer.why
            return
        found[platform] = answer.value
        if ctx.ledger.readable_only is not None:  # the ledger is read-only
            for instance in answer.value:
                if (lease := _lease_of(ctx, platform, instance)) is not None:
                    ctx.seen.setdefault(lease.id, (ctx.clock.now(), instance))
        trouble.update(await _reopen(ctx, platform, answer.value))
        mine = [lease for lease in there if lease.platform == platform]
        await check_balance(ctx, platform, answer.value, mine)

    with first_error():
        async with anyio.create_task_group() as together:  # so that a slow platform does not delay others
            for platform in platforms:
                together.start_soon(survey, platform)
    return found, trouble


async def _machine_leases(ctx: Context) -> list[LeaseRecord]:
    """Return the leases whose machines may be billed, then those whose machines are stopped.

    Within each group, the least recently changed lease is first.
    """
    found = []
    for name in (*ctx.ledger.subjects("lease", *LIVE_LEASES), *ctx.ledger.resting()):
        await checkpoint()
        found.append(read_lease(ctx.ledger, name.removeprefix("lease/")))
    return found


def _lease_of(ctx: Context, platform: str, instance: Instance) -> LeaseRecord | None:
    """Return the latest lease recorded for a listed machine, or else the lease that its token identifies."""
    known = (f"lease/{instance.token}",) if ctx.ledger.state(f"lease/{instance.token}") is not None else ()
    for subject in (*reversed(ctx.ledger.leases_of_instance(instance.id)), *known):
        lease = read_lease(ctx.ledger, subject.removeprefix("lease/"))
        if lease.platform == platform:
            return lease
    return None


async def _reopen(ctx: Context, platform: str, listed: tuple[Instance, ...]) -> dict[str, str]:
    """Resume tracking the listed machines whose leases were recorded as gone or as never rented."""
    trouble = {}
    why = "it is listed although it was recorded as gone"
    for instance in listed:
        lease = _lease_of(ctx, platform, instance)
        if lease is None or instance.state is InstanceState.GONE:
            continue
        from gpuwarden.lifecycle.execution.provisioning import (
            record_abandon_intent,
            record_extra,
            refresh_lease,
        )  # imported here, because it is rarely needed

        try:
            async with ctx.lock(lease.job_id, patience_s=1.0):
                lease = read_lease(ctx.ledger, lease.id)
                if lease.instance_id not in {None, instance.id}:
                    record_extra(ctx, lease, instance)
                elif lease.instance_id is None and lease.state is Lease.NONE:
                    with ctx.ledger.transaction():
                        ctx.ledger.add(lease.subject, LeaseUnverified(instance=instance, why=why))
                        ctx.ledger.add(lease.subject, LeaseAdopted(instance=instance, why=why))
                        job = read_job(ctx.ledger, lease.job_id)
                        if job.lease != lease.id or job.state in TERMINAL_JOBS:  # it never ran a job and never will
                            record_abandon_intent(ctx, lease, "it was listed after its job had stopped waiting for it")
                elif lease.instance_id is None or lease.state is Lease.STOPPED:
                    await refresh_lease(ctx, lease.id)
        except Exception as error:
            trouble[instance.id] = error_message(error)
    return trouble
