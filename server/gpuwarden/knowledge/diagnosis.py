"""Find the entries that explain a log and other observations of a job, with the evidence.

A signature that matches is evidence, not proof: a diagnosis is at most *likely*. It is only *possible* when the line
follows other failures too, when several entries explain it without further evidence for one of them, when there is only
the exit code or a sign with several causes, or when the job has not failed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from gpuwarden.core.models import Frozen
from gpuwarden.knowledge.catalog import Catalogue, Gotcha
from gpuwarden.knowledge.observations import Seen, Sign
from gpuwarden.knowledge.signatures import compiled_signature, literal_of

MAX_LOG = 1_000_000
HEAD = 200_000
MAX_LINE = 2_000
LINE_END = 500
MAX_EVIDENCE = 3
Certainty: TypeAlias = Literal["likely", "possible"]
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]{0,20}[A-Za-z]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\))")


class MatchedLine(Frozen):
    """A line of the log by its number, from 1; 0 for an observation (the exit code or a sign)."""

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
    catalogue: Catalogue,
    log: str,
    *,
    exit_code: int | None = None,
    seen: Sequence[Seen] = (),
    failed: bool = True,
    limit: int = 3,
    excerpt: bool = False,
) -> tuple[Diagnosis, ...]:
    """Return the entries whose signatures match lines of `log` or whose signs were `seen`, the best explained first.

    Of a log above 1 MB the first 200 kB and the rest from the end are read, and of a line 2,000 characters from both
    ends. Of a job that has not `failed` only observations count; its log supports them, and explains a stall. An
    `excerpt` is a few lines that somebody chose: entries that need several lines of a log need only one of an excerpt.
    """
    lines = _lines(log)
    if exit_code is not None:
        lines.append(MatchedLine(number=0, text=f"exit code {exit_code}"))
    stalled = any(s.sign is Sign.STALL for s in seen)
    cases = [
        case
        for case in _cases(catalogue, lines, seen, excerpt=excerpt)
        if failed or case.seen or (stalled and not case.gotcha.secondary)
    ]
    claims = _claims(cases)
    ranked = sorted(cases, key=lambda case: case.rank(claims))
    return tuple(case.diagnosis(claims, failed=failed) for case in ranked[:limit])


Match: TypeAlias = tuple[MatchedLine, str]


class _Wording(NamedTuple):
    """The match of a signature on a line: the signature's longest fixed text, and the whole match."""

    fixed: str
    whole: str

    def beats(self, other: _Wording) -> bool:
        """Return whether this is more specific: its fixed text, or else its whole match, contains the other's."""
        if self.fixed != other.fixed and (self.fixed in other.fixed or other.fixed in self.fixed):
            return other.fixed in self.fixed
        return self.whole != other.whole and other.whole in self.whole


@dataclass(frozen=True)
class _Case:
    """The evidence for one entry: lines (the exit code among them) with their signatures, and signs."""

    gotcha: Gotcha
    hits: list[Match]
    seen: list[Seen]

    @property
    def wordings(self) -> dict[int, _Wording]:
        """Return, per line, the wording with the longest fixed text."""
        found: dict[int, _Wording] = {}
        for line, pattern in self.hits:
            matched = compiled_signature(pattern).search(line.text)
            wording = _Wording(literal_of(pattern), matched.group().lower() if matched else "")
            found[line.number] = max(found.get(line.number, _Wording("", "")), wording, key=lambda w: len(w.fixed))
        return found

    @property
    def numbers(self) -> set[int]:
        return {line.number for line, _ in self.hits}

    @property
    def sure(self) -> bool:
        return any(s.sure for s in self.seen)

    def own(self, claims: dict[int, set[str]]) -> bool:
        """Return whether some evidence is for this entry alone."""
        return (
            self.sure
            or bool(self.seen and self.hits)
            or any(claims.get(n, {self.gotcha.id}) == {self.gotcha.id} for n in self.numbers)
        )

    def rank(self, claims: dict[int, set[str]]) -> tuple[bool, bool, bool, int, str]:
        """Return the most specific first; of secondary failures, the earliest first."""
        if self.gotcha.secondary and not self.seen:
            return True, True, True, min(self.numbers), self.gotcha.id
        specific = max((len(literal_of(pattern)) for _, pattern in self.hits), default=0)
        return False, not self.sure, not self.own(claims), -specific, self.gotcha.id

    def likely(self, claims: dict[int, set[str]]) -> bool:
        """Return whether there is more evidence than a shared line, a secondary line or the exit code."""
        if self.sure or (self.seen and self.numbers - {0}):
            return True
        return not self.gotcha.secondary and self.own(claims) and bool(self.numbers - {0})

    def why(self, claims: dict[int, set[str]], *, failed: bool) -> str:
        """Return what the evidence is, and what it leaves open."""
        numbers = self.numbers - {0}
        matched = f"{len(numbers)} line{'s match' if len(numbers) != 1 else ' matches'} its signature"
        if self.seen and numbers:
            return f"it was observed, and {matched}"
        if self.sure:
            return "it was observed, not read from the log"
        if self.seen:
            return "it was observed; what causes it is open"
        if not failed:
            return f"{matched}, but the job has not failed"
        if not numbers:
            return "only the exit code says so, and it has other causes too"
        if self.gotcha.secondary:
            return "the line alone doesn't establish this; look for what came first"
        return matched if self.own(claims) else "other entries explain the same line; check them in this order"

    def diagnosis(self, claims: dict[int, set[str]], *, failed: bool) -> Diagnosis:
        """Return the entry with the best of its evidence: observations, the first lines and the last one."""
        unique = {line.number: line for line, _ in self.hits}
        numbers = sorted(unique)
        kept = (*numbers[: MAX_EVIDENCE - 1], numbers[-1]) if len(numbers) > MAX_EVIDENCE else tuple(numbers)
        observed = [MatchedLine(number=0, text=s.text[:400]) for s in self.seen[:MAX_EVIDENCE]]
        shown = [MatchedLine(number=n, text=unique[n].text[:400]) for n in kept]
        gotcha = self.gotcha
        return Diagnosis(
            id=gotcha.id,
            title=gotcha.title,
            certainty="likely" if failed and self.likely(claims) else "possible",
            why=self.why(claims, failed=failed),
            cause=gotcha.cause,
            fix=gotcha.fix,
            lines=(*observed, *shown),
            page=gotcha.page,
        )


def _lines(log: str) -> list[MatchedLine]:
    """Split into numbered lines, each once; a progress bar's redraws count as separate lines."""
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
                if len(piece) > MAX_LINE:
                    piece = f"{piece[: MAX_LINE - LINE_END - 1]} {piece[-LINE_END:]}"
                clean = _ESCAPES.sub("", piece).strip()
                if clean and clean not in seen:
                    seen[clean] = MatchedLine.model_construct(number=number, text=clean)
    return list(seen.values())


def _cases(catalogue: Catalogue, lines: list[MatchedLine], seen: Sequence[Seen], *, excerpt: bool) -> Iterator[_Case]:
    """Yield the evidence for every entry that has some; a signature is tried only where its literal occurs."""
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
        enough = len({line for line, _ in hits}) >= (1 if excerpt else gotcha.least_lines)
        case = _Case(gotcha, hits if enough else [], [s for s in seen if s.sign in gotcha.signs])
        if case.hits or case.seen:
            yield case


def _claims(cases: list[_Case]) -> dict[int, set[str]]:
    """Return, per line, the entries that explain it. One whose wording contains another's wins over that one."""
    lines: dict[int, dict[str, _Wording]] = {}
    for case in cases:
        for number, wording in case.wordings.items() if not case.gotcha.secondary else ():
            lines.setdefault(number, {})[case.gotcha.id] = wording
    return {
        number: {key for key, one in wordings.items() if not any(other.beats(one) for other in wordings.values())}
        for number, wordings in lines.items()
    }
