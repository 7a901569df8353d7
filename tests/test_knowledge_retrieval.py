"""Search against queries that were written apart from the entries.

`corpus/queries.jsonl` was written before any score was seen. Weights and wording were tuned on the open part only; the
part with `held` was scored once, at the end. Queries of the kind `none` are about something else and want no answer.

`corpus/issues.jsonl` tells failures of public issues in our own words, in rounds. A round was written before its score
was seen, scored, and then its misses were looked at and mended; so only the first score of a round says how strangers
fare: a 0.68 first and 0.78 in three, b 0.80 and 0.88, c 0.67 and 0.73, d 0.68 and 0.80, e 0.73 and 0.87,
f (a short one) 0.63 and 0.81.

For g 210 reports were pasted as they stood, title and first lines; their texts aren't kept here. 46 of them, before
anything was changed: 0.70 first and 0.83 in three, reports that no entry answers counted as missed. 118 more, each part
scored before it was looked at: 0.59 and 0.75 (0.58 and 0.74 with the search and the entries of before). So an error's
own line is answered well, and a stranger's prose less well than the sentences below. Some of both were then told here.
(The other 46 were read while entries were written, so their score, 0.83 and 0.89, says little.)
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden.knowledge import Hit, search, shipped

CORPUS = Path(__file__).parent / "corpus" / "queries.jsonl"


@cache
def queries() -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(line) for line in CORPUS.read_text(encoding="utf-8").splitlines())


def name(hit: Hit) -> str:
    return hit.id if hit.kind == "gotcha" else hit.page


def shares(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """The shares of queries whose right answer comes first, and within the first three."""
    found = [[name(hit) for hit in search(shipped(), row["query"], 5)] for row in rows]
    first = sum(bool(names) and names[0] in row["want"] for row, names in zip(rows, found, strict=True))
    three = sum(bool(set(names[:3]) & set(row["want"])) for row, names in zip(rows, found, strict=True))
    return first / len(rows), three / len(rows)


def test_the_corpus_is_large_and_mixed_and_names_real_entries() -> None:
    asked = [row for row in queries() if row["want"]]
    assert len(asked) >= 150
    assert {row["kind"] for row in queries()} == {"plain", "page", "zh", "typo", "log", "none"}
    assert len({row["query"] for row in queries()}) == len(queries())
    told = [row for name in "abcdefg" for row in issues(name)]
    for want in {want for row in (*asked, *told) for want in row["want"]}:
        assert want in shipped().gotchas or want in shipped().pages, want


def test_no_query_was_copied_into_an_entry() -> None:
    texts = [" . ".join((g.title, g.symptom, *g.aliases)).lower() for g in shipped().gotchas.values()]
    words = "\n".join(texts)
    ours = [r["query"] for r in queries() if r["kind"] in {"plain", "zh", "typo"}]
    told = [r["query"] for name in "abcdefg" for r in issues(name) if not any(c in r["query"] for c in ":[{(_'`")]
    copied = [query for query in (*ours, *told) if query.lower() in words]
    assert copied == []


@pytest.mark.parametrize("held", [False, True], ids=["open part", "held-out part"])
def test_the_right_entry_comes_first(held: bool) -> None:
    first, three = shares([row for row in queries() if row["want"] and row["held"] is held])
    assert first >= 0.80, first
    assert three >= 0.92, three


def issues(round_: str) -> list[dict[str, Any]]:
    text = (CORPUS.parent / "issues.jsonl").read_text(encoding="utf-8")
    return [row for row in map(json.loads, text.splitlines()) if row["round"] == round_]


@pytest.mark.parametrize("round_", ["a", "b", "c", "d", "e", "f", "g"])
def test_public_issues_find_their_entry(round_: str) -> None:
    rows = issues(round_)
    assert len(rows) >= 25
    first, three = shares(rows)
    assert first >= 0.80, first
    assert three >= 0.92, three


def test_other_subjects_get_no_answer() -> None:
    rows = [row for row in queries() if not row["want"]]
    answered = [row["query"] for row in rows if search(shipped(), row["query"])]
    assert len(answered) <= len(rows) // 10, answered


@pytest.mark.parametrize("query", ["", "   ", "the of and", "?!", "\x00", "。。。", "a" * 100_000])
def test_a_query_that_says_nothing_gets_nothing(query: str) -> None:
    assert search(shipped(), query) == ()


@settings(max_examples=80, deadline=None)
@given(st.text(max_size=300), st.integers(1, 8))
def test_any_text_can_be_asked(query: str, limit: int) -> None:
    hits = search(shipped(), query, limit)
    assert len(hits) <= limit
    assert len({hit.id for hit in hits}) == len(hits)


def test_a_log_line_is_answered_with_the_line_as_evidence() -> None:
    [hit, *_] = search(shipped(), "RuntimeError: DataLoader worker (pid 3) is killed by signal: Bus error.")
    assert (hit.id, hit.how) == ("DATA-015", "signature")
    assert hit.lines[0].number == 1


def test_an_entry_is_found_by_its_own_id() -> None:
    for key in ("OOM-019", "PLAT-022"):
        assert search(shipped(), key)[0].id == key


def test_answers_are_the_same_every_time() -> None:
    for row in queries()[:40]:
        assert search(shipped(), row["query"]) == search(shipped(), row["query"])
