"""Shared fixtures, and the rule for real parts: required in CI, a named skip on a laptop."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import pytest

REQUIRE_REAL = os.environ.get("GPUWARDEN_REQUIRE_REAL") == "1"


def need(what: str, present: bool) -> None:
    """Skip by name where a real part is missing; fail where real parts are required."""
    if present:
        return
    if REQUIRE_REAL:
        pytest.fail(f"{what} is missing, and GPUWARDEN_REQUIRE_REAL=1 asks for the real thing")
    pytest.skip(f"{what} is not installed here")


@pytest.fixture
def need_program() -> Callable[[str], str]:
    """Return the path of a program, or skip or fail."""

    def find(name: str) -> str:
        path = shutil.which(name)
        need(name, path is not None)
        assert path is not None
        return path

    return find


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Async tests run on asyncio."""
    return "asyncio"
