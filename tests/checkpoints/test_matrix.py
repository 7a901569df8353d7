"""The table of damage in docs/corruption.md is what happens, and a manifest notices everything."""

from __future__ import annotations

import importlib.util

import pytest
from tools.corruption_matrix import DAMAGE, FORMATS, MISSED, column

from paths import ROOT
from real_parts import need

PAGE = ROOT / "docs" / "corruption.md"


def documented() -> dict[str, dict[str, str]]:
    """Format -> kind of damage -> sign, as the page has it."""
    rows = [[c.strip() for c in r.strip("|\n").split("|")] for r in PAGE.read_text().splitlines() if r.startswith("| ")]
    table = rows[: next(i for i, row in enumerate(rows) if row[0] == "what")]
    names = table[0][1:]
    return {name: {row[0]: row[i + 1] for row in table[1:]} for i, name in enumerate(names)}


def test_the_page_has_every_format_and_every_kind() -> None:
    page = documented()
    assert list(page) == list(FORMATS)
    assert len(DAMAGE) >= 25
    assert all(list(signs) == list(DAMAGE) for signs in page.values())


@pytest.mark.prove
@pytest.mark.parametrize("name", list(FORMATS))
def test_what_goes_unnoticed_is_on_the_page(name: str) -> None:
    """Run `python tools/corruption_matrix.py --write docs/corruption.md` after a change."""
    library = FORMATS[name][1]
    need(library, importlib.util.find_spec(library) is not None)
    missed = {kind for kind, sign in column(name).items() if sign == MISSED}
    assert missed == {kind for kind, sign in documented()[name].items() if sign == MISSED}
