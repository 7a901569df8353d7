"""Read the runner's open alerts from an observation of a job."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwarden.core.models import Observation, RunnerAlert


def stall_of(seen: Observation) -> str:
    """Return the text of the runner's open stall alert; empty if none is open."""
    return next((text_of(alert) for alert in open_alerts(seen) if alert.kind == "stall"), "")


def divergence_of(seen: Observation) -> str:
    """Return the text of the runner's open alert about a non-finite loss or gradient; empty if none is open."""
    odd = (alert for alert in open_alerts(seen) if alert.kind == "nonfinite")
    return next((text_of(alert) for alert in odd if "loss" in alert.subject or "grad" in alert.subject), "")


def open_alerts(seen: Observation) -> Iterator[RunnerAlert]:
    """Yield the runner's open alerts. A later recovery, finite value or step clears an alert."""
    alerts: dict[tuple[str, str], RunnerAlert] = {}
    for alert in seen.alerts:
        if alert.kind == "recovered":
            alerts.pop(("spike", alert.subject), None)
            alerts.pop(("slowed", alert.subject), None)
        elif alert.kind in {"nonfinite", "spike", "slowed", "stall"}:
            alerts[alert.kind, alert.subject] = alert
    for alert in alerts.values():
        finite = alert.kind == "nonfinite" and alert.subject in seen.metrics
        moved = alert.kind == "stall" and alert.step != seen.step
        if not finite and not moved:
            yield alert


def text_of(alert: RunnerAlert) -> str:
    """Return an alert's text with its source."""
    source = "the runner" if alert.kind == "stall" else "the job's metrics"
    return f"{source}: {alert.text}"
