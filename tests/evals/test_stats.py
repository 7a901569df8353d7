"""Statistics checked against published values and their own definitions."""

from __future__ import annotations

import math
import random

import pytest
from evals.scoring.stats import (
    cluster_bootstrap,
    normalized_gain,
    pass_at_k,
    pass_hat_k,
    wilson,
    zero_bound,
)
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(("n", "low"), [(5, 0.566), (20, 0.839), (60, 0.940)])
def test_wilson_of_perfect_runs(n: int, low: float) -> None:
    found = wilson(n, n)
    assert found is not None
    assert (found.value, found.high) == (1.0, pytest.approx(1.0))
    assert found.low == pytest.approx(low, abs=0.001)


def test_wilson_interval_matches_the_published_table() -> None:
    # Newcombe 1998 (Statistics in Medicine 17:857), table I: 81/263 gives 0.2553 to 0.3662.
    found = wilson(81, 263)
    assert found is not None
    assert (found.low, found.high) == (pytest.approx(0.2553, abs=5e-5), pytest.approx(0.3662, abs=5e-5))
    assert wilson(0, 0) is None


@given(st.integers(1, 12), st.data())
def test_pass_at_k_and_pass_hat_k_match_counting(n: int, data: st.DataObject) -> None:
    from itertools import combinations

    passes, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    draws = list(combinations([True] * passes + [False] * (n - passes), k))
    assert pass_at_k(n, passes, k) == pytest.approx(sum(map(any, draws)) / len(draws))
    assert pass_hat_k(n, passes, k) == pytest.approx(sum(map(all, draws)) / len(draws))


def test_too_few_trials_are_undefined_and_never_perfect() -> None:
    assert pass_at_k(3, 3, 5) is None
    assert pass_hat_k(3, 3, 5) is None


def test_zero_vetoes_leave_an_upper_bound_of_three_over_n() -> None:
    assert zero_bound(60) == pytest.approx(3 / 60, rel=0.05)
    assert zero_bound(0) is None


def test_the_bootstrap_is_wider_when_clusters_differ() -> None:
    same = cluster_bootstrap({c: [0.0, 1.0] * 5 for c in "abcdefgh"})
    apart = cluster_bootstrap({c: [float(i % 2)] * 10 for i, c in enumerate("abcdefgh")})
    assert same is not None and apart is not None
    assert same.value == apart.value == 0.5
    assert same.high - same.low == 0.0
    assert apart.high - apart.low > 0.4
    assert cluster_bootstrap({"a": [1.0, 0.0]}) is None


def test_the_bootstrap_covers_the_truth_close_to_its_nominal_rate() -> None:
    rng, hits, rounds = random.Random(7), 0, 120
    for _ in range(rounds):
        values = {}
        for c in range(24):
            p = rng.betavariate(7, 3)
            values[str(c)] = [float(rng.random() < p) for _ in range(6)]
        found = cluster_bootstrap(values, draws=300)
        assert found is not None
        hits += found.low <= 0.7 <= found.high
    assert hits / rounds > 0.85


def test_normalized_gain() -> None:
    assert normalized_gain(0.7, 0.4) == pytest.approx(0.5)
    assert normalized_gain(1.0, 1.0) is None
    assert math.isclose(normalized_gain(0.3, 0.4) or 0.0, -1 / 6)
