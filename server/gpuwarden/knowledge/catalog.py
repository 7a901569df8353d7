"""Load the catalog from `references/**/*.md`, and report every mistake in it.

A page is Markdown with YAML front matter (`title`, `summary`, and `prefix` if it contains entries). An entry is a
level-2 heading and one fenced block:

    ## OOM-003 · CUDA out of memory in the first backward pass
    ```yaml gotcha
    symptom: ...
    signatures: ['...']      # regular expressions over one log line; may be empty
    examples: ['...']        # log lines; each matches a signature, and each signature matches one
    cause: ...
    fix: ...
    scope: [cuda, torch]
    source: https://...      # or a list
    verified: 2026-11
    ```

Optional keys: `aliases` (synonyms for searching), `see` (ids of related entries), `signs` (observations of a job other
than its log, see `observations.py`), `secondary` (the entry's lines alone don't establish the cause, because they also
follow other failures), `least_lines` (the number of different lines that must match before a log is diagnosed, for
values that mean nothing if they occur only once), `unsigned` (the reason why the entry has neither signatures nor
signs). Prose may follow the block. Every mistake is reported with its file and line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from gpuwarden.core.errors import BadRequest, NotFound
from gpuwarden.core.models import Frozen
from gpuwarden.core.profile import Month
from gpuwarden.data import data_dir
from gpuwarden.frontmatter import load_front_matter, parse_yaml, validate
from gpuwarden.knowledge.observations import Sign
from gpuwarden.knowledge.signatures import compiled_signature, complaint

MAX_PAGE_BYTES = 512 * 1024
ENTRY_HEADING = re.compile(r"^## +([A-Z][A-Z0-9]*-\d+) +· +(\S.*)$")
ANY_ID = re.compile(r"^## +([A-Z][A-Z0-9]*-\d+)\b")
PLACE = re.compile(r"[^:]+:(\d+): (.*)", re.DOTALL)
OPENING = "```yaml gotcha"
Text = Annotated[str, Field(min_length=8, max_length=1500)]
Words = Annotated[str, Field(min_length=1, max_length=200)]


@dataclass(frozen=True)
class Problem:
    """One mistake in the catalog, with its file and line."""

    file: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}"


class NoSignature(StrEnum):
    """The reason why no line in a job's log can distinguish an entry from other entries."""

    SILENT = "silent"
    """The run prints nothing specific to the failure."""
    ADVICE = "advice"
    """The entry is about a decision before a run, not about a failure."""
    CONSOLE = "console"
    """The failure is visible only on a platform's page, in a bill or on the machine, not in the job's log."""
    SHARED = "shared"
    """Another entry has the same log line; only the circumstances distinguish the two."""


class Block(Frozen):
    """The keys of an entry's YAML block."""

    symptom: Text
    signatures: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()
    cause: Text
    fix: Text
    scope: tuple[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")], ...] = Field(min_length=1)
    source: tuple[Annotated[str, Field(pattern=r"^https://\S+$")], ...] = Field(min_length=1)
    verified: Month
    aliases: tuple[Words, ...] = ()
    see: tuple[str, ...] = ()
    signs: tuple[Sign, ...] = ()
    secondary: bool = False
    least_lines: int = Field(default=1, ge=1, le=20)
    unsigned: NoSignature | None = None

    @field_validator("source", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


class Gotcha(Block):
    """One known failure. `page` is its file in the references, and `line` is the line number of its heading."""

    id: str
    title: Words
    page: str
    line: int
    prose: str = ""


class PageHeader(Frozen):
    """The front matter of a page. `prefix` is the first part of its entries' ids. A source is a web address or one of
    gpuwarden's own source files.
    """

    title: Words
    summary: Annotated[str, Field(min_length=8, max_length=400)]
    prefix: Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9]*$")] | None = None
    verified: Month | None = None
    sources: tuple[Annotated[str, Field(pattern=r"^(https://|server/)\S+$")], ...] = ()


class Page(PageHeader):
    """One reference file. `body` is the Markdown after the front matter, and `first` is its first line number."""

    path: str
    body: str
    first: int


class Catalogue:
    """All pages and entries, by path and by id."""

    def __init__(self, pages: Iterable[Page], gotchas: Iterable[Gotcha]) -> None:
        self.pages = {page.path: page for page in pages}
        self.gotchas = {gotcha.id: gotcha for gotcha in gotchas}

    def gotcha(self, key: str) -> Gotcha:
        """Return the entry with this id."""
        found = self.gotchas.get(key.strip().upper())
        if found is None:
            raise NotFound(f"no entry has the id {key!r}", "Search by symptom or by log line instead.")
        return found

    def page(self, path: str) -> Page:
        """Return the page with this path in the references, with or without `.md`."""
        found = self.pages.get(path) or self.pages.get(f"{path}.md")
        if found is None:
            raise NotFound(f"no reference page {path!r}", f"The pages are {', '.join(sorted(self.pages))}.")
        return found


@lru_cache(maxsize=1)
def shipped() -> Catalogue:
    """Return the references in this installation. They are read only once."""
    return load(data_dir("references"))


def load(root: Path) -> Catalogue:
    """Read every page under `root`; raise BadRequest with all mistakes, one `file:line: message` per line."""
    catalog, problems = read_tree(root)
    if problems:
        raise BadRequest("the references have mistakes:\n" + "\n".join(map(str, problems)), "Correct these lines.")
    return catalog


def read_tree(root: Path) -> tuple[Catalogue, list[Problem]]:
    """Read every page under `root`. Return the catalog of valid pages, and all mistakes found."""
    pages: list[Page] = []
    gotchas: list[Gotcha] = []
    problems: list[Problem] = []
    for path in sorted(root.rglob("*.md")):
        reader = _Reader(path.relative_to(root).as_posix(), problems)
        page = reader.read(path)
        if page is not None:
            pages.append(page)
            gotchas.extend(reader.entries(page))
    # Mistakes that can be found only by comparing files: an id used twice, or a `see` without a target.
    first: dict[str, Gotcha] = {}
    for gotcha in gotchas:
        other = first.setdefault(gotcha.id, gotcha)
        if other is not gotcha:
            text = f"{gotcha.id} is already used at {other.page}:{other.line}"
            problems.append(Problem(gotcha.page, gotcha.line, text))
    for gotcha in gotchas:
        for key in gotcha.see:
            if key not in first or key == gotcha.id:
                text = f"{gotcha.id} points to {key}, which is not another entry"
                problems.append(Problem(gotcha.page, gotcha.line, text))
    return Catalogue(pages, gotchas), sorted(problems, key=lambda p: (p.file, p.line))


class _Reader:
    """Reads one file and records its mistakes."""

    def __init__(self, file: str, problems: list[Problem]) -> None:
        self.file = file
        self.problems = problems

    def note(self, line: int, message: str) -> None:
        self.problems.append(Problem(self.file, line, message))

    def read(self, path: Path) -> Page | None:
        try:
            raw = path.read_bytes()
            if len(raw) > MAX_PAGE_BYTES:
                raise _wrong(self.file, 1, f"is larger than {MAX_PAGE_BYTES} bytes")
            front, body, first = load_front_matter(PageHeader, raw.decode(), name=self.file)
        except UnicodeDecodeError as error:
            self.note(1, f"is not UTF-8 (byte {error.start})")
        except BadRequest as error:
            self.broken(error)
        else:
            return Page(path=self.file, body=body, first=first, **front.model_dump())
        return None

    def broken(self, error: BadRequest) -> None:
        """Record an error whose message begins with `file:line:`."""
        place = PLACE.match(error.message)
        self.note(int(place.group(1)) if place else 1, place.group(2) if place else error.message)

    def entries(self, page: Page) -> Iterator[Gotcha]:
        lines = page.body.splitlines()
        heads = [n for n, line in enumerate(lines) if ANY_ID.match(line)]
        if heads and page.prefix is None:
            self.note(1, "front matter: the page has entries but no prefix")
        for n, line in enumerate(lines[: heads[0] if heads else None]):
            if line.strip() == OPENING:
                self.note(page.first + n, "an entry's block without a heading like `## ABC-001 · Title`")
        for head, end in pairwise([*heads, len(lines)]):
            try:
                yield self.entry(page, lines[head:end], page.first + head)
            except BadRequest as error:
                self.broken(error)

    def entry(self, page: Page, lines: list[str], line: int) -> Gotcha:
        found = ENTRY_HEADING.match(lines[0])
        if found is None:
            raise _wrong(page.path, line, "an entry's heading must have the form `## ABC-001 · Title`")
        key, title = found.groups()
        if page.prefix is not None and not key.startswith(f"{page.prefix}-"):
            raise _wrong(page.path, line, f"{key} does not start with this page's prefix {page.prefix}")
        opened = [n for n, text in enumerate(lines) if text.strip() == OPENING]
        if len(opened) != 1:
            raise _wrong(page.path, line, f"{key} has {len(opened)} `{OPENING}` blocks; exactly one is required")
        start = opened[0] + 1
        end = next((n for n in range(start, len(lines)) if lines[n].strip() == "```"), None)
        if end is None:
            raise _wrong(page.path, line + opened[0], f"{key}: the block is not closed")
        data = parse_yaml("\n".join(lines[start:end]), name=page.path, first_line=line + start)
        block = validate(Block, data, name=page.path)
        for message, loc in _patterns(block):
            self.note(data.line_of(loc), f"{key}: {message}")
        prose = "\n".join(lines[end + 1 :]).strip()
        return Gotcha(id=key, title=title.strip(), page=page.path, line=line, prose=prose, **block.model_dump())


def _wrong(file: str, line: int, what: str) -> BadRequest:
    return BadRequest(f"{file}:{line}: {what}", f"Correct {file}.")


def mistakes(block: Block) -> list[str]:
    """Return the mismatches between an entry's signatures and its examples."""
    return [message for message, _ in _patterns(block)]


def _patterns(gotcha: Block) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield each mismatch between the signatures and the examples, with its position in the block."""
    good: list[str] = []
    for i, pattern in enumerate(gotcha.signatures):
        why = complaint(pattern)
        if why is not None:
            yield f"signature {pattern!r} {why}", ("signatures", i)
        elif not any(compiled_signature(pattern).search(line) for line in gotcha.examples):
            yield f"no example matches the signature {pattern!r}", ("signatures", i)
        if why is None:
            good.append(pattern)
    for i, line in enumerate(gotcha.examples):
        if not any(compiled_signature(pattern).search(line) for pattern in good):
            yield f"no signature matches the example {line!r}", ("examples", i)
