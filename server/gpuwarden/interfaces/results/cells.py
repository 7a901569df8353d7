"""Define the part of a reply that describes the cells of a fan-out."""

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
    """One cell that needs attention, with its last problem and the number of queues that it was part of."""

    index: int
    state: str
    tries: int
    problem: str = ""


class FanOutReply(BaseModel):
    """A fan-out.

    `states` counts its cells; `odd` are the cells that are neither open nor verified; `jobs` are those running now.
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
