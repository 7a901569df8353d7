"""Find the entries that explain a log and other observations of a job, with the evidence.

A matching signature is evidence, not proof, so a diagnosis is at most *likely*. A diagnosis is likely only if a sign
establishes it, if public reports have confirmed the signature (see `track_record`), or if the exit code also supports
it. A diagnosis is only *possible* if the line also follows other failures, if several entries explain the line without
further evidence for one of them, if the only evidence is the exit code or a sign with several causes, if the line is
not part of the failure that ended the run, or if the job has not failed. Only the lines most relevant to the end of the
run are matched: see `failure`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

from gpuwarden.core.models import Frozen
from gpuwarden.knowledge.catalog import Catalogue, Gotcha
from gpuwarden.knowledge.failure import Outcome, Reading, Weight
from gpuwarden.knowledge.log_lines import MAX_LINE
from gpuwarden.knowledge.observations import ObservedSign, Sign
from gpuwarden.knowledge.signatures import compiled_signature, literal_of
from gpuwarden.knowledge.track_record import runtime_wordings, trusted

MAX_EVIDENCE = 3
SPECIFIC = 6
"""A match can be *likely* only if its signature has at least this many fixed characters."""
CANT_RUN = (126, 127)
"""Exit codes from a shell that could not run a command. The shell's message gives the reason, so these codes provide no
further evidence.
"""
Certainty: TypeAlias = Literal["likely", "possible"]


class MatchedLine(Frozen):
    """A log line with its number, starting at 1. An exit code or a sign has the number 0."""

    number: int
    text: str


class Diagnosis(Frozen):
    """A short summary of an entry that explains the failure. `id` identifies the full entry."""

    id: str
    title: str
    certainty: Certainty
    why: str
    cause: str
    fix: str
    lines: tuple[MatchedLine, ...]
    page: str
    weight: Weight = Weight.HARD
    telling: tuple[str, ...] = ()
    """The signatures that make the diagnosis likely if public reports confirm them: see `track_record`."""


def diagnose(
    catalogue: Catalogue,
    log: str,
    *,
    exit_code: int | None = None,
    seen: Sequence[ObservedSign] = (),
    failed: bool | None = True,
    limit: int = 3,
    excerpt: bool = False,
    reading: Reading | None = None,
) -> tuple[Diagnosis, ...]:
    """Return the entries whose signatures match lines of `log` or whose signs were observed (`seen`), best match first.

    If a log is larger than 1 MB, only its first 200 kB and its end are read; of a long line, only 2,000 characters from
    both ends are read. If the job has not `failed`, a log line alone is evidence only for an observed stall or for
    wrong metric values. If `failed` is None, the log decides whether the job failed. An `excerpt` is a few selected
    lines: entries that need several lines of a log need only one line of an excerpt. If a `reading` of this log and
    exit code is given, the log is not read again.
    """
    reading = reading or Reading(log, exit_code)
    if failed is None:
        failed = reading.failure.outcome not in {Outcome.SUCCEEDED, Outcome.RUNNING}
        excerpt = excerpt and failed
    lines = _lines(reading)
    if exit_code is not None:
        weight = Weight.SAID if exit_code in CANT_RUN else Weight.HARD
        lines[MatchedLine(number=0, text=f"exit code {exit_code}")] = weight
    stalled = any(s.sign is Sign.STALL for s in seen)
    cases = [
        case
        for case in _cases(catalogue, lines, seen, excerpt=excerpt)
        if failed or case.seen or case.strange or (stalled and not case.gotcha.secondary)
    ]
    cases = _of_the_failure(cases, raised=reading.failure.exception is not None)
    claims = _claims(cases)
    ranked = sorted(cases, key=lambda case: case.rank(claims))
    return tuple(case.diagnosis(claims, failed=bool(failed)) for case in ranked[:limit])


Match: TypeAlias = tuple[MatchedLine, str]


class _Wording(NamedTuple):
    """How a signature matched a line: the signature's longest fixed text, and the full match."""

    fixed: str
    whole: str

    def beats(self, other: _Wording) -> bool:
        """Return whether this match is more specific than `other`, that is, contains its fixed text.

        If the fixed texts are equal, or neither contains the other, the full matches are compared in the same way.
        """
        if self.fixed != other.fixed and (self.fixed in other.fixed or other.fixed in self.fixed):
            return other.fixed in self.fixed
        return self.whole != other.whole and other.whole in self.whole


@dataclass(frozen=True)
class _Case:
    """The evidence for one entry: the lines that its signatures match (or the exit code), and the observed signs."""

    gotcha: Gotcha
    hits: list[Match]
    seen: list[ObservedSign]
    weight: Weight

    @property
    def wordings(self) -> dict[int, _Wording]:
        """Return, for each line number, the wording with the longest fixed text."""
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
        """Return whether some of the evidence supports only this entry."""
        return (
            self.sure
            or bool(self.seen and self.hits)
            or any(claims.get(n, {self.gotcha.id}) == {self.gotcha.id} for n in self.numbers)
        )

    @property
    def strange(self) -> bool:
        """Return whether the evidence consists of metric values that are wrong even if the run continues: see
        `least_lines`.
        """
        return self.gotcha.least_lines > 1 and bool(self.hits)

    @property
    def specific(self) -> int:
        """Return the number of fixed characters in the most specific signature that matched."""
        return max((len(literal_of(pattern)) for _, pattern in self.hits), default=0)

    def rank(self, claims: dict[int, set[str]]) -> tuple[bool, bool, int, bool, bool, int, str]:
        """Return the sort key. The strongest evidence comes first, then the most specific; secondary failures are
        sorted by position.
        """
        if self.gotcha.secondary and not self.seen:
            return True, True, 0, True, True, min(self.numbers), self.gotcha.id
        own = self.own(claims)
        # Whether every match is the exit code or a message that a runtime prints for any program.
        vague = all(line.number == 0 or (self.gotcha.id, pattern) in runtime_wordings() for line, pattern in self.hits)
        return False, not self.sure, -self.weight, not own, vague, -self.specific, self.gotcha.id

    def telling(self, claims: dict[int, set[str]]) -> tuple[str, ...]:
        """Return the signatures if their matches are strong evidence for this entry alone, otherwise an empty tuple."""
        if self.gotcha.secondary or not self.own(claims) or not self.numbers - {0}:
            return ()
        enough = self.strange or (self.weight >= Weight.HARD and self.specific >= SPECIFIC)
        return tuple(sorted({pattern for _, pattern in self.hits})) if enough else ()

    def likely(self, claims: dict[int, set[str]]) -> bool:
        """Return whether the entry is supported by an observation, by the exit code, or by reports that confirm a
        matched signature.
        """
        if self.sure or (self.seen and self.numbers - {0}):
            return True
        telling = self.telling(claims)
        return bool(telling) and (0 in self.numbers or any(trusted(self.gotcha.id, pattern) for pattern in telling))

    def why(self, claims: dict[int, set[str]], *, failed: bool) -> str:
        """Describe the evidence, and any uncertainty."""
        numbers = self.numbers - {0}
        matched = f"{len(numbers)} line{'s match' if len(numbers) != 1 else ' matches'} its signature"
        if self.seen and numbers:
            return f"it was observed, and {matched}"
        if self.sure:
            return "it was observed, not read from the log"
        if self.seen:
            return "it was observed; its cause is unknown"
        if not failed:
            return f"{matched}, but the job has not failed"
        if not numbers:
            return "only the exit code indicates it, and this code has other causes too"
        if self.gotcha.secondary:
            return "the line alone doesn't establish this; check the errors before it"
        if not self.own(claims):
            return "other entries explain the same line; check them in this order"
        return (
            matched if self.likely(claims) else f"{matched}; too few reports confirm that the line has no other cause"
        )

    def diagnosis(self, claims: dict[int, set[str]], *, failed: bool) -> Diagnosis:
        """Return the diagnosis with its main evidence: observed signs, the first matched lines and the last one."""
        unique = {line.number: line for line, _ in reversed(self.hits)}
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
            weight=self.weight,
            telling=self.telling(claims) if failed else (),
        )


def _lines(reading: Reading) -> dict[MatchedLine, Weight]:
    """Return the log's lines with their weights; a repeated text counts once, with its highest weight.

    An exception's message that was wrapped across several lines is added as one line, with its first line's number.
    """
    best: dict[str, tuple[Weight, int]] = {}
    for at, line in enumerate(reading.lines):
        weight = reading.weight(at)
        known = best.get(line.text)
        if known is None or known[0] < weight:
            best[line.text] = (weight, line.number)
    for number, text in reading.joined.items():
        best.setdefault(text[:MAX_LINE], (Weight.RAISED, number))
    return {MatchedLine.model_construct(number=number, text=text): weight for text, (weight, number) in best.items()}


def _of_the_failure(cases: list[_Case], *, raised: bool) -> list[_Case]:
    """Drop the entries with the weakest evidence: those for recovered errors and, if an error was
    found, those for warnings.
    """
    best = max((case.weight for case in cases if not case.gotcha.secondary or case.seen), default=Weight.PLAIN)
    least = Weight.SAID if best >= Weight.SAID or raised else Weight.PLAIN
    kept = [case for case in cases if case.seen or case.weight >= least]
    if raised or best != Weight.SAID:
        return kept
    # No exception was raised, so the run ended with a message from a shell or another program.
    return [replace(case, weight=Weight.HARD) if case.weight == Weight.SAID else case for case in kept]


def _cases(
    catalogue: Catalogue, weights: dict[MatchedLine, Weight], seen: Sequence[ObservedSign], *, excerpt: bool
) -> Iterator[_Case]:
    """Yield every entry that has evidence. A signature is tried only if the log contains its literal."""
    lines = list(weights)
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
        weight = max((weights[line] for line, _ in hits), default=Weight.PLAIN) if enough else Weight.PLAIN
        if enough and weight < Weight.HARD and gotcha.least_lines > 1:
            weight = Weight.SAID  # these values are evidence only if they occur in several lines: see `least_lines`
        case = _Case(gotcha, hits if enough else [], [s for s in seen if s.sign in gotcha.signs], weight)
        if case.hits or case.seen:
            yield case


def _claims(cases: list[_Case]) -> dict[int, set[str]]:
    """Return, for each line, the entries that explain it. A more specific match overrides the other matches."""
    lines: dict[int, dict[str, _Wording]] = {}
    for case in cases:
        for number, wording in case.wordings.items() if not case.gotcha.secondary else ():
            lines.setdefault(number, {})[case.gotcha.id] = wording
    return {
        number: {key for key, one in wordings.items() if not any(other.beats(one) for other in wordings.values())}
        for number, wordings in lines.items()
    }
