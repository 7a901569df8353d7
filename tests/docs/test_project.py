"""Files that come with the repository: a lock file that matches, and a current picture of the demo."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from packaging.requirements import Requirement
from tools.readability import PAGES, chosen, vocabulary

from paths import ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
LOCK: dict[str, Any] = tomllib.loads((ROOT / "uv.lock").read_text("utf-8"))
PICTURE = ROOT / "docs" / "demo.svg"
[OWN] = [p for p in LOCK["package"] if p["name"] == "gpuwarden"]


def wanted(lines: list[str]) -> set[tuple[str, str]]:
    """Return the names and version ranges of requirements."""
    found = [Requirement(line) for line in lines]
    return {(r.name.lower().replace("_", "-"), str(r.specifier)) for r in found}


def locked(entries: list[dict[str, str]]) -> set[tuple[str, str]]:
    return wanted([f"{e['name']}{e.get('specifier', '')}" for e in entries])


def test_lock_file_matches_the_requirements() -> None:
    """Fails after a dependency changes; `make lock` writes the file."""
    extras = [line for lines in PROJECT["project"]["optional-dependencies"].values() for line in lines]
    assert locked(OWN["metadata"]["requires-dist"]) == wanted([*PROJECT["project"]["dependencies"], *extras])
    groups = {name: wanted(lines) for name, lines in PROJECT["dependency-groups"].items()}
    assert {name: locked(entries) for name, entries in OWN["metadata"]["requires-dev"].items()} == groups


def test_the_lock_names_the_public_index_only() -> None:
    text = (ROOT / "uv.lock").read_text("utf-8")
    assert set(re.findall(r"https?://([^/\"]+)", text)) == {"pypi.org", "files.pythonhosted.org"}
    sources = [p["source"] for p in LOCK["package"] if p is not OWN]
    assert {tuple(s.items()) for s in sources} == {(("registry", "https://pypi.org/simple"),)}


def test_pip_constraints_match_the_lock_file() -> None:
    """Fails after a dependency changes; `make lock` writes the file."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    constraints = {(r.name, str(r.specifier).removeprefix("==")) for r in map(Requirement, lines)}
    assert constraints == {(p["name"], p["version"]) for p in LOCK["package"] if p != OWN}


def picture() -> str:
    """Return the words in the picture, with wrapped lines joined."""
    parts = ET.fromstring(PICTURE.read_text("utf-8")).iter("{http://www.w3.org/2000/svg}text")
    return " ".join("".join("".join(part.itertext()) for part in parts).replace("\N{NO-BREAK SPACE}", " ").split())


def acts() -> list[str]:
    """Return the titles of the demo's acts."""
    source = ROOT / "server" / "gpuwarden" / "interfaces" / "cli" / "demo.py"
    calls = [n for n in ast.walk(ast.parse(source.read_text("utf-8"))) if isinstance(n, ast.Call)]
    named = [c for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "act"]
    return [ast.literal_eval(c.args[0]) for c in named]


@pytest.mark.parametrize("title", acts())
def test_the_picture_shows_every_act(title: str) -> None:
    assert title in picture(), "run `make picture`"


def test_picture_loads_no_resource_and_reveals_no_path_or_time() -> None:
    text = PICTURE.read_text("utf-8")
    assert set(re.findall(r"https?://([^/\"\s]+)", text)) <= {"www.w3.org", "www.textualize.io"}
    assert "@font-face" not in text and "<script" not in text
    assert not re.search(r"/(?:home|root|Users|tmp|work|private)/|\b\d\d:\d\d\b", picture())


@pytest.mark.slow
def test_pages_stay_within_the_vocabulary_limits() -> None:
    counts = vocabulary(list(chosen(PAGES, ".md")))
    over = [(name, value) for name, value, limit in counts if value > limit]
    assert over == [], "`python tools/readability.py --markdown --list MEASURE` shows the places"


def test_phrases_are_counted_in_prose_but_not_in_code_or_logs(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    entry = "```yaml gotcha\nsymptom: it lies here\ncause: it\n  lies there\n```\n"
    page.write_text(
        f"---\ntitle: where it lies\n---\nIt `lies in` code,\n```sh\nit lies\n```\n{entry}and\nlies.\n", "utf-8"
    )
    counted = {name: value for name, value, _ in vocabulary([page])}
    words = 3 + 2 + 3 + 2
    assert counted["lies, per 10,000 words"] == pytest.approx(3 * 10_000 / words)
