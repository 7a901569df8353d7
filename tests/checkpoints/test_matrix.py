"""The damage table in docs/corruption.md is current, and no file is refuted because the budget ended its reading."""

from __future__ import annotations

import importlib.util
from itertools import accumulate
from pathlib import Path

import pytest
from tools.corruption_matrix import DAMAGE, FORMATS, MISSED, column

from gpuwarden.checkpoints.budget import Budget
from gpuwarden.checkpoints.verify import verify
from gpuwarden.core.evidence import Cause
from gpuwarden.core.models import Level, Verdict
from paths import ROOT
from real_parts import need

PAGE = ROOT / "docs" / "corruption.md"


def documented() -> dict[str, dict[str, str]]:
    """Return the page's table as format -> kind of damage -> sign."""
    rows = [[c.strip() for c in r.strip("|\n").split("|")] for r in PAGE.read_text().splitlines() if r.startswith("| ")]
    table = rows[: next(i for i, row in enumerate(rows) if row[0] == "limit")]
    names = table[0][1:]
    return {name: {row[0]: row[i + 1] for row in table[1:]} for i, name in enumerate(names)}


def test_the_page_has_every_format_and_every_kind() -> None:
    page = documented()
    assert list(page) == list(FORMATS)
    assert len(DAMAGE) >= 25
    assert all(list(signs) == list(DAMAGE) for signs in page.values())


@pytest.mark.prove
@pytest.mark.parametrize("name", list(FORMATS))
def test_the_page_lists_every_undetected_corruption(name: str) -> None:
    """After a change, run `python tools/corruption_matrix.py --write docs/corruption.md`."""
    library = FORMATS[name][1]
    need(library, importlib.util.find_spec(library) is not None)
    missed = {kind for kind, sign in column(name).items() if sign == MISSED}
    assert missed == {kind for kind, sign in documented()[name].items() if sign == MISSED}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", list(FORMATS))
def test_an_exhausted_budget_refutes_no_file(name: str, tmp_path: Path) -> None:
    """The budget runs out at each of the first reads in turn, so that every part of a reader is interrupted."""
    write, library = FORMATS[name]
    need(library, importlib.util.find_spec(library) is not None)
    write(tmp_path, 0)
    reads: list[int] = []

    class Recorded(Budget):
        def take(self, count: int) -> None:
            reads.append(count)
            super().take(count)

    assert verify(tmp_path, Level.CONTENT, budget=Recorded(60.0, 1 << 40)).verdict is Verdict.PROVEN
    cuts = list(accumulate(reads[:40]))
    reports = [verify(tmp_path, Level.CONTENT, budget=Budget(60.0, cut)) for cut in cuts]
    assert [r.reasons for r in reports if r.verdict is Verdict.REFUTED] == []
    assert Cause.LIMIT in reports[0].causes
