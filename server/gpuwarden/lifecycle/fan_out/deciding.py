"""Carry out a user's or an agent's decision to end, cancel or resume a fan-out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gpuwarden.core.cell_states import CellState
from gpuwarden.core.errors import BadRequest, Refused, WardenError
from gpuwarden.core.guidance import Action, do
from gpuwarden.ledger.events import FanOutEnded, FanOutResumed
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.fan_out.launching import FanOutResult, advance_fan_out
from gpuwarden.lifecycle.fan_out.records import FanOutStatus, fan_out_status, read_fan_out
from gpuwarden.lifecycle.monitoring.check import cancel

TERMINAL: Final = "cli"
"""The name of the terminal interface in an event's actor."""


def end_fan_out(ctx: Context, fan_id: str, by: str) -> FanOutStatus:
    """Stop a fan-out from launching more cells. Running jobs continue, and their outputs are collected.

    Jobs that are recorded but not yet submitted are canceled when they are next advanced (`recalled`).
    """
    fan = read_fan_out(ctx.ledger, fan_id)
    if not fan.ended:
        ctx.ledger.add(fan.subject, FanOutEnded(by=by))
    return fan_out_status(ctx, read_fan_out(ctx.ledger, fan_id))


def resume_fan_out(ctx: Context, fan_id: str, by: str, cells: Sequence[int] = ()) -> FanOutStatus:
    """Allow more attempts for the cells in `cells`, or for all unverified cells if `cells` is empty.

    The receipt, the budget and the configurations stay the same. Raises BadRequest for an index that is not in the plan
    or whose cell is verified or running, and Refused if the user ended the fan-out at a terminal and the call comes
    from another interface.
    """
    fan = read_fan_out(ctx.ledger, fan_id)
    if fan.ended_by.partition("/")[0] == TERMINAL != ctx.ledger.acting.partition("/")[0]:
        raise Refused(
            f"fan-out {fan_id} was ended at a terminal, so it can be resumed only at a terminal",
            do(Action.MANUAL, text=f"Ask the user to resume fan-out {fan_id}."),
        )
    states = fan_out_status(ctx, fan).cells.states
    for index in cells:
        if index not in states:
            raise BadRequest(f"fan-out {fan_id} has no cell {index}; its last cell is {len(fan.cells) - 1}")
        if states[index] in {CellState.VERIFIED, CellState.RUNNING}:
            raise BadRequest(f"cell {index} is {states[index]}, so there is nothing to resume")
    over = {CellState.VERIFIED, CellState.RUNNING, CellState.WAITING}
    chosen_cells = tuple(sorted(set(cells))) or tuple(index for index, state in states.items() if state not in over)
    ctx.ledger.add(fan.subject, FanOutResumed(cells=chosen_cells, by=by))
    return fan_out_status(ctx, read_fan_out(ctx.ledger, fan_id))


async def cancel_fan_out(ctx: Context, fan_id: str, by: str) -> FanOutResult:
    """Stop a fan-out from launching more cells, and cancel its running jobs. Its machines keep running and are billed.

    Raises the first error, but only after trying to cancel every job.
    """
    failed = []
    for job in end_fan_out(ctx, fan_id, by).live:
        try:
            await cancel(ctx, job)
        except WardenError as error:
            failed.append(error)
    found = await advance_fan_out(ctx, fan_id)
    if failed:
        raise failed[0]
    return found


async def continue_fan_out(ctx: Context, fan_id: str, by: str) -> FanOutResult:
    """Resume every unverified cell, and launch as many as currently possible."""
    resume_fan_out(ctx, fan_id, by)
    return await advance_fan_out(ctx, fan_id)
