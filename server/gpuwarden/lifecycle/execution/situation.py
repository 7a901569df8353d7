"""Compute a job's remaining steps from its state and its machine's state."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpuwarden.core.errors import WardenError
from gpuwarden.core.guidance import Action, NextStep, do, steps
from gpuwarden.core.models import InstanceState, Verb
from gpuwarden.core.next_step import Machine, Situation, plan
from gpuwarden.core.reasons import Code
from gpuwarden.core.states import LIVE_LEASES, OPEN_TEARDOWNS, TERMINAL_JOBS, Job, Lease
from gpuwarden.ledger.events import AutoTeardownAnnounced, AutoTeardownHeld, AutoTeardownOrdered, CreateAbsent
from gpuwarden.lifecycle.artifacts.local_copies import copy_state
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.execution.pausing import stop_is_reversible
from gpuwarden.lifecycle.execution.price_change import price_question
from gpuwarden.lifecycle.execution.recovery_advice import recovery_steps
from gpuwarden.lifecycle.execution.relaunch import awaits_store
from gpuwarden.lifecycle.leases.auto_teardown import automatic_teardown, effective_order, watched
from gpuwarden.lifecycle.leases.meter import confirmed_end, given_back, lease_now
from gpuwarden.lifecycle.leases.self_stopped import self_stopped
from gpuwarden.lifecycle.notify import ends_at
from gpuwarden.lifecycle.records import (
    JobRecord,
    LeaseRecord,
    TeardownRecord,
    lease_ids_of,
    read_job,
    read_lease,
    read_teardown,
)

_OFF = frozenset({InstanceState.STOPPED, InstanceState.INTERRUPTED})


def following(ctx: Context, job: JobRecord) -> tuple[NextStep, ...]:
    """Return a job's remaining steps in order, including the steps to resume the job if its machine is gone."""
    now = situation(ctx, job)
    if job.state is Job.PREEMPTED and now.machine is Machine.GONE and awaits_store(ctx, job):
        store = job.spec.artifact_store
        wait = f"Its machine is permanently lost. The watch copies the files from {store} and verifies them, then "
        pull = do(Action.PULL, "to do that now", job_id=job.id)
        return steps((f"{wait}another machine is rented.", pull, do(Action.VERIFY, job_id=job.id)))
    recovery = () if job.state is Job.PREEMPTED else recovery_steps(ctx, job)
    return steps((*plan(now), *recovery))


def following_of(ctx: Context, what: str) -> tuple[NextStep, ...]:
    """Return the remaining steps for the job with this id; empty if no such job has been accepted."""
    known = ctx.ledger.state(f"job/{what}") not in {None, Job.REFUSED}
    return following(ctx, read_job(ctx.ledger, what)) if known else ()


def situation(ctx: Context, job: JobRecord) -> Situation:
    """Return the states that determine a job's next step, as of this process's last poll. No query is sent."""
    question = price_question(ctx, job)
    now = Situation(
        job_id=job.id,
        job=job.state,
        now=ctx.clock.now(),
        launched=job.handle is not None,
        outputs=bool(job.outputs),
        verb=job.spec.teardown,
        artifact_store=job.spec.artifact_store,
        price_ticket=question.ticket if question else "",
        resuming=job.resume_requested,
    )
    if job.reason is Code.REFUSAL_UNSETTLED:
        looked = ctx.ledger.last(f"lease/{job.lease}", CreateAbsent)
        now = replace(now, settles_at=(looked and looked.data.settles_at) or now.now)
    lease = machine_of(ctx, job)
    if lease is None:
        return now if job.state not in TERMINAL_JOBS else replace(now, copy=copy_state(ctx, job.id))
    ticket = open_ticket(ctx, lease)
    stoppable = job.state is Job.PAUSED and stop_is_reversible(ctx, job)
    ordered = automatic_teardown(ctx, job.id)
    announced = ctx.ledger.last(job.subject, AutoTeardownAnnounced) if ordered else None
    due = announced is not None and ticket is not None and announced.data.ticket == ticket.id
    return replace(
        now,
        machine=_machine(ctx, lease),
        storage=remains(ctx, job),
        launched=job.handle is not None and lease.id == job.lease,
        self_stopped=lease.id == job.lease and self_stopped(ctx, job),
        copy=copy_state(ctx, job.id),
        given_back=given_back(ctx, lease) and lease.state in LIVE_LEASES,
        ticket=ticket.id if ticket else "",
        ticket_state=ticket.state if ticket else None,
        stoppable=stoppable,
        verb=ticket.verb if ticket else ordered.verb if ordered else job.spec.teardown,
        ordered=ordered.verb if ordered and job.state is Job.SUCCEEDED else None,
        watched=ordered is None or watched(ctx),
        announced=due,
        ends_at=ends_at(ctx, announced) if announced and due else None,
    )


def remains(ctx: Context, job: JobRecord) -> tuple[str, ...]:
    """Return the names of the storage that is still billed after every machine of a job is gone."""
    leases = [read_lease(ctx.ledger, name) for name in lease_ids_of(ctx.ledger, job.id)]
    rented = [lease for lease in leases if lease.instance_id is not None]
    if not rented or any(confirmed_end(ctx, lease.id) != "gone" for lease in rented):
        return ()
    try:
        return ctx.profile(rented[-1].platform).residue("terminate", requested=job.spec.durable_storage)
    except WardenError:
        return ("storage on a platform that no longer has a profile",)


def machine_of(ctx: Context, job: JobRecord) -> LeaseRecord | None:
    """Return the lease that a job's next step applies to: the lease of its current machine, or another billed lease."""
    live = lease_ids_of(ctx.ledger, job.id, *LIVE_LEASES)
    if job.lease is None or (job.lease not in live and live and confirmed_end(ctx, job.lease) == "gone"):
        return lease_now(ctx, live[0]) if live else None
    return lease_now(ctx, job.lease)


def _machine(ctx: Context, lease: LeaseRecord) -> Machine:
    if lease.state in {Lease.STOPPED, Lease.NONE}:
        return Machine.OFF if confirmed_end(ctx, lease.id) == "stopped" else Machine.GONE
    if lease.instance_id is None:
        return Machine.UNSEEN
    off = lease.instance is not None and lease.instance.state in _OFF
    return Machine.OFF if off and lease.state is not Lease.STOPPING else Machine.BILLING


def open_ticket(ctx: Context, lease: LeaseRecord) -> TeardownRecord | None:
    """Return the latest open teardown request for a machine, if any."""
    for subject in reversed(ctx.ledger.subjects("teardown", *OPEN_TEARDOWNS, job=lease.job_id)):
        found = read_teardown(ctx.ledger, subject.removeprefix("teardown/"))
        if found.lease == lease.id:
            return found
    return None


@dataclass(frozen=True)
class TeardownPlan:
    """The user's advance decision about tearing down a job's machine. Times are in seconds since the epoch.

    `verb` is the verb of automatic teardown, or None without automatic teardown; `through` and `by` are the order's
    channel and author. `ends_at` is set once the notice has been delivered, and `objected_at` once a hold has canceled
    the order. `self_stop_after_s` is the time in seconds between the job's end and the self-stop; None without
    self-stop.
    """

    verb: Verb | None = None
    grace_s: float = 0.0
    set_at: float | None = None
    through: str = ""
    by: str = ""
    ends_at: float | None = None
    objected_at: float | None = None
    self_stop_after_s: float | None = None


def teardown_plan(ctx: Context, job: JobRecord) -> TeardownPlan | None:
    """Return the advance decision about tearing down a job's machine; None if the user will be asked."""
    ordered = ctx.ledger.last(job.subject, AutoTeardownOrdered)
    objected = ctx.ledger.last(job.subject, AutoTeardownHeld)
    order = effective_order(ctx, ordered.data) if ordered is not None else None
    self_stop = job.handle.place.self_stop_order if job.handle is not None and objected is None else None
    if order is None and self_stop is None:
        return None
    found = TeardownPlan(
        self_stop_after_s=self_stop.after_s if self_stop else None, objected_at=objected.at if objected else None
    )
    if ordered is None or order is None:
        return found
    announced = ctx.ledger.last(job.subject, AutoTeardownAnnounced)
    return replace(
        found,
        verb=order.verb,
        grace_s=order.grace_s,
        set_at=ordered.at,
        through=order.through,
        by=order.by,
        ends_at=ends_at(ctx, announced) if announced and objected is None else None,
    )
