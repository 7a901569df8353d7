"""The rule for real parts: required in CI, a named skip on a laptop. Also the size of endurance tests."""

from __future__ import annotations

import os

import pytest

REQUIRE_REAL = os.environ.get("GPUWARDEN_REQUIRE_REAL") == "1"
ENDURANCE = os.environ.get("GPUWARDEN_ENDURANCE") == "1"


def amount(part: int, full: int) -> int:
    """Return the size of a test marked `endurance`: `full` under `make endurance`, else `part`, for `make prove`."""
    return full if ENDURANCE else part


def need(what: str, present: bool) -> None:
    """If a real part is missing, skip the test with its name, or fail it if real parts are required."""
    if present:
        return
    if REQUIRE_REAL:
        pytest.fail(f"{what} is missing, and GPUWARDEN_REQUIRE_REAL=1 asks for the real thing")
    pytest.skip(f"{what} is not installed here")
