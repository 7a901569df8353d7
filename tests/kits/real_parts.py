"""The rule for real parts: required in CI, a named skip on a laptop. And how much a test of endurance plays."""

from __future__ import annotations

import os

import pytest

REQUIRE_REAL = os.environ.get("GPUWARDEN_REQUIRE_REAL") == "1"
ENDURANCE = os.environ.get("GPUWARDEN_ENDURANCE") == "1"


def amount(part: int, full: int) -> int:
    """Return how much a test marked `endurance` plays: all under `make endurance`, else the part for `make prove`."""
    return full if ENDURANCE else part


def need(what: str, present: bool) -> None:
    """Skip by name where a real part is missing; fail where real parts are required."""
    if present:
        return
    if REQUIRE_REAL:
        pytest.fail(f"{what} is missing, and GPUWARDEN_REQUIRE_REAL=1 asks for the real thing")
    pytest.skip(f"{what} is not installed here")
