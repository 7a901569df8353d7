"""The state transitions of an instance. Each is a pure function of a record, a time and a profile, and returns a record
with pending effects.

```
create -> booting -> running -> stopping -> stopped -> booting (start)
             |          |          +-----> interrupted -> running (auto-resume) or booting (start)
             v          |          +-----> gone (preempted, unless the profile's `spot.then` is `stopped`)
          failed        +-> gone (vanished, or the job of a serverless platform ended)
any but gone -> terminating -> gone
```

The effects, in the order in which they are carried out: `on`, `signal`, `kill`, `off`, `wipe:<event>`, `erase`. Each
effect is idempotent, so it can be repeated after a crash.
"""

from __future__ import annotations

from typing import Any

from gpuwarden.core.models import InstanceState
from gpuwarden.core.profile import Event, Profile
from gpuwarden.rehearsal import meter
from gpuwarden.rehearsal.model import Fault, Record, Settings

_S = InstanceState


class Engine:
    """The state transitions on one platform."""

    def __init__(self, profile: Profile, settings: Settings) -> None:
        self.profile = profile
        self.settings = settings

    def advance(self, record: Record, now: float) -> Record:
        """Apply every transition that was due by `now`, each at its due time."""
        while record.due is not None and record.due <= now:
            record = self._move(record, record.due)
        return record

    def born(self, record: Record) -> Record:
        """Return a record in its initial state, booting."""
        return self.boot(record, record.created_at, "created")

    def boot(self, record: Record, at: float, why: str) -> Record:
        """Return the record after power-on: booting, and running after the boot time."""
        slow = record.fault("slow_boot")
        due = at + self.settings.boot_s + (slow.seconds if slow else 0.0)
        left = record.without(slow) if slow else record.faults
        return self._enter(record, _S.BOOTING, at, due=due, why=why, faults=left)

    def stop(self, record: Record, at: float, *, by_itself: bool = False) -> Record:
        """Return the record after a stop: its processes are signaled now and killed after the stop time. An interrupted
        instance stops immediately. `by_itself` is true if the instance itself requested the stop, or if the platform
        stopped it at the end date.
        """
        if record.state == _S.INTERRUPTED:
            return self._enter(record, _S.STOPPED, at, why="stopped while interrupted")
        why = "it stopped by itself" if by_itself else "stop was requested"
        return self._ending(record.but(by_itself=by_itself), _S.STOPPING, at, "stop", self.settings.stop_s, why)

    def terminate(self, record: Record, at: float) -> Record:
        """Return the record after a termination by the user."""
        ended, why = record.but(by_itself=False), "terminate was requested"
        return self._ending(ended, _S.TERMINATING, at, "terminate", self.settings.stop_s, why)

    def preempt(self, record: Record, at: float) -> Record:
        """Return the record after a preemption: a signal, then the grace period. The worst case is assumed for unknown
        facts.
        """
        spot = self.profile.spot
        grace = float(spot.grace_s) if isinstance(spot.grace_s, int | float) else 0.0
        signal = spot.signal == "SIGTERM"
        return self._ending(record, _S.STOPPING, at, "preemption", grace, "preempted by the platform", signal=signal)

    def vanish(self, record: Record, at: float) -> Record:
        """Return the record after the instance has vanished. No list or lookup returns it afterward."""
        return self._gone(record, at, "terminate", "vanished", vanished=True)

    def job_end(self, record: Record, at: float) -> Record:
        """Return the record after its job's end, which may delete files. A serverless instance ends with its job."""
        if self.profile.kind == "serverless":
            return self._gone(record, at, "job_end", "the job ended")
        return record.but(job_ended=True, pending=(*record.pending, "wipe:job_end"))

    def given(self, record: Record, fault: Fault) -> Record:
        """Return the record with one more fault. The delay of a timed fault starts when the instance begins to run."""
        record = record.but(faults=(*record.faults, fault))
        return record.but(due=self._timed(record, record.since)) if record.state == _S.RUNNING else record

    def strike(self, record: Record, at: float, step: int | None) -> Record:
        """Apply each preemption or disappearance of a running instance that is due at this step or time."""
        for fault in record.faults:
            if record.state != _S.RUNNING or not self._ripe(fault, record, at, step):
                continue
            record = record.but(faults=record.without(fault))
            record = self.vanish(record, at) if fault.kind == "vanish" else self.preempt(record, at)
        return record

    @staticmethod
    def _ripe(fault: Fault, record: Record, at: float, step: int | None) -> bool:
        if fault.kind == "preempt" and not record.interruptible:
            return False
        if fault.kind not in {"preempt", "vanish"}:
            return False
        if fault.step is not None:
            return step is not None and step >= fault.step
        return at >= record.since + fault.seconds

    def _move(self, record: Record, at: float) -> Record:
        if record.state == _S.BOOTING:
            failed = record.fault("failed_boot")
            if failed is None:
                return self._run(record, at, "booted")
            return self._enter(record, _S.FAILED, at, why="the boot failed", faults=record.without(failed))
        if record.state == _S.RUNNING:
            return self.strike(record.but(due=None), at, None)
        if record.state == _S.STOPPING:
            if record.cause != "preemption":
                return self._enter(record, _S.STOPPED, at, why="stopped", effects=("kill", "off", "wipe:stop"))
            spot = self.profile.spot
            if spot.then != "stopped":
                return self._gone(record, at, "preemption", record.why)
            due = at + self.settings.resume_s if spot.auto_resume is True else None
            effects = ("kill", "off", "wipe:preemption")
            return self._enter(record, _S.INTERRUPTED, at, due=due, why=record.why, effects=effects)
        if record.state == _S.TERMINATING:
            return self._gone(record, at, "terminate", "terminated")
        if record.state == _S.INTERRUPTED:
            return self._run(record, at, "resumed by the platform")
        back = record.fault("comes_back")
        return self._run(record.but(faults=record.without(back) if back else ()), at, "came back after it was gone")

    def _run(self, record: Record, at: float, why: str) -> Record:
        due = self._timed(record, at)
        return self._enter(record, _S.RUNNING, at, due=due, why=why, effects=("on",), job_ended=False, vanished=False)

    @staticmethod
    def _timed(record: Record, since: float) -> float | None:
        """Return the time of the next timed preemption or disappearance of an instance that has been running since
        `since`.
        """
        kinds = {"preempt", "vanish"} if record.interruptible else {"vanish"}
        timed = [f.seconds for f in record.faults if f.kind in kinds and f.step is None]
        return since + min(timed) if timed else None

    def _gone(self, record: Record, at: float, event: Event, why: str, **changes: Any) -> Record:
        back = record.fault("comes_back")
        due = at + back.seconds if back and event == "terminate" else None
        effects = ("kill", f"wipe:{event}", "erase")
        return self._enter(record, _S.GONE, at, due=due, why=why, effects=effects, **changes)

    def _ending(
        self,
        record: Record,
        state: InstanceState,
        at: float,
        cause: Event,
        grace: float,
        why: str,
        *,
        signal: bool = True,
    ) -> Record:
        effects = ("signal",) if signal else ()
        return self._enter(record, state, at, due=at + grace, why=why, effects=effects, cause=cause)

    def _enter(
        self,
        record: Record,
        state: InstanceState,
        at: float,
        *,
        due: float | None = None,
        why: str = "",
        effects: tuple[str, ...] = (),
        **changes: Any,
    ) -> Record:
        pending = (*record.pending, *effects)
        moved = record.but(**{"state": state, "since": at, "due": due, "why": why, "pending": pending, **changes})
        return meter.turn(self.profile, self.settings, moved, at)
