"""Draft a catalog entry from a failed run. The user reviews the draft; gpuwarden never adds it to the catalog itself.

`references/self-improvement.md` lists the requirements: the cause is known, the failure was reproduced or is explained
by a mechanism, and the lesson is general.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import yaml

from gpuwarden.core.errors import BadRequest
from gpuwarden.frontmatter import parse_yaml, validate
from gpuwarden.knowledge.catalog import Block, Catalogue, Page, mistakes
from gpuwarden.knowledge.diagnosis import diagnose
from gpuwarden.knowledge.search import search
from gpuwarden.knowledge.signatures import MAX_PATTERN, literal_of

MIN_FIXED = 12  # characters; `KeyError: ` alone is too short for a signature
GAP = ".{0,120}"
MAX_EXAMPLES = 4
TO_SAY = {
    "symptom": "the observed failure, in plain words",
    "cause": "the confirmed cause, not a guess",
    "fix": "the change that fixed it",
    "scope": "the affected libraries or platforms",
    "source": "https address of the evidence",
}
_LOOSE = re.compile(r"'[^']{0,120}'|\"[^\"]{0,120}\"|(?:/[\w.+-]+){2,}|0x[0-9a-fA-F]+|\d+(?:\.\d+)*")


@dataclass(frozen=True)
class LessonClaims:
    """The proposal author's statements about the failure."""

    root_caused: bool
    reproduced: bool
    mechanistic: bool
    general: bool

    def missing(self) -> list[str]:
        """Return a clause for each unmet requirement. The list is empty if the lesson is worth an entry."""
        wanted = {
            "its cause is not established": self.root_caused,
            "it was neither reproduced nor explained by a mechanism": self.reproduced or self.mechanistic,
            "it is specific to this project": self.general,
        }
        return [words for words, met in wanted.items() if not met]


@dataclass(frozen=True)
class Draft:
    """The text of a draft entry, its page, and the entries that already explain its log lines."""

    page: str
    text: str
    known: tuple[str, ...]


def draft(
    catalogue: Catalogue, page: str, title: str, fields: dict[str, object], lines: tuple[str, ...], claims: LessonClaims
) -> Draft:
    """Draft an entry for `page` from its fields (`symptom`, `cause`, `fix`, `scope`, `source`, `verified`).

    `lines` contains the log lines that show the failure. Each of them becomes an example and a signature. Raises
    BadRequest if the lesson does not meet the requirements or the entry would not pass the loader.
    """
    below = claims.missing()
    if below:
        raise BadRequest(f"not an entry yet: {'; '.join(below)}", "Keep it as a project note.")
    home = catalogue.page(page)
    key = _next(catalogue, home)
    block: dict[str, object] = {**fields, "examples": list(lines), "signatures": [signature_for(x) for x in lines]}
    text = yaml.safe_dump(block, sort_keys=False, allow_unicode=True, width=110)
    checked = validate(Block, parse_yaml(text, name=f"the draft of {key}"), name=f"the draft of {key}")
    wrong = mistakes(checked)
    if wrong:
        raise BadRequest(f"the draft of {key}: {'; '.join(wrong)}", "Use a line that contains more constant text.")
    broad = [pattern for pattern in checked.signatures if len(literal_of(pattern)) < MIN_FIXED]
    if broad:
        raise BadRequest(
            f"the signature {broad[0]!r} would match too much", "Use a line that contains more constant text."
        )
    known = tuple(found.id for found in diagnose(catalogue, "\n".join(lines), excerpt=True))
    return Draft(home.path, f"## {key} · {title}\n\n```yaml gotcha\n{text}```\n", known)


def sketch(catalogue: Catalogue, page: str, fields: Mapping[str, object], lines: tuple[str, ...]) -> Draft:
    """Return a template for an entry, with the evidence filled in and the other fields empty."""
    home = catalogue.page(page)
    good = [line for line in lines if len(literal_of(signature_for(line))) >= MIN_FIXED][:MAX_EXAMPLES]
    blanks = {key: f"({words})" for key, words in TO_SAY.items()}
    block = {**blanks, **fields, "examples": good, "signatures": [signature_for(line) for line in good]}
    ordered = {key: block[key] for key in (*TO_SAY, *(key for key in block if key not in TO_SAY))}
    text = yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True, width=110)
    known = tuple(found.id for found in diagnose(catalogue, "\n".join(lines), excerpt=True))
    return Draft(home.path, f"## {_next(catalogue, home)} · (title)\n\n```yaml gotcha\n{text}```\n", known)


def home_of(catalogue: Catalogue, lines: tuple[str, ...]) -> str:
    """Return the page with the entries most similar to an error, or the universal page if none is similar."""
    for hit in search(catalogue, " ".join(lines[:3]), 5):
        if catalogue.pages[hit.page].prefix is not None:
            return hit.page
    return "gotchas/universal.md"


def signature_for(line: str) -> str:
    """Turn a log line into a signature: parts that differ between runs (numbers, names, paths) become wildcards."""
    core = line.strip()[: MAX_PATTERN // 2]
    pieces = [re.escape(piece).replace("\\ ", " ") for piece in _LOOSE.split(core)]
    fixed = [piece for piece in pieces if piece.strip()]
    return GAP.join(fixed[:3]).strip(" ")


def _next(catalogue: Catalogue, page: Page) -> str:
    if page.prefix is None:
        raise BadRequest(f"{page.path} has no entries", "Choose one of the pages with a prefix.")
    used = [int(key.rpartition("-")[2]) for key in catalogue.gotchas if key.startswith(f"{page.prefix}-")]
    return f"{page.prefix}-{max(used, default=0) + 1:03d}"
