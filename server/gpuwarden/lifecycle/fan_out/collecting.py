"""Collect the copies of ended queues: find their cells, and check that each cell succeeded and its files are proven."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

from gpuwarden.core.cell_states import Outcome
from gpuwarden.core.errors import NotFound, WardenError
from gpuwarden.core.models import CELLS, MAX_CELLS, Cell, CheckpointEvidence, FileEvidence, Report, Verdict
from gpuwarden.core.sanitize import line
from gpuwarden.core.states import TERMINAL_JOBS, Lease
from gpuwarden.ledger.events import CellProven, QueueCollected, QueueIntent
from gpuwarden.ledger.events.fan_out import CellFound
from gpuwarden.lifecycle.artifacts.local_copies import Pulled, last_pull
from gpuwarden.lifecycle.artifacts.pull import pull
from gpuwarden.lifecycle.artifacts.verify import verify_job
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.fan_out.records import FanOutRecord, read_fan_out
from gpuwarden.lifecycle.leases.meter import confirmed_end
from gpuwarden.lifecycle.records import JobRecord, read_job, read_lease

MAX_REPORT: Final = 1 << 20
"""Maximum size in bytes of a `cell.json` or `result.json` file, which is limited because the job writes these files."""


async def collect(ctx: Context, fan_id: str) -> dict[str, str]:
    """Copy, verify and collect ended queues that have not been collected. Return the reasons for failures, by job."""
    fan, trouble = read_fan_out(ctx.ledger, fan_id), dict[str, str]()
    for queue in fan.queues:
        job = read_job(ctx.ledger, queue.job)
        if job.state not in TERMINAL_JOBS or queue.job in fan.collected:
            continue
        try:
            body = await _collected(ctx, fan, queue, job)
        except WardenError as error:
            trouble[job.id] = error.message
            continue
        with ctx.ledger.transaction():
            if queue.job in read_fan_out(ctx.ledger, fan_id).collected:
                continue  # another process has collected it
            ctx.ledger.add(fan.subject, body)
            proven = read_fan_out(ctx.ledger, fan_id).proven
            for each in body.found:
                if each.outcome is Outcome.PROVEN and each.index in queue.cells and each.index not in proven:
                    cell = CellProven(index=each.index, job=job.id, folder=f"{CELLS}/{each.index:05d}")
                    ctx.ledger.add(fan.subject, cell, token=f"{fan_id}-c{each.index}")
    return trouble


async def _collected(ctx: Context, fan: FanOutRecord, queue: QueueIntent, job: JobRecord) -> QueueCollected:
    """Return the cells in the copy of one queue. Raises WardenError while the queue's machine may still respond."""
    if job.handle is None:
        return QueueCollected(job=job.id, lost="it never ran")
    try:
        await pull(ctx, job.id)
    except NotFound as error:
        if last_pull(ctx, job.id) is None:
            return QueueCollected(job=job.id, lost=line(error.message, 200))
    except WardenError as error:
        gone = job.lease is not None and read_lease(ctx.ledger, job.lease).state is Lease.STOPPED
        if not gone or job.lease is None or confirmed_end(ctx, job.lease) != "gone":
            raise
        if last_pull(ctx, job.id) is None:
            return QueueCollected(job=job.id, lost=line(error.message, 200))
    pulled = last_pull(ctx, job.id)
    if pulled is None or not pulled.places:
        return QueueCollected(job=job.id, lost="it saved nothing")
    report = await verify_job(ctx, job.id)
    by_index = {cell.index: cell for cell in fan.cells}
    # The folders of all cells are read, including cells that the queue was not supposed to run.
    names = {path.split("/")[1] for path in pulled.places if path.startswith(f"{CELLS}/") and path.count("/") > 1}
    # Folder names must have exactly five digits, because otherwise both `7` and `00007` would be cell 7.
    indices = [index for index in range(MAX_CELLS) if f"{index:05d}" in names]
    rows = (_row(fan, by_index.get(index), index, pulled, report) for index in indices)
    return QueueCollected(job=job.id, found=tuple(row for row in rows if row is not None))


def _row(fan: FanOutRecord, cell: Cell | None, index: int, pulled: Pulled, report: Report) -> CellFound | None:
    """Return the result in a cell's folder; None if `cell.json` can't be read, because the cell then did not end."""
    prefix = f"{CELLS}/{index:05d}/"
    content = _read(pulled.places.get(f"{prefix}cell.json"))
    if content is None:
        return None
    config, code = str(content.get("config"))[:100], content.get("exit_code")
    began, ended = _number(content.get("started_at")), _number(content.get("ended_at"))
    found = CellFound(
        index=index,
        config=config,
        outcome=Outcome.FAILED,
        exit_code=code if isinstance(code, int) else None,
        seconds=None if began is None or ended is None else max(0.0, ended - began),
        problem=line(str(content.get("state")), 40),
    )
    if cell is None or config != cell.config or content.get("state") != "done" or code != 0:
        return found
    # The objective is read from the `result.json` with the shortest path.
    results = sorted((p for p in pulled.places if p.startswith(prefix) and p.endswith("/result.json")), key=len)
    result = _read(pulled.places[results[0]]) if results else None
    reached = result.get("objective") if result else None
    reached = reached if isinstance(reached, dict) else {}
    metric = line(str(reached.get("name", "objective")), 60) if reached else ""
    there = [place.removeprefix(prefix) for place in pulled.places if place.startswith(prefix)]
    wanted = fan.plan.base.outputs
    missing = [o for o in wanted if not any(path == o or path.startswith(f"{o}/") for path in there)]
    problem = f"{missing[0]} is missing" if missing else _unproven(prefix, wanted, report)
    outcome = Outcome.UNPROVEN if problem else Outcome.PROVEN
    shown = {
        "outcome": outcome,
        "objective": _number(reached.get("value")),
        "metric": metric,
        "problem": line(problem, 200),
    }
    return found.model_copy(update=shown)


def _unproven(prefix: str, outputs: tuple[str, ...], report: Report) -> str:
    """Return the reason why a cell's outputs are not proven; empty if they are proven."""
    if report.verdict is Verdict.PROVEN:
        return ""

    def within(path: str) -> bool:
        return any(path == prefix + output or path.startswith(f"{prefix}{output}/") for output in outputs)

    own = [file for file in report.files if within(file.path)]
    own_points = [point for point in report.checkpoints if within(point.path) or point.path == prefix.rstrip("/")]
    passing = {*report.unread, *report.aside}
    parts: list[FileEvidence | CheckpointEvidence] = [*own, *own_points]
    for part in parts:
        if part.verdict is not Verdict.PROVEN and part.path not in passing:
            return next(iter((*part.problems, *part.doubts)), "not proven")
    return "" if own else "none of its files were verified"


def _read(path: str | None) -> dict[str, Any] | None:
    """Return a small JSON object that a job wrote; None if it is invalid."""
    if path is None:
        return None
    try:
        with Path(path).open("rb") as file:
            found = json.loads(file.read(MAX_REPORT))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _number(value: object) -> float | None:
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
