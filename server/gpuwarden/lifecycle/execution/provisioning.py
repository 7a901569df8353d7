"""From an accepted job to a machine that can be used, and back again where none comes up.

Every step writes its intent, commits, makes its call, and writes the outcome. A lost reply is looked for by its token.
"""

from __future__ import annotations

from typing import Final

import anyio

from gpuwarden.core.errors import RateLimited, Refused, WardenError
from gpuwarden.core.models import Answer, Instance, InstanceState, JobSpec, Known, Resources, Unknown
from gpuwarden.core.money import usd
from gpuwarden.core.reasons import Code, because
from gpuwarden.core.states import Job, Lease
from gpuwarden.lifecycle.context import STEP_S, Context
from gpuwarden.lifecycle.ending.termination import request_end
from gpuwarden.lifecycle.execution.bootstrap import NoContact, bootstrap, greet_own
from gpuwarden.lifecycle.execution.price_change import price_settled
from gpuwarden.lifecycle.execution.transitions import MAYBE_DONE, move, over_cap
from gpuwarden.lifecycle.monitoring.meter import believed, look, spent
from gpuwarden.lifecycle.records import JobRecord, LeaseRecord, lease_ids, read_job, read_lease
from gpuwarden.lifecycle.timeouts import in_time

MAX_GENERATIONS: Final = 5
FETCH_S: Final = 3600
"""How long a machine is wanted after its job's time is over, so that a person can fetch what is there."""


async def accepted(ctx: Context, job: JobRecord) -> bool:
    """Begin: rent a machine, or contact the user's own."""
    if job.cancel_requested:
        return move(ctx, job, Job.CANCELED, because(Code.CANCELED_EARLY))
    if ctx.profile(job.spec.platform).meter.metered:
        return await _rent(ctx, job)
    try:
        with anyio.fail_after(STEP_S):
            place = await greet_own(ctx, ctx.owned_place(job.spec.platform))
    except (*MAYBE_DONE, TimeoutError):
        return False  # it does not answer now; the job waits
    except WardenError as refusal:
        reason = because(Code.REFUSED_HOST, message=refusal.message)
        return move(ctx, job, Job.FAILED, reason, code=refusal.code, next=[s.as_dict() for s in refusal.next_steps])
    return move(ctx, job, Job.SUBMITTING, place=place.model_dump(mode="json"))


async def _rent(ctx: Context, job: JobRecord) -> bool:
    """Write that an instance will be rented, then rent it."""
    generation = job.generation + 1
    lease = f"{job.id}-i{generation}"
    with ctx.ledger.transaction():
        intent = {"job": job.id, "platform": job.spec.platform, "generation": generation}
        ctx.ledger.add(f"lease/{lease}", "create.intent", intent, state=Lease.UNVERIFIED, token=lease)
        state = None if job.state is Job.PROVISIONING else Job.PROVISIONING
        ctx.ledger.add(job.subject, "job.provisioning", {"lease": lease, "generation": generation}, state=state)
    job = read_job(ctx.ledger, job.id)
    return await _create(ctx, job, read_lease(ctx.ledger, lease), _bounded(ctx, job))


def wanted(spec: JobSpec) -> Resources:
    """Return the machine that a job asks for."""
    return Resources(
        gpu=spec.gpu,
        gpu_count=spec.gpu_count,
        disk_gb=spec.disk_gb,
        interruptible=spec.interruptible,
        durable_storage=spec.durable_storage,
    )


def _bounded(ctx: Context, job: JobRecord) -> Resources:
    """Return the request to the provider: at most the checked price, and no longer than needed.

    No cap is requested from a platform that reports no price.
    """
    spec = job.spec
    runs = 1 + spec.max_restarts if spec.interruptible else 1
    boot_s = ctx.profile(spec.platform).limits.boot_timeout_s
    return wanted(spec).model_copy(
        update={
            "max_price_usd_per_hour": job.price,
            "deadline_s": spec.timeout_s and boot_s + runs * spec.timeout_s + FETCH_S,
        }
    )


async def _create(ctx: Context, job: JobRecord, lease: LeaseRecord, resources: Resources) -> bool:
    try:
        answer: Answer[Instance] = await ctx.provider(lease.platform).create(resources, lease.id)
    except MAYBE_DONE as lost:
        answer = Unknown(lost.message)
    except RateLimited as busy:
        ctx.ledger.add(lease.subject, "create.refused", {"why": busy.message}, state=Lease.NONE)
        return False
    except WardenError as refusal:
        ctx.ledger.add(lease.subject, "create.refused", {"why": refusal.message}, state=Lease.NONE)
        return move(ctx, job, Job.FAILED, because(Code.REFUSED_RENT, message=refusal.message), code=refusal.code)
    if isinstance(answer, Known) and answer.value.token != lease.id:
        answer = Unknown(f"the answer names machine {answer.value.id}, which does not carry the token {lease.id}")
    if isinstance(answer, Known) and (other := _holder(ctx, lease, answer.value)):
        answer = Unknown(f"the answer names machine {answer.value.id}, which belongs to lease {other}")
    if isinstance(answer, Unknown):
        ctx.ledger.add(lease.subject, "create.unknown", {"why": answer.why})
        return False
    _rented(ctx, lease, "lease.created", answer.value)
    return True


def _holder(ctx: Context, lease: LeaseRecord, instance: Instance) -> str | None:
    """Return another lease of exactly this machine: no two jobs are given one, or the end of one ends both."""
    for name in (n for n in lease_ids(ctx.ledger) if n != lease.id and believed(ctx, n) != "gone"):
        other = read_lease(ctx.ledger, name)
        if (other.platform, other.instance_id) == (lease.platform, instance.id):
            return name
    return None


def _rented(ctx: Context, lease: LeaseRecord, kind: str, instance: Instance) -> None:
    ctx.ledger.add(lease.subject, kind, {"instance": instance.model_dump(mode="json")}, state=Lease.METERING)


async def provisioning(ctx: Context, job: JobRecord) -> bool:
    """Wait for the machine that was rented; find it first, where the answer was lost."""
    assert job.lease is not None
    if job.cancel_requested:
        return move(ctx, job, Job.CANCELED, because(Code.CANCELED_EARLY))
    if over_cap(ctx, job):
        return move(ctx, job, Job.CANCELED, because(Code.COST_CAP_EARLY, cap=usd(job.spec.max_cost_usd)))
    lease = read_lease(ctx.ledger, job.lease)
    if lease.state is Lease.NONE:
        if job.generation >= MAX_GENERATIONS:
            return move(ctx, job, Job.FAILED, because(Code.NO_INSTANCE_RENTED, tries=job.generation))
        return await _rent(ctx, job)
    if lease.instance_id is None:
        return await _adopt(ctx, lease)
    return await _booting(ctx, job, lease, await look(ctx, lease.id))


async def tend(ctx: Context, lease_id: str) -> None:
    """Find out about an instance whatever became of its job. The caller has the job's lock."""
    lease = read_lease(ctx.ledger, lease_id)
    if lease.instance_id is not None:
        await look(ctx, lease_id)
        await _give_back(ctx, lease_id)
    elif lease.state is Lease.UNVERIFIED:
        await _adopt(ctx, lease)


async def _adopt(ctx: Context, lease: LeaseRecord) -> bool:
    """Look for an instance that carries our token, after a crash or a lost reply."""
    provider = ctx.provider(lease.platform)
    try:
        found = await in_time(lease.platform, provider.find(lease.id))
    except WardenError as error:
        found = Unknown(error.message)
    if isinstance(found, Unknown):
        return False
    ours = [i for i in found.value if i.token == lease.id]
    if any(_holder(ctx, lease, i) for i in ours):
        return False  # whatever that answer means, it is neither our machine nor the lack of one
    if ours:
        first, *others = sorted(ours, key=lambda i: (i.created_at or 0, i.id))
        with ctx.ledger.transaction():  # once the first is known nobody looks for the others again
            _rented(ctx, lease, "lease.adopted", first)
            for extra in others:
                record_extra(ctx, lease, extra)
        return True
    looked = ctx.ledger.last(lease.subject, "create.absent")
    if looked is None:
        ctx.ledger.add(lease.subject, "create.absent", {"why": "no instance carries the token; one look"})
        return False
    if ctx.clock.now() - looked.at < provider.settle_s:
        return False
    ctx.ledger.add(lease.subject, "lease.none", {"why": "no instance carries the token; two looks"}, state=Lease.NONE)
    return True


def record_extra(ctx: Context, lease: LeaseRecord, extra: Instance) -> None:
    """Keep a second instance with a lease's token in sight: no job uses it, and it bills."""
    n = 1
    while ctx.ledger.state(f"lease/{lease.id}-extra{n}") is not None:
        n += 1
    subject = f"lease/{lease.id}-extra{n}"
    body = {"job": lease.job_id, "platform": lease.platform, "why": "a second instance carries this token"}
    with ctx.ledger.transaction():
        ctx.ledger.add(subject, "lease.extra", body, state=Lease.UNVERIFIED)
        ctx.ledger.add(subject, "lease.adopted", {"instance": extra.model_dump(mode="json")}, state=Lease.METERING)


async def _booting(ctx: Context, job: JobRecord, lease: LeaseRecord, answer: Answer[Instance | None]) -> bool:
    if isinstance(answer, Unknown):
        return False
    instance = answer.value
    if instance is None:
        if read_lease(ctx.ledger, lease.id).state is not Lease.STOPPED:
            return False
        return move(ctx, job, Job.FAILED, because(Code.GONE_EARLY))
    if instance.state in {InstanceState.RUNNING, InstanceState.BOOTING}:
        settled = price_settled(ctx, job, instance)
        if settled == "no":
            return await _abandon(ctx, job, lease, "it bills more than was checked and nobody approved that in time")
        if settled == "ask":
            return False
    if instance.state is InstanceState.RUNNING:
        return await _meet(ctx, job, lease, instance)
    limit = ctx.profile(lease.platform).limits.boot_timeout_s
    if instance.state is InstanceState.FAILED:
        return await _abandon(ctx, job, lease, "it failed to boot")
    if instance.state is InstanceState.BOOTING and ctx.clock.now() - lease.opened_at > limit:
        return await _abandon(ctx, job, lease, f"it did not boot within {limit} s")
    if instance.state is InstanceState.INTERRUPTED:
        await restart(ctx, lease, instance)
    return False


async def _meet(ctx: Context, job: JobRecord, lease: LeaseRecord, instance: Instance) -> bool:
    """First contact with a machine that runs. One that lets nobody in is waited for as long as for a boot."""
    try:
        if instance.place is None:
            raise NoContact("the provider has not reported its address yet")
        try:
            with anyio.fail_after(STEP_S):
                place = await bootstrap(ctx, lease, instance.place)
        except TimeoutError:
            raise NoContact(f"it did not answer within {STEP_S:g} s") from None
    except NoContact as silence:
        waiting = ctx.ledger.last(lease.subject, "host.waiting")
        limit = ctx.profile(lease.platform).limits.boot_timeout_s
        if waiting is None:
            ctx.ledger.add(lease.subject, "host.waiting", {"why": str(silence)})
        elif ctx.clock.now() - waiting.at > limit:
            why = f"it ran for {limit} s and could not be reached ({silence})"
            return await _abandon(ctx, job, lease, why)
        return False
    except Refused as unfit:
        found = [f.model_dump(mode="json") for f in unfit.findings]
        reason = because(Code.UNFIT_HOST, message=unfit.message)
        steps = [s.as_dict() for s in unfit.next_steps]
        return move(ctx, job, Job.FAILED, reason, code=unfit.code, findings=found, next=steps)
    return move(ctx, job, Job.SUBMITTING, place=place.model_dump(mode="json"))


async def _abandon(ctx: Context, job: JobRecord, lease: LeaseRecord, why: str) -> bool:
    """Give back an instance that never came up. It never ran a job, so nothing can be lost."""
    if ctx.ledger.last(lease.subject, "abandon.intent") is None:
        ctx.ledger.add(lease.subject, "abandon.intent", {"why": why}, state=Lease.STOPPING)
    await _give_back(ctx, lease.id)
    paid = spent(ctx, lease.id)
    return move(ctx, job, Job.FAILED, because(Code.GIVEN_BACK, cause=why, cost=usd(paid)))


async def _give_back(ctx: Context, lease_id: str) -> None:
    """Ask for the end of an abandoned instance, again and again: the request may have been lost."""
    subject = f"lease/{lease_id}"
    if ctx.ledger.state(subject) == Lease.STOPPING and ctx.ledger.last(subject, "abandon.intent") is not None:
        await request_end(ctx, lease_id, "terminate")


async def restart(ctx: Context, lease: LeaseRecord, instance: Instance) -> None:
    """Start an interrupted instance again, where the platform does not do it by itself."""
    if ctx.profile(lease.platform).spot.auto_resume is True:
        return
    try:
        await ctx.provider(lease.platform).start(instance.id)
    except WardenError as error:
        ctx.ledger.add(lease.subject, "start.refused", {"why": error.message})
