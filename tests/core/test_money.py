"""The one format for amounts of money, which all of the package uses."""

from __future__ import annotations

import ast
import re

import pytest

from gpuwarden.core.money import money, usd, usd_per_hour
from paths import ROOT

PACKAGE = ROOT / "server/gpuwarden"


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
def test_usd_formats_an_amount(amount: float | None, text: str) -> None:
    assert usd(amount) == text


def test_usd_per_hour_formats_a_price() -> None:
    assert (usd_per_hour(2.49), usd_per_hour(None)) == ("$2.49/h", "unknown")


def test_money_formats_a_platform_currency() -> None:
    assert (money(25, "USD"), money(1180.5, "CNY")) == ("$25.00", "1,180.50 CNY")


@pytest.mark.slow
def test_only_core_money_formats_currency() -> None:
    """Outside `core/money.py`, no f-string may add the currency's name or sign to a value."""
    for file in PACKAGE.rglob("*.py"):
        if file == PACKAGE / "core/money.py" or "_data" in file.parts:
            continue
        sentences = (n for n in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(n, ast.JoinedStr))
        for sentence in sentences:
            bare = "".join(_shape(part) for part in sentence.values)
            assert not re.search(r"\bUSD\b|[$]{:}|} dollars", bare), (file, bare)


def _shape(part: ast.expr) -> str:
    """Return a part of an f-string: its text, `{}` for a value, or `{:}` for a value with a format."""
    if isinstance(part, ast.Constant):
        return str(part.value)
    return "{:}" if isinstance(part, ast.FormattedValue) and part.format_spec else "{}"
