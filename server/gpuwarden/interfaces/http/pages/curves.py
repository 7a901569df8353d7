"""Curves of a job's metrics for the pages: at most a few thousand points, with the non-finite values listed separately.

The points come from the metric store, to which the job posts them. If a job has posted none, the few loss values that
its runner keeps are used.
"""

from __future__ import annotations

from functools import cached_property
from typing import Final

from gpuwarden.core.sanitize import plain
from gpuwarden.interfaces.http.pages.polls import Polls
from gpuwarden.interfaces.http.pages.rendering import View
from gpuwarden.lifecycle.monitoring.check import CheckedJob
from gpuwarden.metrics.store import Curve, MetricStore

LOSS: Final = "loss"
POINTS: Final = 2_000
"""Maximum number of points in one curve: two for each pixel of a wide screen."""
FIRST: Final = ("loss", "train/loss", "train_loss", "eval_loss", "val_loss")
"""Metrics that are listed first, in this order."""


class Curves:
    """The curves for one server's jobs."""

    def __init__(self, polls: Polls) -> None:
        self.polls = polls

    @cached_property
    def store(self) -> MetricStore:
        """Return the metric store, opened on first use."""
        return MetricStore(self.polls.ctx.home)

    def names(self, job_id: str) -> list[str]:
        """Return the metrics that have a curve, the loss first."""
        return names_of(self.store, job_id, self.polls.job(job_id).value)

    def view(
        self,
        job_id: str,
        name: str,
        metric: str,
        between: tuple[float, float] | None,
        *,
        timed: bool = False,
        limit: int = POINTS,
    ) -> View:
        """Return one curve, or a part of it. A non-finite value is a gap. `timed` adds each point's time."""
        curve = curve_of(self.store, job_id, metric, self.polls.job(job_id).value, points=limit, between=between)
        times = curve.times or (None,) * len(curve.x)
        points: list[tuple[float, float | None, float | None]] = [*zip(curve.x, curve.values, times, strict=True)]
        points += [(mark.x, None, mark.at) for mark in curve.markers]
        points.sort(key=lambda point: point[0])
        return {
            "job": job_id,
            "name": name,
            "metric": plain(metric),
            "x": [x for x, _, _ in points],
            "y": [y for _, y, _ in points],
            **({"at": [at for _, _, at in points], "odd_at": [mark.at for mark in curve.markers]} if timed else {}),
            "odd": [mark.x for mark in curve.markers],
            "odd_count": curve.odd,
            "total": curve.total,
            "by_time": curve.by_time,
        }


def names_of(store: MetricStore, job_id: str, seen: CheckedJob | None) -> list[str]:
    """Return a job's metrics that have a curve, the loss first. `seen` is the job's last poll."""
    found = set(store.latest(job_id)) or ({LOSS} if _observed(seen) else set())
    return sorted(found, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))


def curve_of(
    store: MetricStore,
    job_id: str,
    metric: str,
    seen: CheckedJob | None,
    *,
    points: int = POINTS,
    between: tuple[float, float] | None = None,
) -> Curve:
    """Return one curve with at most `points` points, or the part of it between two positions."""
    curve = store.downsampled(job_id, metric, points, between)
    if curve.total or metric != LOSS:
        return curve
    low, high = between or (float("-inf"), float("inf"))
    kept = [(float(step), value) for step, value in _observed(seen) if low <= step <= high]
    return Curve(tuple(x for x, _ in kept), tuple(y for _, y in kept), (), len(kept), 0, False)


def _observed(seen: CheckedJob | None) -> tuple[tuple[int, float], ...]:
    return seen.observation.curve if seen and seen.observation else ()
