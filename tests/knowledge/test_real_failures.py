"""Recorded failures of real libraries, and the diagnosis of their output.

`corpus/failures/record.py` wrote the logs; `test_failures_of_libraries.py` runs the same programs as jobs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuwarden.knowledge import diagnose, shipped
from paths import CORPUS

FAILING = sorted((CORPUS / "logs" / "failing").glob("*.log"))


def test_every_recorded_failure_has_its_program() -> None:
    programs = {path.stem for path in (CORPUS / "failures").glob("*--*.py")}
    assert programs == {path.stem for path in FAILING}
    assert len(programs) >= 50


@pytest.mark.parametrize("path", FAILING, ids=lambda p: p.stem)
def test_a_recorded_failure_of_torch_or_a_trainer_is_diagnosed(path: Path) -> None:
    found = diagnose(shipped(), path.read_text(encoding="utf-8"))
    assert found[0].id == path.stem.split("--")[0], [(d.id, d.lines[0].text) for d in found]
