"""Narrow a run's estimated duration based on its first steps and on earlier runs of the script on the same GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gpuwarden.core.models import Frozen

SETTLED_S: Final = 150.0
SETTLED_STEPS: Final = 20
_SPREAD: Final = (0.75, 1.45)
"""Minimum and maximum remaining duration, relative to the estimate from a settled pace. Later rows may be longer, and
later evaluations and saves may take more time.
"""
_EARLY: Final = (0.4, 2.5)
_EARLIER: Final = (0.6, 1.7)
"""Minimum and maximum duration, relative to an earlier run's pace. The machine and its load may differ."""
_LAST_S: Final = 120.0
"""Seconds that the last save and upload may take."""


class Pace(Frozen):
    """Seconds per step, measured over `steps` steps in `elapsed_s` seconds."""

    seconds: float
    steps: int
    elapsed_s: float

    @property
    def settled(self) -> bool:
        """Return true if the first minutes are over, so that startup and compilation no longer dominate the pace."""
        return self.steps >= SETTLED_STEPS and self.elapsed_s >= SETTLED_S


class Remaining(Frozen):
    """Minimum and maximum number of seconds until the last step, and the basis of the estimate."""

    low: float
    high: float
    basis: str


def remaining(
    left: int, own: Pace | None, earlier: Sequence[Pace] = (), prior: tuple[float, float] | None = None
) -> Remaining | None:
    """Return the time that the remaining steps need; None if neither a pace nor `prior` is given.

    `prior` is the estimate's minimum and maximum seconds per step. It is ignored once the pace is settled.
    """
    if left < 0:
        return None
    if own is not None and own.steps > 0 and own.settled:
        return _of(left, own.seconds * _SPREAD[0], own.seconds * _SPREAD[1], "this run's pace")
    bounds: list[tuple[float, float, str]] = []
    if own is not None and own.steps > 0:
        bounds.append((own.seconds * _EARLY[0], own.seconds * _EARLY[1], "this run's first steps"))
    if earlier:
        paces = [pace.seconds for pace in earlier]
        bounds.append((min(paces) * _EARLIER[0], max(paces) * _EARLIER[1], "earlier runs"))
    if prior is not None:
        bounds.append((*prior, "the estimate"))
    if not bounds:
        return None
    low, high, basis = bounds[0]
    for least, most, name in bounds[1:]:
        if max(low, least) < min(high, most):  # a range that contradicts a more recent observation is ignored
            low, high, basis = max(low, least), min(high, most), f"{basis} and {name}"
    return _of(left, low, high, basis)


def _of(left: int, low: float, high: float, basis: str) -> Remaining:
    return Remaining(low=left * low, high=left * high + _LAST_S, basis=basis)
