"""Name what holds a fan-out's launches, and find what a person should hear of it. Nothing is asked of any machine."""

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
from gpuwarden.lifecycle.fan_out.records import Standing
from gpuwarden.lifecycle.monitoring.alert_conditions import Condition


class Hold(StrEnum):
    """Why nothing more is launched although cells wait. What runs goes on."""

    BUDGET = "budget"
    CAPS = "caps"
    MACHINES = "machines"
    PRICE = "price"
    REFUSED = "refused"
    ENDED = "ended"


_PASSING: Final = frozenset({Hold.BUDGET, Hold.CAPS, Hold.MACHINES})
"""Holds that the end of a machine may lift."""
SHOWN: Final = 8
"""Cells that an alert names; the others are counted."""


@dataclass(frozen=True)
class Held:
    """A hold, and the figures or the message that go with it. A budget of `needs` US dollars in all would lift it."""

    by: Hold
    detail: str = ""
    needs: float | None = None

    def text(self, detail: str) -> str:
        """Return one sentence about the hold with its detail as an interface shows it."""
        return {
            Hold.BUDGET: f"The budget has no room for another machine: {detail} is spent or reserved.",
            Hold.CAPS: f"Your caps hold further launches: {detail}.",
            Hold.MACHINES: f"The machines of ended jobs still bill, and no further one may be rented: {detail}.",
            Hold.PRICE: f"The price is now {detail} an hour, above the one that was checked.",
            Hold.REFUSED: f"The submit gate holds further launches: {detail}.",
            Hold.ENDED: "It was ended, so nothing more is launched.",
        }[self.by]


def fan_out_conditions(
    ctx: Context, now: Standing, held: Held | None, next_steps: Sequence[NextStep]
) -> Iterator[Condition]:
    """Yield what a person should hear of a fan-out as it was last moved on: that it waits for one, or is over.

    A budget, a cap and a machine that bills on may make room by themselves while something runs, so they count as
    holding it from when nothing does.
    """
    fan, steps = now.fan, tuple(next_steps)
    who = f"fan-out {fan.id} ({line(fan.plan.base.name, 60)})"
    proven = f"{now.cells.count(CellState.VERIFIED)} of {counted(fan.plan.size, 'cell')} verified"
    lost = [index for index, state in now.cells.states.items() if state in {CellState.GIVEN_UP, CellState.UNPROVEN}]
    if held is not None and held.by is not Hold.ENDED and not (held.by in _PASSING and now.live):
        text = f"{who} launches nothing more, with {proven}. {held.text(line(held.detail, 300))}"
        hold_s = ctx.policy.watch.finished_minutes * 60 if held.by in _PASSING and now.idle else 0
        yield Condition(fan.subject, f"fan_out_{held.by}", text, hold_s, next_steps=steps)
    if lost:
        named = ", ".join(map(str, lost[:SHOWN])) + (f" and {len(lost) - SHOWN} more" if len(lost) > SHOWN else "")
        text = f"{who}: {counted(len(lost), 'cell')} given up or unproven, and nothing runs them again: {named}."
        yield Condition(fan.subject, "fan_out_given_up", text, next_steps=steps)
    if now.over:
        text = f"{who} is over: {proven}, {usd(now.cost)} spent or reserved."
        yield Condition(fan.subject, "fan_out_over", text, mark=str(fan.decisions), next_steps=steps)
