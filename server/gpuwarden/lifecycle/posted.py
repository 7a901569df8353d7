"""Read the step, the metrics and the alerts that a job posted to the metrics API."""

from __future__ import annotations

import contextlib
import math
from typing import Final

from gpuwarden.core.errors import DiskError
from gpuwarden.core.models import MAX_METRICS, Observation
from gpuwarden.lifecycle.context import Context
from gpuwarden.metrics.points import AlertType
from gpuwarden.metrics.store import FILE, StoredAlert
from gpuwarden.remote.runner.reports import SOURCE

PROBLEMS: Final = frozenset({AlertType.FAILED, AlertType.CANCELLED, AlertType.OOM, AlertType.TIMEOUT})
NEWEST: Final = 20
"""Number of a job's alerts that are read."""


def with_posted_progress(ctx: Context, job_id: str, seen: Observation) -> Observation:
    """Add the step and the metrics that a job posted to an observation without a step.

    Returned unchanged if the job posted nothing, or if the store can't be read.
    """
    if seen.step is not None or not (ctx.home / FILE).exists():
        return seen
    try:
        latest = ctx.metrics.latest(job_id)
    except DiskError:
        return seen
    finite = {name: point.value for name, point in list(latest.items())[:MAX_METRICS] if math.isfinite(point.value)}
    step = max((point.step for point in latest.values() if point.step is not None), default=None)
    return seen.model_copy(update={"step": step, "metrics": finite, "source": "posted"}) if latest else seen


def posted_problems(ctx: Context, job_id: str) -> dict[str, StoredAlert]:
    """Return the newest alert of each type that reports a problem, by type. Empty if the store can't be read.

    The runner's own alerts are left out, because they repeat the observation of the job.
    """
    alerts: tuple[StoredAlert, ...] = ()
    if (ctx.home / FILE).exists():
        with contextlib.suppress(DiskError):
            alerts = ctx.metrics.alerts(job_id, max(0, ctx.metrics.last_alert(job_id) - NEWEST), NEWEST)
    return {a.type: a for a in alerts if a.type in PROBLEMS and a.fields.get("source") != SOURCE}


def posted_text(alert: StoredAlert) -> str:
    """Return an alert's type, and its message if it has one."""
    message = str(alert.fields.get("error_message", ""))
    return f"{alert.type}: {message}" if message else alert.type
