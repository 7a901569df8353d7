"""Fan-out plans: create cells from a grid or a random search, and assign them to machines.

All functions in this module are pure. A cell is one run with one configuration. Its index is its identity in the plan.
The digest of its configuration shows whether a folder belongs to this cell.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Final

from pydantic import Field, ValidationError, model_validator

from gpuwarden.core.errors import BadRequest
from gpuwarden.core.inputs import build
from gpuwarden.core.models import MAX_CELLS, Cell, Frozen, JobSpec, digest

SEED: Final = "seed"
QUEUE_START_S: Final = 300
"""Seconds that each queue gets in addition to its cells' time, to install packages once and to store files."""


class Search(Frozen):
    """A search that chooses settings based on the results of earlier cells.

    `space` maps each setting to a range `low..high` or to a list of choices `a,b,c`.
    """

    space: dict[str, str] = Field(min_length=1, max_length=16)
    trials: int = Field(ge=1, le=MAX_CELLS)
    maximize: bool = False
    seed: int = 0

    @model_validator(mode="after")
    def _large_enough(self) -> Search:
        ends = [bounds(text) for text in self.space.values()]
        if not any(ends):
            choices = len(grid({name: text.split(",") for name, text in self.space.items()}))
            if choices < self.trials:
                raise ValueError(
                    f"the space has only {choices:,} different settings, so {self.trials:,} cells would collide"
                )
        return self


class FanOutPlan(Frozen):
    """A fan-out's cells and limits. `base` is the job for one cell, so its timeout applies to one cell.

    Raises ValueError for cells that collide, because they have the same index or would do the same work.
    """

    base: JobSpec
    cells: tuple[Cell, ...] = Field(default=(), max_length=MAX_CELLS)
    search: Search | None = None
    max_machines: int = Field(default=1, ge=1, le=256)
    max_cost_usd: float | None = Field(default=None, gt=0, le=1_000_000)
    max_tries: int = Field(default=3, ge=1, le=20)
    weigh: str = ""
    """The numeric setting to which a cell's cost is proportional; empty if all cells cost the same."""

    @model_validator(mode="after")
    def _apart(self) -> FanOutPlan:
        if self.base.cells or self.base.script is None:
            raise ValueError("a fan-out's job must have a script and no cells; the cells belong in the plan")
        if self.base.alternatives:
            raise ValueError("a fan-out runs on one platform; remove the alternatives")
        if not self.cells and self.search is None:
            raise ValueError("the plan has no cells")
        if [cell.index for cell in self.cells] != list(range(len(self.cells))):
            raise ValueError("the cell indices must be 0, 1, 2 ... in this order")
        if wrong := next((c for c in self.cells if c.config != config_of(self.base, c.settings)), None):
            raise ValueError(f"cell {wrong.index} has the digest of another configuration")
        first: dict[str, int] = {}
        for cell in self.cells:
            if cell.config in first:
                raise ValueError(f"cells {first[cell.config]} and {cell.index} collide because they are the same run")
            first[cell.config] = cell.index
            weight(cell, self.weigh)
        if self.search and self.weigh:
            raise ValueError("a search's cells can't have weights; remove the weight setting")
        return self

    @property
    def size(self) -> int:
        """Return the number of cells, including those still to be chosen."""
        return self.search.trials if self.search else len(self.cells)

    @property
    def digest(self) -> str:
        """Return the digest of the full request."""
        return digest(self)


def config_of(base: JobSpec, settings: Mapping[str, str]) -> str:
    """Return the digest of everything that determines a cell's result: program, arguments, env, inputs and settings."""
    program = [base.script, list(base.args), base.env, list(base.inputs)]
    return digest([program, dict(settings)])


def cells_of(base: JobSpec, chosen: Iterable[Mapping[str, str]], first: int = 0) -> tuple[Cell, ...]:
    """Return one cell for each of the given settings, in the same order."""
    return tuple(
        Cell(index=index, settings=dict(settings), config=config_of(base, settings))
        for index, settings in enumerate(chosen, first)
    )


def grid(axes: Mapping[str, Sequence[str]], seeds: int = 0) -> list[dict[str, str]]:
    """Return every combination of the axes, each with the seeds 0 to `seeds` - 1; the last axis varies fastest.

    Raises ValueError if an axis is empty or repeats a value, or if the grid has too many cells.
    """
    whole = {**axes, **({SEED: [str(n) for n in range(seeds)]} if seeds else {})}
    if seeds and SEED in axes:
        raise ValueError("the seed is both a grid axis and a number of seeds; omit one of the two")
    for name, values in whole.items():
        if not values or "" in values:
            raise ValueError(f"{name} has no value or an empty value; specify non-empty values")
        if repeated := next((value for value, count in Counter(values).items() if count > 1), None):
            raise ValueError(f"{name} has the value {repeated} twice, so cells would collide")
    if (count := math.prod(map(len, whole.values()))) > MAX_CELLS:
        raise ValueError(f"the grid has {count:,} cells; the limit is {MAX_CELLS:,}")
    return [dict(zip(whole, values, strict=True)) for values in product(*whole.values())]


def plan_of(base: JobSpec, chosen: Sequence[Mapping[str, str]], **limits: object) -> FanOutPlan:
    """Return the plan for a job and its cells' settings. Raises BadRequest if the plan is invalid."""
    try:
        cells = cells_of(base, chosen)
    except ValueError as error:
        raise BadRequest(f"the plan can't be created: {first_problem(error)}") from error
    return build(FanOutPlan, {"base": base, "cells": cells, **limits})


def gridded(base: JobSpec, axes: Mapping[str, Sequence[str]], seeds: int, **limits: object) -> FanOutPlan:
    """Return the plan for a grid. Raises BadRequest if the plan is invalid or its cells collide."""
    try:
        chosen = grid(axes, seeds)
    except ValueError as error:
        raise BadRequest(f"the plan can't be created: {first_problem(error)}") from error
    return plan_of(base, chosen, **limits)


def first_problem(error: ValueError) -> str:
    """Return the first problem in a validation error, without pydantic's header."""
    return str(error.errors()[0]["msg"]) if isinstance(error, ValidationError) else str(error)


def bounds(text: str) -> tuple[float, float] | None:
    """Return the bounds of `low..high`; None for a list of choices. Raises ValueError for an invalid range."""
    low, between, high = text.partition("..")
    if not between:
        return None
    ends = float(low), float(high)
    if not all(map(math.isfinite, ends)) or not 0 < ends[0] < ends[1]:
        raise ValueError(f"{text} is not a range low..high of positive numbers with low below high")
    return ends


def drawn(space: Mapping[str, str], count: int, seed: int) -> list[dict[str, str]]:
    """Return `count` different random settings. The same seed gives the same settings.

    Ranges are sampled on a logarithmic scale, choices with equal probability. Raises ValueError if the space has fewer
    different settings.
    """
    choices = {name: text.split(",") for name, text in space.items()}
    ranges = {name: bounds(text) for name, text in space.items()}
    source, found = random.Random(seed), dict[tuple[str, ...], dict[str, str]]()
    for _ in range(100 * count):
        if len(found) == count:
            break
        settings = {
            name: f"{math.exp(source.uniform(*map(math.log, ends))):.6g}" if ends else source.choice(choices[name])
            for name, ends in ranges.items()
        }
        found.setdefault(tuple(settings.values()), settings)
    if len(found) < count:
        raise ValueError(f"the space has fewer than {count:,} different settings; use a grid")
    return list(found.values())


# -------------------------------------------------------------------------------------------------------- packing


def weight(cell: Cell, weigh: str) -> float:
    """Return a cell's relative cost: its setting `weigh`, or 1 if `weigh` is empty.

    Raises ValueError if the setting is missing or not a positive number.
    """
    if not weigh:
        return 1.0
    value = float(cell.settings[weigh]) if weigh in cell.settings else math.nan
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"cell {cell.index} can't have a weight: its {weigh} is not a positive number")
    return value


def pack(cells: Sequence[Cell], machines: int, weigh: str = "") -> list[list[Cell]]:
    """Return at most `machines` queues of about equal cost: each cell, costliest first, joins the cheapest queue."""
    queues: list[tuple[float, list[Cell]]] = [(0.0, []) for _ in range(min(machines, len(cells)))]
    for cell in sorted(cells, key=lambda c: (-weight(c, weigh), c.index)):
        n = min(range(len(queues)), key=lambda n: (queues[n][0], n))
        queues[n] = queues[n][0] + weight(cell, weigh), [*queues[n][1], cell]
    return [queue for _, queue in queues]


def queue_spec(plan: FanOutPlan, cells: Sequence[Cell], name: str) -> JobSpec:
    """Return the job that runs cells on one machine, one per GPU at a time."""
    base = plan.base
    turns = math.ceil(len(cells) / base.gpu_count)
    return base.model_copy(
        update={
            "name": name,
            "cells": tuple(cells),
            "outputs": ("cells",),
            "cell_timeout_s": base.timeout_s,
            "timeout_s": None if base.timeout_s is None else base.timeout_s * turns + QUEUE_START_S,
            "estimate_s": None if base.estimate_s is None else base.estimate_s * turns,
            "max_cost_usd": None,
        }
    )


def cell_spec(plan: FanOutPlan, cell: Cell) -> JobSpec:
    """Return one cell as a separate job, for the submit gate's rules."""
    base = plan.base
    env = {**base.env, "GPUWARDEN_CELL": str(cell.index)}
    return base.model_copy(update={"args": (*base.args, *cell.args), "env": env})


def representatives(plan: FanOutPlan) -> list[Cell]:
    """Return one cell for each combination of non-numeric settings, because rules don't depend on numeric values."""
    number = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
    found: dict[tuple[tuple[str, str], ...], Cell] = {}
    for cell in plan.cells:
        found.setdefault(tuple((k, v) for k, v in cell.settings.items() if not number.fullmatch(v)), cell)
    return list(found.values())
