"""A draft entry is refused below the bar and accepted by the loader above it; nothing is ever written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.core.errors import BadRequest
from gpuwarden.data import data_dir
from gpuwarden.knowledge import diagnose, load, shipped
from gpuwarden.knowledge.proposal import LessonClaims, draft, signature_for
from wording import Wording

MET = LessonClaims(root_caused=True, reproduced=False, mechanistic=True, general=True)
LINE = "FrobnicatorError: lane 3 of 'gpu-7' lost sync after 12.5 s (/opt/frob/lane.py)"
FIELDS: dict[str, Any] = {
    "symptom": "The frobnicator loses its lanes after a while.",
    "cause": "A lane is never fed again after an idle second.",
    "fix": "Feed every lane, or fewer lanes.",
    "scope": ["torch"],
    "source": "https://example.org/frob/1",
    "verified": "2026-11",
}


def test_a_draft_loads_as_an_entry(tmp_path: Path) -> None:
    made = draft(shipped(), "training/throughput", "Lanes lose sync", FIELDS, (LINE,), MET)
    assert made.page == "training/throughput.md"
    assert made.known == ()
    front = "---\ntitle: T\nsummary: A page for a test.\nprefix: PERF\n---\n"
    (tmp_path / "p.md").write_text(front + made.text, encoding="utf-8")
    [gotcha] = load(tmp_path).gotchas.values()
    assert gotcha.id not in shipped().gotchas
    other = "FrobnicatorError: lane 8 of 'gpu-0' lost sync after 99.1 s (/srv/x/lane.py)"
    assert [d.id for d in diagnose(load(tmp_path), other)] == [gotcha.id]


def test_already_known_lines_are_reported() -> None:
    lines = ("ValueError: Attempting to unscale FP16 gradients.",)
    assert draft(shipped(), "training/throughput", "Again", FIELDS, lines, MET).known == ("PREC-005",)


@pytest.mark.parametrize(
    "claims",
    [
        LessonClaims(root_caused=False, reproduced=True, mechanistic=True, general=True),
        LessonClaims(root_caused=True, reproduced=False, mechanistic=False, general=True),
        LessonClaims(root_caused=True, reproduced=True, mechanistic=True, general=False),
    ],
    ids=["no cause", "not seen twice", "of one person"],
)
def test_a_proposal_below_the_bar_is_refused(claims: LessonClaims, wording: Wording) -> None:
    with pytest.raises(BadRequest) as refused:
        draft(shipped(), "training/throughput", "T", FIELDS, (LINE,), claims)
    wording(refused)


@pytest.mark.parametrize("change", [{"source": "hearsay"}, {"verified": "soon"}, {"scope": []}, {"colour": "red"}])
def test_an_unloadable_draft_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        draft(shipped(), "training/throughput", "T", {**FIELDS, **change}, (LINE,), MET)


@pytest.mark.parametrize("line", ["12 34 56 a", "KeyError: 'abc'", "'x'", "."])
def test_a_line_without_fixed_words_is_refused(line: str) -> None:
    with pytest.raises(BadRequest):
        draft(shipped(), "training/throughput", "T", FIELDS, (line,), MET)


def test_a_page_without_entries_accepts_no_draft(wording: Wording) -> None:
    with pytest.raises(BadRequest) as refused:
        draft(shipped(), "principles", "T", FIELDS, (LINE,), MET)
    wording(refused, "principles")


def test_drafting_writes_nothing() -> None:
    before = {path: path.stat().st_mtime_ns for path in data_dir("references").rglob("*.md")}
    draft(shipped(), "training/throughput", "Lanes lose sync", FIELDS, (LINE,), MET)
    assert {path: path.stat().st_mtime_ns for path in data_dir("references").rglob("*.md")} == before


@given(st.text(min_size=1, max_size=300).filter(lambda t: "\n" not in t and t.strip()))
def test_a_signature_matches_its_source_line(line: str) -> None:
    assert re.search(signature_for(line), line.strip())
