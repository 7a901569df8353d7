"""Reply about a fan-out: the number of cells per state, the cost, and the spread of results per configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gpuwarden.core.cell_states import CellState
from gpuwarden.core.guidance import Action, approval, do
from gpuwarden.core.money import usd
from gpuwarden.core.plural import counted
from gpuwarden.core.sanitize import named, quoted
from gpuwarden.interfaces.results.base import SHOWN, findings
from gpuwarden.interfaces.results.cells import CellReply, FanOutReply, SpreadReply
from gpuwarden.interfaces.results.check import CheckReply
from gpuwarden.interfaces.results.submission import SubmitReply
from gpuwarden.lifecycle.fan_out.holds import Held, Hold
from gpuwarden.lifecycle.fan_out.summary import spreads

if TYPE_CHECKING:
    from gpuwarden.lifecycle.fan_out.launching import FanOutResult
    from gpuwarden.lifecycle.fan_out.limits import LimitIncrease
    from gpuwarden.lifecycle.fan_out.records import FanOutStatus

_OPEN: Final = frozenset({CellState.WAITING, CellState.RUNNING, CellState.VERIFIED})


def fanned_out(result: FanOutResult) -> SubmitReply:
    """Return the reply to a call that may launch a fan-out."""
    reply = SubmitReply(
        findings=findings(result.findings),
        price_usd_per_hour=result.price,
        worst_cost_usd=result.worst_cost,
        adopted=result.adopted,
        fan_out=_cells(result),
    )
    if result.now is not None:
        reply.job_id, reply.state, reply.next = result.now.fan.id, _state(result.now), result.next_steps
        reply.ok, reply.message = reply.state != "over", _message(result, result.now)
        if result.rise is not None:
            return _rising(reply, result.rise)
        reply.code = "adopted" if result.adopted and reply.state == "running" else reply.state
        return reply
    reply.receipt, reply.receipt_expires_at = result.receipt, result.expires_at
    reply.code = "approval_required" if result.ask else "checked"
    most = f", at most {usd(result.worst_cost)} in all" if result.worst_cost is not None else ""
    reply.message = f"Checked {counted(result.plan.size, 'cell')}{most}; nothing was launched."
    if result.receipt:
        reply.next = (do(Action.SUBMIT, "to launch", receipt=result.receipt),)
    if result.ask:
        reply.message += f" The user has to approve the spending: {result.ask}."
        reply.next = (approval(result.receipt), *reply.next)
    return reply


def _rising(reply: SubmitReply, rise: LimitIncrease) -> SubmitReply:
    """Return the reply to a check of higher limits. The new limits are not active yet."""
    issued = rise.issued
    reply.ok, reply.code = True, "approval_required" if issued.ask else "checked"
    reply.receipt, reply.receipt_expires_at, reply.next = rise.receipt, issued.expires_at, rise.next_steps
    most = f"{usd(issued.worst_cost)} in all on at most {counted(issued.machines, 'machine')} at a time"
    reply.message = f"Checked: {rise.fan_id} would spend at most {most}; nothing was changed."
    if issued.ask:
        reply.message += f" The user has to approve this: {issued.ask}."
    return reply


def fan_out_checked(result: FanOutResult, now: FanOutStatus) -> CheckReply:
    """Return the reply to a check of an accepted fan-out."""
    state = _state(now)
    return CheckReply(
        job_id=now.fan.id,
        state=state,
        ok=state != "over",
        code=state,
        message=_message(result, now),
        next=result.next_steps,
        fan_out=_cells(result),
    )


def _state(now: FanOutStatus) -> str:
    """Return `complete` if every cell is verified, `over` if no further cell will be verified, otherwise `running`."""
    whole = now.cells.count(CellState.VERIFIED) == now.fan.plan.size
    return "complete" if whole else "over" if now.over else "running"


def _message(result: FanOutResult, now: FanOutStatus) -> str:
    proven, machines = now.cells.count(CellState.VERIFIED), ""
    if now.live:
        machines = f", {counted(len(now.live), 'machine')} running"
    message = f"Fan-out {now.fan.id}: {proven} of {counted(now.fan.plan.size, 'cell')} verified{machines}."
    return f"{message} {_held(result.held)}".rstrip()


def _cells(result: FanOutResult) -> FanOutReply:
    """Return the cells' states, cost and results."""
    reply, now = FanOutReply(cells=result.plan.size, held=_held(result.held)), result.now
    if now is None:
        return reply
    fan, cells = now.fan, now.cells
    reply.unknown = {job: quoted(why, 300) for job, why in result.trouble}
    reply.cost_usd, reply.jobs = round(now.cost, 4), list(now.live)
    reply.states = {str(state): cells.count(state) for state in CellState if cells.count(state)}
    last = {index: found.problem for (_, index), found in fan.found.items()}
    odd = [i for i, state in cells.states.items() if state not in _OPEN]
    reply.odd = [
        CellReply(index=i, state=cells.states[i], tries=cells.tries[i], problem=quoted(last.get(i, ""), 200))
        for i in odd[:SHOWN]
    ]
    reply.duplicates, reply.strangers = list(cells.duplicates), [index for _, index in cells.strangers]
    reply.table = [
        SpreadReply(
            settings={key: named(value, 80) for key, value in row.settings},
            cells=row.cells,
            proven=len(row.values),
            metric=named(row.metric, 60) if row.metric else "",
            mean=row.mean,
            std=row.deviation,
            median=row.median,
            low=min(row.values, default=None),
            high=max(row.values, default=None),
        )
        for row in spreads(fan)
    ]
    return reply


def _held(held: Held | None) -> str:
    """Return the reason why no more cells are launched, in one sentence; empty if launching continues."""
    if held is None:
        return ""
    foreign = held.by in {Hold.CAPS, Hold.REFUSED}  # the detail contains file names or policy keys
    return held.text(quoted(held.detail, 300) if foreign else held.detail)
