"""Times, durations and curves in a few characters, and a job's progress made of them."""

from __future__ import annotations

import sys
from datetime import datetime
from itertools import pairwise
from typing import TYPE_CHECKING

from gpuwarden.core.money import usd

if TYPE_CHECKING:
    from gpuwarden.interfaces.results.check import CheckReply

BLOCKS = "▁▂▃▄▅▆▇█"
CURVE = 24


def local(at: float | None, form: str = "%H:%M") -> str:
    """Format a time of this computer's zone; `-` outside of the calendar."""
    try:
        return datetime.fromtimestamp(at).astimezone().strftime(form) if at is not None else "-"
    except (OverflowError, ValueError, OSError):
        return "-"


def zone() -> str:
    """Return the name of this computer's time zone now."""
    return datetime.now().astimezone().strftime("%Z")


def span(seconds: float | None) -> str:
    """Format a duration: `2d 3h`, `3h 20m`, `4m 10s`, `8s`."""
    if seconds is None:
        return "-"
    left = max(0, round(seconds))
    parts = [(left // 86_400, "d"), (left // 3_600 % 24, "h"), (left // 60 % 60, "m"), (left % 60, "s")]
    first = next((n for n, (count, _) in enumerate(parts) if count), 3)
    return " ".join(f"{count}{unit}" for count, unit in parts[first : first + 2] if count) or "0s"


def sparkline(values: list[float], width: int = CURVE) -> str:
    """Return a curve as a row of blocks, each the mean of its part of the values."""
    if len(values) < 2:
        return ""
    width = min(width, len(values))
    cuts = [round(n * len(values) / width) for n in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    return "".join(BLOCKS[round((v - low) / (high - low) * 7) if high > low else 0] for v in means)


def progress_of(reply: CheckReply) -> list[str]:
    """Return the lines below a job's state: how far, how long, at what cost, and its curve."""
    lines = []
    if reply.started_at is not None:
        left = f", about {span(reply.remaining_s)} left" if reply.remaining_s is not None else ""
        begun = f"{local(reply.started_at, '%Y-%m-%d %H:%M')} {zone()}"
        cost = f", {usd(reply.projected_cost_usd)} at its end" if reply.projected_cost_usd is not None else ""
        lines.append(
            f"started {begun}, {span(reply.elapsed_s)} ago{left}{cost}" if reply.elapsed_s else f"started {begun}"
        )
    curve = sparkline(reply.curve) if "utf" in (sys.stdout.encoding or "").lower() else ""
    if curve:
        lines.append(f"loss {curve} {reply.curve[0]:.4g} -> {reply.curve[-1]:.4g}")
    gpu = reply.usage.get("gpu_util")
    if gpu is not None:
        memory = reply.usage.get("gpu_mem_used")
        lines.append(f"GPU {gpu:.0f} %" + (f", {memory / 2**30:.1f} GiB" if memory else ""))
    return lines
