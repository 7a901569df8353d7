"""Describe why a fan-out launches no more cells, and compute its alert conditions. No machine is queried."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from gpuwarden.core.cell_states import CellState
from gpuwarden.core.guidance import NextStep
from gpuwarden.core.money import usd
from gpuwarden.core.plural import counted
from gpuwarden.core.sanitize import line
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.fan_out.records import FanOutStatus
from gpuwarden.lifecycle.monitoring.alert_conditions import Condition


class Hold(StrEnum):
    """The reason why no more cells are launched although some are waiting. Running jobs continue."""

    BUDGET = "budget"
    CAPS = "caps"
    MACHINES = "machines"
    PRICE = "price"
    REFUSED = "refused"
    ENDED = "ended"


_PASSING: Final = frozenset({Hold.BUDGET, Hold.CAPS, Hold.MACHINES})
"""Holds that may be cleared when a machine ends."""
SHOWN: Final = 8
"""Number of cells that an alert lists; the others are only counted."""


@dataclass(frozen=True)
class Held:
    """A hold with its details. `needs` is the total budget in US dollars that would clear the hold."""

    by: Hold
    detail: str = ""
    needs: float | None = None

    def text(self, detail: str) -> str:
        """Return a sentence about the hold. `detail` is the hold's detail, formatted for display."""
        return {
            Hold.BUDGET: f"The budget is too small for another machine: {detail} is spent or reserved.",
            Hold.CAPS: f"Your caps block further launches: {detail}.",
            Hold.MACHINES: f"Machines of ended jobs are still billed, so no other machine may be rented: {detail}.",
            Hold.PRICE: f"The price is now {detail} an hour, above the checked price.",
            Hold.REFUSED: f"The submit gate blocks further launches: {detail}.",
            Hold.ENDED: "The fan-out was ended, so no more cells are launched.",
        }[self.by]


def fan_out_conditions(
    ctx: Context, now: FanOutStatus, held: Held | None, next_steps: Sequence[NextStep]
) -> Iterator[Condition]:
    """Yield the alert conditions for a fan-out: it is waiting for the user, has given up cells, or has finished.

    The end of a running job may free budget, caps or machines, so these holds are reported only if no job is running.
    """
    fan, steps = now.fan, tuple(next_steps)
    who = f"fan-out {fan.id} ({line(fan.plan.base.name, 60)})"
    proven = f"{now.cells.count(CellState.VERIFIED)} of {counted(fan.plan.size, 'cell')} verified"
    lost = [index for index, state in now.cells.states.items() if state in {CellState.GIVEN_UP, CellState.UNPROVEN}]
    if held is not None and held.by is not Hold.ENDED and not (held.by in _PASSING and now.live):
        text = f"{who} launches no more cells; {proven}. {held.text(line(held.detail, 300))}"
        hold_s = ctx.policy.watch.finished_minutes * 60 if held.by in _PASSING and now.idle else 0
        yield Condition(fan.subject, f"fan_out_{held.by}", text, hold_s, next_steps=steps)
    if lost:
        named = ", ".join(map(str, lost[:SHOWN])) + (f" and {len(lost) - SHOWN} more" if len(lost) > SHOWN else "")
        text = f"{who}: {counted(len(lost), 'cell')} given up or unproven, and not retried automatically: {named}."
        yield Condition(fan.subject, "fan_out_given_up", text, next_steps=steps)
    if now.over:
        text = f"{who} has finished: {proven}, {usd(now.cost)} spent or reserved."
        yield Condition(fan.subject, "fan_out_over", text, mark=str(fan.decisions), next_steps=steps)
