"""Format times, durations, curves and job progress for the terminal."""

from __future__ import annotations

import sys
from datetime import datetime
from itertools import pairwise
from typing import TYPE_CHECKING

from gpuwarden.core.money import usd, usd_per_hour
from gpuwarden.core.plural import counted

if TYPE_CHECKING:
    from gpuwarden.interfaces.results.base import AutoTeardownReply
    from gpuwarden.interfaces.results.check import CheckReply
    from gpuwarden.interfaces.results.overview import JobLineReply, StatusReply

BLOCKS = "▁▂▃▄▅▆▇█"
CURVE = 24


def local(at: float | None, form: str = "%H:%M") -> str:
    """Format a time in the local time zone; `-` for None or a time that the calendar can't represent."""
    try:
        return datetime.fromtimestamp(at).astimezone().strftime(form) if at is not None else "-"
    except (OverflowError, ValueError, OSError):
        return "-"


def zone() -> str:
    """Return the name of the current local time zone."""
    return datetime.now().astimezone().strftime("%Z")


def span(seconds: float | None) -> str:
    """Format a duration: `2d 3h`, `3h 20m`, `4m 10s`, `8s`."""
    if seconds is None:
        return "-"
    left = max(0, round(seconds))
    parts = [(left // 86_400, "d"), (left // 3_600 % 24, "h"), (left // 60 % 60, "m"), (left % 60, "s")]
    first = next((n for n, (count, _) in enumerate(parts) if count), 3)
    return " ".join(f"{count}{unit}" for count, unit in parts[first : first + 2] if count) or "0s"


def sparkline(values: list[float]) -> str:
    """Return a curve as a row of block characters. Each character represents the mean of several consecutive values."""
    if len(values) < 2:
        return ""
    width = min(CURVE, len(values))
    cuts = [round(n * len(values) / width) for n in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    return "".join(BLOCKS[round((v - low) / (high - low) * 7) if high > low else 0] for v in means)


def auto_teardown_lines(found: AutoTeardownReply) -> list[str]:
    """Return the lines that describe a job's automatic teardown and self-stop."""
    lines = []
    if found.automatic_teardown:
        origin = f"set in the policy on {local(found.set_at, '%m-%d %H:%M')} {zone()}"
        if found.through == "approval":
            origin = f"set with the job's approval on {local(found.set_at, '%m-%d %H:%M')} {zone()}, by {found.by}"
        after = f"once everything is proven, {span((found.grace_minutes or 0) * 60)} after an alert"
        if found.ends_at is not None:
            after = f"at {local(found.ends_at)} {zone()}"
        text = f"automatic teardown: {found.automatic_teardown} the machine {after} ({origin})"
        if found.objected_at is not None:
            text = f"automatic teardown ({found.automatic_teardown}): canceled at {local(found.objected_at)} {zone()}"
        lines.append(text)
    if found.self_stop_after_minutes is not None:
        after = span(found.self_stop_after_minutes * 60)
        lines.append(f"self-stop: {after} after the job ends, unless gpuwarden connects")
    return lines


def progress_parts(line: JobLineReply) -> list[str]:
    """Return the progress of one listed job: its step, loss, remaining time and GPU use."""
    parts = []
    if line.step is not None:
        parts.append(f"step {line.step:,}" + (f"/{line.total_steps:,}" if line.total_steps else ""))
    parts += [f"loss {line.loss:.4g}"] if line.loss is not None else []
    parts += [f"{span(line.remaining_s)} left"] if line.remaining_s is not None else []
    parts += [f"GPU {line.gpu_percent:.0f} %"] if line.gpu_percent is not None else []
    return parts


def billing_now(reply: StatusReply) -> str:
    """Return the current cost per hour. Machines with an unknown price are counted separately, never as free."""
    billing = [line for line in (*reply.running, *reply.ended) if line.billing]
    real = [line for line in billing if not line.pretend]
    if not real:
        return "only rehearsals are billed" if billing else "no instance is billed"
    unknown = sum(line.price_usd_per_hour is None for line in real)
    more = f" and {counted(unknown, 'machine')} with an unknown price" if unknown else ""
    return f"now {usd_per_hour(reply.spending.usd_per_hour)}{more}"


def progress_of(reply: CheckReply) -> list[str]:
    """Return the lines to show below a job's state: progress, time, cost, curve and proof."""
    lines = []
    if reply.started_at is not None:
        left = f", about {span(reply.remaining_s)} left" if reply.remaining_s is not None else ""
        if reply.remaining_range_s:
            least, most = reply.remaining_range_s
            left = (
                (left or ", ") + (" (" if left else "") + f"{span(least)} to {span(most)}" + (")" if left else " left")
            )
        begun = f"{local(reply.started_at, '%Y-%m-%d %H:%M')} {zone()}"
        cost = f", {usd(reply.projected_cost_usd)} when it ends" if reply.projected_cost_usd is not None else ""
        lines.append(
            f"started {begun}, {span(reply.elapsed_s)} ago{left}{cost}" if reply.elapsed_s else f"started {begun}"
        )
    if reply.allocation:
        keys = ("engine", "id", "state", "queue", "nodes", "why", "resources")
        restarts = reply.allocation.get("restarts")
        named = " ".join(str(reply.allocation[key]) for key in keys if key in reply.allocation)
        lines.append(named + (f", restarted {restarts} times" if restarts else ""))
    curve = sparkline(reply.curve) if "utf" in (sys.stdout.encoding or "").lower() else ""
    if curve:
        lines.append(f"loss {curve} {reply.curve[0]:.4g} -> {reply.curve[-1]:.4g}")
    gpu = reply.usage.get("gpu_util")
    if gpu is not None:
        memory = reply.usage.get("gpu_mem_used")
        lines.append(f"GPU {gpu:.0f} %" + (f", {memory / 2**30:.1f} GiB" if memory else ""))
    if reply.evidence:
        proof = ", ".join(f"{rung} {held.replace('_', ' ')}" for rung, held in reply.evidence.items())
        lines.append(f"outputs: {proof}")
    return lines
