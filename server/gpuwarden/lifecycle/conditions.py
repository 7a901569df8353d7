"""What is worth an alert now, read from the ledger and from what this process last observed. Nothing is asked here."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Final

from gpuwarden.core.fence import line
from gpuwarden.core.models import Beat, Observation
from gpuwarden.core.money import usd, usd_per_hour
from gpuwarden.core.states import LIVE_LEASES, TERMINAL_JOBS, Job, Lease
from gpuwarden.lifecycle.clocks import clocks_of
from gpuwarden.lifecycle.dearer import price_question
from gpuwarden.lifecycle.diagnose import stall_of
from gpuwarden.lifecycle.funds import known_funds
from gpuwarden.lifecycle.instances import leases_of
from gpuwarden.lifecycle.meter import believed, lease_now, spent
from gpuwarden.lifecycle.onward import onward
from gpuwarden.lifecycle.records import JobRecord, LeaseRecord, job_ids, lease_ids, read_job, read_lease
from gpuwarden.lifecycle.warden import REHEARSAL, Warden
from gpuwarden.remote.connect import HostKeyChanged

DAY_S: Final = 86_400.0
IDLE_PERCENT: Final = 5.0
OBSERVED: Final = frozenset({"idle_gpu", "stalled", "disk_filling", "inodes_filling"})
"""Kinds that only a look at the machine can raise or clear."""
BALANCE: Final = "watch/balance-"
"""Before a platform's name: the subject of what is said of its account's money."""


@dataclass(frozen=True)
class Condition:
    """One thing that is so now. It becomes an alert when it has held for `hold_s` seconds.

    `since` is when it began, where the ledger knows; otherwise it counts from when it was first seen. A condition
    whose `same` changes begins anew. One with a `mark` tells of an event: it is told once and never clears.
    """

    subject: str
    kind: str
    text: str
    hold_s: float = 0.0
    since: float | None = None
    same: str = ""
    mark: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """What is told once."""
        return self.subject, self.kind, self.mark


def conditions(w: Warden, raised: Container[tuple[str, str, str]]) -> list[Condition]:
    """Everything that is so now. `raised` are the alerts that stand: what is near its limit stays until it is well."""
    found = [*_budgets(w), *_accounts(w, raised)]
    for job_id in job_ids(w.ledger):
        job = read_job(w.ledger, job_id)
        live = leases_of(w, job)
        if job.state in TERMINAL_JOBS and not live and not _recent(w, job.since):
            continue
        found += _of_job(w, job, raised)
        found += [c for name in live for c in _of_lease(w, job, lease_now(w, name))]
    resting = [name for name in lease_ids(w.ledger, Lease.STOPPED) if believed(w, name) == "stopped"]
    for lease in (lease_now(w, name) for name in resting):
        found += _clocks(w, read_job(w.ledger, lease.job_id), lease)
    return found


def _recent(w: Warden, at: float) -> bool:
    return w.clock.now() - at < DAY_S


# --------------------------------------------------------------------------------------------------------- a job


def _of_job(w: Warden, job: JobRecord, raised: Container[tuple[str, str, str]]) -> Iterator[Condition]:
    why = line(job.why, 200)
    if job.state is Job.FAILED and _recent(w, job.since):
        yield Condition(job.subject, "failed", f"{job.id} failed: {why}{_next(w, job)}", mark=str(job.since))
    taken = w.ledger.last(job.subject, "job.preempted")
    if taken is not None and _recent(w, taken.at):
        yield Condition(job.subject, "preempted", f"{job.id} was interrupted{_next(w, job)}", mark=str(taken.seq))
    if job.state in TERMINAL_JOBS:
        return
    if question := price_question(w, job):
        yield Condition(job.subject, "dearer", f"{job.id}: {question}")
    if isinstance(w.blind.get(job.id), HostKeyChanged):
        text = f"{job.id}: {line(w.blind[job.id].message)}. Is this still your machine? Nothing is sent to it."
        yield Condition(job.subject, "host_key", text)
    if job.state is Job.UNKNOWN:
        text = f"nothing is known of {job.id}: {why}. Its machine counts as billing."
        yield Condition(job.subject, "unknown", text, w.policy.watch.unknown_minutes * 60, since=job.since)
    seen = w.observed.get(job.id)
    if seen is not None and job.state in {Job.RUNNING, Job.UNKNOWN}:
        yield from _of_look(w, job, seen, raised)


def _next(w: Warden, job: JobRecord) -> str:
    said = onward(w, job)
    return f". {said}" if said else ""


def _of_look(
    w: Warden, job: JobRecord, seen: Observation, raised: Container[tuple[str, str, str]]
) -> Iterator[Condition]:
    watch, beat = w.policy.watch, Beat() if seen.stale or seen.beat is None else seen.beat
    look = f"See `gpuwarden check {job.id}`."
    if beat.gpu_util is not None and beat.gpu_util < IDLE_PERCENT:
        text = f"{job.id}: its GPU has been idle for {watch.idle_minutes} minutes. Is it stuck? {look}"
        yield Condition(job.subject, "idle_gpu", text, watch.idle_minutes * 60)
    step = "no step" if seen.step is None else f"step {seen.step}"
    text = f"{job.id}: no new step and no line of log for {watch.stall_minutes} minutes ({step}). {look}"
    hold_s = watch.stall_minutes * 60
    if said := stall_of(seen):  # it has waited already
        text, hold_s = f"{job.id}: {line(said, 120)}. {look}", 0
    yield Condition(job.subject, "stalled", text, hold_s, same=f"{seen.step} {seen.log_bytes}")
    for kind, what, free, total in (
        ("disk_filling", "disk space", beat.disk_free, beat.disk_total),
        ("inodes_filling", "inodes", beat.inodes_free, beat.inodes_total),
    ):
        # An alert that stands clears a little later than it was raised, so that it does not flicker.
        limit = watch.disk_free_percent * (1.2 if (job.subject, kind, "") in raised else 1.0)
        if free is not None and total and 100 * free / total < limit:
            text = f"{job.id}: {100 * free / total:.0f} % of the {what} are left; the next checkpoint may not fit."
            yield Condition(job.subject, kind, text)


# ------------------------------------------------------------------------------------------------------- a machine


def _of_lease(w: Warden, job: JobRecord, lease: LeaseRecord) -> Iterator[Condition]:
    watch, cost = w.policy.watch, spent(w, lease.id)
    machine = f"the machine of {job.id} on {lease.platform}"
    if job.state in TERMINAL_JOBS and lease.state is not Lease.STOPPING:
        text = f"{job.id} {job.state.told} and its machine still bills{_price(lease)}. Next: {_give_back(job)}."
        yield Condition(lease.subject, "finished_billing", text, watch.finished_minutes * 60, since=job.since)
    if lease.state is Lease.UNVERIFIED:
        text = f"{machine} can't be seen; it counts as billing. Look at the platform's console."
        yield Condition(lease.subject, "unknown", text, watch.unknown_minutes * 60, since=lease.since)
    if cost is not None and job.spec.max_cost_usd is not None and cost >= job.spec.max_cost_usd:
        process = "its process is stopped" if job.state in TERMINAL_JOBS else "its process is being stopped"
        text = f"{job.id} met its max_cost_usd of {usd(job.spec.max_cost_usd)}: {process}, {machine} stays and bills. "
        yield Condition(lease.subject, "cost_cap", f"{text}May it go? {_give_back(job)}.")
    back = w.ledger.last(lease.subject, "lease.came_back")
    if back is not None and _recent(w, back.at) and job.state in TERMINAL_JOBS:
        text = f"{machine} was believed ended and runs again; it bills. Next: `gpuwarden teardown {job.id}`."
        yield Condition(lease.subject, "came_back", text, mark=str(back.seq))
    cap = w.policy.caps_for(lease.platform).per_instance_usd
    if cost is not None and 0 < cap <= cost:
        yield Condition(
            lease.subject,
            "instance_cap",
            f"{machine} has cost {usd(cost)}; per_instance_usd is {usd(cap)}. May it go on?",
        )
    yield from _clocks(w, job, lease)


def _give_back(job: JobRecord) -> str:
    """What ends the meter. Alerts go to people, so it is commands and no tools."""
    return f"`gpuwarden pull {job.id}`, `gpuwarden verify {job.id}`, then `gpuwarden teardown {job.id}`"


def _price(lease: LeaseRecord) -> str:
    price = lease.instance.price_usd_per_hour if lease.instance else None
    return "" if price is None else f", {usd_per_hour(price)}"


def _clocks(w: Warden, job: JobRecord, lease: LeaseRecord) -> Iterator[Condition]:
    for clock in clocks_of(w, lease, job):
        left = clock.at - w.clock.now()
        if left < w.policy.watch.danger_hours * 3600:
            when = f"in about {left / 3600:.0f} h" if left > 0 else "any moment now"
            text = f"{lease.platform} acts on the machine of {job.id} {when} ({clock.trigger}): {clock.effect}."
            yield Condition(lease.subject, "danger_clock", line(text), mark=f"{clock.at:.0f}")


# ------------------------------------------------------------------------------------------------------- all of it


def _budgets(w: Warden) -> Iterator[Condition]:
    for subject, platform in (("watch/day", ""), ("watch/rehearsal-day", REHEARSAL)):
        cap = w.policy.caps_for(platform).per_day_usd
        if cap > 0 and (billed := billed_today(w, pretend=bool(platform))) >= cap:
            text = f"about {usd(billed)} in 24 hours; per_day_usd is {usd(cap)}. May the running jobs go on?"
            yield Condition(subject, "day_budget", text)


def _accounts(w: Warden, raised: Container[tuple[str, str, str]]) -> Iterator[Condition]:
    """The balances that end soon. One that stands clears later than it was raised: what is spent goes up and down."""
    for funds in known_funds(w):
        subject, clock = f"{BALANCE}{funds.platform}", funds.clock
        hours = w.policy.watch.danger_hours * (1.2 if (subject, "danger_clock", "") in raised else 1.0)
        if clock is not None and clock.at - w.clock.now() < hours * 3600:
            text = f"{funds.platform}: {clock.trigger}: {clock.effect}. Add credit, or give back what is not needed."
            yield Condition(subject, "danger_clock", line(text, 400))


def billed_today(w: Warden, *, pretend: bool) -> float:
    """What the machines of the last 24 hours cost in these hours, as far as it is known: at most a day each."""
    return sum(
        _last_day(w, lease_now(w, name))
        for name in lease_ids(w.ledger)
        if read_lease(w.ledger, name).platform.startswith(REHEARSAL) is pretend
    )


def _last_day(w: Warden, lease: LeaseRecord) -> float:
    cost = spent(w, lease.id)
    if cost is None or (lease.state not in LIVE_LEASES and not _recent(w, lease.since)):
        return 0.0
    price = lease.instance.price_usd_per_hour if lease.instance else None
    return cost if price is None or _recent(w, lease.opened_at) else min(cost, price * 24)
