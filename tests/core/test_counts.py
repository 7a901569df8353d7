"""Counts with the correct plural, and no "file(s)" in any message."""

from __future__ import annotations

import ast
import re

import pytest

from gpuwarden.core.plural import counted
from paths import ROOT

PACKAGE = ROOT / "server/gpuwarden"


@pytest.mark.parametrize(("number", "text"), [(0, "no file"), (1, "1 file"), (2, "2 files"), (12_000, "12,000 files")])
def test_counted_formats_number_and_noun(number: int, text: str) -> None:
    assert counted(number, "file") == text


def test_counted_accepts_an_irregular_plural() -> None:
    assert counted(2, "process", "processes") == "2 processes"


@pytest.mark.slow
def test_strings_never_use_an_optional_plural_suffix() -> None:
    for file in PACKAGE.rglob("*.py"):
        texts = (n.value for n in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(n, ast.Constant))
        found = [t for t in texts if isinstance(t, str) and re.search(r"[a-z]{3}\((?:s|es)\)", t)]
        assert not found, (file, found)
