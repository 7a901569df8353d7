"""The watch: advance all jobs, leases and teardowns, and raise alerts.

It ends a machine only by automatic teardown, after a notice and with all outputs verified (`teardown/orders.py`). Only
one watch leads at a time; the others show the leader's results. An alert is an event in the ledger: the first process
that observes the condition raises the alert, and the first that observes the end of the condition clears it. If a
condition must last for some time, its start is stored in `watch.json` next to the ledger; losing that file only delays
alerts.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

import anyio
from anyio.lowlevel import checkpoint
from filelock import FileLock, Timeout

from gpuwarden.core.clock import doubled
from gpuwarden.core.states import LIVE_LEASES, Job, Lease
from gpuwarden.core.task_groups import first_error
from gpuwarden.ledger.events import AlertCleared, AlertRaised
from gpuwarden.lifecycle.artifacts.background import BackgroundCopier
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.execution.transitions import over_cap
from gpuwarden.lifecycle.fan_out.driving import FanOuts
from gpuwarden.lifecycle.leases.auto_teardown import ROUND, WATCH_FILE, rounds
from gpuwarden.lifecycle.monitoring.alert_conditions import (
    BALANCE,
    OBSERVED,
    UPLOAD,
    Condition,
    conditions,
)
from gpuwarden.lifecycle.monitoring.balances import dated
from gpuwarden.lifecycle.monitoring.inventory import (
    error_message,
    leases_of,
    reconcile,
    sweep,
    unsettled,
)
from gpuwarden.lifecycle.monitoring.reports import ReportPuller
from gpuwarden.lifecycle.notify import Alert, AlertSender, Key, record
from gpuwarden.lifecycle.records import lease_ids_of, read_job, read_lease
from gpuwarden.lifecycle.teardown.orders import AutoTeardowns
from gpuwarden.private import private_folder, write_private

EVERY_S: Final = 15.0
MAX_WAIT_S: Final = 300.0
REPORTS_S: Final = 5.0
"""Seconds between metric fetches. The interval is short, because the user may be watching a curve."""
LEAP_S: Final = 300.0
"""A round counts as missed if it is more than this many seconds late. A slow platform can delay a round."""
SWEEP_S: Final = 600.0
"""Seconds between reads of the platforms' lists, which reveal machines that exist although they are recorded as ended.
"""
FIRST_SWEEP_S: Final = 30.0
"""Seconds before a list that could not be read is requested again. The delay doubles with each failure."""
GAP_S: Final = 3600.0
"""Maximum seconds between two observations of a continuous condition. If `same` is set and unchanged, no limit applies.
"""


@dataclass(frozen=True)
class Round:
    """The result of a round: the alerts that were raised or cleared, the open alerts, and the reasons for failures."""

    news: tuple[Alert, ...]
    standing: tuple[Alert, ...]
    trouble: dict[str, str]


@dataclass
class Watcher:
    """Watches one state folder. Several processes can watch a folder: the ledger accepts each alert only once."""

    ctx: Context
    every_s: float = EVERY_S
    _next_sweep: float = 0.0
    _unread: int = 0
    """Number of consecutive sweeps with an unreadable list."""
    _raised: dict[Key, Alert] = field(default_factory=dict)
    _misses: dict[str, int] = field(default_factory=dict)
    _next: dict[str, float] = field(default_factory=dict)
    _looked_at: float = 0.0
    _leading: bool = False
    """Whether this process held the lock in the last round. If `defers` is set, the lock is released between rounds."""

    def __post_init__(self) -> None:
        self.copier, self.orders, self.reports = (
            BackgroundCopier(self.ctx),
            AutoTeardowns(self.ctx),
            ReportPuller(self.ctx),
        )
        self.fan_outs, self.alert_sender = FanOuts(self.ctx), AlertSender(self.ctx)
        # Lock files are never removed: a watch that locks a removed file would not exclude another watch.
        locks = private_folder(self.ctx.home / "locks")
        self._lock, self._copies, self._fetches = (
            FileLock(locks / f"{name}.lock", mode=0o600) for name in ("watch", "copies", "reports")
        )

    async def run(self, report: Callable[[Round], None], *, defers: bool = False) -> None:
        """Run rounds until canceled. Only the leader acts. If `defers` is true, the leader gives up the lead after each
        round.
        """
        with first_error():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._keep_copies)
                tasks.start_soon(self._fetch_reports)
                while True:
                    self._leading = self.leads()
                    report(await (self.round() if self._leading else self.follow()))
                    if defers:
                        self._lock.release()
                    await self.ctx.clock.sleep(self.every_s)

    def leads(self) -> bool:
        """Take the lead if no other watch has it, and return whether this process leads. The lock is released when the
        process exits.
        """
        if not self._lock.is_locked:
            with contextlib.suppress(Timeout):
                self._lock.acquire(blocking=False)
        return self._lock.is_locked

    async def once(self) -> Round:
        """Run one round, including copies, for a timer that starts the watch at intervals."""
        if not self.leads():
            return await self.follow()
        try:
            # Copy first; otherwise, the outputs of a job that has just ended would wait for the timer's next run.
            await reconcile(self.ctx)
            await _alone(self._copies, "copies", self.copier, self.fan_outs)
            found = await self.round()
            await _alone(self._fetches, "metrics", self.reports)  # last, because a slow machine must not delay alerts
            return replace(found, trouble=found.trouble | self.reports.trouble)
        finally:
            self._lock.release()

    async def follow(self) -> Round:
        """Return the alerts that the leading watch has raised since the last call."""
        before = set(self._raised)
        self._read()
        news = [alert for key, alert in self._raised.items() if key not in before]
        return Round(tuple(news), tuple(self._raised.values()), {})

    async def _keep_copies(self) -> None:
        """Copy and verify outputs, and launch fan-out jobs, concurrently so that no copy delays alerts."""
        while True:
            if self._leading:
                await _alone(self._copies, "copies", self.copier, self.fan_outs)
            await self.ctx.clock.sleep(self.every_s)

    async def _fetch_reports(self) -> None:
        """Fetch metrics concurrently with the rounds, because a slow machine must not delay alerts about other
        machines.
        """
        while True:
            if self._leading:
                await _alone(self._fetches, "metrics", self.reports)
            await self.ctx.clock.sleep(min(self.every_s, REPORTS_S))

    async def round(self) -> Round:
        """Reconcile, find conditions, record the changes and deliver them. Failures are reported, not raised."""
        try:
            now = self.ctx.clock.now()
            # If the clock was set back, a delay may exceed its limit; the delay is then ignored.
            waiting = {job for job, at in self._next.items() if 0 < at - now <= MAX_WAIT_S and not self._at_cap(job)}
            self.ctx.observed.clear()
            trouble = await reconcile(self.ctx, skip=waiting)
            await self._back_off(trouble, waiting)
            if not 0 < self._next_sweep - now <= SWEEP_S:
                unread = (await sweep(self.ctx))[1]
                # An unreadable list is read again sooner, because it may contain a billed machine that is running
                # again.
                self._unread = self._unread + 1 if unread else 0
                self._next_sweep = now + (doubled(FIRST_SWEEP_S, self._unread, SWEEP_S) or SWEEP_S)
                trouble |= unread
            awake_since = self._awake_since(now)
            trouble |= self.reports.trouble | self.fan_outs.trouble | self.copier.trouble
            trouble |= await self.orders.round(awake_since)
            self._read()
            found = [*await conditions(self.ctx, self._raised), *self.fan_outs.conditions()]
            news = self._settle(found, self._held(found, awake_since))
            trouble |= await self.alert_sender.round({c.key for c in found})
            if (doubt := self.ctx.ledger.trouble()) is not None:
                trouble["ledger"] = f"{doubt.message}. {doubt.hint}"
            return Round(tuple(news), tuple(self._raised.values()), trouble)
        except Exception as error:
            return Round((), tuple(self._raised.values()), {"watch": error_message(error)})

    def _awake_since(self, now: float) -> float:
        """Return the time of the first round since the last gap.

        During a gap, the user could not object, because the computer was asleep, the clock was changed, or no watch ran
        for longer than the grace period of an announced teardown.
        """
        since, last = rounds(self.ctx)
        grace_s = max(self.orders.shortest_grace(), 3 * self.every_s)
        allowed_s = min(grace_s, 3 * self.every_s + LEAP_S) if last == self._looked_at else grace_s
        self._looked_at = now
        return since if 0 <= now - last <= allowed_s else now

    # --------------------------------------------------------------------------------------------------- back-off

    def _at_cap(self, job_id: str) -> bool:
        """Return whether a job with a known state reached its cost cap.

        Jobs at their cap are polled without delay, so that a platform that does not respond can't postpone their end.
        """
        job = read_job(self.ctx.ledger, job_id)
        return job.state is not Job.UNKNOWN and over_cap(self.ctx, job)

    async def _back_off(self, trouble: dict[str, str], waiting: set[str]) -> None:
        """Double the polling interval of each job that did not respond; check all other jobs in every round."""
        live = unsettled(self.ctx)
        for job_id in set(self._misses) - set(live):
            self._misses.pop(job_id)
            self._next.pop(job_id, None)
        for job_id in (j for j in live if j not in waiting):
            await checkpoint()
            job = read_job(self.ctx.ledger, job_id)
            unverified = any(read_lease(self.ctx.ledger, n).state is Lease.UNVERIFIED for n in leases_of(self.ctx, job))
            if job_id in trouble or job_id in self.ctx.blind or job.state is Job.UNKNOWN or unverified:
                n = self._misses[job_id] = self._misses.get(job_id, 0) + 1
                self._next[job_id] = self.ctx.clock.now() + doubled(2 * self.every_s, n, MAX_WAIT_S)
            else:
                self._misses.pop(job_id, None)
                self._next.pop(job_id, None)

    # -------------------------------------------------------------------------------------------- lasting conditions

    def _held(self, found: list[Condition], awake_since: float) -> list[Condition]:
        """Return the conditions that have lasted long enough, and store the round's state."""
        now, file = self.ctx.clock.now(), self.ctx.home / WATCH_FILE
        try:
            stored = json.loads(file.read_text("utf-8"))
            past = {str(k): (float(v[0]), float(v[1]), str(v[2])) for k, v in stored.items()}
        except (OSError, ValueError, AttributeError, TypeError, LookupError):
            past = {}
        present: dict[str, tuple[float, float, str]] = {ROUND: (awake_since, self._looked_at, "")}
        held = []
        for c in found:
            name = "|".join(c.key)
            since = c.since
            if since is None and c.hold_s:
                first, last, same = past.get(name, (now, now, c.same))
                goes_on = same == c.same and (c.same or now - last <= GAP_S)
                since = first if goes_on else now
                present[name] = since, now, c.same
            if since is None or now - since >= c.hold_s:
                held.append(c)
        unseen = {n: v for n, v in past.items() if n not in present and self._unseen(*n.split("|")[:2])}
        with contextlib.suppress(PermissionError):  # on Windows, the file may be in use
            write_private(file, json.dumps(present | unseen))
        return held

    def _unseen(self, subject: str, kind: str) -> bool:
        """Return whether a condition is currently unknown, because the machine or account was not observed."""
        if subject.startswith(BALANCE):
            return not dated(self.ctx, subject.removeprefix(BALANCE))
        if self.fan_outs.unseen(subject):
            return True
        job_id = subject.removeprefix("job/")
        state = self.ctx.ledger.state(subject)
        if kind == UPLOAD:  # uploads continue after the job's end, as long as the machine exists
            return job_id not in self.ctx.observed and bool(lease_ids_of(self.ctx.ledger, job_id, *LIVE_LEASES))
        return kind in OBSERVED and job_id not in self.ctx.observed and state in {Job.RUNNING, Job.UNKNOWN}

    # --------------------------------------------------------------------------------------------------- the ledger

    def _read(self) -> None:
        """Read the currently open alerts, which any process may have raised."""
        standing = (Alert.read(event) for event in self.ctx.ledger.standing_alerts())
        self._raised = {alert.key: alert for alert in standing}

    def _settle(self, found: list[Condition], held: list[Condition]) -> list[Alert]:
        """In one transaction, read the open alerts, raise new alerts and clear those whose conditions have ended."""
        stays = {c.key for c in held} | {c.key for c in found if not c.same}
        with self.ctx.ledger.transaction():
            self._read()
            over = [k for k in self._raised if k not in stays and not self._unseen(*k[:2])]
            new = [c for c in held if self.ctx.ledger.alert(*c.key) is None]
            news = [record(self.ctx, AlertRaised, c.key, c.text, c.next_steps) for c in new]
            news += [record(self.ctx, AlertCleared, key, self._raised[key].text) for key in over]
        self._read()
        return news


async def _alone(lock: FileLock, name: str, *workers: BackgroundCopier | FanOuts | ReportPuller) -> None:
    """Run a round of each worker unless another process is doing so. The first worker's `trouble` gets the errors."""
    try:
        with contextlib.suppress(Timeout):
            lock.acquire(blocking=False)
        for worker in workers if lock.is_locked else ():
            await worker.round()
    except Exception as error:
        workers[0].trouble[name] = error_message(error)
    finally:
        lock.release()
