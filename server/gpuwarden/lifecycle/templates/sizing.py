"""Choose the GPU and the time limit for a filled template, based on an estimate of its memory and run time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from gpuwarden.core.errors import WardenError
from gpuwarden.core.models import Capacity, Resources
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.offers import ask_offer
from gpuwarden.lifecycle.submission.estimating import estimate

SPARE: Final = 1.3


async def sized(
    ctx: Context, script: str, args: Sequence[str], platform: str, gpu: str | None
) -> tuple[str | None, int | None]:
    """Return a GPU and a time limit in seconds, each None if unknown. A given GPU is not changed.

    The GPU is the smallest one available on the platform that is certain to have enough memory for the run.
    """
    try:
        found = await estimate(ctx, script, args, [gpu] if gpu else (), {})
    except WardenError:
        return gpu, None
    fitting = sorted((c for c in found.cards if gpu or c.fit == "fits"), key=lambda c: (c.gpu.gb, c.gpu.tflops))
    card = next(iter(fitting), None)  # the default if the platform offers none of them or does not respond
    for each in fitting if platform and not gpu else ():
        try:
            offer = await ask_offer(ctx, platform, Resources(gpu=each.gpu.name))
        except WardenError:
            break
        if offer.capacity in {Capacity.AVAILABLE, Capacity.UNKNOWN}:
            card = each
            break
    limit = math.ceil(card.seconds.high * SPARE / 60) * 60 if card and card.seconds else None
    return gpu or (card.gpu.name if card else None), limit
