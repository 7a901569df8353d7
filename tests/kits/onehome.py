"""Check that each fact has one home: find near-duplicate sentences and restated numbers in all pages.

A *place* is a file and a line. Sentences come from the prose of references, skills, profiles, docs and the README, and
from the symptom, cause and fix of entries; code blocks, generated blocks and tables of numbers are left out.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from gpuwarden.core.policy import Policy
from gpuwarden.frontmatter import read_front_matter
from gpuwarden.knowledge.catalog import read_tree
from gpuwarden.knowledge.words import STOP, stem

ALIKE = 0.5
"""Minimum share of common words, weighted by rarity, of sentences that count as duplicates."""
LEAST = 6  # content words; shorter sentences are idioms
_GENERATED = re.compile(r"<!-- generated:[\w-]+ -->.*?<!-- /generated -->", re.DOTALL)
_FENCED = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)
_END = re.compile(r"(?<=[.;!?:])\s+(?=[A-Z`\d*(])|\n\s*\n|\n(?=[-*|#\d])")
_WORD = re.compile(r"[a-z][a-z0-9_]+|\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Sentence:
    """One sentence and its place. `about` is its known subject: the scopes of its entry, or its file.

    `data` marks a text from a profile's front matter, which is the home of a platform's facts.
    """

    file: str
    line: int
    text: str
    about: frozenset[str] = frozenset()
    data: bool = False

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


def sentences(root: Path) -> list[Sentence]:
    """Return every sentence of the repository at `root` that may be the home of facts."""
    found: list[Sentence] = []
    catalogue, _ = read_tree(root / "references")
    for gotcha in catalogue.gotchas.values():
        for text in (gotcha.title, gotcha.symptom, gotcha.cause, gotcha.fix, gotcha.prose):
            found += split(f"references/{gotcha.page}", gotcha.line, text, frozenset(gotcha.scope))
    for page in catalogue.pages.values():
        if page.prefix is None and page.path != "rules.md":  # rules.md is generated
            found += split(f"references/{page.path}", page.first, page.body)
    for file in sorted([*root.glob("skills/*/SKILL.md"), *root.glob("profiles/*.md")]):
        front = read_front_matter(file.read_text("utf-8"), name=file.name)
        about = frozenset({file.stem}) if file.parent.name == "profiles" else frozenset[str]()
        name = file.relative_to(root).as_posix()
        found += split(name, front.body_line, front.body, about)
        if about:
            found += [Sentence(name, _line_of(text, file), text, about, data=True) for text in _texts(front.data)]
    for page in sorted([*root.glob("*.md"), *root.glob("docs/*.md")]):
        if page.name != "CHANGELOG.md":  # a changelog may repeat facts
            found += split(page.relative_to(root).as_posix(), 1, page.read_text("utf-8"))
    return found


def _line_of(text: str, file: Path) -> int:
    """Return the line of a front matter text, found by its first 30 characters."""
    lines = file.read_text("utf-8").split("\n")
    return next((n for n, line in enumerate(lines, 1) if text[:30] in line), 1)


def split(file: str, first: int, text: str, about: frozenset[str] = frozenset()) -> Iterator[Sentence]:
    """Yield the sentences of a page's text that begins at line `first`."""
    for pattern in (_FENCED, _GENERATED):
        text = pattern.sub(lambda block: "\n" * block.group().count("\n"), text)
    at = 0
    for piece in _END.split(text):
        at = text.find(piece, at)
        clean = " ".join(piece.split())
        if clean and not set(clean) <= set("|-: #"):
            yield Sentence(file, first + text.count("\n", 0, at), clean, about)
        at += len(piece)


# ------------------------------------------------------------------------------------------------ near-duplicates


def repeats(found: list[Sentence]) -> list[tuple[Sentence, Sentence, float]]:
    """Return pairs of near-duplicates from different places, the most similar first."""
    bags = [_stems(s.text) for s in found]
    seen: dict[str, int] = defaultdict(int)
    for bag in bags:
        for word in bag:
            seen[word] += 1
    weight = {word: 1.0 / (1 + count) ** 0.5 for word, count in seen.items()}
    holders: dict[tuple[str, str], list[int]] = defaultdict(list)
    for n, s in enumerate(found):
        if len(bags[n]) >= LEAST:
            for pair in set(pairwise(_ordered(s.text))):
                holders[pair].append(n)
    close: set[tuple[int, int]] = set()
    for numbers in holders.values():
        if len(numbers) <= 12:
            close |= set(combinations(numbers, 2))
    rivals = ((a, b) for a, b in close if _may_not_agree(found[a], found[b]))
    pairs = [(found[a], found[b], _share(bags[a], bags[b], weight)) for a, b in rivals]
    return sorted((p for p in pairs if p[2] >= ALIKE), key=lambda p: (-p[2], str(p[0])))


def _may_not_agree(a: Sentence, b: Sentence) -> bool:
    """Return whether two sentences must differ: they have different places and are not about two similar platforms."""
    profiles = a.file.startswith("profiles/") and b.file.startswith("profiles/")
    return (a.file, a.line) != (b.file, b.line) and not (profiles and (a.file != b.file or (a.data and b.data)))


def _share(a: frozenset[str], b: frozenset[str], weight: dict[str, float]) -> float:
    """Return the share of words that two sentences have in common; rare words have more weight."""
    both, either = sum(weight[w] for w in a & b), sum(weight[w] for w in a | b)
    return both / either if either else 0.0


@lru_cache(maxsize=20_000)
def _ordered(text: str) -> tuple[str, ...]:
    return tuple(stem(w) for w in _WORD.findall(text.lower()) if w not in STOP)


def _stems(text: str) -> frozenset[str]:
    return frozenset(_ordered(text))


# ------------------------------------------------------------------------------------------------ restated numbers

_SPELLED = (
    *("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen"),
    *("fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
_TENS = {"thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "ninety": 90}
NUMBERS = {word: n for n, word in enumerate(_SPELLED, 1)} | _TENS
UNITS = {
    "s": ("time", 1), "sec": ("time", 1), "second": ("time", 1), "min": ("time", 60), "minute": ("time", 60),
    "h": ("time", 3600), "hour": ("time", 3600), "day": ("time", 86_400), "d": ("time", 86_400),
    "week": ("time", 604_800), "month": ("months", 1), "gb": ("bytes", 1), "gib": ("bytes", 1), "tb": ("bytes", 1000),
    "%": ("share", 1), "percent": ("share", 1), "file": ("count", 1), "inode": ("count", 1),
}  # fmt: skip
_UNIT = "|".join(u for u in UNITS if u != "%")
_QUANTITY = re.compile(rf"(?i)(?<![\w.-])(\d[\d,]*(?:\.\d+)?|{'|'.join(NUMBERS)})[ -]?(%|{_UNIT})s?(?![\w])")
Quantity = tuple[str, float]


def quantities(text: str) -> dict[Quantity, str]:
    """Return a text's numbers with units, in one unit per kind: 15 days and fifteen days are the same quantity."""
    found: dict[Quantity, str] = {}
    for match in _QUANTITY.finditer(text):
        number = NUMBERS.get(match[1].lower()) or float(match[1].replace(",", ""))
        kind, scale = UNITS[match[2].lower()]
        found[kind, number * scale] = match[0]
    return found


@dataclass(frozen=True)
class Fact:
    """A quantity and its home. It applies to a sentence if `meant` returns true."""

    home: str
    quantity: Quantity
    meant: Callable[[Sentence], bool]


def profile_facts(root: Path) -> list[Fact]:
    """Return every quantity in a profile's front matter; it applies to sentences about that platform."""
    found = []
    for file in sorted((root / "profiles").glob("*.md")):
        data = read_front_matter(file.read_text("utf-8"), name=file.name).data
        names = {file.stem, *re.findall(r"[a-z0-9]{5,}", str(data.get("provider") or ""))} - {"local", "ssh"}
        home = f"profiles/{file.name}"
        for text in _texts({k: v for k, v in data.items() if k != "limits"}):
            found += [Fact(home, quantity, _speaks_of(names, home)) for quantity in quantities(text)]
    return found


def _speaks_of(names: set[str], home: str) -> Callable[[Sentence], bool]:
    words = "|".join("[- ]?".join(map(re.escape, n.split("-"))) for n in sorted(names))
    said = re.compile(rf"(?i)\b(?:{words})\b") if names else None
    return lambda s: s.file != home and bool(s.about & names or (said and said.search(s.text)))


def policy_facts() -> list[Fact]:
    """Return the policy's defaults; each applies to sentences with all words of the setting's name."""
    found = []
    for path, value in _numbers(Policy().model_dump()):
        words = [stem(w) for w in re.split(r"[._]", path) if len(w) > 3 and w not in UNIT_WORDS]
        unit = next((u for word, u in UNIT_WORDS.items() if path.endswith(f"_{word}")), None)
        if unit and value:
            found.append(Fact(f"core/policy.py ({path})", (unit[0], value * unit[1]), _has_all(words)))
    return found


UNIT_WORDS = {"minutes": ("time", 60), "s": ("time", 1), "hours": ("time", 3600), "percent": ("share", 1)}


def _has_all(words: list[str]) -> Callable[[Sentence], bool]:
    return lambda s: bool(words) and set(words) <= _stems(s.text)


def constant(home: str, kind: str, value: float, *words: str) -> Fact:
    """Return a constant in the code; it applies to sentences with all of `words`."""
    return Fact(home, (kind, value), _has_all([stem(w) for w in words]))


def restated(found: list[Sentence], facts: list[Fact]) -> list[str]:
    """Return `place: sentence: repeats QUANTITY of HOME` for every literal that has another home."""
    wrong = []
    for s in found:
        said = quantities(s.text)
        for quantity, literal in said.items():
            homes = sorted({f.home for f in facts if f.quantity == quantity and f.meant(s)})
            wrong += [f"{s}: repeats {literal!r} of {home}" for home in homes]
    return wrong


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            if key not in {"source", "verified"}:
                yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(item, f"{path}.{key}".lstrip("."))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, float(value)
