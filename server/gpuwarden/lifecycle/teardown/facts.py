"""Gather the facts that the teardown rules need about the machine, its files, and their proven copies."""

from __future__ import annotations

from gpuwarden.core.errors import WardenError
from gpuwarden.core.models import (
    Answer,
    Disclosure,
    Handle,
    Instance,
    InstanceState,
    Known,
    Manifest,
    Unknown,
    Verb,
    Verdict,
    digest,
)
from gpuwarden.core.profile import Profile
from gpuwarden.core.rules import Finding
from gpuwarden.core.states import AT_REST, LIVE_LEASES, TERMINAL_JOBS, Job, Lease
from gpuwarden.core.weights import checkpoint_like
from gpuwarden.ledger.events import ArtifactsPulled, OutputsDeclared, TeardownAwaitingHuman, TeardownBlocked
from gpuwarden.lifecycle.artifacts.local_copies import (
    CopyStatus,
    Pulled,
    complete_after,
    copy_for,
    last_pull,
    read_pull,
    verified_now,
)
from gpuwarden.lifecycle.artifacts.store_copy import StoreCopy, compare_with_store
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.execution.running import observe
from gpuwarden.lifecycle.leases.meter import poll_lease
from gpuwarden.lifecycle.leases.self_stopped import started_since
from gpuwarden.lifecycle.leases.shared_answers import sharing_nothing
from gpuwarden.lifecycle.records import (
    JobRecord,
    LeaseRecord,
    TeardownRecord,
    read_job,
    read_lease,
    read_teardown,
)
from gpuwarden.remote.transfer.destination import bare
from gpuwarden.rules.catalog import unusable_rules
from gpuwarden.rules.facts import OutputFile, TeardownFacts


async def gather(ctx: Context, record: TeardownRecord) -> tuple[TeardownFacts, Pulled | None]:
    """Gather the current facts for the teardown rules. Earlier responses are not reused."""
    job, lease = read_job(ctx.ledger, record.job_id), read_lease(ctx.ledger, record.lease)
    profile = ctx.profile(lease.platform)
    with sharing_nothing():
        machine = await poll_lease(ctx, lease.id)
    if lease.state is Lease.NONE or (lease.state is Lease.STOPPED and lease.instance_id is None):
        machine = Known(None)
    pulled, whole = last_pull(ctx, job.id), complete_copy(ctx, job)
    handle = await _handle(ctx, job, lease)
    listed = await _listed(ctx, job, machine, whole, handle)
    rests = isinstance(listed, Known) and whole is not None and listed.value is whole.manifest
    if isinstance(listed, Known):
        pulled = copy_for(ctx, job.id, listed.value)
    copy = verified_now(ctx, job.id, pulled) if pulled else CopyStatus()
    shown_last = whole.disclosure if rests and whole is not None else None
    store = None if rests else await _stored(ctx, job, handle, listed, pulled, copy)
    changed: tuple[str, ...] = ()
    if isinstance(listed, Known) and pulled is not None:
        before = {a.path: a.stamp for a in pulled.manifest.files}
        stored = store.files if store else frozenset()
        late = {a.path for a in listed.value.files if before.get(a.path) != a.stamp}
        changed = tuple(sorted(late - stored))
    # The job's recorded end comes from a file that the job itself can write, so observe the job again.
    with sharing_nothing():
        seen = await observe(ctx, job) if job.state in AT_REST else None
    facts = TeardownFacts(
        job_id=job.id,
        job_state=Job.RUNNING if seen is not None and seen.state is Job.RUNNING else job.state,
        verb=record.verb,
        profile=profile,
        machine=machine,
        files=_files(job, profile, record.verb, listed, pulled, store),
        missing=() if isinstance(listed, Unknown) else listed.value.missing,
        skipped=() if isinstance(listed, Unknown) else listed.value.skipped,
        manifest=pulled.manifest if pulled else None,
        changed=changed,
        copy_verdict=copy.verdict,
        copy_equal=copy.equal,
        copy_problems=copy.problems,
        copy_unread=copy.unread,
        copy_aside=copy.aside,
        other_jobs=_other_jobs(ctx, job, lease),
        unusable_rules=unusable_rules(),
        durable_storage=job.spec.durable_storage,
        store=store.address if store else "",
        store_why=store.why if store else "",
        disclosure=await _disclosed(ctx, job, lease, handle, shown_last),
        checkpoint_before=_checkpoint_before(ctx, job, lease),
    )
    return facts, pulled


async def _handle(ctx: Context, job: JobRecord, lease: LeaseRecord) -> Answer[Handle | None]:
    """Return the handle of the job that gpuwarden launched on a machine; None if no job was launched there.

    A launch that was refused or not confirmed may still have happened, so the machine is queried.
    """
    if lease.id != job.lease or (job.handle is None and (job.attempt == 0 or job.place is None)):
        return Known(None)
    if job.handle is not None or job.place is None:
        return Known(job.handle)
    try:
        found = await ctx.backend(ctx.profile(job.spec.platform).backend).find(job.place, job.id)
    except WardenError as error:
        found = Unknown(error.message)
    return Unknown(f"it is unknown whether the job was launched: {found.why}") if isinstance(found, Unknown) else found


async def _listed(
    ctx: Context,
    job: JobRecord,
    machine: Answer[Instance | None],
    whole: Pulled | None,
    handle: Answer[Handle | None],
) -> Answer[Manifest]:
    """List the files on the machine, or, if it is off, the files in a complete copy made after the job's end."""
    if isinstance(handle, Unknown):
        return handle
    if handle.value is None:
        return Known(Manifest(taken_at=0.0, files=()))
    try:
        return Known(await ctx.backend(handle.value.backend).list_files(handle.value, job.outputs))
    except WardenError as error:
        instance = machine.value if isinstance(machine, Known) else None
        off = instance is not None and instance.state in {InstanceState.STOPPED, InstanceState.INTERRUPTED}
        return Known(whole.manifest) if whole is not None and off else Unknown(error.message)


async def _stored(
    ctx: Context,
    job: JobRecord,
    handle: Answer[Handle | None],
    listed: Answer[Manifest],
    pulled: Pulled | None,
    copy: CopyStatus,
) -> StoreCopy | None:
    """Check the artifact store, if the job has one and the local copy is not sufficient."""
    if not job.spec.artifact_store or isinstance(listed, Unknown) or isinstance(handle, Unknown):
        return None
    proven = copy.verdict is Verdict.PROVEN and pulled is not None and all(pulled.has(f) for f in listed.value.files)
    if proven or handle.value is None:
        return None
    return await compare_with_store(ctx, job, handle.value, listed.value)


def complete_copy(ctx: Context, job: JobRecord) -> Pulled | None:
    """Return the latest complete copy of a job's outputs.

    A copy is complete if it was made after the job had ended and after outputs were last declared. A copy from an
    artifact store also requires the store's final report, and the machine must not have been started again since then.
    """
    since = complete_after(ctx, job.id)
    for event in reversed(ctx.ledger.events(job.subject, kind=ArtifactsPulled)) if since else ():
        if since is None or event.seq < since:
            break
        data = event.data
        # a file that a running job was still writing may be missing from the copy's manifest
        lacks = data.unsettled or (data.problems and not data.not_taken)
        pulled = None if lacks else read_pull(ctx, data.record, data.digest)
        if pulled is None or (pulled.store and started_since(ctx, job, event.seq)):
            continue
        return pulled
    return None


async def _disclosed(
    ctx: Context, job: JobRecord, lease: LeaseRecord, handle: Answer[Handle | None], shown_last: Disclosure | None
) -> Answer[Disclosure]:
    """Return the undeclared content of a rented machine.

    `shown_last` is the last disclosure in the artifact store if the machine is off.
    """
    if lease.id != job.lease:
        return Unknown("gpuwarden received no reply when it requested this machine, and never connected to it")
    if isinstance(handle, Unknown):
        return handle
    if handle.value is None:
        return Known(Disclosure())
    return Known(shown_last) if shown_last is not None else await _disclose(ctx, job, handle.value)


async def _disclose(ctx: Context, job: JobRecord, handle: Handle) -> Answer[Disclosure]:
    """Return foreign processes, and the files that the job wrote outside its outputs, except unchanged inputs."""
    try:
        backend = ctx.backend(handle.backend)
        found = await backend.disclose(handle)
        # An input with a new modification time may still have its original content.
        new = {file.path for file in found.files}
        sent = {file.path: file.sha256 for file in job.inputs if file.path in new}
        there = (await backend.manifest(handle, sent)).files if sent else ()
    except WardenError as error:
        return Unknown(error.message)
    same = {file.path for file in there if bare(file.sha256 or "") == sent.get(file.path)}
    # The machine does not know about outputs declared after the launch, so remove them from its list here.
    fresh = (
        file
        for file in found.files
        if file.path not in same and not any(f"{file.path}/".startswith(f"{output}/") for output in job.declared)
    )
    return Known(found.model_copy(update={"files": tuple(fresh)}))


async def not_copied(ctx: Context, job: JobRecord, handle: Handle, copy: Pulled | None) -> Answer[tuple[str, ...]]:
    """Return the paths of the outputs and undeclared checkpoints on the machine that a local copy lacks.

    The answer is unknown if the machine can't be fully inspected.
    """
    listed = await _listed(ctx, job, Known(None), None, Known(handle))
    disclosed = await _disclose(ctx, job, handle)
    if isinstance(listed, Unknown):
        return listed
    if isinstance(disclosed, Unknown):
        return disclosed
    if not disclosed.value.complete:
        return Unknown("the list of its files is incomplete")
    outputs = (file.path for file in listed.value.files if copy is None or not copy.has(file))
    undeclared = (file.path for file in disclosed.value.files if checkpoint_like(file.path))
    return Known((*outputs, *listed.value.skipped, *undeclared))


def _checkpoint_before(ctx: Context, job: JobRecord, lease: LeaseRecord) -> str:
    """Return the TD-ELSE-002 message if the last check of a machine reported an undeclared checkpoint.

    The message is empty if outputs were declared after that check, because they may include the checkpoint.
    """
    judged = [
        event
        for subject in ctx.ledger.subjects("teardown", job=job.id)
        if read_teardown(ctx.ledger, subject.removeprefix("teardown/")).lease == lease.id
        for kind in (TeardownBlocked, TeardownAwaitingHuman)
        if (event := ctx.ledger.last(subject, kind)) is not None
    ]
    last = max(judged, key=lambda event: event.seq, default=None)
    declared = ctx.ledger.last(job.subject, OutputsDeclared)
    if last is None or (declared is not None and declared.seq > last.seq):
        return ""
    return next((found.message for found in last.data.findings if found.rule == "TD-ELSE-002"), "")


def _files(
    job: JobRecord,
    profile: Profile,
    verb: Verb,
    listed: Answer[Manifest],
    pulled: Pulled | None,
    store: StoreCopy | None,
) -> Answer[tuple[OutputFile, ...]]:
    """Return each listed file with its storage tier, its copies, and whether the teardown deletes it."""
    if isinstance(listed, Unknown):
        return listed
    rows = []
    for file in listed.value.files:
        path = profile.place_of(file.path)
        tier = profile.tier_of(path, requested=job.spec.durable_storage)
        rows.append(
            OutputFile(
                path=file.path,
                size=file.size,
                tier=tier.tier if tier else "unknown",
                dies=not profile.survives(path, verb, requested=job.spec.durable_storage),
                copied=pulled is not None and pulled.has(file),
                stored=store is not None and file.path in store.files,
            )
        )
    return Known(tuple(rows))


def _other_jobs(ctx: Context, job: JobRecord, lease: LeaseRecord) -> tuple[str, ...]:
    """Return the other jobs that use the same instance and have not ended."""
    found = []
    for subject in ctx.ledger.leases_of_instance(lease.instance_id) if lease.instance_id else ():
        other = read_lease(ctx.ledger, subject.removeprefix("lease/"))
        same = other.platform == lease.platform and other.state in LIVE_LEASES
        if same and other.job_id != job.id and read_job(ctx.ledger, other.job_id).state not in TERMINAL_JOBS:
            found.append(other.job_id)
    return tuple(found)


def facts_digest(
    record: TeardownRecord, facts: TeardownFacts, pulled: Pulled | None, findings: tuple[Finding, ...]
) -> str:
    """Return the digest of the facts that the user approves: files that are destroyed, their copies, and findings."""
    machine = facts.machine
    return digest(
        {
            "ticket": record.id,
            "verb": record.verb,
            "lease": record.lease,
            "instance": None if isinstance(machine, Unknown) or machine.value is None else machine.value.id,
            "job_state": facts.job_state,
            "files": "unknown" if isinstance(facts.files, Unknown) else [vars(f) for f in facts.files.value],
            "missing": list(facts.missing),
            "skipped": list(facts.skipped),
            "pull": pulled.digest if pulled else None,
            **({"store": [facts.store, facts.store_why]} if facts.store else {}),
            "copy": facts.copy_verdict,
            "findings": [f.model_dump(mode="json") for f in findings],
        }
    )
