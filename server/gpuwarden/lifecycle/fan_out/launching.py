"""Launch each queue of a fan-out on a separate machine, within budget and caps, until every cell is proven.

A queue's intent and its job's acceptance are recorded in one transaction, before any call. After a crash or a lost
reply, `advance` adopts the job, so no cell runs on two machines. If the engine supports arrays, all waiting cells are
submitted as one array, and all its jobs are recorded in one transaction. The engine then runs as many jobs at a time as
there are free machines.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from pathlib import Path

from gpuwarden.core.cell_states import CellState
from gpuwarden.core.errors import Refused, WardenError
from gpuwarden.core.fan_out import FanOutPlan, cell_spec, pack
from gpuwarden.core.guidance import Action, NextStep, do
from gpuwarden.core.money import usd
from gpuwarden.core.rules import Finding
from gpuwarden.core.states import Job
from gpuwarden.ledger.events import FanOutRequested
from gpuwarden.lifecycle.context import CAPS, Context
from gpuwarden.lifecycle.execution.advance import advance
from gpuwarden.lifecycle.execution.bootstrap import pin_host_key
from gpuwarden.lifecycle.execution.situation import following
from gpuwarden.lifecycle.fan_out.collecting import collect
from gpuwarden.lifecycle.fan_out.holds import Held, Hold
from gpuwarden.lifecycle.fan_out.limits import LimitIncrease, consented
from gpuwarden.lifecycle.fan_out.queues import inside, queue_of, record_array, record_queue, takes_arrays
from gpuwarden.lifecycle.fan_out.records import FanOutStatus, fan_out_status, read_fan_out
from gpuwarden.lifecycle.fan_out.search import chosen
from gpuwarden.lifecycle.leases.budgets import over_caps
from gpuwarden.lifecycle.leases.shared_answers import shared_answers, sharing
from gpuwarden.lifecycle.records import read_job, read_receipt
from gpuwarden.lifecycle.submission.submit import (
    check_spec,
    moved,
    take_inputs,
)


@dataclass(frozen=True)
class FanOutResult:
    """Result of a fan-out call. If the plan was only checked, `now` is None, and `receipt` launches it."""

    plan: FanOutPlan
    findings: tuple[Finding, ...] = ()
    price: float | None = None
    worst_cost: float | None = None
    receipt: str | None = None
    expires_at: float | None = None
    ask: str = ""
    now: FanOutStatus | None = None
    adopted: bool = False
    held: Held | None = None
    trouble: tuple[tuple[str, str], ...] = ()
    rise: LimitIncrease | None = None
    """Higher limits that have been checked but not applied."""
    next_steps: tuple[NextStep, ...] = ()


async def advance_fan_out(ctx: Context, fan_id: str, *, jobs: bool = True) -> FanOutResult:
    """Advance a fan-out as far as possible: advance open jobs, copy outputs of ended jobs, and launch more cells.

    If `jobs` is false, the open jobs are not advanced, because the caller advances them.
    """
    now = fan_out_status(ctx, read_fan_out(ctx.ledger, fan_id))
    trouble: list[tuple[str, str]] = []  # each job with its error, which is empty if the job was advanced
    if jobs and shared_answers(ctx) is not None:
        trouble += [await _advanced(ctx, job) for job in now.live]
    elif jobs:
        with sharing(ctx, [read_job(ctx.ledger, job) for job in now.live], ()):  # poll each place only once
            trouble += [await _advanced(ctx, job) for job in now.live]
    trouble += (await collect(ctx, fan_id)).items()
    async with ctx.lock(fan_id):
        held, launched = await _launch_all(ctx, fan_id)
    for job_id in launched:
        job = read_job(ctx.ledger, job_id)
        if not job.array or job.state is Job.SUBMITTING:  # the first job of an array submits the whole array
            trouble.append(await _advanced(ctx, job_id))
    fan = read_fan_out(ctx.ledger, fan_id)
    told = tuple((job, why) for job, why in trouble if why)
    now = fan_out_status(ctx, fan)
    rest = _following(ctx, now, held)
    return FanOutResult(fan.plan, price=fan.price, now=now, held=held, trouble=told, next_steps=rest)


def _following(ctx: Context, now: FanOutStatus, held: Held | None) -> tuple[NextStep, ...]:
    """Return the next steps: check again, end an idle machine, raise the budget, or retry unverified cells."""
    steps: list[NextStep] = []
    if now.live or not (held or now.over):
        steps.append(do(Action.CHECK, "; the call does not wait", job_id=now.fan.id))
    if now.idle and not now.live:
        steps += following(ctx, read_job(ctx.ledger, now.idle[0]))
    elif held and held.needs is not None and not now.live:
        most = math.ceil(held.needs * 100) / 100
        steps.append(do(Action.RESUME, "to raise its budget to this amount", job_id=now.fan.id, max_cost_usd=most))
    elif not steps and now.cells.count(CellState.VERIFIED) < now.fan.plan.size:
        steps.append(do(Action.RESUME, "to retry the unverified cells", job_id=now.fan.id))
    return tuple(steps)


async def _advanced(ctx: Context, job_id: str) -> tuple[str, str]:
    try:
        await advance(ctx, job_id)
    except WardenError as error:
        return job_id, error.message
    return job_id, ""


async def _launch_all(ctx: Context, fan_id: str) -> tuple[Held | None, list[str]]:
    """Launch waiting cells until none is left, no machine is free, or a hold applies. Return the hold and new jobs."""
    launched: list[str] = []
    while True:
        now = fan_out_status(ctx, read_fan_out(ctx.ledger, fan_id))
        profile = ctx.profile(now.fan.plan.base.platform)
        # A machine that the user owns runs one queue at a time.
        most = now.fan.plan.max_machines if profile.meter.metered or profile.kind == "engine" else 1
        room = most - now.busy - len(now.idle)
        if now.fan.ended:
            return (Held(Hold.ENDED) if now.cells.launchable else None), launched
        if room > 0 and now.fan.plan.search is not None:
            now = _choose_cells(ctx, now, room)
        if not now.cells.launchable or room <= 0:
            stuck = now.cells.launchable and now.idle and not now.live
            return (Held(Hold.MACHINES, ", ".join(now.idle[:8])) if stuck else None), launched
        jobs = await _launch(ctx, now, room)
        if isinstance(jobs, Held):
            return jobs, launched
        launched += jobs


def _choose_cells(ctx: Context, now: FanOutStatus, room: int) -> FanOutStatus:
    """Let the search choose cells for the free machines, and record these cells."""
    fan, free = now.fan, room * now.fan.plan.base.gpu_count - len(now.cells.launchable)
    count = min(free, fan.plan.size - len(fan.cells))
    if count <= 0:
        return now
    reached = {i: fan.found[p.job, i].objective for i, p in fan.proven.items()}
    failed = {i: None for i, state in now.cells.states.items() if state is CellState.GIVEN_UP}
    cells = chosen(fan.plan, fan.cells, reached | failed, count)
    ctx.ledger.add(fan.subject, FanOutRequested(cells=cells))
    return fan_out_status(ctx, read_fan_out(ctx.ledger, fan.id))


async def _launch(ctx: Context, now: FanOutStatus, room: int) -> list[str] | Held:
    """Launch one machine's cells, or all cells on an engine with arrays. Return the ids of their jobs, or the hold."""
    fan, plan = now.fan, now.fan.plan
    by_index = {cell.index: cell for cell in fan.cells}
    waiting = [by_index[index] for index in now.cells.launchable]
    engine = ctx.profile(plan.base.platform).kind == "engine"
    array = len(waiting) > 1 and takes_arrays(ctx, plan)
    cells = waiting[:1] if engine else pack(waiting, room, plan.weigh)[0]
    there = copy.copy(ctx)
    there.cwd = Path(fan.folder)  # not this process's folder, because any process may advance a fan-out
    try:
        checked = await check_spec(there, cell_spec(plan, cells[0]), tasks=len(waiting) if array else 1)
        place = await pin_host_key(ctx, ctx.owned_place(plan.base.platform)) if array else None
    except Refused as refusal:
        return Held(Hold.REFUSED, refusal.message)
    except WardenError as error:
        if not array:
            raise
        return Held(Hold.REFUSED, error.message)
    if changed := moved(read_receipt(ctx.ledger, fan.receipt).issued, checked):
        return Held(Hold.REFUSED, changed)  # if the facts differed, the plan's cells would not be comparable
    if checked.facts.metered and (checked.facts.price is None or checked.facts.price > (fan.price or 0.0)):
        return Held(Hold.PRICE, usd(checked.facts.price), needs=fan.budget)
    number = len(fan.queues) + 1
    if place is not None:
        queues = [queue_of(plan, [cell], checked, number + n) for n, cell in enumerate(waiting)]
        return await record_array(there, fan, queues, place, min(room, len(waiting)))
    ready = inside(fan, cells, checked, number, now.cost)
    if ready is None:
        least = queue_of(plan, cells[:1], checked, number).checked.facts.worst_cost
        return Held(Hold.BUDGET, usd(now.cost), needs=None if least is None else now.cost + least)
    worst = ready.checked.facts.worst_cost
    async with ctx.lock(CAPS):
        if checked.facts.metered and not consented(ctx, fan, now.cost + (worst or 0.0)):
            over = over_caps(ctx, ready.checked.facts.spec, worst or 0.0, fan.person)
            if over:
                return Held(Hold.CAPS, over)
        await take_inputs(there, ready.checked)
        record_queue(ctx, fan, ready)
    return [ready.job_id(fan)]
