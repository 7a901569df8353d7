"""Reply to `gpuwarden estimate`: memory and time as intervals, and the requested GPUs."""

from __future__ import annotations

from pydantic import BaseModel, Field

from gpuwarden.core.sanitize import named
from gpuwarden.interfaces.results.base import Result
from gpuwarden.lifecycle.submission.estimating import Estimate

GB = 1e9


class CardReply(BaseModel):
    """One GPU, and whether the run fits: `fits`, `may_fit` or `will_not_fit`.

    `seconds` contains the shortest and longest times; it is empty if the number of steps is unknown.
    """

    gpu: str
    count: int
    gb: int
    fit: str
    seconds: list[int] = Field(default_factory=list)


class EstimateReply(Result):
    """Lowest and highest memory use on one GPU, in gigabytes (10^9 bytes), and how it was computed."""

    model: str
    parameters: int
    method: str
    low_gb: float
    high_gb: float
    level: str
    """`traced`: from tracing the model itself; `formula`: from a formula."""
    how: str
    parts_gb: dict[str, float] = Field(default_factory=dict)
    """Typical size of each memory component, in gigabytes."""
    cards: list[CardReply] = Field(default_factory=list)


def estimated(found: Estimate) -> EstimateReply:
    """Return the reply to an estimate."""
    return EstimateReply(
        model=named(found.model, 200),
        parameters=found.run.params,
        method=found.run.method,
        low_gb=round(found.memory.low, 2),
        high_gb=round(found.memory.high, 2),
        level=found.memory.level,
        how=found.memory.how + (f"; not traced: {found.not_traced}" if found.not_traced else ""),
        parts_gb={name: round(size / GB, 2) for name, size in found.parts.items()},
        cards=[
            CardReply(
                gpu=card.gpu.name,
                count=card.count,
                gb=card.gpu.gb,
                fit=card.fit,
                seconds=[round(card.seconds.low), round(card.seconds.high)] if card.seconds else [],
            )
            for card in found.cards
        ],
    )
