"""The part of a reply that describes a fan-out and its cells."""

from __future__ import annotations

from pydantic import BaseModel, Field


class SpreadReply(BaseModel):
    """The results of one configuration over its seeds; `std` is the sample standard deviation."""

    settings: dict[str, str]
    cells: int
    proven: int
    metric: str = ""
    mean: float | None = None
    std: float | None = None
    median: float | None = None
    low: float | None = None
    high: float | None = None


class CellReply(BaseModel):
    """One cell that needs attention. `tries` is the number of queues to which the cell has been added."""

    index: int
    state: str
    tries: int
    problem: str = ""


class FanOutReply(BaseModel):
    """The states, costs and results of a fan-out.

    `states` counts the cells by state. `odd` lists the cells that are neither waiting, running nor verified, `jobs`
    lists the running jobs, `duplicates` lists the cells that completed more than once, and `strangers` lists the cells
    that are not in their queue or differ from the plan.
    """

    cells: int = 0
    states: dict[str, int] = Field(default_factory=dict)
    cost_usd: float | None = None
    held: str = ""
    jobs: list[str] = Field(default_factory=list)
    odd: list[CellReply] = Field(default_factory=list)
    duplicates: list[int] = Field(default_factory=list)
    strangers: list[int] = Field(default_factory=list)
    table: list[SpreadReply] = Field(default_factory=list)
    unknown: dict[str, str] = Field(default_factory=dict)
