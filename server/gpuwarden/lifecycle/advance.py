"""Move a job on as far as it goes now. Any process may do so; what a crash left open, the next call finishes.

Every step writes its intent, commits, makes its call, and writes the outcome. When an intent has no outcome the step
looks for what it may have done before it does it again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import anyio

from gpuwarden.core.errors import BadReply, NotFound, RateLimited, Refused, Unreachable, WardenError
from gpuwarden.core.fence import scrubbed, secret_values
from gpuwarden.core.models import Answer, Instance, InstanceState, JobSpec, Known, Observation, Resources, Unknown
from gpuwarden.core.states import TERMINAL_JOBS, Job, Lease
from gpuwarden.lifecycle.contact import NoContact, greet, greet_own, pinned
from gpuwarden.lifecycle.ending import ask_end
from gpuwarden.lifecycle.meter import look, spent
from gpuwarden.lifecycle.records import JobRecord, LeaseRecord, read_job, read_lease
from gpuwarden.lifecycle.warden import LOCK_PATIENCE_S, STEP_S, Warden
from gpuwarden.remote.launch import DIED

MAX_STEPS: Final = 8
MAX_GENERATIONS: Final = 5
FETCH_S: Final = 3600
"""How long a machine is wanted after its job's time is over, so that a person can fetch what is there."""
CANCEL_GRACE_S: Final = 10.0
SAVE_GRACE_S: Final = 120.0
"""What a job that met its cap has after SIGTERM to write a checkpoint; a caller does not wait for all of it."""
MAYBE_DONE = (Unreachable, BadReply)
"""After these nobody knows whether the call was carried out."""


async def advance(w: Warden, job_id: str) -> JobRecord:
    """Take the steps that can be taken now, and return where the job is."""
    read_job(w.ledger, job_id)
    async with w.lock(job_id):
        return await advance_locked(w, job_id)


async def advance_locked(w: Warden, job_id: str) -> JobRecord:
    """The same, for a caller that holds the job's lock: a step that may be long is begun only while others can wait."""
    begun = anyio.current_time()
    for _ in range(MAX_STEPS):
        job = read_job(w.ledger, job_id)
        step = STEPS.get(job.state)
        if step is None or not await step(w, job) or anyio.current_time() - begun > LOCK_PATIENCE_S - STEP_S:
            break
    return read_job(w.ledger, job_id)


def move(w: Warden, job: JobRecord, state: Job, why: str = "", **body: object) -> bool:
    """Record a job's move; True, so that a step can end with it."""
    w.ledger.add(job.subject, f"job.{state}", {"why": why, **body}, state=state)
    return True


# ----------------------------------------------------------------------------------------------------- renting


async def _accepted(w: Warden, job: JobRecord) -> bool:
    if job.cancel_requested:
        return move(w, job, Job.CANCELED, "canceled before it was launched")
    if w.profile(job.spec.platform).meter.metered:
        return await _rent(w, job)
    try:
        with anyio.fail_after(STEP_S):
            place = await greet_own(w, w.owned_place(job.spec.platform))
    except (*MAYBE_DONE, TimeoutError):
        return False  # it does not answer now; the job waits
    except WardenError as refusal:
        return move(w, job, Job.FAILED, f"{refusal.message}. {refusal.hint}", code=refusal.code)
    return move(w, job, Job.SUBMITTING, place=place.model_dump(mode="json"))


async def _rent(w: Warden, job: JobRecord) -> bool:
    """Write that an instance will be rented, then rent it."""
    generation = job.generation + 1
    lease = f"{job.id}-i{generation}"
    with w.ledger.transaction():
        intent = {"job": job.id, "platform": job.spec.platform, "generation": generation}
        w.ledger.add(f"lease/{lease}", "create.intent", intent, state=Lease.UNVERIFIED, token=lease)
        state = None if job.state is Job.PROVISIONING else Job.PROVISIONING
        w.ledger.add(job.subject, "job.provisioning", {"lease": lease, "generation": generation}, state=state)
    job = read_job(w.ledger, job.id)
    return await _create(w, job, read_lease(w.ledger, lease), _bounded(w, job))


def wanted(spec: JobSpec) -> Resources:
    """The machine that a job asks for."""
    return Resources(
        gpu=spec.gpu,
        gpu_count=spec.gpu_count,
        disk_gb=spec.disk_gb,
        interruptible=spec.interruptible,
        durable_storage=spec.durable_storage,
    )


def _bounded(w: Warden, job: JobRecord) -> Resources:
    """What is asked of the provider: at no higher price than the one that was checked, and for no longer than needed.

    A platform that tells no prices holds no cap, so none is asked for where none was told.
    """
    spec = job.spec
    runs = 1 + spec.max_restarts if spec.interruptible else 1
    boot_s = w.profile(spec.platform).limits.boot_timeout_s
    return wanted(spec).model_copy(
        update={
            "max_price_usd_per_hour": job.price,
            "deadline_s": spec.timeout_s and boot_s + runs * spec.timeout_s + FETCH_S,
        }
    )


async def _create(w: Warden, job: JobRecord, lease: LeaseRecord, resources: Resources) -> bool:
    try:
        answer: Answer[Instance] = await w.provider(lease.platform).create(resources, lease.id)
    except MAYBE_DONE as lost:
        answer = Unknown(lost.message)
    except RateLimited as busy:
        w.ledger.add(lease.subject, "create.refused", {"why": busy.message}, state=Lease.NONE)
        return False
    except WardenError as refusal:
        w.ledger.add(lease.subject, "create.refused", {"why": refusal.message}, state=Lease.NONE)
        return move(w, job, Job.FAILED, f"the platform refused to rent a machine: {refusal.message}", code=refusal.code)
    if isinstance(answer, Known) and answer.value.token != lease.id:
        answer = Unknown(f"the answer tells of machine {answer.value.id}, which does not carry the token {lease.id}")
    if isinstance(answer, Unknown):
        w.ledger.add(lease.subject, "create.unknown", {"why": answer.why})
        return False
    _rented(w, lease, "lease.created", answer.value)
    return True


def _rented(w: Warden, lease: LeaseRecord, kind: str, instance: Instance) -> None:
    w.ledger.add(lease.subject, kind, {"instance": instance.model_dump(mode="json")}, state=Lease.METERING)


async def _provisioning(w: Warden, job: JobRecord) -> bool:
    assert job.lease is not None
    if job.cancel_requested:
        return move(w, job, Job.CANCELED, "canceled before it was launched")
    if _over_cap(w, job):
        return move(w, job, Job.CANCELED, f"max_cost_usd {job.spec.max_cost_usd} was met before the launch")
    lease = read_lease(w.ledger, job.lease)
    if lease.state is Lease.NONE:
        if job.generation >= MAX_GENERATIONS:
            return move(w, job, Job.FAILED, f"no machine was rented in {job.generation} tries")
        return await _rent(w, job)
    if lease.instance_id is None:
        return await _adopt(w, lease)
    return await _booting(w, job, lease, await look(w, lease.id))


async def tend(w: Warden, lease_id: str) -> None:
    """Find out about an instance whatever became of its job. The caller holds the job's lock."""
    lease = read_lease(w.ledger, lease_id)
    if lease.instance_id is not None:
        await look(w, lease_id)
        await _give_back(w, lease_id)
    elif lease.state is Lease.UNVERIFIED:
        await _adopt(w, lease)


async def _adopt(w: Warden, lease: LeaseRecord) -> bool:
    """Look for an instance that carries our token, after a crash or a lost reply."""
    provider = w.provider(lease.platform)
    try:
        found = await provider.find(lease.id)
    except WardenError as error:
        found = Unknown(error.message)
    if isinstance(found, Unknown):
        return False
    ours = [i for i in found.value if i.token == lease.id]
    if ours:
        first, *others = sorted(ours, key=lambda i: (i.created_at or 0, i.id))
        with w.ledger.transaction():  # once the first is known nobody looks for the others again
            _rented(w, lease, "lease.adopted", first)
            for extra in others:
                record_extra(w, lease, extra)
        return True
    looked = w.ledger.last(lease.subject, "create.absent")
    if looked is None:
        w.ledger.add(lease.subject, "create.absent", {"why": "no instance carries the token; one look"})
        return False
    if w.clock.now() - looked.at < provider.settle_s:
        return False
    w.ledger.add(lease.subject, "lease.none", {"why": "no instance carries the token; two looks"}, state=Lease.NONE)
    return True


def record_extra(w: Warden, lease: LeaseRecord, extra: Instance) -> None:
    """Keep a second instance with a lease's token in sight: no job uses it, and it bills."""
    n = 1
    while w.ledger.state(f"lease/{lease.id}-extra{n}") is not None:
        n += 1
    subject = f"lease/{lease.id}-extra{n}"
    body = {"job": lease.job_id, "platform": lease.platform, "why": "a second instance carries this token"}
    with w.ledger.transaction():
        w.ledger.add(subject, "lease.extra", body, state=Lease.UNVERIFIED)
        w.ledger.add(subject, "lease.adopted", {"instance": extra.model_dump(mode="json")}, state=Lease.METERING)


async def _booting(w: Warden, job: JobRecord, lease: LeaseRecord, answer: Answer[Instance | None]) -> bool:
    if isinstance(answer, Unknown):
        return False
    instance = answer.value
    if instance is None:
        if read_lease(w.ledger, lease.id).state is not Lease.STOPPED:
            return False
        return move(w, job, Job.FAILED, "the instance was gone before the job could start")
    if instance.state is InstanceState.RUNNING:
        return await _meet(w, job, lease, instance)
    limit = w.profile(lease.platform).limits.boot_timeout_s
    if instance.state is InstanceState.FAILED:
        return await _abandon(w, job, lease, "it failed to boot")
    if instance.state is InstanceState.BOOTING and w.clock.now() - lease.opened_at > limit:
        return await _abandon(w, job, lease, f"it did not boot within {limit} s")
    if instance.state is InstanceState.INTERRUPTED:
        await _restart(w, lease, instance)
    return False


async def _meet(w: Warden, job: JobRecord, lease: LeaseRecord, instance: Instance) -> bool:
    """First contact with a machine that runs. One that lets nobody in is waited for as long as for a boot."""
    try:
        if instance.place is None:
            raise NoContact("the provider has not told its address yet")
        try:
            with anyio.fail_after(STEP_S):
                place = await greet(w, lease, instance.place)
        except TimeoutError:
            raise NoContact(f"it did not answer within {STEP_S:g} s") from None
    except NoContact as silence:
        waiting = w.ledger.last(lease.subject, "host.waiting")
        limit = w.profile(lease.platform).limits.boot_timeout_s
        if waiting is None:
            w.ledger.add(lease.subject, "host.waiting", {"why": str(silence)})
        elif w.clock.now() - waiting.at > limit:
            why = f"it ran for {limit} s and could not be reached ({silence})"
            return await _abandon(w, job, lease, why)
        return False
    except Refused as unfit:
        why = f"the machine is not fit for the job: {unfit.message}. {unfit.hint} It is still rented and billing."
        found = [f.model_dump(mode="json") for f in unfit.findings]
        return move(w, job, Job.FAILED, why, code=unfit.code, findings=found)
    return move(w, job, Job.SUBMITTING, place=place.model_dump(mode="json"))


async def _abandon(w: Warden, job: JobRecord, lease: LeaseRecord, why: str) -> bool:
    """Give back an instance that never came up. It never ran anything of ours, so there is nothing to lose."""
    if w.ledger.last(lease.subject, "abandon.intent") is None:
        w.ledger.add(lease.subject, "abandon.intent", {"why": why}, state=Lease.STOPPING)
    await _give_back(w, lease.id)
    paid = spent(w, lease.id)
    cost = "unknown" if paid is None else f"{paid:.4f} USD"
    return move(w, job, Job.FAILED, f"the instance was given back because {why}; cost so far: {cost}")


async def _give_back(w: Warden, lease_id: str) -> None:
    """Ask for the end of an abandoned instance, again and again: the request may have been lost."""
    subject = f"lease/{lease_id}"
    if w.ledger.state(subject) == Lease.STOPPING and w.ledger.last(subject, "abandon.intent") is not None:
        await ask_end(w, lease_id, "terminate")


async def _restart(w: Warden, lease: LeaseRecord, instance: Instance) -> None:
    """Start an interrupted instance again, where the platform does not do it by itself."""
    if w.profile(lease.platform).spot.auto_resume is True:
        return
    try:
        await w.provider(lease.platform).start(instance.id)
    except WardenError as error:
        w.ledger.add(lease.subject, "start.refused", {"why": error.message})


# --------------------------------------------------------------------------------------------------- launching


async def _submitting(w: Warden, job: JobRecord) -> bool:
    assert job.place is not None
    attempt = _attempt(w, job)
    if job.cancel_requested:
        launched = await _launched(w, job, attempt)
        if launched is None:
            return False
        if not launched:
            return move(w, job, Job.CANCELED, "canceled before it was launched")
    if job.lease is not None:
        answer = await look(w, job.lease)
        if isinstance(answer, Known) and (stopped := _machine_lost(w, job, answer.value)) is not None:
            return stopped
    token = f"{job.id}-a{attempt}"
    secrets = _secret_values(w, job)
    if w.ledger.used("submit.intent", token) is None:
        w.ledger.add(job.subject, "submit.intent", {"attempt": attempt}, token=token)
    backend = w.backend(w.profile(job.spec.platform).backend)
    try:
        with anyio.fail_after(STEP_S):
            handle = await backend.submit(job.spec, job.place, job.id, secrets=secrets, attempt=attempt)
    except (*MAYBE_DONE, TimeoutError):
        return False  # submit is idempotent on token and attempt: the next call asks again
    except WardenError as refusal:
        return move(w, job, Job.FAILED, f"the job could not be launched: {refusal.message}", code=refusal.code)
    body = {"handle": handle.model_dump(mode="json"), "attempt": attempt}
    w.ledger.add(job.subject, "job.submitted", body, state=Job.RUNNING)
    return True


def _attempt(w: Warden, job: JobRecord) -> int:
    """The attempt that the present move to *submitting* announced; the first is 1."""
    moved = w.ledger.last(job.subject, "job.submitting")
    return int(moved.body.get("attempt", 1)) if moved else 1


async def _launched(w: Warden, job: JobRecord, attempt: int) -> bool | None:
    """Whether an attempt may have been launched; None when nobody can tell."""
    if job.attempt < attempt:
        return False
    assert job.place is not None
    try:
        found = await w.backend(w.profile(job.spec.platform).backend).find(job.place, job.id)
    except WardenError:
        return None
    return None if isinstance(found, Unknown) else found.value is not None


def _secret_values(w: Warden, job: JobRecord) -> dict[str, str]:
    missing = [name for name in job.spec.secrets if not w.env.get(name)]
    if missing:
        raise NotFound(
            f"job {job.id} needs the secret(s) {', '.join(missing)}, which have no value in this process",
            "Set them in the environment that gpuwarden runs in, then call again; the job waits.",
        )
    return {name: w.env[name] for name in job.spec.secrets}


# ------------------------------------------------------------------------------------------------------ running


async def _running(w: Warden, job: JobRecord) -> bool:
    assert job.handle is not None
    machine: Answer[Instance | None] | None = await look(w, job.lease) if job.lease else None
    if job.cancel_requested or _over_cap(w, job):
        return await _end(w, job)
    observed = await observe(w, job)
    state, why = judge(job, observed, machine)
    if state is Job.UNKNOWN and job.id in w.blind:
        why = w.blind[job.id].message
    if state is job.state:
        return False
    if state is Job.FAILED and _gone(machine) and not _lease_ended(w, job):
        return False  # gone is believed on the second look
    told: dict[str, Any] = {"observation": observed.model_dump(mode="json")} if observed else {}
    kept = scrubbed({"why": why, **told}, secret_values(w.env, job.spec.secrets))  # what the job itself may have said
    return move(w, job, state, **kept)


async def observe(w: Warden, job: JobRecord) -> Observation | None:
    """What the backend sees of a job; None when it can't see it."""
    if job.handle is None:
        return None
    w.observed.pop(job.id, None)
    w.blind.pop(job.id, None)
    try:
        seen = (await w.backend(job.handle.backend).poll([job.handle])).get(job.handle.token)
    except WardenError as error:
        w.blind[job.id] = error
        return None
    if seen is not None:
        w.observed[job.id] = seen
    return seen


def judge(job: JobRecord, seen: Observation | None, machine: Answer[Instance | None] | None) -> tuple[Job, str]:
    """The job's next state from two observations: of the process, and of the machine under it."""
    instance = machine.value if isinstance(machine, Known) else None
    off = instance is not None and instance.state in {InstanceState.INTERRUPTED, InstanceState.STOPPED}
    if seen is not None and seen.state in {Job.SUCCEEDED, Job.CANCELED, Job.PREEMPTED}:
        return seen.state, seen.why
    if seen is not None and seen.state is Job.FAILED:
        if not seen.why.startswith(DIED):
            return Job.FAILED, seen.why
        if off or (job.spec.interruptible and instance is not None):
            return Job.PREEMPTED, "the machine was taken back in the middle of the run"
        if _gone(machine):
            return Job.FAILED, "the instance is gone, and the job with it"
        return Job.FAILED, seen.why
    if _gone(machine):
        return Job.FAILED, "the instance is gone, and the job with it"
    if off:
        return Job.PREEMPTED, "the machine was taken back in the middle of the run"
    if seen is None or seen.state is Job.UNKNOWN:
        return Job.UNKNOWN, seen.why if seen else "the machine does not answer"
    return seen.state, seen.why


def _gone(machine: Answer[Instance | None] | None) -> bool:
    return isinstance(machine, Known) and machine.value is None


def _lease_ended(w: Warden, job: JobRecord) -> bool:
    return job.lease is not None and read_lease(w.ledger, job.lease).state is Lease.STOPPED


def _over_cap(w: Warden, job: JobRecord) -> bool:
    if job.lease is None or job.spec.max_cost_usd is None:
        return False
    cost = spent(w, job.lease)
    return cost is not None and cost >= job.spec.max_cost_usd


async def _end(w: Warden, job: JobRecord) -> bool:
    """End the process of a job that was canceled or met its cap. The machine stays: that is another question."""
    assert job.handle is not None
    observed = await observe(w, job)
    if observed is not None and observed.state in {Job.SUCCEEDED, Job.FAILED} and not observed.why.startswith(DIED):
        return move(w, job, observed.state, observed.why)
    try:
        grace_s = CANCEL_GRACE_S if job.cancel_requested else SAVE_GRACE_S
        result = await w.backend(job.handle.backend).stop(job.handle, grace_s=grace_s)
    except WardenError:
        return False
    if result == "pending":
        return False
    why = "canceled on request" if job.cancel_requested else f"stopped at max_cost_usd {job.spec.max_cost_usd}"
    return move(w, job, Job.CANCELED, why)


async def _preempted(w: Warden, job: JobRecord) -> bool:
    """Relaunch the identical command in the same folder, so that it resumes from its checkpoint."""
    if job.cancel_requested:
        return move(w, job, Job.CANCELED, "canceled on request")
    if _over_cap(w, job):
        return move(w, job, Job.CANCELED, f"stopped at max_cost_usd {job.spec.max_cost_usd}")
    if job.attempt > job.spec.max_restarts:
        return move(w, job, Job.FAILED, f"interrupted {job.attempt} times; max_restarts is {job.spec.max_restarts}")
    place = job.place
    if job.lease is not None:
        answer = await look(w, job.lease)
        if isinstance(answer, Unknown):
            return False
        if answer.value is None:
            ended = _lease_ended(w, job)
            return ended and move(w, job, Job.FAILED, "the machine was taken back for good, with what was on it")
        if answer.value.state is InstanceState.INTERRUPTED:
            await _restart(w, read_lease(w.ledger, job.lease), answer.value)
        if answer.value.state is not InstanceState.RUNNING or answer.value.place is None:
            return False
        place = pinned(w, job.lease, answer.value.place)
    assert place is not None
    return move(w, job, Job.SUBMITTING, "relaunch", attempt=job.attempt + 1, place=place.model_dump(mode="json"))


def _machine_lost(w: Warden, job: JobRecord, instance: Instance | None) -> bool | None:
    """Handle a machine that went away while a launch was being made; None when it is there."""
    if instance is None:
        return _lease_ended(w, job) and move(w, job, Job.FAILED, "the instance was gone before the launch")
    if instance.state in {InstanceState.INTERRUPTED, InstanceState.STOPPED}:
        return move(w, job, Job.PREEMPTED, "the machine was taken back before the launch")
    return None


Step = Callable[[Warden, JobRecord], Awaitable[bool]]
STEPS: Final[dict[Job, Step]] = {
    Job.ACCEPTED: _accepted,
    Job.PROVISIONING: _provisioning,
    Job.SUBMITTING: _submitting,
    Job.QUEUED: _running,
    Job.RUNNING: _running,
    Job.UNKNOWN: _running,
    Job.PREEMPTED: _preempted,
}
assert set(STEPS) | TERMINAL_JOBS | {Job.DRAFT} == set(Job)
