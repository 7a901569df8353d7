"""The teardown gate: end a machine only after all its outputs are proven safe elsewhere and the user has approved.

An approval is bound to a digest of the facts that the user was shown. It expires and can be used only once. If the
facts change, the request must be approved again. After the stop or termination has been requested from the provider,
the instance is polled until its billing is confirmed stopped.
"""

from __future__ import annotations

import contextlib
import secrets as random
import shlex
from dataclasses import dataclass
from typing import Final

from gpuwarden.backends.base import HostKeyBackend
from gpuwarden.core.errors import BadRequest, Conflict, NotSupported, Refused, WardenError
from gpuwarden.core.guidance import Action, NextStep, approval, do
from gpuwarden.core.models import Unknown, Verb, Verdict
from gpuwarden.core.policy import WEAK, Channel
from gpuwarden.core.rules import Finding, Severity, run_rules
from gpuwarden.core.sanitize import named, quoted
from gpuwarden.core.states import LIVE_LEASES, OPEN_TEARDOWNS, TERMINAL_JOBS, Lease, Teardown
from gpuwarden.ledger.events import (
    ApprovalGranted,
    ApprovalUsed,
    AutoTeardownOrdered,
    LeaseStopping,
    LeaseUnverified,
    TeardownAwaitingHuman,
    TeardownBlocked,
    TeardownNeedsHuman,
    TeardownRequested,
    TeardownVerifiedStopped,
    TeardownWithdrawn,
)
from gpuwarden.lifecycle.artifacts.local_copies import Pulled, copy_for, verified_now
from gpuwarden.lifecycle.context import REHEARSAL, Context
from gpuwarden.lifecycle.execution.advance import advance, advance_locked
from gpuwarden.lifecycle.execution.provisioning import refresh_lease
from gpuwarden.lifecycle.execution.situation import following
from gpuwarden.lifecycle.leases.auto_teardown import automatic_teardown
from gpuwarden.lifecycle.leases.meter import confirmed_end, lease_now
from gpuwarden.lifecycle.leases.termination import call_sent, request_end, voided
from gpuwarden.lifecycle.records import (
    JobRecord,
    LeaseRecord,
    TeardownRecord,
    lease_ids_of,
    read_job,
    read_lease,
    read_teardown,
)
from gpuwarden.lifecycle.team import check_approver
from gpuwarden.lifecycle.teardown.facts import facts_digest, gather, not_copied
from gpuwarden.rules.catalog import rules_of
from gpuwarden.rules.facts import OutputFile

SHOWN: Final = 5
"""Maximum number of files named in a message."""
PATIENCE_S: Final = 600.0
"""If a machine is not confirmed stopped after this many seconds, the user must check the provider's console."""
_VOID: Final = "the approval is void: automatic teardown was canceled, or the approval expired before a call was sent"
FUTILE: Final = frozenset({"TD-VERB-001", "TD-VERB-002"})
"""Rules that an approval can't override: the platform does not support the verb, or billing would continue after it."""


@dataclass(frozen=True)
class TeardownView:
    """A teardown request as shown to the user or an agent."""

    record: TeardownRecord
    job: JobRecord
    lease: LeaseRecord
    findings: tuple[Finding, ...]
    dying: tuple[OutputFile, ...] = ()
    kept: tuple[OutputFile, ...] = ()
    copy_at: str | None = None
    unseen: str = ""
    """The reason why the last poll of the instance failed."""
    next_steps: tuple[NextStep, ...] = ()

    @property
    def complete(self) -> bool:
        """Return whether everything is proven, so that an approval in a client is sufficient."""
        return all(f.severity is Severity.INFO for f in self.findings)


async def request(ctx: Context, job_id: str, verb: Verb) -> TeardownView:
    """Request to stop or terminate a job's machine. Nothing happens to the machine before the user approves.

    The request is either blocked, with its findings, or has a ticket that the user can approve. A repeated call gathers
    the facts again. Raises NotSupported if the machine is not rented, and Conflict if the job has none.
    """
    job = read_job(ctx.ledger, job_id)
    if not ctx.profile(job.spec.platform).meter.metered:
        raise await _owned(ctx, job)
    async with ctx.lock(job_id):
        job = await advance_locked(ctx, job_id)
        lease, live = job.lease, lease_ids_of(ctx.ledger, job.id, *LIVE_LEASES)
        if lease is None:
            raise Conflict(f"job {job_id} has not rented a machine, so there is nothing to tear down")
        ended = lease not in live and not (verb == "terminate" and confirmed_end(ctx, lease) == "stopped")
        if ended and live:  # this lease has ended, and another lease of the job is billed
            lease = live[0]
        await refresh_lease(ctx, lease)
        ticket = _open_ticket(ctx, lease, verb)
        return await _proceed(ctx, ticket)


async def _owned(ctx: Context, job: JobRecord) -> NotSupported:
    """Return the error for a machine that is not rented, with the steps to remove the run folder."""
    with contextlib.suppress(WardenError):
        job = await advance(ctx, job.id)
    message = (
        f"{job.spec.platform} is not rented, so it is not billed and has no instance to tear down. "
        f"The state of job {job.id} is {job.state}"
    )
    if job.state not in TERMINAL_JOBS:
        cancel = do(Action.CANCEL, "to end its processes without changing the machine or its files", job_id=job.id)
        return NotSupported(message, cancel)
    if job.handle is None:
        return NotSupported(message, "The job was never launched there, so it left no files.")
    pulled = copy_for(ctx, job.id)
    proven = pulled is not None and verified_now(ctx, job.id, pulled).verdict is Verdict.PROVEN
    if job.outputs and not proven:
        only = f"Its outputs are in its run folder {job.handle.run_dir}; no copy of them is proven."
        pull = [do(Action.PULL, job_id=job.id)] if pulled is None else []
        verify = do(Action.VERIFY, "before you remove the run folder", job_id=job.id)
        return NotSupported(message, [only, *pull, verify])
    left = await not_copied(ctx, job, job.handle, pulled)
    if isinstance(left, Unknown):
        return NotSupported(message, f"Its run folder {job.handle.run_dir} can't be inspected now: {quoted(left.why)}.")
    if left.value:
        names = ", ".join(map(named, left.value[:SHOWN]))
        names += f" and {len(left.value) - SHOWN} more" if len(left.value) > SHOWN else ""
        only = f"Its run folder {job.handle.run_dir} has files that no copy contains: {names}."
        again = do(Action.PULL, "for each path that is not a declared output", job_id=job.id, also=("PATH",))
        return NotSupported(message, [only, again, do(Action.VERIFY, job_id=job.id)])
    copy = f"The copy in {pulled.dest} is proven, so the" if proven and pulled else "The job left no outputs, so the"
    remove = ["rm", "-r", "--", job.handle.run_dir]
    if job.handle.place.host and isinstance(ctx.backend(job.handle.backend), HostKeyBackend):  # reached over SSH
        remove = ["ssh", job.handle.place.host, shlex.join(remove)]
    return NotSupported(message, f"{copy} user may remove its run folder manually: {shlex.join(remove)}")


async def proceed(ctx: Context, ticket: str) -> TeardownView:
    """Gather a request's facts again, and advance it as far as possible."""
    job_id = read_teardown(ctx.ledger, ticket).job_id
    async with ctx.lock(job_id):
        return await _proceed(ctx, ticket)


def _open_ticket(ctx: Context, lease: str, verb: Verb) -> str:
    """Return the id of the request for a lease and a verb: an open one, the one that ended the machine, or a new one.

    If a request with another verb is being executed, return that request's id.
    """
    record = read_lease(ctx.ledger, lease)
    job = record.job_id
    for subject in ctx.ledger.subjects("teardown", *OPEN_TEARDOWNS, job=job):
        found = read_teardown(ctx.ledger, subject.removeprefix("teardown/"))
        if found.lease != lease:
            continue
        if found.verb == verb or found.state is Teardown.EXECUTING:
            return found.id
        why = f"{verb} was requested"
        with ctx.ledger.transaction():
            if found.state is Teardown.NEEDS_HUMAN:  # the verb had no effect, but another verb may work
                ctx.ledger.add(found.subject, TeardownRequested(why=why))
            ctx.ledger.add(found.subject, TeardownWithdrawn(why=why))
    if record.state in {Lease.STOPPED, Lease.NONE}:  # a repeated call must not ask the user again
        for subject in reversed(ctx.ledger.subjects("teardown", Teardown.VERIFIED_STOPPED, job=job)):
            found = read_teardown(ctx.ledger, subject.removeprefix("teardown/"))
            if found.lease == lease and found.verb in {verb, "terminate"}:
                return found.id
    if confirmed_end(ctx, lease) == "gone":
        raise Conflict(
            f"the instance of job {job} is gone, and its billing is confirmed stopped", "No teardown is needed."
        )
    ticket = f"t{random.token_hex(5)}"
    ctx.ledger.add(f"teardown/{ticket}", TeardownRequested(job=job, lease=lease, verb=verb))
    return ticket


async def _proceed(ctx: Context, ticket: str) -> TeardownView:
    record = read_teardown(ctx.ledger, ticket)
    if record.state in {Teardown.EXECUTING, Teardown.NEEDS_HUMAN}:
        await _finish(ctx, record)
    elif record.state is Teardown.APPROVED:
        await _execute(ctx, record)
    elif record.state in OPEN_TEARDOWNS and confirmed_end(ctx, record.lease) == "gone":
        why = "the instance was gone before this request was executed, and its billing is confirmed stopped"
        ctx.ledger.add(record.subject, TeardownWithdrawn(why=why))
    elif record.state in OPEN_TEARDOWNS:
        return await _judge(ctx, record)
    return _view(ctx, read_teardown(ctx.ledger, ticket))


async def _judge(ctx: Context, record: TeardownRecord) -> TeardownView:
    """Gather the facts, run the rules on them, and record the request's resulting state."""
    facts, pulled = await gather(ctx, record)
    findings = tuple(run_rules(rules_of("teardown"), facts))
    blocked = any(f.blocks for f in findings)
    seen = facts_digest(record, facts, pulled, findings)
    waiting = record.state is Teardown.AWAITING_HUMAN
    late = record.expires_at is not None and ctx.clock.now() > record.expires_at
    settled = record.state is (Teardown.BLOCKED if blocked else Teardown.AWAITING_HUMAN)
    if not settled or late or record.digest != seen or record.without_proof:
        judged = TeardownBlocked if blocked else TeardownAwaitingHuman
        event = judged(digest=seen, findings=findings, expires_at=ctx.clock.now() + ctx.policy.approval.ttl_s)
        with ctx.ledger.transaction():
            if waiting and not blocked:
                why = "the ticket expired" if late and record.digest == seen else "the facts changed"
                ctx.ledger.add(record.subject, TeardownRequested(why=why))
            ctx.ledger.add(record.subject, event, moves=not (blocked and record.state is Teardown.BLOCKED))
    kept = () if isinstance(facts.files, Unknown) else tuple(f for f in facts.files.value if not f.dies)
    record = read_teardown(ctx.ledger, record.id)
    return _view(ctx, record, findings, facts.dying, kept, pulled)


def _view(
    ctx: Context,
    record: TeardownRecord,
    findings: tuple[Finding, ...] | None = None,
    dying: tuple[OutputFile, ...] = (),
    kept: tuple[OutputFile, ...] = (),
    pulled: Pulled | None = None,
) -> TeardownView:
    if findings is None:
        findings = record.findings
    job, lease = read_job(ctx.ledger, record.job_id), lease_now(ctx, record.lease)
    copy_at = pulled.dest if pulled else None
    unseen, rest = ctx.unseen.get(record.lease, ""), following(ctx, job)
    return TeardownView(record, job, lease, findings, dying, kept, copy_at, unseen, rest)


async def approve(
    ctx: Context, ticket: str, seen: str, *, channel: Channel, by: str, loss: str | None = None
) -> TeardownView:
    """Record the user's approval of exactly the facts with digest `seen`, then execute the request.

    `loss` is the text that the user typed to accept losing unverified outputs. It must match the job's name, and is
    accepted only at a terminal. Raises Conflict if the facts have changed, or if the ticket has expired or has been
    used, and Refused if proof is missing.
    """
    job_id = read_teardown(ctx.ledger, ticket).job_id
    async with ctx.lock(job_id):
        record = read_teardown(ctx.ledger, ticket)
        if record.state not in {Teardown.AWAITING_HUMAN, Teardown.BLOCKED}:
            again = do(Action.TEARDOWN, "to get a new ticket", job_id=job_id)
            raise Conflict(f"ticket {ticket} is {record.state}; it can't be approved now", again)
        if record.expires_at is not None and ctx.clock.now() > record.expires_at:
            if record.state is Teardown.AWAITING_HUMAN:
                ctx.ledger.add(record.subject, TeardownRequested(why="the ticket expired"))
            await _judge(ctx, read_teardown(ctx.ledger, ticket))
            raise Conflict(f"ticket {ticket} has expired", "Show it again, then approve the current facts.")
        view = await _judge(ctx, record)
        if view.record.digest != seen:
            raise Conflict(
                f"the facts for ticket {ticket} have changed since they were shown", "Show the ticket again."
            )
        _check_channel(ctx, view, channel, loss)
        record = view.record
        active = ctx.active_policy
        granted = ApprovalGranted(
            digest=seen,
            channel=channel,
            by=by,
            policy=active.digest,
            expires_at=ctx.clock.now() + active.policy.approval.ttl_s,
            findings=record.findings,
            without_proof=loss is not None and record.state is Teardown.BLOCKED,
        )
        with ctx.ledger.transaction():
            if record.state is Teardown.BLOCKED:
                body = granted.model_dump(exclude={"event", "why"})
                given_up = TeardownAwaitingHuman(why="the user accepted losing unverified outputs", **body)
                ctx.ledger.add(record.subject, given_up)
            ctx.ledger.add(record.subject, granted)
        await _execute(ctx, read_teardown(ctx.ledger, ticket), fresh=True)
        return _view(ctx, read_teardown(ctx.ledger, ticket), view.findings, view.dying, view.kept)


def _check_channel(ctx: Context, view: TeardownView, channel: Channel, loss: str | None) -> None:
    """Raise Refused or BadRequest if an approval through this channel is not sufficient for the current request."""
    record = view.record
    check_approver(ctx)
    if channel not in ctx.policy.approval.channels:
        raise Refused(
            f"the policy does not allow approval through {channel}",
            f"It allows: {', '.join(ctx.policy.approval.channels)}.",
        )
    if channel == "rehearsal" and not view.lease.platform.startswith(REHEARSAL):
        raise Refused("a flag can't approve a teardown on a real platform", approval(record.id))
    futile = [f for f in view.findings if f.blocks and f.rule in FUTILE]
    if futile:
        raise Refused(f"approval can't override this rule: {futile[0].message}", futile[0].fix, view.findings)
    if record.state is Teardown.BLOCKED and loss is None:
        raise Refused(f"ticket {record.id} is blocked: proof is missing", "See its findings.", view.findings)
    if loss is not None and (channel != "terminal" or loss != view.job.spec.name):
        raise BadRequest(
            "the confirmation does not match the job name",
            f"Type the job's name, {view.job.spec.name!r}, at a terminal.",
        )
    if channel in WEAK and not view.complete:
        raise Refused(
            "approval in a client is not sufficient, because some facts are not proven",
            approval(record.id),
            view.findings,
        )


def silent(view: TeardownView, storage: bool = False) -> bool:
    """Return whether the findings require no user decision.

    Storage that is still billed after a stop is expected. If `storage` is true, the user has also accepted the storage
    that is billed after termination.
    """
    chosen = {"TD-VERB-002"} if storage or view.record.verb == "stop" else set()
    return all(not f.blocks and f.rule in chosen for f in view.findings)


def storage_accepted(ctx: Context, view: TeardownView, order: AutoTeardownOrdered) -> bool:
    """Return whether all storage that is billed after a machine's termination was accepted with its job."""
    profile = ctx.profile(view.lease.platform)
    return set(profile.residue("terminate", requested=view.job.spec.durable_storage)) <= set(order.storage)


async def approve_by_order(ctx: Context, ticket: str, seen: str, order: AutoTeardownOrdered) -> TeardownView:
    """Execute an automatic teardown for exactly the facts with digest `seen`, if the user has nothing to decide.

    Raises Conflict if the facts or the request's state have changed, and Refused if the user has to decide.
    """
    async with ctx.lock(read_teardown(ctx.ledger, ticket).job_id):
        record = read_teardown(ctx.ledger, ticket)
        if record.state is not Teardown.AWAITING_HUMAN:
            raise Conflict(f"ticket {ticket} is {record.state}; automatic teardown can't approve it")
        view = await _judge(ctx, record)
        if view.record.state is not Teardown.AWAITING_HUMAN or view.record.digest != seen:
            raise Conflict(f"the facts for ticket {ticket} have changed since the notice")
        if not silent(view, storage_accepted(ctx, view, order)) or view.record.verb != order.verb:
            raise Refused(f"ticket {ticket} needs the user's decision", approval(ticket), view.findings)
        origin = f"the approval of {order.receipt}" if order.through == "approval" else "the policy file"
        granted = ApprovalGranted(
            digest=seen,
            channel="automatic_teardown",
            by=f"automatic teardown, set by {origin}, by {order.by}"
            if order.by
            else f"automatic teardown, set by {origin}",
            policy=order.policy,
            expires_at=ctx.clock.now() + ctx.policy.approval.ttl_s,
            findings=view.record.findings,
        )
        with ctx.ledger.transaction():
            if automatic_teardown(ctx, view.job.id) != order:  # canceled by a hold or by the policy
                raise Refused(f"automatic teardown of job {view.job.id} was canceled", approval(ticket))
            ctx.ledger.add(record.subject, granted)
        await _execute(ctx, read_teardown(ctx.ledger, ticket), fresh=True)
        return _view(ctx, read_teardown(ctx.ledger, ticket), view.findings, view.dying, view.kept)


async def _execute(ctx: Context, record: TeardownRecord, *, fresh: bool = False) -> None:
    """Use an approval and call the provider. If the approval is outdated or void, the request must be approved again.

    `fresh` means that the facts have just been compared, under the same lock.
    """
    granted = ctx.ledger.last(record.subject, ApprovalGranted)
    assert granted is not None
    if voided(ctx, record):
        ctx.ledger.add(record.subject, TeardownRequested(why=_VOID))
        await _judge(ctx, read_teardown(ctx.ledger, record.id))
        return
    if not fresh:
        facts, pulled = await gather(ctx, record)
        findings = tuple(run_rules(rules_of("teardown"), facts))
        revoked = granted.data.channel == "automatic_teardown" and automatic_teardown(ctx, record.job_id) is None
        expired = not granted.data.holds_at(ctx.clock.now())
        if revoked or expired or facts_digest(record, facts, pulled, findings) != granted.data.digest:
            why = "the approval expired" if expired else "the facts changed after the approval"
            why = "automatic teardown was canceled" if revoked else why
            ctx.ledger.add(record.subject, TeardownRequested(why=why))
            await _judge(ctx, read_teardown(ctx.ledger, record.id))
            return
    lease = read_lease(ctx.ledger, record.lease)
    with ctx.ledger.transaction():
        used = ApprovalUsed(channel=granted.data.channel, digest=granted.data.digest, verb=record.verb)
        ctx.ledger.add(record.subject, used, token=f"{record.id}-{granted.seq}")
        # A machine with an unknown id is first looked up by its token, until it is found or confirmed not to exist.
        if lease.state in {Lease.METERING, Lease.UNVERIFIED} and lease.instance_id is not None:
            ctx.ledger.add(lease.subject, LeaseStopping(ticket=record.id, verb=record.verb))
    await _finish(ctx, read_teardown(ctx.ledger, record.id))


async def _finish(ctx: Context, record: TeardownRecord) -> None:
    """Send the request to the provider, and poll the machine. Each call does this until the new state is confirmed."""
    await refresh_lease(ctx, record.lease)
    if not _done(ctx, record):
        await request_end(ctx, record.lease, record.verb, record)
        await refresh_lease(ctx, record.lease)
    waited = ctx.clock.now() - record.since > PATIENCE_S
    if _done(ctx, record):
        cost = lease_now(ctx, record.lease).cost
        stopped = TeardownVerifiedStopped(cost_usd=cost, why="billing is confirmed stopped")
        ctx.ledger.add(record.subject, stopped)
    elif voided(ctx, record) and (waited or not call_sent(ctx, record)):  # no call was sent, or it had no effect
        with ctx.ledger.transaction():
            if record.state is Teardown.EXECUTING:
                ctx.ledger.add(record.subject, TeardownNeedsHuman(why=_VOID))
            ctx.ledger.add(record.subject, TeardownRequested(why=_VOID))
            if ctx.ledger.state(f"lease/{record.lease}") == Lease.STOPPING:
                ctx.ledger.add(f"lease/{record.lease}", LeaseUnverified(why=_VOID))
        await _judge(ctx, read_teardown(ctx.ledger, record.id))
    elif record.state is Teardown.EXECUTING and waited:
        unseen = ctx.unseen.get(record.lease, "")
        why = f"{record.verb} was requested over {PATIENCE_S:g} s ago, but billing is not confirmed stopped"
        why += f": {unseen}" if unseen else ""
        ctx.ledger.add(record.subject, TeardownNeedsHuman(why=why))


def _done(ctx: Context, record: TeardownRecord) -> bool:
    """Return whether the machine is confirmed stopped, or gone if its termination was requested."""
    return confirmed_end(ctx, record.lease) in ({"gone"} if record.verb == "terminate" else {"gone", "stopped"})


async def withdraw(ctx: Context, ticket: str, why: str) -> TeardownRecord:
    """Withdraw a request before it is executed."""
    async with ctx.lock(read_teardown(ctx.ledger, ticket).job_id):
        ctx.ledger.add(f"teardown/{ticket}", TeardownWithdrawn(why=why))
    return read_teardown(ctx.ledger, ticket)
