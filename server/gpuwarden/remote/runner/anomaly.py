"""Detect anomalies by comparing new values with earlier values from the same run."""

from __future__ import annotations

from typing import Iterable

STEP = "a step"


def at_step(step: int | None) -> str:
    """Return " at step N" for use in a message; empty if the step is unknown."""
    return "" if step is None else f" at step {step}"


def middle(values: Iterable[float]) -> float:
    """Return the median: the middle value, or the upper of the two middle values."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


class AnomalyDetector:
    """Detects a loss that jumps and stays high, and steps that become much slower.

    An anomaly is reported once, after `ROW` consecutive values, and its end is reported too. A report consists of a
    kind, a text and a subject. The subject is the name of the loss, or `STEP` for slow steps.
    """

    MEMORY, LEAST, ROW = 50, 20, 5  # values kept, values before the first alert, consecutive values
    JUMP, SLOW, SLOW_S = 5.0, 5.0, 30.0

    def __init__(self) -> None:
        self.losses: dict[str, list[float]] = {}
        self.early: dict[str, float] = {}
        self.high: dict[str, int] = {}
        self.paces: list[float] = []
        self.recent: list[tuple[float, float]] = []  # seconds, steps
        self.slow = False
        self.last: tuple[float, int] | None = None

    def loss(self, name: str, value: float, step: int | None) -> tuple[str, str, str] | None:
        """Add a new value for the loss `name`. Return an alert's kind, text and subject, or None if no alert is due."""
        past = self.losses.setdefault(name, [])
        limit = None
        if len(past) >= self.LEAST:
            usual = middle(past)
            early = self.early.setdefault(name, middle(past[: self.LEAST // 2]))
            spread = middle(abs(v - usual) for v in past)
            # The maximum of 5 * median, median + 10 * spread, and early median / 2.
            limit = max(self.JUMP * usual, usual + 10 * spread, early / 2) if usual > 0 else None
        if limit is None or value <= limit:
            was, self.high[name] = self.high.get(name, 0), 0
            self.losses[name] = [*past, value][-self.MEMORY :]
            return ("recovered", f"{name} is back to {value:.4g}{at_step(step)}", name) if was >= self.ROW else None
        self.high[name] = self.high.get(name, 0) + 1
        text = f"{name} is {value:.4g}{at_step(step)}, the {self.ROW}th value in a row above {limit:.4g}"
        return ("spike", text, name) if self.high[name] == self.ROW else None

    def pace(self, step: int, now: float) -> tuple[str, str, str] | None:
        """Add the newest step. Return the kind, text and subject of an alert, or None if no alert is due."""
        last, self.last = self.last, (now, step)
        if last is None or step <= last[1]:
            return None
        self.recent.append((now - last[0], float(step - last[1])))
        if len(self.recent) <= self.ROW:
            return None
        if not self.slow:
            seconds, steps = self.recent.pop(0)
            self.paces = [*self.paces, seconds / steps][-self.MEMORY :]
        self.recent = self.recent[-self.ROW :]
        if len(self.paces) < self.LEAST:
            return None
        usual, present = middle(self.paces), middle(seconds / steps for seconds, steps in self.recent)
        slow = present > self.SLOW * usual and sum(seconds for seconds, _ in self.recent) > self.SLOW_S
        if self.slow and present < self.SLOW / 2 * usual:
            self.slow = False
            return "recovered", f"a step takes {present:.3g} s again", STEP
        if self.slow or not slow:
            return None
        self.slow = True
        return "slowed", f"a step now takes {present:.3g} s instead of {usual:.3g} s (at step {step})", STEP
