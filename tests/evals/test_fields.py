"""Fields of untrusted records."""

from __future__ import annotations

from typing import Any

import pytest
from evals.transcripts.fields import number


@pytest.mark.parametrize("value", [True, "1", None, float("nan"), float("inf"), 10**400])
def test_only_finite_numbers_are_accepted(value: Any) -> None:
    assert number(value) is None
    assert number(3) == 3.0
