"""Advance every open fan-out in a ledger for the watch: prove the outputs of ended queues, and launch more cells."""

from __future__ import annotations

from typing import Final

from anyio.lowlevel import checkpoint

from gpuwarden.core.clock import doubled
from gpuwarden.ledger.events import FanOutAccepted, FanOutLimited, FanOutResumed
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.fan_out.holds import fan_out_conditions
from gpuwarden.lifecycle.fan_out.launching import FanOutResult, advance_fan_out
from gpuwarden.lifecycle.monitoring.alert_conditions import DAY_S, Condition
from gpuwarden.lifecycle.monitoring.inventory import error_message

FIRST_WAIT_S: Final = 30.0
MOST_WAIT_S: Final = 600.0


class FanOuts:
    """Advances the fan-outs in one ledger. The interval between attempts doubles after each hold or failure.

    A finished fan-out is checked again only after it is resumed or its limits change.
    """

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self._trouble: dict[str, dict[str, str]] = {}
        self._open: set[str] = set()
        self._read = 0
        self._misses: dict[str, int] = {}
        self._next: dict[str, float] = {}
        self._last: dict[str, FanOutResult] = {}
        self._ended: dict[str, float] = {}

    @property
    def trouble(self) -> dict[str, str]:
        """Return the reasons for failures, by fan-out or job."""
        return {name: why for each in self._trouble.values() for name, why in each.items()}

    async def round(self) -> None:
        """Advance each open fan-out as far as possible. Failures are reported in `trouble`, not raised."""
        events = self.ctx.ledger.events
        kinds = (FanOutAccepted, FanOutResumed, FanOutLimited)
        news = [event for kind in kinds for event in events(kind=kind, after=self._read)]
        for event in news:
            fan_id = event.subject.removeprefix("fanout/")
            self._open.add(fan_id)
            self._next.pop(fan_id, None)
            self._ended.pop(fan_id, None)
        self._read = max((event.seq for event in news), default=self._read)
        for fan_id in sorted(self._open):
            await checkpoint()
            if self.ctx.clock.now() >= self._next.get(fan_id, 0.0):
                waits = await self._advanced(fan_id)
                n = self._misses[fan_id] = self._misses.get(fan_id, 0) + 1 if waits else 0
                self._next[fan_id] = self.ctx.clock.now() + doubled(FIRST_WAIT_S, n, MOST_WAIT_S)

    def conditions(self) -> list[Condition]:
        """Return the alert conditions for fan-outs that are open or that finished in the last day."""
        for fan_id in [name for name, at in self._ended.items() if self.ctx.clock.now() - at > DAY_S]:
            del self._ended[fan_id], self._last[fan_id]
        found = [(each.now, each.held, each.next_steps) for each in self._last.values()]
        return [each for now, held, steps in found if now for each in fan_out_conditions(self.ctx, now, held, steps)]

    def unseen(self, subject: str) -> bool:
        """Return whether a subject is an open fan-out that this process has not advanced yet."""
        fan_id = subject.removeprefix("fanout/")
        return fan_id != subject and fan_id not in self._last and (fan_id in self._open or not self._read)

    async def _advanced(self, fan_id: str) -> bool:
        """Advance one fan-out. Return whether a hold or a failure blocks it."""
        try:
            found = await advance_fan_out(self.ctx, fan_id, jobs=False)
        except Exception as error:
            self._trouble[fan_id] = {fan_id: error_message(error)}
            return True
        self._trouble[fan_id] = {job: f"its copy has not been proven yet: {why}" for job, why in found.trouble}
        self._last[fan_id] = found
        if found.now is not None and found.now.over:
            self._open.discard(fan_id)
            self._ended[fan_id] = self.ctx.ledger.history(found.now.fan.subject)[-1].at
        return found.held is not None or bool(found.trouble)
