"""Run the watch inside a server, so that jobs advance and alerts are logged even if no agent calls a tool."""

from __future__ import annotations

import logging

from gpuwarden.core.sanitize import line, scrubbed
from gpuwarden.interfaces.mcp.wording import in_calls
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.monitoring.watch import EVERY_S, Round, Watcher

logger = logging.getLogger(__name__)


async def watch_in_background(ctx: Context, every_s: float = EVERY_S) -> None:
    """Run the watch while the server runs. Without it, an idle machine is noticed only on the next tool call."""
    shown: dict[str, str] = {}

    def report(done: Round) -> None:
        nonlocal shown
        texts = [f"{alert.kind}: {alert.text} {in_calls(alert.next_steps)}" for alert in done.news if alert.raised]
        texts += [f"{what}: {why}" for what, why in done.trouble.items() if shown.get(what) != why]
        shown = done.trouble
        for text in texts:
            logger.warning("%s", line(scrubbed(text, ctx.hidden(text)), 600))

    await ctx.clock.sleep(every_s)
    await Watcher(ctx, every_s).run(report, defers=True)
