"""Reply to `gpuwarden metrics`: the metrics that a job reported, each with its last value and its curve."""

from __future__ import annotations

from typing import Final

from pydantic import Field

from gpuwarden.core.models import Frozen
from gpuwarden.core.sanitize import named, quoted
from gpuwarden.interfaces.results.base import Result
from gpuwarden.lifecycle.posted import posted_text
from gpuwarden.metrics.store import MetricStore

CURVE: Final = 48
MAX_ALERTS: Final = 20


class MetricReply(Frozen):
    """One metric. `last` is None if the last value is not finite; `odd` counts the values that are not finite."""

    name: str
    points: int
    step: int | None = None
    last: float | None = None
    odd: int = 0
    curve: tuple[float, ...] = ()


class MetricsReply(Result):
    """Metrics by name, and alerts from the job and its runner, newest last."""

    job_id: str
    metrics: list[MetricReply] = Field(default_factory=list)
    alerts: list[str] = Field(default_factory=list)


def reported(store: MetricStore, job_id: str, note: str = "") -> MetricsReply:
    """Return the metrics and alerts that a job reported."""
    found = []
    for series in store.series(job_id):
        curve = store.downsampled(job_id, series.name, CURVE)
        value = series.last.value
        found.append(
            MetricReply(
                name=named(series.name),
                points=series.total,
                step=series.last.step,
                last=value if abs(value) < float("inf") else None,
                odd=curve.odd,
                curve=curve.values,
            )
        )
    alerts = store.alerts(job_id, max(0, store.last_alert(job_id) - 10_000), 1_000)[-MAX_ALERTS:]
    return MetricsReply(
        job_id=job_id,
        message=note or ("" if found else f"{job_id} has reported no metrics."),
        metrics=found,
        alerts=[quoted(posted_text(alert)) for alert in alerts],
    )
