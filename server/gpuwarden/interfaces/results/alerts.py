"""Reply to one watch round."""

from __future__ import annotations

from pydantic import Field

from gpuwarden.core.guidance import steps
from gpuwarden.core.plural import counted
from gpuwarden.core.sanitize import named, quoted
from gpuwarden.interfaces.results.base import WarnedReply, WithNextSteps
from gpuwarden.lifecycle.monitoring.watch import Round
from gpuwarden.lifecycle.notify import Alert


class AlertReply(WithNextSteps):
    """One alert. `state` is raised, or cleared once the problem is over. `about` is the subject: a job, a lease, an
    account's balance or the current day.
    """

    at: float
    about: str
    kind: str
    state: str
    text: str
    hint: str = ""


class WatchReply(WarnedReply):
    """One watch round: new alerts, alerts that are still open, and the polls and messages that failed."""

    news: list[AlertReply] = Field(default_factory=list)
    standing: list[AlertReply] = Field(default_factory=list)
    unknown: dict[str, str] = Field(default_factory=dict)


def watched(done: Round) -> WatchReply:
    """Return the reply to one watch round. `ok` is false while an alert is open."""
    unknown = {named(k, 80): quoted(v) for k, v in done.trouble.items()}
    calls = {alert.key for alert in (*done.news, *done.standing) if alert.raised}
    return WatchReply(
        ok=not calls and not unknown,
        code="alert" if calls else "unknown" if unknown else "ok",
        message=f"{counted(len(calls), 'open alert').capitalize()}.",
        next=steps("Follow each alert's hint." if calls or unknown else ""),
        news=[_alert(a) for a in done.news],
        standing=[_alert(a) for a in done.standing],
        unknown=unknown,
    )


def _alert(alert: Alert) -> AlertReply:
    state = "raised" if alert.raised else "cleared"
    return AlertReply(
        at=alert.at,
        about=alert.subject,
        kind=alert.kind,
        state=state,
        text=quoted(alert.text, 600),
        next=alert.next_steps,
    )
