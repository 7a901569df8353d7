"""Read the step, the metrics and the alerts that a job posted to the metrics API."""

from __future__ import annotations

import contextlib
import math
from typing import Final

from gpuwarden.core.errors import DiskError
from gpuwarden.core.models import MAX_METRICS, Observation
from gpuwarden.core.states import TERMINAL_JOBS
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.records import JobRecord
from gpuwarden.metrics.points import AlertType
from gpuwarden.metrics.store import FILE, Point, StoredAlert
from gpuwarden.remote.runner.reports import SOURCE

PROBLEMS: Final = frozenset({AlertType.FAILED, AlertType.CANCELLED, AlertType.OOM, AlertType.TIMEOUT})
NEWEST: Final = 20
"""Number of a job's latest alerts to read."""


def with_posted_progress(ctx: Context, job_id: str, seen: Observation) -> Observation:
    """If an observation has no step, add the step and the metrics that the job posted.

    The observation is unchanged if the job posted nothing, or if the store can't be read.
    """
    return _updated(seen, _latest(ctx, job_id)) if seen.step is None else seen


def with_newest_step(ctx: Context, job: JobRecord) -> Observation | None:
    """Return this process's last observation of a job, with the progress that the job has posted since.

    A posted point replaces a step from another source only if the job's machine reports a later time for the point.
    """
    seen = ctx.observed.get(job.id)
    if seen is None or job.state in TERMINAL_JOBS:
        return seen
    after = -1.0 if seen.step is None or seen.source == "posted" else seen.at
    return _updated(seen, {name: p for name, p in _latest(ctx, job.id).items() if (p.at or 0.0) > after})


def _latest(ctx: Context, job_id: str) -> dict[str, Point]:
    if (ctx.home / FILE).exists():
        with contextlib.suppress(DiskError):
            return ctx.metrics.latest(job_id)
    return {}


def _updated(seen: Observation, latest: dict[str, Point]) -> Observation:
    if not latest:
        return seen
    metrics = [(name, point.value) for name, point in latest.items() if math.isfinite(point.value)]
    metrics += [(name, value) for name, value in seen.metrics.items() if name not in latest]
    steps = [step for step in (seen.step, *(point.step for point in latest.values())) if step is not None]
    progress = {"step": max(steps, default=None), "metrics": dict(metrics[:MAX_METRICS]), "source": "posted"}
    return seen.model_copy(update=progress)


def posted_problems(ctx: Context, job_id: str) -> dict[str, StoredAlert]:
    """Return the newest alert of each type that reports a problem, by type. Empty if the store can't be read.

    The runner's own alerts are left out, because they repeat the job's observation.
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
