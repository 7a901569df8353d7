"""Read the alerts of a job's runner: which of them are not over."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwarden.core.models import Observation, RunnerAlert


def stall_of(seen: Observation) -> str:
    """Return the runner's alert on a stall that goes on; empty where there is none."""
    return next((text_of(alert) for alert in open_alerts(seen) if alert.kind == "stall"), "")


def divergence_of(seen: Observation) -> str:
    """Return the runner's alert on a loss or a gradient that is not finite now; empty where there is none."""
    odd = (alert for alert in open_alerts(seen) if alert.kind == "nonfinite")
    return next((text_of(alert) for alert in odd if "loss" in alert.subject or "grad" in alert.subject), "")


def open_alerts(seen: Observation) -> Iterator[RunnerAlert]:
    """Yield the runner's alerts that are not over: neither recovered from nor followed by a finite value or a step."""
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
    """Return an alert with its source."""
    source = "the runner" if alert.kind == "stall" else "the job's metrics"
    return f"{source}: {alert.text}"
