"""Events for fan-outs: the plan, the queues of cells, and the results in the copies of the queues' outputs."""

from __future__ import annotations

from typing import Literal

from pydantic import AliasChoices, Field

from gpuwarden.core.cell_states import Outcome
from gpuwarden.core.fan_out import FanOutPlan
from gpuwarden.core.models import Cell, Frozen
from gpuwarden.ledger.events.base import Body


class FanOutAccepted(Body):
    """A plan was accepted with a receipt. `price` is the price in USD per hour at the time of the check.

    `folder` is the working directory that contains the inputs.
    """

    event: Literal["fanout.accepted"] = "fanout.accepted"
    plan: FanOutPlan = Field(validation_alias=AliasChoices("plan", "roster"))
    receipt: str
    price: float | None = None
    folder: str


class FanOutRequested(Body):
    """A search chose more cells. A resumed search reads its earlier choices from these events."""

    event: Literal["fanout.asked"] = "fanout.asked"
    cells: tuple[Cell, ...]


class QueueIntent(Body):
    """Cells are assigned to one machine as a job. The job is accepted in the same transaction."""

    event: Literal["fanout.queue.intent"] = "fanout.queue.intent"
    job: str
    cells: tuple[int, ...]
    worst_cost: float | None = None


class ArrayIntent(Body):
    """Jobs are about to be submitted to their engine as one array. The engine runs `at_once` of them at a time.

    The token `array` ensures that this happens only once.
    """

    event: Literal["fanout.array.intent"] = "fanout.array.intent"
    array: str
    jobs: tuple[str, ...]
    at_once: int


class CellFound(Frozen):
    """The result of one cell, read from the copy of its queue's outputs.

    `objective` is the value that the cell reported; None if it reported none.
    """

    index: int
    config: str
    outcome: Outcome
    objective: float | None = None
    metric: str = ""
    exit_code: int | None = None
    seconds: float | None = None
    problem: str = ""


class QueueCollected(Body):
    """The copy of a finished queue's outputs was examined. If no copy exists, `lost` is the reason."""

    event: Literal["fanout.queue.collected"] = "fanout.queue.collected"
    job: str
    found: tuple[CellFound, ...] = ()
    lost: str = ""


class CellProven(Body):
    """A cell succeeded, and the copy of its outputs is proven. The token allows one such event per cell."""

    event: Literal["fanout.cell.proven"] = "fanout.cell.proven"
    index: int
    job: str
    folder: str


class FanOutEnded(Body):
    """The user or a tool ended a fan-out. No more cells are launched, but running jobs continue."""

    event: Literal["fanout.ended"] = "fanout.ended"
    by: str = ""


class FanOutResumed(Body):
    """The user or a tool resumed a fan-out. Each of these cells gets its full number of attempts again."""

    event: Literal["fanout.resumed"] = "fanout.resumed"
    cells: tuple[int, ...] = ()
    by: str = ""


class FanOutLimited(Body):
    """A fan-out's limits were changed. If no limit was raised, no approval is needed, and `receipt` is empty.

    With a receipt, `price` is the price for which it was issued, in USD per hour. It replaces the earlier price.
    """

    event: Literal["fanout.limited"] = "fanout.limited"
    max_machines: int
    max_cost_usd: float | None = None
    receipt: str = ""
    price: float | None = None
    by: str = ""
