"""Events of fan-outs: the plan, the queues that its cells were given to, and what their copies showed."""

from __future__ import annotations

from typing import Literal

from pydantic import AliasChoices, Field

from gpuwarden.core.cell_states import Outcome
from gpuwarden.core.fan_out import FanOutPlan
from gpuwarden.core.models import Cell, Frozen
from gpuwarden.ledger.events.base import Body


class FanOutAccepted(Body):
    """A plan was accepted against a receipt. `price` is USD an hour when it was checked.

    `folder` is the working directory, which the inputs are below.
    """

    event: Literal["fanout.accepted"] = "fanout.accepted"
    plan: FanOutPlan = Field(validation_alias=AliasChoices("plan", "roster"))
    receipt: str
    price: float | None = None
    folder: str


class FanOutAsked(Body):
    """A search chose further cells. A search that goes on repeats its choices from here."""

    event: Literal["fanout.asked"] = "fanout.asked"
    cells: tuple[Cell, ...]


class QueueIntent(Body):
    """Cells are given to a machine of their own: a job, which is accepted in the same transaction."""

    event: Literal["fanout.queue.intent"] = "fanout.queue.intent"
    job: str
    cells: tuple[int, ...]
    worst_cost: float | None = None


class ArrayIntent(Body):
    """Jobs are about to be sent to their engine as one array, which runs `at_once` of them at a time.

    Its token is `array`, which allows that once.
    """

    event: Literal["fanout.array.intent"] = "fanout.array.intent"
    array: str
    jobs: tuple[str, ...]
    at_once: int


class CellFound(Frozen):
    """What the copy of a queue shows of one cell. `objective` is what it reached, where it says."""

    index: int
    config: str
    outcome: Outcome
    objective: float | None = None
    metric: str = ""
    exit_code: int | None = None
    seconds: float | None = None
    problem: str = ""


class QueueCollected(Body):
    """The copy of an ended queue was looked through; `lost` says why there is none."""

    event: Literal["fanout.queue.collected"] = "fanout.queue.collected"
    job: str
    found: tuple[CellFound, ...] = ()
    lost: str = ""


class CellProven(Body):
    """A cell ended well and its copy is proven. Its token allows one such event for each cell of a plan."""

    event: Literal["fanout.cell.proven"] = "fanout.cell.proven"
    index: int
    job: str
    folder: str


class FanOutEnded(Body):
    """A person or a tool canceled a fan-out: nothing more is launched. What runs goes on."""

    event: Literal["fanout.ended"] = "fanout.ended"
    by: str = ""


class FanOutResumed(Body):
    """A person or a tool let a fan-out go on: these cells have as many tries again as they had."""

    event: Literal["fanout.resumed"] = "fanout.resumed"
    cells: tuple[int, ...] = ()
    by: str = ""


class FanOutLimited(Body):
    """A fan-out has other limits from now on. `receipt` is empty for limits that only fell: nobody has to consent.

    With a receipt, `price` is what was checked with it, in USD an hour, and takes the place of the first one.
    """

    event: Literal["fanout.limited"] = "fanout.limited"
    max_machines: int
    max_cost_usd: float | None = None
    receipt: str = ""
    price: float | None = None
    by: str = ""
