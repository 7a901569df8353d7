"""The rounds of a server: jobs move on and alerts are said while no agent looks."""

from __future__ import annotations

import logging

from gpuwarden.core.fence import line, scrubbed, secret_values
from gpuwarden.lifecycle.warden import Warden
from gpuwarden.lifecycle.watch import EVERY_S, Round, Watcher

logger = logging.getLogger(__name__)


async def tend(w: Warden, every_s: float = EVERY_S) -> None:
    """Watch while the server runs, so that no machine waits, billing, for an agent to look."""
    said: dict[str, str] = {}

    def tell(done: Round) -> None:
        nonlocal said
        texts = [f"{alert.kind}: {alert.text}" for alert in done.news if alert.raised]
        texts += [f"{what}: {why}" for what, why in done.trouble.items() if said.get(what) != why]
        said = done.trouble
        for text in texts:
            logger.warning("%s", scrubbed(line(text, 600), secret_values(w.env)))

    await w.clock.sleep(every_s)
    await Watcher(w, every_s).run(tell)
