"""Advance an accepted job until it has a usable machine; terminate a machine that does not become usable.

Every step records its intent, commits, makes its call, and records the outcome. If a reply is lost, the step searches
for the instance by its token. A step returns whether the job's state changed, so that the caller can run the next step.
"""

from __future__ import annotations

import math
from typing import Final

import anyio

from gpuwarden.core.clock import doubled
from gpuwarden.core.errors import AuthFailed, NoCapacity, RateLimited, Refused, WardenError
from gpuwarden.core.models import Answer, Instance, InstanceState, JobSpec, Known, Resources, Unknown
from gpuwarden.core.money import usd
from gpuwarden.core.reasons import Code, because
from gpuwarden.core.states import Job, Lease
from gpuwarden.ledger.events import (
    AbandonIntent,
    AutoTeardownOrdered,
    CreateAbsent,
    CreateDoubted,
    CreateIntent,
    CreateRefused,
    CreateUnknown,
    HostWaiting,
    JobCanceled,
    JobFailed,
    JobMovedOn,
    JobProvisioning,
    JobSubmitting,
    LeaseAdopted,
    LeaseCreated,
    LeaseExtra,
    LeaseNone,
    RelaunchIntent,
    SelfStopOrdered,
    StartRefused,
)
from gpuwarden.lifecycle.context import STEP_S, Context
from gpuwarden.lifecycle.execution.bootstrap import NoContact, bootstrap, pin_host_key
from gpuwarden.lifecycle.execution.price_change import allowed_price, price_settled
from gpuwarden.lifecycle.execution.transitions import MAYBE_DONE, move, over_cap
from gpuwarden.lifecycle.leases.accounts import BoundProvider, account_in_use
from gpuwarden.lifecycle.leases.expirations import longest_run_s
from gpuwarden.lifecycle.leases.meter import confirmed_end, given_back, poll_lease, spent
from gpuwarden.lifecycle.leases.shared_answers import shared_answers
from gpuwarden.lifecycle.leases.termination import request_end
from gpuwarden.lifecycle.records import JobRecord, LeaseRecord, read_job, read_lease, recalled

MAX_GENERATIONS: Final = 5
RELAUNCH_WAIT_S: Final = 300.0
"""Seconds before the first retry if a platform has no capacity for an interrupted job. The wait doubles each time."""
HURRIED_WAIT_S: Final = 5.0
MOST_HURRIED_S: Final = 300.0
"""Initial and maximum delay in seconds before a rate-limited create request is retried. The delay doubles each time."""
FETCH_S: Final = 3600
"""Seconds that a machine is kept after its job's time limit, so that the user can pull its outputs.

This time is added to any grace period that the user set.
"""


async def accepted(ctx: Context, job: JobRecord) -> bool:
    """Start an accepted job: rent a machine, or contact the user's machine."""
    if job.cancel_requested or recalled(ctx.ledger, job.id):
        return move(ctx, job, JobCanceled(), because(Code.CANCELED_EARLY))
    if ctx.profile(job.spec.platform).meter.metered:
        return not _in_hurry(ctx, job) and await rent(ctx, job)
    try:
        with anyio.fail_after(STEP_S):
            place = await pin_host_key(ctx, ctx.owned_place(job.spec.platform))
    except (*MAYBE_DONE, TimeoutError):
        return False  # the machine does not respond; the job waits
    except WardenError as refusal:
        failed = JobFailed(code=refusal.code, following=tuple(s.as_dict() for s in refusal.next_steps))
        return move(ctx, job, failed, because(Code.REFUSED_HOST, message=refusal.message))
    return move(ctx, job, JobSubmitting(place=place))


def _in_hurry(ctx: Context, job: JobRecord) -> bool:
    """Return whether the job's platform rate-limited another job's create request in this pass over all jobs."""
    walk = shared_answers(ctx)
    return walk is not None and job.spec.platform in walk.hurried


async def rent(ctx: Context, job: JobRecord) -> bool:
    """Record the account and the intent to rent an instance, then rent the instance.

    The job fails if the policy no longer allows the platform.
    """
    platform = job.spec.platform
    if not ctx.policy.allows(platform):
        return move(ctx, job, JobFailed(code=Refused.code), because(Code.FORBIDDEN, platform=platform))
    try:
        account = await account_in_use(ctx, platform)
    except AuthFailed as missing:
        return _refused(ctx, job, missing.message, missing.code)
    generation = job.generation + 1
    lease = f"{job.id}-i{generation}"
    with ctx.ledger.transaction():
        intent = CreateIntent(job=job.id, platform=platform, generation=generation, account=account)
        ctx.ledger.add(f"lease/{lease}", intent, token=lease)
        rents = JobProvisioning(lease=lease, generation=generation)
        ctx.ledger.add(job.subject, rents, moves=job.state is not Job.PROVISIONING)
    # The request limits the price to the checked price, if known, and the lifetime to the longest time needed.
    job, spec = read_job(ctx.ledger, job.id), job.spec
    most_s = longest_run_s(ctx, spec)
    limits = {"max_price_usd_per_hour": job.price, "deadline_s": most_s and most_s + FETCH_S + patience_s(ctx, job.id)}
    return await _create(ctx, job, read_lease(ctx.ledger, lease), wanted(spec).model_copy(update=limits))


def wanted(spec: JobSpec) -> Resources:
    """Return the resources of the machine that a job requests."""
    return Resources(
        gpu=spec.gpu,
        gpu_count=spec.gpu_count,
        disk_gb=spec.disk_gb,
        interruptible=spec.interruptible,
        durable_storage=spec.durable_storage,
        options=spec.options,
    )


def patience_s(ctx: Context, job_id: str) -> int:
    """Return the longest time in seconds that the user allowed between the job's end and the machine's teardown."""
    ordered = ctx.ledger.last(f"job/{job_id}", AutoTeardownOrdered)
    self_stop = ctx.ledger.last(f"job/{job_id}", SelfStopOrdered)
    return math.ceil(max(ordered.data.grace_s if ordered else 0.0, self_stop.data.after_s if self_stop else 0.0))


async def _create(ctx: Context, job: JobRecord, lease: LeaseRecord, resources: Resources) -> bool:
    """Send the create request and record its outcome. A response that contains another lease's machine is treated as
    lost.

    A platform may refuse a request and still carry it out, and its list may be outdated. Therefore the job keeps
    waiting for its machine, which counts as billed, until a second poll `settle_s` seconds later: if a machine is
    found, it is adopted as if the request had succeeded; otherwise the job fails with the refusal. If the same work is
    submitted elsewhere in the meantime, the user must approve it (`spending_question`). If the platform refuses before
    anything was ordered, such as after a search without results, the job fails at once and can be submitted elsewhere.
    """
    try:
        answer: Answer[Instance] = await ctx.provider(lease.platform).create(resources, lease.id)
    except MAYBE_DONE as lost:
        answer = Unknown(lost.message)
    except WardenError as refusal:
        if isinstance(refusal, RateLimited) and (walk := shared_answers(ctx)) is not None:
            walk.hurried.add(lease.platform)
        with ctx.ledger.transaction():
            ctx.ledger.add(lease.subject, CreateDoubted(why=refusal.message, code=refusal.code))
            if refusal.unsent:
                ctx.ledger.add(lease.subject, CreateRefused(why=refusal.message))
        return _refused_for_good(ctx, job, lease) if refusal.unsent else await _adopt(ctx, lease)
    if isinstance(answer, Known) and answer.value.token != lease.id:
        answer = Unknown(f"the response contains machine {answer.value.id}, which does not have the token {lease.id}")
    if isinstance(answer, Known) and (other := _holder(ctx, lease, answer.value)):
        answer = Unknown(f"the response contains machine {answer.value.id}, which belongs to lease {other}")
    if isinstance(answer, Unknown):
        ctx.ledger.add(lease.subject, CreateUnknown(why=answer.why))
        return False
    with ctx.ledger.transaction():
        ctx.ledger.add(lease.subject, LeaseCreated(instance=answer.value))
        if answer.value.state is InstanceState.FAILED:
            record_abandon_intent(ctx, lease, answer.value.why)
    if answer.value.state is InstanceState.FAILED:
        return await _abandon(ctx, job, lease, answer.value.why)
    return True


def _refused_for_good(ctx: Context, job: JobRecord, lease: LeaseRecord) -> bool:
    """Fail a job whose request was refused, or advance it to its next choice if the platform had no capacity.

    A rate-limited or lost request is repeated instead.
    """
    doubted = ctx.ledger.last(lease.subject, CreateDoubted)
    if doubted is None or _rate_limited(ctx, lease.subject) or job.given_up == lease.id:
        return False
    if doubted.data.code == NoCapacity.code and ctx.ledger.last(job.subject, RelaunchIntent) is not None:
        return False  # keep trying this platform, because capacity may return after an interruption
    if doubted.data.code == NoCapacity.code and job.choice + 1 < len(job.choices):
        following = job.choices[job.choice + 1]
        # The event also records that no machine was rented under the abandoned lease; otherwise the job would keep
        # waiting for one. The next step sends the request to the next platform.
        given_up = JobMovedOn(
            choice=job.choice + 1,
            platform=following.platform,
            gpu=following.gpu,
            lease=lease.id,
            generation=job.generation,
            why=doubted.data.why,
        )
        ctx.ledger.add(job.subject, given_up)
        return True
    return _refused(ctx, job, doubted.data.why, doubted.data.code)


def _rate_limited(ctx: Context, lease: str) -> bool:
    """Return whether the platform refused to create a lease's machine because of its rate limit."""
    doubted = ctx.ledger.last(lease, CreateDoubted)
    return doubted is not None and doubted.data.code == RateLimited.code


def _refused(ctx: Context, job: JobRecord, why: str, code: str) -> bool:
    return move(ctx, job, JobFailed(code=code), because(Code.REFUSED_RENT, message=why))


def _holder(ctx: Context, lease: LeaseRecord, instance: Instance) -> str | None:
    """Return the id of another lease that holds this machine, if any.

    Two jobs must not share a machine, because terminating it for one job would also end the other job.
    """
    for name in (s.removeprefix("lease/") for s in ctx.ledger.leases_of_instance(instance.id)):
        if (
            name != lease.id
            and confirmed_end(ctx, name) != "gone"
            and read_lease(ctx.ledger, name).platform == lease.platform
        ):
            return name
    return None


async def provisioning(ctx: Context, job: JobRecord) -> bool:
    """Wait for the rented machine; if the reply to the create request was lost, search for the machine first."""
    assert job.lease is not None
    if job.cancel_requested:
        return move(ctx, job, JobCanceled(), because(Code.CANCELED_EARLY))
    if over_cap(ctx, job):
        return move(ctx, job, JobCanceled(), because(Code.COST_CAP_EARLY, cap=usd(job.spec.max_cost_usd)))
    lease = read_lease(ctx.ledger, job.lease)
    if lease.state is Lease.NONE:
        if _refused_for_good(ctx, job, lease):
            return True
        again = ctx.ledger.last(job.subject, RelaunchIntent)
        if again is None and recalled(ctx.ledger, job.id):
            return move(ctx, job, JobCanceled(), because(Code.CANCELED_EARLY))
        if _in_hurry(ctx, job):
            return False
        begun = max(again.data.generation if again else 0, job.given_up_generation)
        limited = [_rate_limited(ctx, f"lease/{job.id}-i{n}") for n in range(begun + 1, job.generation + 1)]
        tries = limited.count(False)  # a rate limit does not reflect the platform's capacity
        if limited and limited[-1]:
            wait_s = doubled(HURRIED_WAIT_S, len(limited), MOST_HURRIED_S)
        elif tries >= MAX_GENERATIONS:
            return move(ctx, job, JobFailed(), because(Code.NO_INSTANCE_RENTED, tries=tries))
        else:
            wait_s = RELAUNCH_WAIT_S * 2.0 ** (tries - 1) if again is not None else 0.0
        return False if 0 <= ctx.clock.now() - lease.since < wait_s else await rent(ctx, job)
    if lease.instance_id is None:
        return await _adopt(ctx, lease)
    if given_back(ctx, lease):
        return await _abandon(ctx, job, lease, "")
    return await _booting(ctx, job, lease, await poll_lease(ctx, lease.id))


async def refresh_lease(ctx: Context, lease_id: str) -> None:
    """Poll a lease's instance, regardless of its job's state. The caller holds the job's lock."""
    lease = read_lease(ctx.ledger, lease_id)
    if lease.instance_id is not None:
        await poll_lease(ctx, lease_id)
        await _give_back(ctx, lease_id)
    elif lease.state is Lease.UNVERIFIED:
        await _adopt(ctx, lease)


async def _adopt(ctx: Context, lease: LeaseRecord) -> bool:
    """Search for an instance with the lease's token, after a crash or a lost reply."""
    found = await _carrying(ctx, lease)
    if isinstance(found, Unknown):
        return False
    if found.value:
        with ctx.ledger.transaction():  # record all instances at once, because the search is not repeated
            ctx.ledger.add(lease.subject, LeaseAdopted(instance=found.value[0]))
            for extra in found.value[1:]:
                record_extra(ctx, lease, extra)
        return True
    looked, settle_s = ctx.ledger.last(lease.subject, CreateAbsent), ctx.provider(lease.platform).settle_s
    if looked is None or ctx.clock.now() < looked.at:  # if the clock was set back, the wait starts again
        settles_at = ctx.clock.now() + settle_s
        ctx.ledger.add(
            lease.subject, CreateAbsent(why="no instance has the token; first search", settles_at=settles_at)
        )
        return False
    if ctx.clock.now() - looked.at < settle_s:
        return False
    ctx.ledger.add(lease.subject, LeaseNone(why="no instance has the token; second search"))
    return True


async def _carrying(ctx: Context, lease: LeaseRecord) -> Answer[tuple[Instance, ...]]:
    """Search once for the instances with a lease's token. Return them oldest first."""
    try:
        found = await BoundProvider(ctx, lease).find(lease.id)
    except WardenError as error:
        found = Unknown(error.message)
    if isinstance(found, Known):
        ours = sorted((i for i in found.value if i.token == lease.id), key=lambda i: (i.created_at or 0, i.id))
        held = any(_holder(ctx, lease, i) for i in ours)  # then it is unknown whether this lease has a machine
        found = Unknown("the machine with the token belongs to another lease") if held else Known(tuple(ours))
    if isinstance(found, Unknown):
        ctx.unseen[lease.id] = found.why
    else:
        ctx.unseen.pop(lease.id, None)
    return found


def record_extra(ctx: Context, lease: LeaseRecord, extra: Instance) -> None:
    """Record a second instance with a lease's token as a separate lease, because it is billed but no job uses it."""
    n = 1
    while ctx.ledger.state(f"lease/{lease.id}-extra{n}") is not None:
        n += 1
    subject = f"lease/{lease.id}-extra{n}"
    why = "a second instance has this token"
    opened = LeaseExtra(job=lease.job_id, platform=lease.platform, account=lease.account, why=why)
    with ctx.ledger.transaction():
        ctx.ledger.add(subject, opened)
        ctx.ledger.add(subject, LeaseAdopted(instance=extra))


async def _booting(ctx: Context, job: JobRecord, lease: LeaseRecord, answer: Answer[Instance | None]) -> bool:
    """Handle the state of a rented machine: contact it, wait, restart it, or terminate it."""
    if isinstance(answer, Unknown):
        return False
    instance = answer.value
    if instance is None:
        if read_lease(ctx.ledger, lease.id).state is not Lease.STOPPED:
            return False
        return move(ctx, job, JobFailed(), because(Code.GONE_EARLY))
    if instance.state in {InstanceState.RUNNING, InstanceState.BOOTING}:
        settled = price_settled(ctx, job, instance)
        if settled == "no":
            return await _abandon(ctx, job, lease, "its price is above the checked price and was not approved in time")
        if settled == "ask":
            return False
    if instance.state is InstanceState.RUNNING:
        return await _meet(ctx, job, lease, instance)
    limit = ctx.profile(lease.platform).limits.boot_timeout_s
    refused = ctx.ledger.last(lease.subject, CreateDoubted)
    if instance.state in {InstanceState.STOPPED, InstanceState.INTERRUPTED} and refused is not None:
        return await _abandon(ctx, job, lease, f"it was created by a request that was refused ({refused.data.why})")
    if instance.state is InstanceState.FAILED:
        return await _abandon(ctx, job, lease, "it failed to boot")
    late = {
        InstanceState.BOOTING: f"it did not boot within {limit} s",
        InstanceState.STOPPED: "it was stopped before the job was launched",
        InstanceState.INTERRUPTED: "it was interrupted before the job was launched",
    }
    if instance.state in late and ctx.clock.now() - lease.opened_at > limit:
        return await _abandon(ctx, job, lease, late[instance.state])
    if instance.state is InstanceState.INTERRUPTED:
        await restart(ctx, lease, instance)
    return False


async def _meet(ctx: Context, job: JobRecord, lease: LeaseRecord, instance: Instance) -> bool:
    """Connect to a running machine for the first time. Retry an unreachable machine until the boot timeout."""
    try:
        if instance.place is None:
            raise NoContact("the provider has not reported its address yet")
        try:
            with anyio.fail_after(STEP_S):
                place = await bootstrap(ctx, lease, instance.place)
        except TimeoutError:
            raise NoContact(f"it did not respond within {STEP_S:g} s") from None
    except NoContact as silence:
        waiting = ctx.ledger.last(lease.subject, HostWaiting)
        limit = ctx.profile(lease.platform).limits.boot_timeout_s
        if waiting is None:
            ctx.ledger.add(lease.subject, HostWaiting(why=str(silence)))
        elif ctx.clock.now() - waiting.at > limit:
            why = f"it ran for {limit} s and could not be reached ({silence})"
            return await _abandon(ctx, job, lease, why)
        return False
    except Refused as unfit:
        following = tuple(s.as_dict() for s in unfit.next_steps)
        failed = JobFailed(code=unfit.code, findings=tuple(unfit.findings), following=following)
        return move(ctx, job, failed, because(Code.UNFIT_HOST, message=unfit.message))
    return move(ctx, job, JobSubmitting(attempt=job.attempt + 1, place=place))


async def _abandon(ctx: Context, job: JobRecord, lease: LeaseRecord, why: str) -> bool:
    """Terminate an instance that did not become usable. It did not run a job, so no outputs can be lost."""
    why = record_abandon_intent(ctx, lease, why)
    await _give_back(ctx, lease.id)
    paid = spent(ctx, lease.id)
    return move(ctx, job, JobFailed(), because(Code.GIVEN_BACK, cause=why, cost=usd(paid)))


def record_abandon_intent(ctx: Context, lease: LeaseRecord, why: str) -> str:
    """Record once that an instance will be terminated, and return the recorded reason."""
    intent = ctx.ledger.last(lease.subject, AbandonIntent)
    if intent is None:
        intent = ctx.ledger.add(lease.subject, AbandonIntent(why=why))
    return intent.data.why


async def _give_back(ctx: Context, lease_id: str) -> None:
    """Ask the platform to terminate an abandoned instance. Every call asks again, in case a request was lost."""
    subject = f"lease/{lease_id}"
    intent, state = ctx.ledger.last(subject, AbandonIntent), ctx.ledger.state(subject)
    if intent is None or state in {Lease.STOPPED, Lease.NONE}:
        return
    if state != Lease.STOPPING:  # it was confirmed gone, but the platform reports it again
        ctx.ledger.add(subject, AbandonIntent(why=intent.data.why))
    await request_end(ctx, lease_id, "terminate")


async def restart(ctx: Context, lease: LeaseRecord, instance: Instance) -> None:
    """Restart an interrupted instance, or raise its bid up to the checked or approved price."""
    try:
        if ctx.profile(lease.platform).spot.auto_resume is not True:
            await BoundProvider(ctx, lease).start(instance.id)
        elif most := allowed_price(ctx, read_job(ctx.ledger, lease.job_id)):
            await BoundProvider(ctx, lease).raise_bid(instance.id, most)
    except WardenError as error:
        ctx.ledger.add(lease.subject, StartRefused(why=error.message))
