"""One form of money, and no other way of writing it in the package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpuwarden.core.money import usd, usd_per_hour

PACKAGE = Path(__file__).resolve().parents[1] / "server/gpuwarden"
OF_A_PLATFORM = {"providers/prime_intellect.py", "rehearsal/hub_jobs.py"}
"""Here `USD` is a word of a platform's interface."""


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (None, "unknown"),
        (0, "$0.00"),
        (0.000_01, "<$0.0001"),
        (0.0031, "$0.0031"),
        (0.31, "$0.31"),
        (0.3456, "$0.3456"),
        (0.999_96, "$1.00"),
        (1, "$1.00"),
        (12.345, "$12.35"),
        (1234.5678, "$1,234.57"),
        (-2.5, "-$2.50"),
    ],
)
def test_an_amount(amount: float | None, text: str) -> None:
    assert usd(amount) == text


def test_a_price() -> None:
    assert (usd_per_hour(2.49), usd_per_hour(None)) == ("$2.49/h", "unknown")


def test_nothing_else_writes_money() -> None:
    other = re.compile(r"(?<!metavar=.)\bUSD\b|[$]{[^}]*:[,.]|[}] dollars")
    for file in PACKAGE.rglob("*.py"):
        name = file.relative_to(PACKAGE).as_posix()
        if name == "core/money.py" or name in OF_A_PLATFORM or "_data" in file.parts:
            continue
        found = [row for row in file.read_text("utf-8").splitlines() if other.search(row)]
        assert not found, (name, found)
