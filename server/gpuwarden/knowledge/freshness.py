"""List the parts of the knowledge base that need maintenance: invalid entries, old facts, dead references, missing
sources.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any, Literal, TypeAlias

from gpuwarden.core.errors import BadRequest
from gpuwarden.core.models import Frozen
from gpuwarden.frontmatter import read_front_matter
from gpuwarden.knowledge.catalog import Catalogue, read_tree

Kind: TypeAlias = Literal["broken", "stale", "dead_reference", "no_source"]
URGENT_SCOPES = {"billing", "teardown"}
URGENT_BLOCKS = {"storage", "meter", "verbs", "spot", "unattended", "danger_clocks"}  # in a profile's front matter
_LINK = re.compile(r"\]\((?!\w+:|#)([^)\s#]+)")
_FILE = re.compile(r"`([a-z0-9_/-]+\.md)`")
_ENTRY = re.compile(r"(?<![A-Z-])([A-Z]{2,5}-\d{3})\b")  # PF-HUB-001 is a gate's rule, not the entry HUB-001
_FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


class Issue(Frozen):
    """One item to review. `urgent` marks facts about costs and about the loss of machines or data."""

    kind: Kind
    urgent: bool
    file: str
    line: int
    message: str


def check(references: Path, *, today: date, months: int = 6, more: tuple[Path, ...] = ()) -> list[Issue]:
    """List the issues in `references` and in the folders `more` (profiles, skills), urgent ones first.

    A fact is stale if it was last verified more than `months` months before `today`.
    """
    catalogue, problems = read_tree(references)
    issues = [Issue(kind="broken", urgent=False, file=p.file, line=p.line, message=p.message) for p in problems]
    for gotcha in catalogue.gotchas.values():
        urgent = bool(URGENT_SCOPES & set(gotcha.scope))
        issues += _stale(gotcha.verified, gotcha.id, gotcha.page, gotcha.line, urgent, today, months)
    for page in catalogue.pages.values():
        if page.prefix is None and not page.sources:
            message = "the page has no sources"
            issues.append(Issue(kind="no_source", urgent=False, file=page.path, line=1, message=message))
        if page.verified is not None:
            issues += _stale(page.verified, "the page", page.path, 1, False, today, months)
        issues += _dead(page.path, page.body, page.first, catalogue, references / page.path)
    for folder in more:
        for path in sorted(folder.rglob("*.md")):
            issues += _about_file(folder, path, catalogue, today, months)
    return sorted(issues, key=lambda i: (not i.urgent, i.kind, i.file, i.line))


def age(verified: str, today: date) -> int:
    """Return the number of months between `verified` (YYYY-MM) and the month of `today`."""
    year, month = map(int, verified.split("-")[:2])
    return (today.year - year) * 12 + today.month - month


def _stale(verified: str, what: str, file: str, line: int, urgent: bool, today: date, months: int) -> Iterator[Issue]:
    old = age(verified, today)
    if old > months:
        message = f"{what} was last verified in {verified}, {old} months ago"
        yield Issue(kind="stale", urgent=urgent, file=file, line=line, message=message)


def _about_file(folder: Path, path: Path, catalogue: Catalogue, today: date, months: int) -> Iterator[Issue]:
    """Check a profile or a skill: the `verified` stamps in its front matter and the references in its text."""
    name = f"{folder.name}/{path.relative_to(folder).as_posix()}"
    text = path.read_text(encoding="utf-8")
    first, body = 1, text
    if text.startswith("---"):
        try:
            front = read_front_matter(text, name=name)
        except BadRequest as error:
            yield Issue(kind="broken", urgent=False, file=name, line=1, message=error.message)
            return
        first, body = front.body_line, front.body
        for where, verified in _stamps(front.data):
            urgent = bool(URGENT_BLOCKS & set(where.split(".")))
            yield from _stale(verified, where or "the file", name, 1, urgent, today, months)
    yield from _dead(name, body, first, catalogue, path)


def _stamps(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Yield (location, year-month) for every mapping with a `verified` key."""
    if isinstance(value, dict):
        if isinstance(value.get("verified"), str):
            yield where, value["verified"]
        for key, item in value.items():
            yield from _stamps(item, f"{where}.{key}".lstrip("."))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            name = item.get("tier") or item.get("id") if isinstance(item, dict) else None
            yield from _stamps(item, f"{where}.{name or number}")


def _dead(file: str, body: str, first: int, catalogue: Catalogue, path: Path) -> Iterator[Issue]:
    """Yield an issue for each link to a missing file and each id without an entry. Code blocks are skipped."""
    prefixes = {page.prefix for page in catalogue.pages.values() if page.prefix}
    text = _FENCED.sub(lambda block: "\n" * block.group().count("\n"), body)
    for number, line in enumerate(text.split("\n"), first):
        for key in _ENTRY.findall(line):
            if key.split("-")[0] in prefixes and key not in catalogue.gotchas:
                yield _nowhere(file, number, f"{key} is not an entry")
        for link in _LINK.findall(line):
            if not (path.parent / link).exists():
                yield _nowhere(file, number, f"{link} doesn't exist")
        for name in _FILE.findall(line):
            if name not in catalogue.pages and not any(page.endswith(f"/{name}") for page in catalogue.pages):
                yield _nowhere(file, number, f"{name} is not a page in the references")


def _nowhere(file: str, line: int, message: str) -> Issue:
    return Issue(kind="dead_reference", urgent=False, file=file, line=line, message=message)
