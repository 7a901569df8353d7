"""The loader accepts the references as they are and rejects every kind of mistake, with file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuwarden.core.errors import BadRequest, NotFound
from gpuwarden.data import data_dir
from gpuwarden.knowledge import Catalogue, load, read_tree, shipped
from wording import Wording

FRONT = "---\ntitle: A page\nsummary: A page for the tests.\nprefix: ABC\n---\n"
ENTRY = """\
## ABC-001 · It breaks

```yaml gotcha
symptom: Something breaks in a known way.
signatures:
  - 'RuntimeError: it broke at \\d+'
examples:
  - 'RuntimeError: it broke at 12'
cause: A cause that is known.
fix: A fix that is known.
scope: [any]
source: https://example.org/issue/1
verified: 2026-11
```

Some prose.
"""
AT = 6  # line of the entry's heading in the file


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    return tmp_path


def write(tree: Path, text: str, name: str = "page.md") -> Path:
    (tree / name).write_text(text, encoding="utf-8")
    return tree


def test_a_valid_page_is_read_completely(tree: Path) -> None:
    gotcha = load(write(tree, FRONT + ENTRY)).gotcha("abc-001")
    assert (gotcha.title, gotcha.page, gotcha.line, gotcha.prose) == ("It breaks", "page.md", AT, "Some prose.")
    assert gotcha.source == ("https://example.org/issue/1",)
    assert gotcha.verified == "2026-11"


BROKEN = [
    ("no front matter", "# A page\n", 1, "---"),
    ("front matter not closed", "---\ntitle: A page\n", 1, "---"),
    ("unknown key of a page", FRONT.replace("prefix", "colour") + ENTRY, 4, "colour"),
    ("summary missing", "---\ntitle: A page\nprefix: ABC\n---\n", 2, "summary"),
    ("entries without a prefix", FRONT.replace("prefix: ABC\n", "") + ENTRY, 1, "prefix"),
    ("another page's prefix", FRONT + ENTRY.replace("ABC-001", "XYZ-001"), AT, "ABC"),
    ("a heading without a title", FRONT + ENTRY.replace(" · It breaks", ""), AT, ""),
    ("a heading with a hyphen", FRONT + ENTRY.replace(" · ", " - "), AT, ""),
    ("no block", FRONT + "## ABC-001 · It breaks\n\nProse only.\n", AT, " 0 "),
    ("two blocks", FRONT + ENTRY + ENTRY.split("\n\n", 1)[1], AT, " 2 "),
    ("a block without a heading", FRONT + ENTRY.split("\n\n", 1)[1], AT, ""),
    ("a block that isn't closed", FRONT + ENTRY.split("```\n\nSome")[0], AT + 2, ""),
    ("a key twice", FRONT + ENTRY.replace("cause:", "fix:"), AT + 9, "fix"),
    ("an unknown key", FRONT + ENTRY.replace("scope:", "scopes: [x]\nscope:"), AT + 10, "scopes"),
    ("an anchor", FRONT + ENTRY.replace("[any]", "&a [any]"), AT + 10, ""),
    ("no source", FRONT + ENTRY.replace("source: https://example.org/issue/1\n", ""), AT + 3, "source"),
    (
        "a source that is not an address",
        FRONT + ENTRY.replace("https://example.org/issue/1", "hearsay"),
        AT + 11,
        "source",
    ),
    ("an empty list of sources", FRONT + ENTRY.replace("https://example.org/issue/1", "[]"), AT + 11, "source"),
    ("no month", FRONT + ENTRY.replace("verified: 2026-11\n", ""), AT + 3, "verified"),
    ("a month that isn't one", FRONT + ENTRY.replace("2026-11", "2026-13"), AT + 12, "verified"),
    ("a day in place of a month", FRONT + ENTRY.replace("2026-11", "2026-11-02"), AT + 12, "verified"),
    ("an empty cause", FRONT + ENTRY.replace("A cause that is known.", "''"), AT + 8, "cause"),
    ("text where a list belongs", FRONT + ENTRY.replace("[any]", "any"), AT + 10, "scope"),
    ("a truth value in words", FRONT + ENTRY.replace("scope:", "secondary: 'yes'\nscope:"), AT + 10, "secondary"),
    (
        "a broken expression",
        FRONT + ENTRY.replace("broke at \\d+", "broke at ("),
        AT + 5,
        "missing ), unterminated subpattern",
    ),
    ("an expression without an example", FRONT + ENTRY.replace("at 12", "in two"), AT + 5, ""),
    (
        "an example without an expression",
        FRONT + ENTRY.replace("cause:", "  - 'all is well'\ncause:"),
        AT + 8,
        "all is well",
    ),
    ("an unbounded wildcard", FRONT + ENTRY.replace("it broke at \\d+", "it.*\\d+"), AT + 5, ""),
    ("a repeated group", FRONT + ENTRY.replace("it broke at \\d+", "it (?:broke )+at"), AT + 5, ""),
    ("a look-ahead", FRONT + ENTRY.replace("at \\d+", "(?=at)"), AT + 5, ""),
    ("a back-reference", FRONT + ENTRY.replace("it broke", "(i)t broke\\1?"), AT + 5, ""),
    (
        "an expression that matches nothing at all",
        FRONT + ENTRY.replace("RuntimeError: it broke at \\d+", "(?:x)?"),
        AT + 5,
        "",
    ),
    ("see leads nowhere", FRONT + ENTRY.replace("scope:", "see: [ABC-009]\nscope:"), AT, "ABC-009"),
    ("see leads home", FRONT + ENTRY.replace("scope:", "see: [ABC-001]\nscope:"), AT, ""),
    ("an id twice", FRONT + ENTRY + "\n" + ENTRY, AT + 17, "page.md:6"),
]


THEIRS = ("source", "verified", "cause", "scope", "secondary")  # fields with an error message from pydantic


@pytest.mark.parametrize(("text", "line", "value"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN])
def test_a_mistake_is_reported_with_file_and_line(
    tree: Path, text: str, line: int, value: str, wording: Wording
) -> None:
    with pytest.raises(BadRequest) as error:
        load(write(tree, text))
    assert f"page.md:{line}: " in str(error.value), str(error.value)
    if value in THEIRS:
        assert value in str(error.value)
    else:
        wording(error, *([value] if value else []))


def test_a_signature_needs_a_fixed_part_of_three_characters(tree: Path, wording: Wording) -> None:
    assert not read_tree(write(tree, FRONT + ENTRY.replace("RuntimeError: it broke at \\d+", "\\wError: it")))[1]
    problems = read_tree(write(tree, FRONT + ENTRY.replace("it broke at \\d+", "\\d+|Ru")))[1]
    wording(problems[0].message)


def test_non_text_bytes_and_oversized_pages_are_refused(tree: Path) -> None:
    (tree / "page.md").write_bytes(b"---\ntitle: \xff\n---\n")
    (tree / "sub" / "big.md").write_text(FRONT + "x" * 600_000)
    messages = [str(p) for p in read_tree(tree)[1]]
    assert [m.split(": ", 1)[0] for m in messages] == ["page.md:1", "sub/big.md:1"]


def test_all_mistakes_of_a_tree_are_reported_at_once(tree: Path) -> None:
    write(tree, FRONT + ENTRY.replace("2026-11", "soon"))
    write(tree, FRONT.replace("ABC", "XYZ") + ENTRY.replace("ABC-", "XYZ-").replace("[any]", "[]"), "sub/other.md")
    assert [(p.file, p.line) for p in read_tree(tree)[1]] == [("page.md", 18), ("sub/other.md", 16)]


def test_an_unknown_entry_or_page_raises_not_found() -> None:
    empty = Catalogue([], [])
    with pytest.raises(NotFound):
        empty.gotcha("ABC-001")
    with pytest.raises(NotFound):
        empty.page("nowhere")


def test_the_references_are_complete_and_large_enough() -> None:
    catalogue = shipped()
    assert len(catalogue.gotchas) >= 230
    wanted = "principles lifecycle preflight monitoring transport spot-resilience multinode parallel-ablation "
    wanted += (
        "china-network self-improvement known-good gguf training-patterns hardware gotchas/universal gotchas/platforms"
    )
    for name in wanted.split():
        assert catalogue.page(name).title
    training = {path.stem for path in (data_dir("references") / "training").glob("*.md")}
    assert training >= {
        "oom-memory", "distributed-launch", "precision-stability", "throughput", "checkpoint-resume", "convergence",
        "data-pipeline", "by-domain", "dataset-formats", "hub-and-auth", "verifying-results",
    }  # fmt: skip


def test_titles_and_symptoms_are_unique() -> None:
    gotchas = shipped().gotchas.values()
    for field in ("title", "symptom"):
        seen = [getattr(g, field) for g in gotchas]
        assert len(seen) == len(set(seen)), field
