"""Delays between attempts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.core.clock import doubled


def test_a_delay_doubles_up_to_its_maximum() -> None:
    assert [doubled(30, failures, 600) for failures in range(8)] == [0, 30, 60, 120, 240, 480, 600, 600]


@given(failures=st.integers(-1, 10**9), first=st.floats(0.1, 3600), longest=st.floats(3600, 1e6))
def test_retry_delay_stays_bounded_after_years_of_failures(failures: int, first: float, longest: float) -> None:
    assert 0 <= doubled(first, failures, longest) <= doubled(first, failures + 1, longest) <= longest
