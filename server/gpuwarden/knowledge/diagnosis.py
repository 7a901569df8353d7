"""From a log to the entries that explain it, with the lines that say so.

A signature that matches is evidence, not proof: a diagnosis is at most *likely*. It is only *possible* when the line
follows other failures too, when several entries explain it, or when there is only the exit code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, TypeAlias

from gpuwarden.core.models import Frozen
from gpuwarden.knowledge.catalogue import Catalogue, Gotcha
from gpuwarden.knowledge.patterns import compiled_signature, literal_of

MAX_LOG = 1_000_000
HEAD = 200_000
MAX_LINE = 2_000
LINE_END = 500
MAX_EVIDENCE = 3
Certainty: TypeAlias = Literal["likely", "possible"]
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]{0,20}[A-Za-z]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\))")


class MatchedLine(Frozen):
    """A line of the log, by its number (from 1; 0 for the exit code, which is no line)."""

    number: int
    text: str


class Diagnosis(Frozen):
    """One entry that explains lines of the log. Short on purpose: `id` leads to the whole."""

    id: str
    title: str
    certainty: Certainty
    why: str
    cause: str
    fix: str
    lines: tuple[MatchedLine, ...]
    page: str


def diagnose(
    catalogue: Catalogue, log: str, *, exit_code: int | None = None, limit: int = 3, excerpt: bool = False
) -> tuple[Diagnosis, ...]:
    """Return the entries whose signatures match lines of `log`, the best explained first; often none.

    Of a log above 1 MB the first 200 kB and the rest from the end are read, and of a line 2,000 characters from both
    ends. An `excerpt` is a few lines that somebody chose: entries that want several lines of a log
    are content with one of it.
    """
    lines = _lines(log)
    if exit_code is not None:
        lines.append(MatchedLine(number=0, text=f"exit code {exit_code}"))
    matches = _matches(catalogue, lines)
    found = [(g, hits) for g, hits in matches if len({line for line, _ in hits}) >= (1 if excerpt else g.least_lines)]
    claims: dict[int, int] = {}
    for gotcha, hits in found:
        for line in {line.number for line, _ in hits if not gotcha.secondary}:
            claims[line] = claims.get(line, 0) + 1
    ranked = sorted(found, key=lambda pair: _rank(pair[0], pair[1], claims))
    return tuple(_diagnosis(gotcha, hits, claims) for gotcha, hits in ranked[:limit])


Match: TypeAlias = tuple[MatchedLine, str]


def _lines(log: str) -> list[MatchedLine]:
    """Split into numbered lines, each once; a progress bar's redraws are lines of their own."""
    cut = len(log) - MAX_LOG
    if cut > 0:
        head, tail = log[:HEAD], log[HEAD + cut :]
        skipped = log.count("\n", HEAD, HEAD + cut)
        parts = [(1, head), (1 + head.count("\n") + skipped, tail)]
    else:
        parts = [(1, log)]
    seen: dict[str, MatchedLine] = {}
    for first, text in parts:
        for number, line in enumerate(text.split("\n"), first):
            for piece in line.split("\r"):
                clean = _ESCAPES.sub("", _bounded(piece)).strip()
                if clean and clean not in seen:
                    seen[clean] = MatchedLine.model_construct(number=number, text=clean)
    return list(seen.values())


def _bounded(line: str) -> str:
    return line if len(line) <= MAX_LINE else f"{line[: MAX_LINE - LINE_END - 1]} {line[-LINE_END:]}"


def _matches(catalogue: Catalogue, lines: list[MatchedLine]) -> Iterator[tuple[Gotcha, list[Match]]]:
    whole = "\n".join(line.text for line in lines).lower()
    lowered = [line.text.lower() for line in lines]
    for gotcha in catalogue.gotchas.values():
        hits: list[Match] = []
        for pattern in gotcha.signatures:
            literal = literal_of(pattern)
            if literal not in whole:
                continue
            regex = compiled_signature(pattern)
            hits += [
                (line, pattern)
                for line, low in zip(lines, lowered, strict=True)
                if literal in low and regex.search(line.text)
            ]
        yield gotcha, hits


def _own(hits: list[Match], claims: dict[int, int]) -> bool:
    return any(claims.get(line.number, 0) <= 1 for line, _ in hits)


def _rank(gotcha: Gotcha, hits: list[Match], claims: dict[int, int]) -> tuple[bool, bool, int, str]:
    specific = max(len(literal_of(pattern)) for _, pattern in hits)
    return gotcha.secondary, not _own(hits, claims), -specific, gotcha.id


def _diagnosis(gotcha: Gotcha, hits: list[Match], claims: dict[int, int]) -> Diagnosis:
    unique = {line.number: line for line, _ in hits}
    numbers = sorted(unique)
    likely = not gotcha.secondary and _own(hits, claims) and numbers != [0]
    if likely:
        why = f"{len(numbers)} line{'s match' if len(numbers) > 1 else ' matches'} its signature"
    elif numbers == [0]:
        why = "only the exit code says so, and it has other causes too"
    elif gotcha.secondary:
        why = "the line alone doesn't establish this; look for what came first"
    else:
        why = "other entries explain the same line; check them in this order"
    kept = (*numbers[: MAX_EVIDENCE - 1], numbers[-1]) if len(numbers) > MAX_EVIDENCE else tuple(numbers)
    shown = tuple(MatchedLine(number=n, text=unique[n].text[:400]) for n in kept)
    return Diagnosis(
        id=gotcha.id,
        title=gotcha.title,
        certainty="likely" if likely else "possible",
        why=why,
        cause=gotcha.cause,
        fix=gotcha.fix,
        lines=shown,
        page=gotcha.page,
    )
