"""Measure the speed of a training run, and reduce its loss curve to a few points."""

from __future__ import annotations

from collections import deque

LAST_S, APART_S = 300.0, 1.0
POINTS = 32


class Pace:
    """The training speed, measured over the last `LAST_S` seconds."""

    def __init__(self) -> None:
        self.seen: deque[tuple[float, int]] = deque(maxlen=512)

    def reached(self, step: int, now: float) -> None:
        """Add the newest step and its time in seconds."""
        if self.seen and step < self.seen[-1][1]:
            self.seen.clear()  # training restarted
        if len(self.seen) > 1 and now - self.seen[-2][0] < APART_S:
            self.seen.pop()
        self.seen.append((now, step))
        while len(self.seen) > 2 and now - self.seen[0][0] > LAST_S:
            self.seen.popleft()

    def left_s(self, total: int | None) -> float | None:
        """Return the estimated number of seconds until step `total`; None if unknown."""
        if not total or len(self.seen) < 2:
            return None
        (begun, first), (now, last) = self.seen[0], self.seen[-1]
        if last <= first or now <= begun:
            return None
        return max(0, total - last) * (now - begun) / (last - first)


class Curve:
    """A run's loss curve, reduced to a limited number of points, each the mean of the same number of values."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []
        self.each, self.sum, self.count = 1, 0.0, 0

    def add(self, step: int | None, value: float) -> None:
        """Add the loss at a step."""
        if abs(value) > 1e30:
            return
        self.sum, self.count = self.sum + value, self.count + 1
        if self.count < self.each:
            return
        mean = float("%.5g" % (self.sum / self.count))
        self.points, self.sum, self.count = [*self.points, (step or 0, mean)], 0.0, 0
        if len(self.points) >= 2 * POINTS:
            old, self.each = self.points, 2 * self.each
            self.points = [
                (old[n + 1][0], float("%.5g" % ((old[n][1] + old[n + 1][1]) / 2))) for n in range(0, 2 * POINTS, 2)
            ]
