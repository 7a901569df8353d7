"""Wait for a job to change, for a limited time."""

from __future__ import annotations

import contextlib
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

News = tuple[str, int | None, tuple[tuple[str, str, int | None], ...]]


async def wait(ctx: Context, job_id: str, until: Until, seconds: float) -> bool:
    """Poll a job until it ends or changes as `until` specifies. Return False if the time is up first.

    Any state change ends the wait, unless `until` is `end`. A new step or alert ends the wait if `until` is `step` or
    `alert`. The wait lasts at most `seconds` seconds, and the intervals between polls grow.
    """
    end, pause = ctx.clock.now() + seconds, FIRST_S
    first = await _news(ctx, job_id)
    while True:
        state, step, alerts = await _news(ctx, job_id) if pause > FIRST_S else first
        moved = until != "end" and state != first[0]
        stepped = until == "step" and step is not None and step != first[1]
        alerted = until == "alert" and set(alerts) - set(first[2])
        if moved or stepped or alerted or read_job(ctx.ledger, job_id).state in TERMINAL_JOBS:
            return True
        left = end - ctx.clock.now()
        if left <= 0:
            return False
        await ctx.clock.sleep(min(pause, left))
        pause = min(pause * 1.5, MOST_S)


async def _news(ctx: Context, job_id: str) -> News:
    """Advance a job and return its state, step and alerts. Values that can't be read count as unchanged."""
    with contextlib.suppress(WardenError):
        await advance(ctx, job_id)
    job = read_job(ctx.ledger, job_id)
    seen = ctx.observed.get(job_id)
    mine = (event.data for event in ctx.ledger.standing_alerts() if event.subject == job.subject)
    raised = tuple((alert.condition, alert.text, None) for alert in mine)
    alerts = tuple((a.kind, a.text, a.step) for a in seen.alerts) if seen else ()
    return job.state, seen.step if seen else None, (*raised, *alerts)
