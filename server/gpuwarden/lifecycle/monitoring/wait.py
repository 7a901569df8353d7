"""Wait for a job to change, for a limited time."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

from gpuwarden.core.errors import WardenError
from gpuwarden.core.models import Until
from gpuwarden.core.states import TERMINAL_JOBS
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.execution.advance import advance
from gpuwarden.lifecycle.records import read_job

MAX_WAIT_S: Final = 45.0
"""Longest wait in seconds for an MCP client, because some clients cancel a call after 60 seconds."""
FIRST_S, MOST_S = 1.0, 15.0


@dataclass(frozen=True)
class News:
    """What a wait compares: a job's state and step, and a digest of each of its alerts."""

    state: str
    step: int | None
    alerts: tuple[str, ...]


async def wait(ctx: Context, job_id: str, until: Until, seconds: float) -> bool:
    """Poll a job until its state or, as requested by `until`, its step or alerts change. Return whether they changed.

    The time limit is `seconds`. For an ended job, return True immediately. The intervals between polls become longer.
    """
    end, pause = ctx.clock.now() + seconds, FIRST_S
    first = now = await _advanced(ctx, job_id)
    while not changed(first, now, until):
        left = end - ctx.clock.now()
        if left <= 0:
            return False
        await ctx.clock.sleep(min(pause, left))
        pause = min(pause * 1.5, MOST_S)
        now = await _advanced(ctx, job_id)
    return True


def changed(first: News, now: News, until: Until) -> bool:
    """Return whether a wait that began with `first` is over: the job has ended, or what `until` names has changed."""
    stepped = until == "step" and now.step is not None and now.step != first.step
    alerted = until == "alert" and not set(now.alerts) <= set(first.alerts)
    return now.state in TERMINAL_JOBS or now.state != first.state or stepped or alerted


async def _advanced(ctx: Context, job_id: str) -> News:
    with contextlib.suppress(WardenError):
        await advance(ctx, job_id)
    return news(ctx, job_id)


def news(ctx: Context, job_id: str) -> News:
    """Return a job's state, step and alerts as they were last seen. Values that can't be read count as unchanged."""
    job = read_job(ctx.ledger, job_id)
    seen = ctx.observed.get(job_id)
    mine = (event.data for event in ctx.ledger.standing_alerts() if event.subject == job.subject)
    raised = [f"{alert.condition} {alert.text}" for alert in mine]
    reported = [f"{alert.kind} {alert.step} {alert.text}" for alert in (seen.alerts if seen else ())]
    digests = {sha256(text.encode()).hexdigest()[:8] for text in (*raised, *reported)}
    return News(job.state, seen.step if seen else None, tuple(sorted(digests)))
