"""Send the alerts in the ledger to the desktop command, the signed webhook and the Slack webhook.

| variable | meaning |
|---|---|
| `GPUWARDEN_WEBHOOK_SECRET` | the key that signs the requests to the policy's `[watch] webhook_url` |
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Final
from urllib.parse import urlsplit

import anyio

from gpuwarden.core import processes
from gpuwarden.core.clock import doubled
from gpuwarden.core.errors import WardenError
from gpuwarden.core.guidance import NextStep, read_steps
from gpuwarden.core.sanitize import line, redact
from gpuwarden.ledger.event import Event
from gpuwarden.ledger.events import AlertBody, AlertCleared, AlertRaised, AlertSent, AlertUnsent, AutoTeardownAnnounced
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.leases.auto_teardown import automatic_teardown

SECRET: Final = "GPUWARDEN_WEBHOOK_SECRET"  # noqa: S105 - the variable's name
TRIES: Final = 3
PATIENCE_S: Final = 10.0
"""Seconds for one alert on one channel, including retries.

The limit is short, because a round that takes longer than a grace period counts as a gap.
"""
FIRST_RETRY_S: Final = 60.0
MOST_RETRY_S: Final = 600.0
DAY_S: Final = 86_400.0
MAX_ALERTS: Final = 20
"""Maximum number of alerts per channel and round; the next round sends the rest."""
ENDING_SOON: Final = "ending_soon"
"""Kind of the alert that announces an automatic teardown. Its mark is the sequence number of the announcement."""


Key = tuple[str, str, str]
"""Subject, kind and mark of an alert. An alert is raised once per key."""


@dataclass(frozen=True)
class Alert:
    """One alert from the ledger. `raised` is false if the event clears the alert."""

    seq: int
    at: float
    subject: str
    kind: str
    mark: str
    text: str
    raised: bool
    next_steps: tuple[NextStep, ...] = ()

    @classmethod
    def read(cls, event: Event[AlertBody]) -> Alert:
        """Build an alert from its event."""
        told = event.data
        return cls(
            event.seq,
            event.at,
            event.subject,
            told.condition,
            told.mark,
            told.text,
            raised=isinstance(told, AlertRaised),
            next_steps=read_steps(told.following),
        )

    @property
    def key(self) -> Key:
        """Return the alert's key."""
        return self.subject, self.kind, self.mark


def record(ctx: Context, event: type[AlertBody], key: Key, text: str, following: tuple[NextStep, ...] = ()) -> Alert:
    """Record that an alert has been raised or cleared, and return the alert."""
    subject, condition, mark = key
    told = tuple(step.as_dict() for step in following)
    return Alert.read(ctx.ledger.add(subject, event(condition=condition, mark=mark, text=text, following=told)))


Channel = Callable[[Context, Alert], Awaitable[str | None]]
"""Sends one alert. Returns the reason if the alert can't be sent, else None."""


def channels(ctx: Context) -> dict[str, Channel]:
    """Return the channels that the policy configures, by name."""
    watch = ctx.policy.watch
    found: tuple[tuple[str, object, Channel], ...] = (
        ("desktop", watch.desktop, _desktop),
        ("webhook", watch.webhook_url, _webhook),
        ("slack", watch.slack_url, _slack),
    )
    return {name: send for name, setting, send in found if setting}


def delivered_at(ctx: Context, raised: Event[AlertRaised]) -> float | None:
    """Return the time when the first channel accepted an alert.

    Return None if no channel has accepted it yet, or if the policy can't be read.
    If no channel is configured, the alert counts as delivered at the time of its event.
    """
    try:
        if not channels(ctx):
            return raised.at
    except WardenError:
        return None
    sent = (e for e in ctx.ledger.history(raised.subject) if isinstance(e.data, AlertSent))
    return next((e.at for e in sent if e.data.alert == raised.seq), None)


def ends_at(ctx: Context, announced: Event[AutoTeardownAnnounced]) -> float | None:
    """Return the time when an announced teardown is due; None if its notice has not been delivered.

    The grace period starts at delivery. If the current policy has a longer grace period, the longer period applies.
    """
    raised, order = (
        ctx.ledger.alert(announced.subject, ENDING_SOON, str(announced.seq)),
        automatic_teardown(ctx, announced.subject.removeprefix("job/")),
    )
    told = delivered_at(ctx, raised) if raised is not None else None
    grace_s = max(announced.data.ends_at - announced.at, order.grace_s if order else 0.0)
    return None if told is None else max(announced.data.ends_at, told + grace_s)


class AlertSender:
    """Sends alerts to every configured channel, and retries until the alert is accepted or cleared."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.trouble: dict[str, str] = {}
        """Maps the name of each failed channel to the reason for its failure."""
        self._tries: Counter[tuple[str, int]] = Counter()
        self._next: dict[str, float] = {}

    async def round(self, current: Iterable[Key]) -> dict[str, str]:
        """Send each channel its pending alerts, until one can't be sent. Return the reason for each channel's failure.

        A new alert is sent at once. The delay before the next attempt doubles after each failure. `current` contains
        the keys of the conditions that are currently true.
        """
        now, by_name = self.ctx.clock.now(), channels(self.ctx)
        waiting = self._waiting(current) if by_name else []
        self.trouble = {name: why for name, why in self.trouble.items() if name in by_name}
        for name, send in by_name.items():
            due = [alert for alert in waiting if self._wants(name, alert)]
            if now < self._next.get(name, 0.0) and all(self._tries[name, alert.seq] for alert in due):
                continue
            due.sort(key=lambda alert: self._tries[name, alert.seq])  # a failed alert must not block the others
            self.trouble.pop(name, None)
            for alert in due[:MAX_ALERTS]:
                why = await send(self.ctx, alert)
                if not why:
                    self.ctx.ledger.add(alert.subject, AlertSent(alert=alert.seq, channel=name))
                    continue
                self.trouble[name] = why
                n = self._tries[name, alert.seq] = self._tries[name, alert.seq] + 1
                self._next[name] = self.ctx.clock.now() + doubled(FIRST_RETRY_S, n, MOST_RETRY_S)
                if n == 1:
                    self.ctx.ledger.add(f"watch/{name}", AlertUnsent(alert=alert.seq, why=why))
                break
        return self.trouble

    def _waiting(self, current: Iterable[Key]) -> list[Alert]:
        """Return the active alerts and the alerts cleared in the last day, in order."""
        ledger = self.ctx.ledger
        events = [
            event for key in current if key[2] and (event := ledger.alert(*key))
        ]  # a condition with a mark is a single event, which `standing_alerts` omits
        over = ledger.recent(AlertCleared, self.ctx.clock.now() - DAY_S)
        found: Iterator[Event[AlertBody]] = chain(events, ledger.standing_alerts(), over)
        return sorted(map(Alert.read, found), key=lambda alert: alert.seq)

    def _wants(self, name: str, alert: Alert) -> bool:
        """Return whether an alert is still pending for a channel. Only the webhook receives cleared alerts."""
        taken = (e.data for e in self.ctx.ledger.history(alert.subject) if isinstance(e.data, AlertSent))
        return (alert.raised or name == "webhook") and not any(
            sent.alert == alert.seq and sent.channel == name for sent in taken
        )


def _words(ctx: Context, alert: Alert) -> str:
    steps = ctx.phrase(alert.next_steps)
    text = f"{alert.text} Next: {steps}" if steps else alert.text
    return line(redact(text, ctx.hidden(text)), 900)


async def _desktop(ctx: Context, alert: Alert) -> str | None:
    """Run the user's command, with the alert's title and text in place of the placeholders.

    Only entire arguments are replaced, because text inside an argument could be executed as code.
    """
    values = {"{title}": f"gpuwarden: {alert.kind}", "{text}": _words(ctx, alert)}
    argv = [values.get(word, word) for word in ctx.policy.watch.desktop]
    try:
        with anyio.fail_after(PATIENCE_S):
            code, _ = await processes.run(argv, keep=False)
    except (OSError, TimeoutError) as error:
        return f"the desktop command failed: {type(error).__name__}"
    return f"the desktop command exited with code {code}" if code else None


async def _webhook(ctx: Context, alert: Alert) -> str | None:
    """Post the alert as signed JSON."""
    secret = ctx.env.get(SECRET)
    if not secret:
        return f"{SECRET} is not set, and unsigned alerts are not sent"
    state = "raised" if alert.raised else "cleared"
    body = {"id": alert.seq, "at": alert.at, "subject": alert.subject, "kind": alert.kind, "state": state}
    following = [step.as_dict() for step in alert.next_steps]
    raw = json.dumps({**body, "text": _words(ctx, alert), "next": following}).encode()
    stamp = str(int(ctx.clock.now()))
    headers = {"X-Gpuwarden-Timestamp": stamp, "X-Gpuwarden-Signature": sign(secret, stamp, raw)}
    return await _post(ctx, ctx.policy.watch.webhook_url or "", raw, headers)


def sign(secret: str, stamp: str, body: bytes) -> str:
    """Return `sha256=` followed by the HMAC of the timestamp, a dot and the body, in hex.

    The receiver checks the signature and the timestamp.
    """
    return "sha256=" + hmac.new(secret.encode(), stamp.encode() + b"." + body, hashlib.sha256).hexdigest()


async def _slack(ctx: Context, alert: Alert) -> str | None:
    """Post the alert's text to Slack, escaped as Slack requires."""
    text = _words(ctx, alert).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return await _post(ctx, ctx.policy.watch.slack_url or "", json.dumps({"text": f"gpuwarden: {text}"}).encode(), {})


async def _post(ctx: Context, url: str, body: bytes, headers: dict[str, str]) -> str | None:
    """Post JSON, with retries for temporary failures. The URL may be a secret, so errors never contain it."""
    import httpx2

    local = urlsplit(url).hostname in {"localhost", "127.0.0.1", "::1"}
    headers = headers | {"Content-Type": "application/json"}
    why = "no answer"
    try:
        with anyio.fail_after(PATIENCE_S):
            for attempt in range(TRIES):
                if attempt:
                    await ctx.clock.sleep(2.0**attempt)
                try:
                    async with (
                        httpx2.AsyncClient(timeout=PATIENCE_S, trust_env=not local, follow_redirects=False) as client,
                        client.stream("POST", url, content=body, headers=headers) as response,
                    ):
                        status = int(response.status_code)  # the response body is not read
                except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
                    why = f"no answer: {type(error).__name__}"
                    continue
                if 200 <= status < 300:
                    return None
                why = f"the webhook returned status {status}"
                if status < 500 and status not in {408, 429}:
                    return why
    except TimeoutError:
        return f"{why} within {PATIENCE_S:g} s"
    return f"{why}, {TRIES} times in a row"
