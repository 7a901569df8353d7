"""The documentation site's pages, without the program that renders them; `make docs` does that in strict mode."""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tools.build_site import COPIED, ROOT, Pages, broken_links, plain, publish_skills


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, object, Pages]:
    pages = Pages(tmp_path_factory.mktemp("pages"))
    return pages.target, pages.write(), pages


def leaves(nav: object) -> Iterator[str]:
    """Yield the pages of a navigation."""
    if isinstance(nav, str):
        yield nav
    for item in nav if isinstance(nav, list) else nav.values() if isinstance(nav, dict) else ():
        yield from leaves(item)


@pytest.mark.slow
def test_every_page_is_in_the_navigation_once(written: tuple[Path, object, Pages]) -> None:
    target, nav, _ = written
    listed = list(leaves(nav))
    assert sorted(listed) == sorted(p.relative_to(target).as_posix() for p in target.rglob("*.md"))
    assert len(listed) > 60


def test_every_page_of_the_repository_is_published(written: tuple[Path, object, Pages]) -> None:
    target, _, pages = written
    for folder in ("references", "profiles"):
        for file in (ROOT / folder).rglob("*.md"):
            assert (target / file.relative_to(ROOT)).exists(), file
    assert {f"docs/{p.name}" for p in ROOT.glob("docs/*.md")} <= set(COPIED) and pages.ids


def test_entries_are_text_with_an_anchor(written: tuple[Path, object, Pages]) -> None:
    target, _, pages = written
    text = "\n".join(p.read_text("utf-8") for p in (target / "references").rglob("*.md"))
    assert "yaml gotcha" not in text
    assert set(pages.ids) == {a.upper() for a in re.findall(r"^## .*\{ #(\S+) \}$", text, re.MULTILINE)}


def test_ids_and_page_names_become_links_outside_of_code(written: tuple[Path, object, Pages]) -> None:
    _, _, pages = written
    told = "See PLAT-005, `monitoring.md`, [limits](../SECURITY.md#limits) and [evals](../evals/cases.jsonl).\n"
    linked = (
        "See [PLAT-005](../references/gotchas/platforms.md#plat-005), [monitoring.md](../references/monitoring.md), "
        "[limits](security.md#limits) and [evals](https://github.com/gpuwarden/gpuwarden/blob/main/evals/cases.jsonl).\n"
    )
    code = "```sh\necho PLAT-005\n```\n"
    assert pages.relinked(told + code, "docs/policy.md") == linked + code


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a [rank 2][c10d] *x* __init__", r"a \[rank 2\]\[c10d\] \*x\* \_\_init\_\_"), ("`*.py`", "`*.py`")],
)
def test_entry_text_is_escaped_for_markdown(text: str, shown: str) -> None:
    assert plain(text) == shown


@pytest.mark.parametrize(
    ("link", "found"),
    [("../b/", 0), ("../b/#there", 0), ("#here", 0), ("https://example.org/x", 0), ("../b/#gone", 1), ("../c/", 1)],
)
def test_broken_link_is_found(tmp_path: Path, link: str, found: int) -> None:
    for name, text in {"a": f'<p id="here"><a href="{link}">x</a>', "b": '<h1 id="there">'}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").write_text(text, "utf-8")
    assert len(list(broken_links(tmp_path))) == found


def test_every_skill_is_published_completely_with_its_digest(tmp_path: Path) -> None:
    for site in (tmp_path / "one", tmp_path / "two"):
        publish_skills(site)
    folder = tmp_path / "one/.well-known/agent-skills"
    index = json.loads((folder / "index.json").read_text("utf-8"))
    assert index == json.loads((tmp_path / "two/.well-known/agent-skills/index.json").read_text("utf-8"))
    assert {skill["name"] for skill in index["skills"]} == {p.parent.name for p in ROOT.glob("skills/*/SKILL.md")}
    for skill in index["skills"]:
        content = (folder / skill["url"]).read_bytes()
        assert skill["digest"] == f"sha256:{hashlib.sha256(content).hexdigest()}" and skill["type"] == "archive"
        zipfile.ZipFile(folder / skill["url"]).extractall(tmp_path / skill["name"])
        here = ROOT / "skills" / skill["name"]
        files = {f.relative_to(here) for f in here.rglob("*") if f.is_file() and "__pycache__" not in f.parts}
        assert files == {f.relative_to(tmp_path / skill["name"]) for f in (tmp_path / skill["name"]).rglob("*.*")}
        assert all((here / f).read_bytes() == (tmp_path / skill["name"] / f).read_bytes() for f in files)
