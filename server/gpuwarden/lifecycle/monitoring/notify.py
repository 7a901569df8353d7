"""Alerts on their way out: a command on the desktop, a signed webhook, a Slack webhook. The ledger has them already.

| variable | meaning |
|---|---|
| `GPUWARDEN_WEBHOOK_SECRET` | signs what the webhook of the policy's [watch] gets |
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import anyio

from gpuwarden.core import processes
from gpuwarden.core.guidance import NextStep, read_steps
from gpuwarden.core.sanitize import line, redact
from gpuwarden.ledger.event import Event
from gpuwarden.ledger.events import AlertBody, AlertRaised, AlertUnsent
from gpuwarden.lifecycle.context import Context

SECRET: Final = "GPUWARDEN_WEBHOOK_SECRET"  # noqa: S105 - the variable's name
TRIES: Final = 3
PATIENCE_S: Final = 10.0
MAX_ALERTS: Final = 20
"""Of one round; the rest is in the ledger."""


@dataclass(frozen=True)
class Alert:
    """One alert of the ledger. `raised` is false for the one that says that it is over."""

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
        """Return the alert that an event records."""
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
    def key(self) -> tuple[str, str, str]:
        """Return the key under which it is reported once."""
        return self.subject, self.kind, self.mark


Channel = Callable[[Context, Alert], Awaitable[str | None]]
"""Sends one alert, and returns why that failed; None where it did not."""


async def deliver(ctx: Context, alerts: list[Alert]) -> dict[str, str]:
    """Send alerts to every channel of the policy. Returns why a channel failed; one that failed is not asked again.

    Desktop and Slack hear only of what is raised, the webhook of what is over too.
    """
    trouble: dict[str, str] = {}
    if len(alerts) > MAX_ALERTS:
        trouble["alerts"] = f"{len(alerts) - MAX_ALERTS} alerts were not sent on; the ledger has them"
    watch = ctx.policy.watch
    channels: tuple[tuple[str, object, Channel], ...] = (
        ("desktop", watch.desktop, _desktop),
        ("webhook", watch.webhook_url, _webhook),
        ("slack", watch.slack_url, _slack),
    )
    for name, send in ((name, send) for name, setting, send in channels if setting):
        for alert in alerts[:MAX_ALERTS]:
            if (alert.raised or name == "webhook") and (why := await send(ctx, alert)):
                trouble[name] = why
                ctx.ledger.add(f"watch/{name}", AlertUnsent(alert=alert.seq, why=why))
                break
    return trouble


def _words(ctx: Context, alert: Alert) -> str:
    steps = ctx.phrase(alert.next_steps)
    text = f"{alert.text} Next: {steps}" if steps else alert.text
    return line(redact(text, ctx.hidden(text)), 900)


async def _desktop(ctx: Context, alert: Alert) -> str | None:
    """Run the user's command. Only whole arguments are replaced: inside one, the text could become code."""
    values = {"{title}": f"gpuwarden: {alert.kind}", "{text}": _words(ctx, alert)}
    argv = [values.get(word, word) for word in ctx.policy.watch.desktop]
    try:
        with anyio.fail_after(PATIENCE_S):
            code, _ = await processes.run(argv, keep=False)
    except (OSError, TimeoutError) as error:
        return f"the desktop command failed: {type(error).__name__}"
    return f"the desktop command ended with {code}" if code else None


async def _webhook(ctx: Context, alert: Alert) -> str | None:
    """Post the alert as signed JSON."""
    secret = ctx.env.get(SECRET)
    if not secret:
        return f"{SECRET} is not set; an alert is not sent unsigned"
    state = "raised" if alert.raised else "cleared"
    body = {"id": alert.seq, "at": alert.at, "subject": alert.subject, "kind": alert.kind, "state": state}
    following = [step.as_dict() for step in alert.next_steps]
    raw = json.dumps({**body, "text": _words(ctx, alert), "next": following}).encode()
    stamp = str(int(ctx.clock.now()))
    headers = {"X-Gpuwarden-Timestamp": stamp, "X-Gpuwarden-Signature": sign(secret, stamp, raw)}
    return await _post(ctx, ctx.policy.watch.webhook_url or "", raw, headers)


def sign(secret: str, stamp: str, body: bytes) -> str:
    """Return `sha256=` and the HMAC of time stamp, dot and body, in hex. The receiver compares it and the time."""
    return "sha256=" + hmac.new(secret.encode(), stamp.encode() + b"." + body, hashlib.sha256).hexdigest()


async def _slack(ctx: Context, alert: Alert) -> str | None:
    """Post the alert's text to Slack, escaped as Slack asks."""
    text = _words(ctx, alert).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return await _post(ctx, ctx.policy.watch.slack_url or "", json.dumps({"text": f"gpuwarden: {text}"}).encode(), {})


async def _post(ctx: Context, url: str, body: bytes, headers: dict[str, str]) -> str | None:
    """Post JSON, again when it may help. The address may be a secret, so it is in no answer."""
    import httpx2

    local = urlsplit(url).hostname in {"localhost", "127.0.0.1", "::1"}
    headers = headers | {"Content-Type": "application/json"}
    why = ""
    for attempt in range(TRIES):
        if attempt:
            await ctx.clock.sleep(4.0**attempt)
        try:
            with anyio.fail_after(PATIENCE_S):
                async with (
                    httpx2.AsyncClient(timeout=PATIENCE_S, trust_env=not local, follow_redirects=False) as client,
                    client.stream("POST", url, content=body, headers=headers) as response,
                ):
                    status = int(response.status_code)  # the body of the answer is not read
        except (httpx2.HTTPError, httpx2.InvalidURL, TimeoutError, OSError) as error:
            why = f"no answer: {type(error).__name__}"
            continue
        if 200 <= status < 300:
            return None
        why = f"the webhook answered {status}"
        if status < 500 and status not in {408, 429}:
            return why
    return f"{why}, {TRIES} times"
