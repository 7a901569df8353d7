"""Statistics for small samples: intervals, pass@k, pass^k, and comparisons that take clusters into account."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

Z95: Final = 1.959963984540054
_SEED: Final = 20_261_121


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


def wilson(passes: int, n: int, z: float = Z95) -> Interval | None:
    """Return the Wilson score interval for a rate, or None without trials."""
    if n <= 0:
        return None
    rate = passes / n
    middle = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    return Interval(rate, max(0.0, middle - half), min(1.0, middle + half))


def pass_at_k(n: int, passes: int, k: int) -> float | None:
    """Return the unbiased estimate of the probability that at least one of `k` trials passes, or None with fewer than
    `k` trials.
    """
    if n < k or k < 1:
        return None
    return 1.0 - math.comb(n - passes, k) / math.comb(n, k)


def pass_hat_k(n: int, passes: int, k: int) -> float | None:
    """Return the estimated probability that all of `k` trials pass (pass^k), or None with fewer than `k` trials."""
    if n < k or k < 1:
        return None
    return math.comb(passes, k) / math.comb(n, k)


def zero_bound(n: int) -> float | None:
    """Return the 95 % upper bound on the rate of an event that did not occur in `n` trials, which is about 3/n."""
    return None if n < 1 else 1.0 - 0.05 ** (1.0 / n)


def cluster_bootstrap(values: Mapping[str, Sequence[float]], draws: int = 2000) -> Interval | None:
    """Return the mean of all values, with a bootstrap interval that resamples whole clusters.

    Variants and paraphrases of one situation are correlated, so resampling cases would make the interval too narrow.
    Returns None with fewer than two clusters.
    """
    groups = [(sum(v), len(v)) for v in values.values() if v]
    if len(groups) < 2:
        return None
    rng = random.Random(_SEED)  # seeded, so that the same results give the same interval
    means = []
    for _ in range(draws):
        drawn = rng.choices(groups, k=len(groups))
        means.append(sum(s for s, _ in drawn) / sum(n for _, n in drawn))
    means.sort()
    low, high = means[int(0.025 * draws)], means[min(draws - 1, int(0.975 * draws))]
    return Interval(sum(s for s, _ in groups) / sum(n for _, n in groups), low, high)


def normalized_gain(rate: float, base: float) -> float | None:
    """Return the achieved share of the possible improvement, (rate - base) / (1 - base), or None if `base` is 1."""
    return None if base >= 1.0 else (rate - base) / (1.0 - base)
