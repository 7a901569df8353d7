"""Read fan-outs from the ledger: the plan, its queues, and the current state of every cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from gpuwarden.core.cell_states import CellFolder, CellState, Outcome, QueueState, Reconciled, reconcile
from gpuwarden.core.errors import NotFound
from gpuwarden.core.fan_out import FanOutPlan
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.models import Cell
from gpuwarden.core.states import LIVE_LEASES, TERMINAL_JOBS, Job
from gpuwarden.ledger.event import Event
from gpuwarden.ledger.events import (
    ArrayIntent,
    CellProven,
    FanOutAccepted,
    FanOutEnded,
    FanOutLimited,
    FanOutRequested,
    FanOutResumed,
    QueueCollected,
    QueueIntent,
)
from gpuwarden.ledger.events.fan_out import CellFound
from gpuwarden.ledger.store import Ledger
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.leases.budgets import committed
from gpuwarden.lifecycle.records import lease_ids_of, read_job, read_lease, read_receipt
from gpuwarden.people import user_of


@dataclass(frozen=True)
class FanOutRecord:
    """One fan-out. `cells` contains the cells of the plan and the cells that a search has added.

    `person` is the user who requested the fan-out, and `folder` contains its inputs. `plan` has the current limits;
    `asked` is the digest of the accepted plan. `consent` is the receipt for the current limits, which were applied at
    `consented_at`. `shown` is the maximum cost on that receipt in US dollars; None if unknown.
    """

    id: str
    plan: FanOutPlan
    asked: str
    receipt: str
    consent: str
    consented_at: float
    shown: float | None
    person: str
    folder: str
    price: float | None
    accepted_at: float
    cells: tuple[Cell, ...]
    queues: tuple[QueueIntent, ...]
    collected: dict[str, QueueCollected]
    proven: dict[int, CellProven]
    ended: bool
    arrays: dict[str, int]
    """The number of jobs that the engine runs at a time, keyed by their array's token."""
    resumed: dict[int, int]
    """The number of queues that existed when a cell was last resumed, keyed by cell index."""
    decisions: int
    """The number of times that the fan-out was ended or resumed, or that its limits were changed."""
    ended_by: str
    """The actor who ended the fan-out, and the interface that was used, as in the ledger; empty if it was not ended."""

    @property
    def budget(self) -> float | None:
        """Return the fan-out's total budget in US dollars: the requested budget, or else the cost on the receipt; None
        if neither is known.
        """
        return self.shown if self.plan.max_cost_usd is None else self.plan.max_cost_usd

    @property
    def subject(self) -> str:
        """Return the fan-out's subject in the ledger."""
        return f"fanout/{self.id}"

    @cached_property
    def found(self) -> dict[tuple[str, int], CellFound]:
        """Return the cells found in the copies, keyed by job and index."""
        return {(job, each.index): each for job, body in self.collected.items() for each in body.found}


def fold_fan_out(fan_id: str, events: Sequence[Event[Any]]) -> FanOutRecord | None:
    """Build a fan-out's record from its events; None if the fan-out was not accepted."""
    accepted = next((e for e in events if isinstance(e.data, FanOutAccepted)), None)
    if accepted is None:
        return None
    bodies = [event.data for event in events]
    began: FanOutAccepted = accepted.data
    asked = [cell for body in bodies if isinstance(body, FanOutRequested) for cell in body.cells]
    ended_by, queues, resumed = "", 0, dict[int, int]()
    limits, price, consent, consented_at = dict[str, Any](), began.price, began.receipt, accepted.at
    for event, body in zip(events, bodies, strict=True):
        queues += isinstance(body, QueueIntent)
        if isinstance(body, FanOutEnded):
            ended_by = event.actor
        elif isinstance(body, FanOutResumed):
            ended_by, resumed = "", resumed | dict.fromkeys(body.cells, queues)
        elif isinstance(body, FanOutLimited):
            limits = {"max_machines": body.max_machines, "max_cost_usd": body.max_cost_usd}
            if body.receipt:
                price, consent, consented_at = body.price, body.receipt, event.at
    return FanOutRecord(
        id=fan_id,
        plan=began.plan.model_copy(update=limits),
        asked=began.plan.digest,
        receipt=began.receipt,
        consent=consent,
        consented_at=consented_at,
        shown=None,
        person=user_of(accepted.actor),
        folder=began.folder,
        price=price,
        accepted_at=accepted.at,
        cells=(*began.plan.cells, *asked),
        queues=tuple(body for body in bodies if isinstance(body, QueueIntent)),
        collected={body.job: body for body in bodies if isinstance(body, QueueCollected)},
        proven={body.index: body for body in bodies if isinstance(body, CellProven)},
        ended=bool(ended_by),
        arrays={body.array: body.at_once for body in bodies if isinstance(body, ArrayIntent)},
        resumed=resumed,
        decisions=sum(isinstance(body, FanOutEnded | FanOutResumed | FanOutLimited) for body in bodies),
        ended_by=ended_by,
    )


def read_fan_out(ledger: Ledger, fan_id: str) -> FanOutRecord:
    """Return the fan-out with this id. Raises NotFound."""
    found = fold_fan_out(fan_id, ledger.history(f"fanout/{fan_id}"))
    if found is None:
        raise NotFound(f"this ledger has no fan-out {fan_id!r}", do(Action.LIST_INSTANCES, "to see its jobs"))
    return replace(found, shown=read_receipt(ledger, found.consent).issued.worst_cost)


def fan_out_ids(ledger: Ledger) -> list[str]:
    """Return the ids of all fan-outs, oldest first."""
    return [event.subject.removeprefix("fanout/") for event in ledger.events(kind=FanOutAccepted)]


@dataclass(frozen=True)
class FanOutStatus:
    """The current state of a fan-out. `cost` is its past and reserved cost in US dollars.

    `live` lists its open jobs, and `idle` its ended jobs whose machines may be billed. `busy` is the number of machines
    that the open jobs can use at the same time.
    """

    fan: FanOutRecord
    cells: Reconciled
    live: tuple[str, ...]
    idle: tuple[str, ...]
    busy: int
    cost: float

    @property
    def over(self) -> bool:
        """Return whether no cell is running, and no more cells can be launched or requested from a search."""
        if self.fan.ended:
            return self.cells.count(CellState.RUNNING) == 0
        asked = self.fan.plan.search is None or len(self.fan.cells) >= self.fan.plan.size
        return not self.cells.open and asked


def fan_out_status(ctx: Context, fan: FanOutRecord) -> FanOutStatus:
    """Return the current state of a fan-out, computed from its plan, its jobs and their copies, without any queries."""
    jobs = [read_job(ctx.ledger, queue.job) for queue in fan.queues]
    queues = [
        QueueState(job.id, queue.cells, job.state in TERMINAL_JOBS, job.state is Job.SUCCEEDED, job.id in fan.collected)
        for job, queue in zip(jobs, fan.queues, strict=True)
    ]
    seen = [CellFolder(job, each.index, each.config, each.outcome) for (job, _), each in fan.found.items()]
    # `proven` contains only the first proof of each cell, so a job that proved a cell again is not in it.
    assert all(fan.found[p.job, p.index].outcome is Outcome.PROVEN for p in fan.proven.values())
    leases = {job.id: [read_lease(ctx.ledger, name) for name in lease_ids_of(ctx.ledger, job.id)] for job in jobs}
    cost = sum(committed(ctx, job, leases[job.id]) for job in jobs)
    live = tuple(job.id for job in jobs if job.state not in TERMINAL_JOBS)
    bills = [name for name, mine in leases.items() if any(lease.state in LIVE_LEASES for lease in mine)]
    idle = tuple(name for name in bills if name not in live)
    of_arrays = Counter(job.array for job in jobs if job.id in live)
    busy = sum(min(count, fan.arrays.get(token, count)) for token, count in of_arrays.items())
    cells = reconcile(fan.cells, queues, seen, fan.plan.max_tries, fan.resumed)
    return FanOutStatus(fan, cells, live, idle, busy, cost)
