"""The knowledge check finds entries that are old, broken, or unsourced, and links that lead nowhere."""

from __future__ import annotations

from datetime import date
from math import sqrt
from pathlib import Path

import pytest

from gpuwarden.data import data_dir
from gpuwarden.knowledge import shipped
from gpuwarden.knowledge.freshness import Issue, age, check
from wording import Wording

TODAY = date(2026, 11, 21)
PAGE = "---\ntitle: P\nsummary: A page for tests.\n{}---\n{}"
ENTRY = """\
## ABC-00{n} · Entry {n}

```yaml gotcha
symptom: Something is known to break.
cause: The cause is known too.
fix: The fix is known as well.
scope: [{scope}]
source: https://example.org
verified: {month}
```
"""


def test_ages_in_months_span_years() -> None:
    assert [age(m, TODAY) for m in ("2026-11", "2026-05", "2025-11", "2027-01")] == [0, 6, 12, -2]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "references").mkdir()
    return tmp_path


def issues(tree: Path, *more: str, months: int = 6) -> list[Issue]:
    return check(tree / "references", today=TODAY, months=months, more=tuple(tree / name for name in more))


def test_stale_billing_facts_come_first(tree: Path, wording: Wording) -> None:
    facts = [("torch", "2026-04"), ("torch, billing", "2026-03"), ("torch", "2026-05")]
    body = "".join(ENTRY.format(n=n, scope=scope, month=month) for n, (scope, month) in enumerate(facts, 1))
    (tree / "references" / "a.md").write_text(PAGE.format("prefix: ABC\n", body))
    found = issues(tree)
    assert [(i.urgent, i.kind, i.file, i.line) for i in found] == [
        (True, "stale", "a.md", 16),
        (False, "stale", "a.md", 6),
    ]
    wording(found[0].message, "ABC-002", "2026-03", 8)
    assert issues(tree, months=12) == []


def test_profile_stamps_are_read_and_stale_meter_stamps_are_urgent(tree: Path) -> None:
    (tree / "profiles").mkdir()
    stamp = "verified: 2025-01"
    text = f"---\nid: x\nmeter:\n  {stamp}\nlogin:\n  {stamp}\nstorage:\n  - tier: disk\n    {stamp}\n---\n"
    (tree / "profiles" / "x.md").write_text(text)
    found = issues(tree, "profiles")
    about = [(i.urgent, i.message.split()[0]) for i in found]
    assert about == [(True, "meter"), (True, "storage.disk"), (False, "login")]


def test_pages_need_sources_and_references_must_resolve(tree: Path) -> None:
    text = "See ABC-001 and ABC-009, [here](b.md), [there](c.md), `b.md` and `d.md`.\n"
    text += "```\nABC-777 in code\n```\nXYZ-001\n"
    (tree / "references" / "b.md").write_text(PAGE.format("", text))
    (tree / "references" / "a.md").write_text(
        PAGE.format("prefix: ABC\n", ENTRY.format(n=1, scope="any", month="2026-11") + "\nSee ABC-002.\n")
    )
    found = [(i.kind, i.file, i.line, i.message.split()[0]) for i in issues(tree)]
    assert found == [
        ("dead_reference", "a.md", 17, "ABC-002"),
        ("dead_reference", "b.md", 5, "ABC-009"),
        ("dead_reference", "b.md", 5, "c.md"),
        ("dead_reference", "b.md", 5, "d.md"),
        ("no_source", "b.md", 1, "the"),
    ]


def test_a_signature_without_a_matching_example_is_reported(tree: Path, wording: Wording) -> None:
    entry = ENTRY.format(n=1, scope="any", month="2026-11").replace("cause:", "signatures: ['never seen']\ncause:")
    (tree / "references" / "a.md").write_text(PAGE.format("prefix: ABC\n", entry))
    [found] = issues(tree)
    assert (found.kind, found.line) == ("broken", 10)
    wording(found.message)


def test_an_unreadable_file_is_reported_as_an_issue(tree: Path) -> None:
    (tree / "profiles").mkdir()
    (tree / "profiles" / "x.md").write_text("---\na: 1\na: 2\n---\n")
    assert [i.kind for i in issues(tree, "profiles")] == ["broken"]


def test_the_shipped_knowledge_is_fresh_today() -> None:
    assert check(data_dir("references"), today=TODAY, more=(data_dir("profiles"), data_dir("skills"))) == []


def test_the_interval_table_is_calculated_correctly() -> None:
    rows = [
        line.strip("| ").split(" | ")
        for line in shipped().page("spot-resilience").body.splitlines()
        if line.startswith("|") and " h |" in line
    ]
    assert len(rows) >= 4
    for mu, cost, interval, steps in rows:
        seconds = sqrt(2 * int(mu.split()[0]) * 3600 * int(cost.split()[0]))
        assert abs(int(interval.split()[0]) - seconds) < 1
        exact, rounded = int(steps.split(",")[0]), int(steps.split()[-1])
        assert abs(exact - seconds / 2) < 1
        assert rounded <= exact
