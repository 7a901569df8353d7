"""Carry out what a person or an agent decides about a fan-out: end it, cancel it, or let it go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gpuwarden.core.cell_states import CellState
from gpuwarden.core.errors import BadRequest, Refused
from gpuwarden.core.guidance import Action, do
from gpuwarden.ledger.events import FanOutEnded, FanOutResumed
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.fan_out.launching import FanOutResult, advance_fan_out
from gpuwarden.lifecycle.fan_out.records import Standing, read_fan_out, standing
from gpuwarden.lifecycle.monitoring.check import cancel

TERMINAL: Final = "cli"
"""The interface of an event's actor that people at a terminal use."""


def end_fan_out(ctx: Context, fan_id: str, by: str) -> Standing:
    """Launch nothing more of a fan-out. What runs goes on, and what it saves is collected.

    What was decided and not sent yet is recalled by whoever moves it on next (`recalled`).
    """
    fan = read_fan_out(ctx.ledger, fan_id)
    if not fan.ended:
        ctx.ledger.add(fan.subject, FanOutEnded(by=by))
    return standing(ctx, read_fan_out(ctx.ledger, fan_id))


def resume_fan_out(ctx: Context, fan_id: str, by: str, cells: Sequence[int] = ()) -> Standing:
    """Give cells that are not verified further tries, whatever became of them: those named, or all.

    The receipt, the budget and the configurations stay. Raises BadRequest for an index that the plan does not have,
    or whose cell is verified or runs, and Refused for a call from elsewhere where a person ended it at a terminal.
    """
    fan = read_fan_out(ctx.ledger, fan_id)
    if fan.ended_by.partition("/")[0] == TERMINAL != ctx.ledger.acting.partition("/")[0]:
        raise Refused(
            f"a person ended fan-out {fan_id} at a terminal, and only there it goes on",
            do(Action.MANUAL, text=f"Ask the user whether fan-out {fan_id} may go on."),
        )
    states = standing(ctx, fan).cells.states
    for index in cells:
        if index not in states:
            raise BadRequest(f"fan-out {fan_id} has no cell {index}; its last one is {len(fan.cells) - 1}")
        if states[index] in {CellState.VERIFIED, CellState.RUNNING}:
            raise BadRequest(f"cell {index} is {states[index]}, so there is nothing to resume")
    over = {CellState.VERIFIED, CellState.RUNNING, CellState.WAITING}
    chosen_cells = tuple(sorted(set(cells))) or tuple(index for index, state in states.items() if state not in over)
    ctx.ledger.add(fan.subject, FanOutResumed(cells=chosen_cells, by=by))
    return standing(ctx, read_fan_out(ctx.ledger, fan_id))


async def cancel_fan_out(ctx: Context, fan_id: str, by: str) -> FanOutResult:
    """Launch nothing more of a fan-out and end what runs, with a signal first. Its machines stay and bill on."""
    for job in end_fan_out(ctx, fan_id, by).live:
        await cancel(ctx, job)
    return await advance_fan_out(ctx, fan_id)


async def continue_fan_out(ctx: Context, fan_id: str, by: str) -> FanOutResult:
    """Resume every cell that is not verified, and launch what fits now."""
    resume_fan_out(ctx, fan_id, by)
    return await advance_fan_out(ctx, fan_id)
