"""Compute the current alert conditions from the ledger and this process's last observations. Nothing is queried."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from anyio.lowlevel import checkpoint

from gpuwarden.core.deadlines import utc
from gpuwarden.core.guidance import Action, NextStep, do, steps
from gpuwarden.core.models import Heartbeat, Observation
from gpuwarden.core.money import usd, usd_per_hour
from gpuwarden.core.plural import counted
from gpuwarden.core.reasons import Code
from gpuwarden.core.sanitize import line
from gpuwarden.core.states import AT_REST, LIVE_LEASES, TERMINAL_JOBS, Job, Lease
from gpuwarden.core.store_address import StoreAddress
from gpuwarden.ledger.events import (
    AbandonIntent,
    AlertRaised,
    AutoTeardownAnnounced,
    JobPreempted,
    LeaseCameBack,
    RelaunchIntent,
    ResumeIntent,
)
from gpuwarden.lifecycle.context import REHEARSAL, Context, Ended
from gpuwarden.lifecycle.execution.price_change import price_question
from gpuwarden.lifecycle.execution.recovery_advice import recovery_steps
from gpuwarden.lifecycle.execution.situation import following
from gpuwarden.lifecycle.leases.auto_teardown import automatic_teardown
from gpuwarden.lifecycle.leases.expirations import clocks_of
from gpuwarden.lifecycle.leases.meter import lease_now, silent
from gpuwarden.lifecycle.leases.self_stopped import self_stopped
from gpuwarden.lifecycle.monitoring.balances import known_funds
from gpuwarden.lifecycle.monitoring.inventory import leases_of, unsettled
from gpuwarden.lifecycle.monitoring.runner_alerts import divergence_of, stall_of
from gpuwarden.lifecycle.monitoring.waiting import Waiting, what_waits
from gpuwarden.lifecycle.notify import Alert, Key, record
from gpuwarden.lifecycle.posted import posted_problems, posted_text
from gpuwarden.lifecycle.records import JobRecord, LeaseRecord, lease_ids, read_job, read_lease
from gpuwarden.remote.ssh.host_keys import HostKeyChanged

DAY_S: Final = 86_400.0
OVERLAP_S: Final = 600.0
"""Maximum difference between the clocks of two processes that write to the same ledger."""
IDLE_PERCENT: Final = 5.0
REPEAT_S: Final = 600.0
"""Seconds before an alert about an unanswered question is first repeated."""
ORDER_LATE_S: Final = 120.0
"""Seconds by which automatic teardown may be late before the alert about the idle machine is raised."""
OBSERVED: Final = frozenset({"idle_gpu", "stalled", "diverged", "disk_filling", "inodes_filling"})
"""Kinds of conditions that only an observation of the machine can raise or clear."""
ASKED: Final = frozenset({"finished_billing", "cost_cap", "ending_soon"})
"""Kinds of conditions that are not shown if a question about tearing down the job's machine is shown."""
UPLOAD: Final = "upload_failed"
"""Kind of the condition for a failed upload to an artifact store. An upload can fail even after the job has ended."""
SAID_BY_RUNNER: Final = {
    "gpu_oom": ("gpu_oom", "a GPU ran out of memory, according to the job's output."),
    "timeout": ("time_limit", "its time limit is near; unsaved work will be lost."),
}
"""Maps each kind of runner alert that is forwarded to the user to its condition's kind and text."""
BALANCE: Final = "watch/balance-"
"""Subject prefix of alerts about an account's balance, followed by the platform's name."""


@dataclass(frozen=True)
class Condition:
    """A condition that is true now. It becomes an alert after it has lasted for `hold_s` seconds.

    `since` is the time at which the condition started, if it is recorded in the ledger; otherwise the condition starts
    with its first observation. If `same` changes, the condition starts again. A condition with a `mark` is an event: it
    is reported once and never cleared.
    """

    subject: str
    kind: str
    text: str
    hold_s: float = 0.0
    since: float | None = None
    same: str = ""
    mark: str = ""
    next_steps: tuple[NextStep, ...] = ()

    @property
    def key(self) -> Key:
        """Return the key that identifies the condition; each key is reported once."""
        return self.subject, self.kind, self.mark


async def conditions(ctx: Context, raised: Container[Key]) -> list[Condition]:
    """Return all current conditions, and let other tasks run between jobs.

    `raised` contains the keys of the open alerts, because the threshold for clearing an alert is stricter than the
    threshold for raising it.
    """
    found = []
    for subject, platform in (("watch/day", ""), ("watch/rehearsal-day", REHEARSAL)):
        cap = ctx.policy.caps_for(platform).per_day_usd
        if cap > 0 and (billed := await billed_today(ctx, pretend=bool(platform))) >= cap:
            text = f"about {usd(billed)} spent in 24 hours; per_day_usd is {usd(cap)}. May the running jobs continue?"
            found.append(Condition(subject, "day_budget", text))
    for funds in known_funds(ctx):
        subject, clock = f"{BALANCE}{funds.platform}", funds.clock
        # An open alert is cleared at a higher threshold than it was raised at, because spending fluctuates.
        hours = ctx.policy.watch.danger_hours * (1.2 if (subject, "danger_clock", "") in raised else 1.0)
        if clock is not None and clock.at - ctx.clock.now() < hours * 3600:
            text = f"{funds.platform}: {clock.trigger}: {clock.effect}. Add credit, or tear down unneeded machines."
            found.append(Condition(subject, "danger_clock", line(text, 400)))
    for job_id in _watched(ctx):
        await checkpoint()
        found += _conditions_of(ctx, read_job(ctx.ledger, job_id), raised)
    found += waiting_for_approval(ctx)
    for name in ctx.ledger.resting():
        await checkpoint()
        lease = lease_now(ctx, name.removeprefix("lease/"))
        job = read_job(ctx.ledger, lease.job_id)
        found += _clocks(ctx, job, lease)
        if lease.id == job.lease and self_stopped(ctx, job):
            rate = lease.instance.stopped_usd_per_hour if lease.instance else None
            disk = f" ({usd_per_hour(rate)})" if rate else ""
            text = f"{job.id}'s idle machine on {lease.platform} stopped itself. Its disk may be billed{disk}."
            text += f" Its artifact store is {job.spec.artifact_store}." if job.spec.artifact_store else ""
            found.append(Condition(lease.subject, "self_stopped", text, next_steps=following(ctx, job)))
            found += [ending for ending in _ending(ctx, job) if ending not in found]
    return found


def _watched(ctx: Context) -> list[str]:
    """Return the ids of the jobs to check.

    These are the `unsettled` jobs, and the jobs that failed or were interrupted in the last day.
    """
    day = ctx.clock.now() - DAY_S
    failed = ctx.ledger.subjects("job", Job.FAILED, since=day)
    lately = (*failed, *(event.subject for event in ctx.ledger.recent(JobPreempted, day)))
    return list(dict.fromkeys((*unsettled(ctx), *(subject.removeprefix("job/") for subject in lately))))


def _conditions_of(ctx: Context, job: JobRecord, raised: Container[Key]) -> Iterator[Condition]:
    """Yield the conditions of a job and its machines."""
    yield from _job_conditions(ctx, job, raised)
    for name in leases_of(ctx, job):
        yield from _lease_conditions(ctx, job, lease_now(ctx, name))


def shown_alerts(ctx: Context, waiting: Sequence[Waiting]) -> list[Alert]:
    """Return the raised alerts whose cause may persist, except those that are also listed as a question.

    Alerts that are omitted here are later recorded as cleared by the leading watch.
    """
    alerts = [Alert.read(event) for event in ctx.ledger.standing_alerts()]
    keys, present = {alert.key for alert in alerts}, dict[str, set[Key]]()
    watched, asked = set(_watched(ctx)), {each.job_id for each in waiting}
    resting = set(ctx.ledger.resting())

    def goes_on(alert: Alert) -> bool:
        kind, _, name = alert.subject.partition("/")
        if kind in {"teardown", "receipt"}:
            return False
        if kind not in {"job", "lease"} or alert.subject in resting:
            return True
        job = read_job(ctx.ledger, name if kind == "job" else read_lease(ctx.ledger, name).job_id)
        if job.id in asked and alert.kind in ASKED:
            return False
        if kind == "job" and job.state not in TERMINAL_JOBS and job.id not in ctx.observed:
            return True  # only an observation of the job can clear such an alert
        if job.id not in present:
            present[job.id] = {c.key for c in _conditions_of(ctx, job, keys)} if job.id in watched else set()
        return alert.key in present[job.id]

    return [alert for alert in alerts if goes_on(alert)]


def waiting_for_approval(ctx: Context) -> Iterator[Condition]:
    """Yield a condition for each question that waits for the user's answer, with the question's text.

    A question is repeated at increasing intervals: each interval is three times as long as the previous one.
    """
    for asked in what_waits(ctx):
        if asked.kind in {"ordered", "price", "blocked", "unasked"}:
            continue  # these kinds have their own alerts
        age_s = ctx.clock.now() - asked.since
        times = 0 if age_s < REPEAT_S else 1 + int(math.log(age_s / REPEAT_S, 3))
        kind, text = "approval", f"{asked.text}. This is waiting for your approval."
        if asked.kind == "unseen_end":  # the platform accepted the request, but the machine is still billed
            kind, text = "unseen_end", f"{asked.text}."
        yield Condition(asked.subject, kind, line(text, 600), mark=str(times), next_steps=asked.next_steps)


def _recent(ctx: Context, at: float) -> bool:
    return ctx.clock.now() - at < DAY_S


# --------------------------------------------------------------------------------------------------------- a job


def _job_conditions(ctx: Context, job: JobRecord, raised: Container[Key]) -> Iterator[Condition]:
    """Yield a job's conditions: failure, interruption, open questions, and those from its last observation."""
    why = line(job.why, 200)
    if job.state is Job.FAILED and _recent(ctx, job.since):
        text, following = f"{job.id} failed: {why}.", (*job.next_steps, *recovery_steps(ctx, job))
        yield Condition(job.subject, "failed", text, mark=str(job.since), next_steps=following)
    taken = ctx.ledger.last(job.subject, JobPreempted)
    if taken is not None and taken.data.reason_code is not Code.ENGINE_DROPPED and _recent(ctx, taken.at):
        text, following = f"{job.id} was interrupted.", recovery_steps(ctx, job)
        yield Condition(job.subject, "preempted", text, mark=str(taken.seq), next_steps=following)
    again = ctx.ledger.last(job.subject, RelaunchIntent)
    if again is not None and _recent(ctx, again.at):
        text = (
            f"{job.id} lost its machine. A new one is rented for at most {usd(again.data.worst_cost)}, and the job "
            f"resumes from the proven copy; {usd(again.data.left)} of the relaunch budget remains after that."
        )
        yield Condition(
            job.subject, "relaunched", text, mark=str(again.seq), next_steps=(do(Action.CHECK, job_id=job.id),)
        )
    yield from _ending(ctx, job)
    yield from _posted(ctx, job)
    seen = ctx.observed.get(job.id)
    if seen is not None and (failed := next((a for a in seen.alerts if a.kind == "self_stop_failed"), None)):
        text = f"{job.id}: {line(failed.text, 240)}. The machine is billed."
        yield Condition(job.subject, "self_stop_failed", text, next_steps=(do(Action.CHECK, job_id=job.id),))
    if seen is not None and seen.upload and job.spec.artifact_store:
        keys = " and ".join(StoreAddress.parse(job.spec.artifact_store).secrets)
        text = f"{job.id}: {line(seen.upload, 300)}. The store is {job.spec.artifact_store}; its key is {keys}."
        rights = "Give the key write access to the store; the upload is then retried automatically."
        yield Condition(job.subject, UPLOAD, text, next_steps=steps((rights, do(Action.CHECK, job_id=job.id))))
    if job.state in TERMINAL_JOBS:
        return
    if question := price_question(ctx, job):
        yield Condition(job.subject, "dearer", f"{job.id}: {question.text}", next_steps=question.next_steps)
    if isinstance(ctx.blind.get(job.id), HostKeyChanged):
        text = (
            f"{job.id}: {line(ctx.blind[job.id].message)}. Is this still your machine? gpuwarden has stopped using it."
        )
        yield Condition(job.subject, "host_key", text)
    if job.state is Job.UNKNOWN and job.reason is not Code.SELF_STOPPED:
        text = f"the state of {job.id} is unknown: {why}. Its machine counts as billed."
        yield Condition(job.subject, "unknown", text, ctx.policy.watch.unknown_minutes * 60, since=job.since)
    if job.state is Job.SUBMITTING and job.lease is not None:
        why = f" ({line(ctx.blind[job.id].message, 200)})" if job.id in ctx.blind else ""
        text = f"the launch of {job.id} on its machine has not been confirmed{why}. The machine counts as billed."
        yield Condition(job.subject, "unknown", text, ctx.policy.watch.unknown_minutes * 60, since=job.since)
    if seen is not None and job.state in {Job.RUNNING, Job.UNKNOWN}:
        yield from _observed_conditions(ctx, job, seen, raised)


def _posted(ctx: Context, job: JobRecord) -> Iterator[Condition]:
    """Yield the problems that a job posted. Each type is reported once, because a job may post any number of alerts."""
    for kind, alert in posted_problems(ctx, job.id).items():
        if _recent(ctx, alert.at):
            text = f"{job.id} reports {line(posted_text(alert), 240)}."
            yield Condition(job.subject, "posted", text, mark=kind, next_steps=(do(Action.CHECK, job_id=job.id),))


def _ending(ctx: Context, job: JobRecord) -> Iterator[Condition]:
    """Yield the notice that automatic teardown will end a job's machine after a grace period."""
    announced = ctx.ledger.last(job.subject, AutoTeardownAnnounced)
    if announced is not None and job.state is Job.SUCCEEDED and (order := automatic_teardown(ctx, job.id)):
        origin = "the policy" if order.through == "policy" else f"the approval of {order.receipt}"
        text = (
            f"{job.id} succeeded, and its outputs have verified local copies. Automatic teardown, set by {origin}, "
            f"will {order.verb} its machine in {counted(round(order.grace_s / 60), 'minute')}."
        )
        text += f" {' and '.join(order.storage)} remains billed after that." if order.storage else ""
        objection = (do(Action.HOLD, "to object", job_id=job.id),)
        yield Condition(job.subject, "ending_soon", text, mark=str(announced.seq), next_steps=objection)


def _observed_conditions(
    ctx: Context, job: JobRecord, seen: Observation, raised: Container[Key]
) -> Iterator[Condition]:
    """Yield the conditions shown by an observation of a job: an idle GPU, a stall, or a nearly full disk."""
    watch, beat = ctx.policy.watch, Heartbeat() if seen.stale or seen.beat is None else seen.beat
    look = (do(Action.CHECK, job_id=job.id),)
    if beat.gpu_util is not None and beat.gpu_util < IDLE_PERCENT:
        text = f"{job.id}: its GPU has been idle for {watch.idle_minutes} minutes. Is the job stuck?"
        yield Condition(job.subject, "idle_gpu", text, watch.idle_minutes * 60, next_steps=look)
    if message := divergence_of(seen):
        text = f"{job.id}: {line(message, 160)}. Later checkpoints are unusable."
        yield Condition(job.subject, "diverged", text, next_steps=look)
    for kind, (condition, words) in SAID_BY_RUNNER.items():
        if any(alert.kind == kind for alert in seen.alerts):
            yield Condition(job.subject, condition, f"{job.id}: {words}", mark=str(job.attempt), next_steps=look)
    step = "no step" if seen.step is None else f"step {seen.step}"
    text = f"{job.id}: no new step and no log line for {watch.stall_minutes} minutes ({step})."
    hold_s = watch.stall_minutes * 60
    if message := stall_of(seen):  # the runner waited before it reported the stall
        text, hold_s = f"{job.id}: {line(message, 120)}.", 0
    same = f"{seen.step} {seen.log_bytes} {sorted(seen.metrics.items())}"
    yield Condition(job.subject, "stalled", text, hold_s, same=same, next_steps=look)
    for kind, what, free, total in (
        ("disk_filling", "disk space", beat.disk_free, beat.disk_total),
        ("inodes_filling", "inodes", beat.inodes_free, beat.inodes_total),
    ):
        # An open alert is cleared at a higher threshold than it was raised at, so that the alert does not flicker.
        limit = watch.disk_free_percent * (1.2 if (job.subject, kind, "") in raised else 1.0)
        if free is not None and total and 100 * free / total < limit:
            text = f"{job.id}: {100 * free / total:.0f} % of the {what} is left; the next checkpoint may not fit."
            yield Condition(job.subject, kind, text)


# ------------------------------------------------------------------------------------------------------- a machine


def _lease_conditions(ctx: Context, job: JobRecord, lease: LeaseRecord) -> Iterator[Condition]:
    """Yield a machine's conditions: idle but billed, unreachable, at a cap, running again, or ending soon."""
    watch, cost = ctx.policy.watch, lease.cost
    machine, seen = f"{job.id}'s machine on {lease.platform}", lease.instance
    rate = "" if seen is None or seen.price_usd_per_hour is None else f", {usd_per_hour(seen.price_usd_per_hour)}"
    if job.state in AT_REST and lease.state is not Lease.STOPPING:
        yield finished_billing(ctx, job, lease)
    given_back = ctx.ledger.last(lease.subject, AbandonIntent) if lease.state is Lease.STOPPING else None
    unused = lease.id != job.lease and lease.state is not Lease.STOPPING and job.state not in AT_REST
    if seen is not None and (given_back is not None or unused):
        # A teardown request applies only to the job's current machine, so this machine must be ended in the console.
        why, hold_s = f"was rented for {job.id}, but the job does not use it", 0.0
        if given_back is not None:
            why, hold_s = f"was abandoned because {line(given_back.data.why, 160)}", watch.finished_minutes * 60
        bills = "its disk may be billed" if seen.meter is False else f"it is billed{rate}"
        text = f"the machine {line(seen.id, 80)} on {lease.platform} {why}, and {bills} ({usd(cost)} so far)."
        yield Condition(
            lease.subject,
            "unused_billing",
            f"{text} Terminate it in the platform's console.",
            hold_s,
            since=given_back.at if given_back is not None else None,
        )
    unseen = ctx.unseen.get(lease.id, "")
    since = lease.answers[-1][0] if lease.answers else lease.opened_at
    if silent(ctx, lease):
        why = f" ({line(unseen, 200)})" if unseen else ""
        text = (
            f"{lease.platform} has not reported {job.id}'s machine since {utc(since)}{why}. "
            f"The machine counts as billed, {usd(cost, lease.estimated)} so far. Check the platform's console."
        )
        yield Condition(lease.subject, "unknown", text, watch.unknown_minutes * 60, since=since)
    if cost is not None and job.spec.max_cost_usd is not None and cost >= job.spec.max_cost_usd:
        process = "its process is stopped" if job.state in TERMINAL_JOBS else "its process is being stopped"
        bills = f"{machine} is still billed"
        if silent(ctx, lease):
            cost_now = usd(cost, estimated=True)
            bills = f"{machine} may still be billed ({cost_now}; the platform has not reported it since {utc(since)})"
        limit = usd(job.spec.max_cost_usd)
        text = f"{job.id} reached its cost cap of {limit}: {process}, but {bills}. May it be torn down?"
        yield Condition(lease.subject, "cost_cap", text, next_steps=following(ctx, job))
    if cost is None and job.spec.max_cost_usd is not None and job.state not in AT_REST:
        text = (
            f"{lease.platform} reports no price for {job.id}'s machine, so its cost cap of "
            f"{usd(job.spec.max_cost_usd)} can't be enforced. May the job continue?"
        )
        yield Condition(
            lease.subject,
            "cap_unenforced",
            text,
            watch.unknown_minutes * 60,
            since=lease.opened_at,
            next_steps=(do(Action.CANCEL, job_id=job.id),),
        )
    back = ctx.ledger.last(lease.subject, LeaseCameBack)
    woken = ctx.ledger.last(lease.subject, ResumeIntent)
    asked = woken is not None and back is not None and woken.seq < back.seq and back.at - woken.at < DAY_S
    if back is not None and not asked and _recent(ctx, back.at) and job.state in TERMINAL_JOBS:
        off = back.data.instance is not None and back.data.instance.meter is False
        but = f"off, but {back.data.why}" if off else "ended, but is still running and is billed"
        text = f"{machine} was recorded as {but}."
        end = (do(Action.TEARDOWN, job_id=job.id),)
        yield Condition(lease.subject, "came_back", text, mark=str(back.seq), next_steps=end)
    cap = ctx.policy.caps_for(lease.platform).per_instance_usd
    if cost is not None and 0 < cap <= cost:
        yield Condition(
            lease.subject,
            "instance_cap",
            f"{machine} has cost {usd(cost)}; per_instance_usd is {usd(cap)}. May the machine continue?",
        )
    yield from _clocks(ctx, job, lease)


def finished_billing(ctx: Context, job: JobRecord, lease: LeaseRecord) -> Condition:
    """Return the condition that an ended job's machine is billed, or that its announced teardown is overdue.

    The first announcement sets the due time, because repeated announcements would postpone it forever.
    """
    ordered = automatic_teardown(ctx, job.id) is not None
    announced = (
        next(iter(ctx.ledger.events(job.subject, kind=AutoTeardownAnnounced, limit=1)), None) if ordered else None
    )
    due = None if announced is None else announced.data.ends_at
    price = lease.instance.price_usd_per_hour if lease.instance else None
    rate = "" if price is None else f", {usd_per_hour(price)}"
    overdue = "" if due is None else " Its automatic teardown is overdue."
    return Condition(
        lease.subject,
        "finished_billing",
        f"{job.id} {job.state.phrase} and its machine is still billed{rate}.{overdue}",
        max(ctx.policy.watch.finished_minutes * 60, 0.0 if due is None else due + ORDER_LATE_S - job.since),
        since=job.since,
        next_steps=following(ctx, job),
    )


def raise_overdue(ctx: Context) -> None:
    """Raise an alert for each overdue automatic teardown. Every command calls this, in case no watch is running.

    If the policy can't be read, no alert is raised, because replies already report that problem.
    """
    unable = ctx.ledger.readable_only or any(notice.kind == "broken" for notice in ctx.warnings)
    for job_id in () if unable else ctx.ledger.jobs_with_leases(*LIVE_LEASES):
        if automatic_teardown(ctx, job_id) is None or (job := read_job(ctx.ledger, job_id)).state is not Job.SUCCEEDED:
            continue
        for lease in (lease_now(ctx, name) for name in leases_of(ctx, job)):
            found = finished_billing(ctx, job, lease)
            if lease.state is Lease.STOPPING or ctx.clock.now() - job.since < found.hold_s:
                continue
            with ctx.ledger.transaction():  # another process may check at the same time
                if ctx.ledger.alert(*found.key) is None:
                    record(ctx, AlertRaised, found.key, found.text, found.next_steps)


def _clocks(ctx: Context, job: JobRecord, lease: LeaseRecord) -> Iterator[Condition]:
    """Yield a condition for each approaching deadline."""
    for clock in clocks_of(ctx, lease, job):
        left = clock.at - ctx.clock.now()
        if left < ctx.policy.watch.danger_hours * 3600 and not clock.after_job:
            when = f"in about {left / 3600:.0f} h" if left > 0 else "any moment now"
            text = f"{lease.platform} will act on {job.id}'s machine {when} ({clock.trigger}): {clock.effect}."
            yield Condition(lease.subject, "danger_clock", line(text), mark=f"{clock.at:.0f}")


# --------------------------------------------------------------------------------------------------- daily costs


async def billed_today(ctx: Context, *, pretend: bool) -> float:
    """Return the known cost of machines in the last 24 hours, in US dollars: at most one day's cost per machine.

    The cost of an ended machine does not change, so each process computes it only once.
    """
    now = ctx.clock.now()
    day = now - DAY_S
    for name in ctx.ledger.subjects("lease", since=max(day, ctx.ended_until - OVERLAP_S)):
        await checkpoint()
        lease = lease_now(ctx, name.removeprefix("lease/"))
        ctx.ended.pop(lease.id, None)
        if lease.state not in LIVE_LEASES:
            ctx.ended[lease.id] = Ended(lease.since, _last_day(ctx, lease), lease.platform.startswith(REHEARSAL))
    ctx.ended_until = now
    for name in [name for name, ended in ctx.ended.items() if ended.at <= day]:
        del ctx.ended[name]
    total = sum(ended.cost for ended in ctx.ended.values() if ended.pretend is pretend)
    for lease_id in lease_ids(ctx.ledger, *LIVE_LEASES):
        await checkpoint()
        lease = lease_now(ctx, lease_id)
        if lease.platform.startswith(REHEARSAL) is pretend:
            total += _last_day(ctx, lease)
    return total


def _last_day(ctx: Context, lease: LeaseRecord) -> float:
    cost = lease.cost
    if cost is None or (lease.state not in LIVE_LEASES and not _recent(ctx, lease.since)):
        return 0.0
    price = lease.instance.price_usd_per_hour if lease.instance else None
    return cost if price is None or _recent(ctx, lease.opened_at) else min(cost, price * 24)
