"""Signs: observations of a job that do not come from its log. A job can print any log line, but can't fake a sign.

A catalog entry lists its signs (`signs: [stall]`) in the same way as the signatures for its log lines.
"""

from __future__ import annotations

from enum import StrEnum

from gpuwarden.core.models import Frozen


class Sign(StrEnum):
    """A kind of observation made by the runner or a backend."""

    NONFINITE_LOSS = "nonfinite-loss"
    NONFINITE_HIDDEN = "nonfinite-hidden"
    """A gradient norm that is not finite, with a loss of exactly 0."""
    NONFINITE_METRIC = "nonfinite-metric"
    LOSS_SPIKE = "loss-spike"
    SLOWED = "slowed"
    STALL = "stall"
    OOM_KILL = "oom-kill"
    TIME_LIMIT = "time-limit"
    VANISHED = "vanished"
    DISK_FULL = "disk-full"
    INODES_USED = "inodes-used"


class ObservedSign(Frozen):
    """An observed sign and its description. If `sure` is true, the sign alone establishes the cause; otherwise, it only
    makes the cause more likely.
    """

    sign: Sign
    text: str
    sure: bool = False
