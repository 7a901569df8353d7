"""Search by words or by a log excerpt: signatures first, then field-weighted BM25.

A query is a list of slots, one per word. A slot matches its word, a concept that the word belongs to, or the nearest
known spelling; only the best match counts. Two measures decide whether a result is good enough: the score, and the
*coverage*, which is the share of the query that the entry matches (rare words carry more weight).
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import resources
from itertools import islice, pairwise
from typing import Literal

from gpuwarden.core.models import Frozen
from gpuwarden.knowledge.catalog import Catalogue
from gpuwarden.knowledge.decisions import PAGE as DECISIONS
from gpuwarden.knowledge.diagnosis import Certainty, MatchedLine, diagnose
from gpuwarden.knowledge.failure import Outcome, Reading, Weight
from gpuwarden.knowledge.report_parsing import gist
from gpuwarden.knowledge.version_skew import Change, explain
from gpuwarden.knowledge.words import Speller, chinese_terms, english_concepts, everyday, terms, tokens

MAX_QUERY = 64_000
HEAD = 16_000
MAX_LINES = 4_000
"""If a text has more lines than this, only its beginning and end are read, because the time grows with the number of
lines.
"""
MAX_SLOTS = 80
K1 = 6.0
B = 0.35
GOTCHA_FIELDS = {
    "title": 2.0,
    "aliases": 4.0,
    "symptom": 1.5,
    "examples": 0.7,
    "scope": 1.0,
    "cause": 1.0,
    "fix": 0.3,
    "prose": 0.5,
}
SECTION_FIELDS = {"title": 2.0, "heading": 2.5, "body": 0.6}
MAX_TIMES = 5
"""Further occurrences of a term in a field are not counted, because aliases in two languages repeat a concept."""
CONCEPT = 0.75
RESPELLED = 0.8
PAIR = 0.5
CHINESE_PAIR = 0.9
COMMON = 0.15
"""The weight of log(1 + count / FEW_REPORTS) in the ranking. `frequency.txt` contains the number of reports for each
entry.
"""
FEW_REPORTS = 2.5
"""For counts far below this value, the effect is approximately proportional to the count."""
STRANGER = 0.5
MAX_RARITY = 5.0
EVERYDAY_RARITY = 1.5
COUNT_RARITY = 0.8  # a number up to 400 is usually a count; a larger one may be an HTTP status, a port or a version
ENOUGH = 14.0  # a long description does not have to match completely
ENOUGH_OF_A_PASSAGE = 22.0
SECTION = 1.15
CANDIDATES = 40
CLOSENESS = 0.8  # maximum bonus, given if an entry's title, alias or sentence equals the query
COVERED = 0.6  # the part of a score that depends on the coverage of the query
FITS = ((17.0, 0.3), (13.0, 0.46), (10.0, 0.5), (8.0, 0.65))
SIGNATURE_SCORE = 100.0
TITLED = 1.25  # factor for words in the first line of a pasted report
LEAST_LOG = 5
"""The minimum number of lines in a log; a shorter text is treated as an excerpt."""
FEW_LINES = 3
MAX_CALLS = 4
"""The number of innermost calls in a traceback that are searched as words."""
SPEAK_FOR = 8  # the query's words support an entry if it is among this many best matches
_COUNT = re.compile(r"[0-9]{1,2}|[1-3][0-9]{2}|400")
_CODES = frozenset({"137", "139", "134", "143", "255"})
_ID = re.compile(r"\b[A-Z]{2,5}-\d{3}\b")


class Hit(Frozen):
    """One result. `id` is an entry's id, or `page#heading-words` for a page section."""

    id: str
    kind: Literal["gotcha", "page"]
    title: str
    page: str
    score: float
    how: Literal["id", "signature", "words"]
    summary: str
    fix: str = ""
    lines: tuple[MatchedLine, ...] = ()
    certainty: Certainty = "possible"
    telling: tuple[str, ...] = ()


@dataclass(frozen=True)
class Document:
    """An indexed entry or section: its search result, the weight of each of its terms, and its short texts."""

    hit: Hit
    weights: dict[str, float]
    passages: tuple[str, ...]


@dataclass(frozen=True)
class Slot:
    """One word of the query, and its alternatives: (term, weight)."""

    ways: tuple[tuple[str, float], ...]
    rarity: float

    @cached_property
    def terms(self) -> frozenset[str]:
        """Return the terms of all alternatives."""
        return frozenset(term for term, _ in self.ways)


class Index:
    """Term statistics for a catalog."""

    def __init__(self, catalogue: Catalogue) -> None:
        texts = list(_texts(catalogue))
        counted = [{name: Counter(terms(text)) for name, text in fields.items()} for _, fields, _ in texts]
        lengths: dict[str, list[int]] = defaultdict(list)
        for (hit, _, _), counts in zip(texts, counted, strict=True):
            for name, count in counts.items():
                lengths[f"{hit.kind}.{name}"].append(count.total())
        mean = {name: max(sum(seen) / len(seen), 1.0) for name, seen in lengths.items()}
        self.documents: list[Document] = []
        for (hit, fields, weights), counts in zip(texts, counted, strict=True):
            total: dict[str, float] = defaultdict(float)
            for name, count in counts.items():
                scale = weights[name] / (1 - B + B * count.total() / mean[f"{hit.kind}.{name}"])
                for term, times in count.items():
                    total[term] += scale * min(times, MAX_TIMES)
            passages: tuple[str, ...] = ()  # the short texts of an entry, each compared with the complete query
            if "aliases" in fields:
                aliases, symptom = fields["aliases"].split(" . "), re.split(r"[.;:] ", fields["symptom"])
                passages = (fields["title"], *aliases, *symptom)
            self.documents.append(Document(hit, dict(total), passages))
        asked_for = frequencies()
        reports = (asked_for.get(document.hit.id, 0.0) for document in self.documents)
        self._often = [1 + COMMON * math.log1p(count / FEW_REPORTS) for count in reports]
        self.hits = {document.hit.id: document.hit for document in self.documents}
        self._units: dict[int, list[tuple[list[Slot], frozenset[str]]]] = {}
        self._rarities: dict[str, float] = {}
        self._weights: dict[str, dict[int, float]] = {}
        self.postings: dict[str, list[int]] = defaultdict(list)
        for number, document in enumerate(self.documents):
            for term in document.weights:
                self.postings[term].append(number)
        self.speller = Speller(self.postings)

    def rarity(self, term: str) -> float:
        """Return a term's inverse document frequency; an unknown term gets the maximum."""
        if term not in self._rarities:
            most = MAX_RARITY  # everyday words and counts carry little information
            if term in everyday():
                most = EVERYDAY_RARITY
            elif _COUNT.fullmatch(term) and term not in _CODES:
                most = COUNT_RARITY
            seen = len(self.postings.get(term, ()))
            self._rarities[term] = min(math.log(1 + (len(self.documents) - seen + 0.5) / (seen + 0.5)), most)
        return self._rarities[term]

    def slots(self, query: str) -> list[Slot]:
        """Turn a query into slots, one per distinct word."""
        stems = [s for s in tokens(query) if s in self.postings or not ("_" in s or s[0].isdigit())][:MAX_SLOTS]
        stems = [part for s in stems for part in (self.speller.parts(s) if s not in self.postings else (s,))][
            :MAX_SLOTS
        ]
        spelled = [(s if s in self.postings else self.speller.nearest(s) or s) for s in stems]
        named: dict[int, list[str]] = defaultdict(list)
        for concept, start, end in english_concepts(spelled):
            for at in range(start, end):
                named[at].append(concept)
        found: dict[str, Slot] = {}
        for at, (word, given) in enumerate(zip(spelled, stems, strict=True)):
            weight = 1.0 if word == given else RESPELLED
            ways = ((word, weight), *((concept, CONCEPT * weight) for concept in named[at]))
            # A word in the query has the weight of its concept, if any; an unknown word has a lower weight.
            rarity = min(self.rarity(term) for term in (word, *named[at]))
            known = word in self.postings or named[at]
            found.setdefault(word, Slot(ways, rarity if known else STRANGER * rarity))
        chinese, pairs = chinese_terms(query)
        for concept in chinese:
            found.setdefault(concept, Slot(((concept, 1.0),), self.rarity(concept)))
        for pair in pairs[:MAX_SLOTS]:
            found.setdefault(pair, Slot(((pair, 0.6),), CHINESE_PAIR if pair in self.postings else 0.2))
        return list(found.values())

    def _weighed(self, term: str) -> dict[int, float]:
        """Return a term's weight in each document that contains it."""
        if term not in self.postings:
            return {}
        if term not in self._weights:
            weights = {number: self.documents[number].weights[term] for number in self.postings[term]}
            rarity = self.rarity(term)
            self._weights[term] = {n: rarity * weight * (K1 + 1) / (weight + K1) for n, weight in weights.items()}
        return self._weights[term]

    def _gains(self, slot: Slot) -> dict[int, tuple[float, float]]:
        """Return the best (gain, weight) of a slot for each document that matches it."""
        best: dict[int, tuple[float, float]] = {}
        for term, weight in slot.ways:
            for number, full in self._weighed(term).items():
                gain = weight * full
                if gain > best.get(number, (0.0, 0.0))[0]:
                    best[number] = (gain, weight)
        return best

    def ranked(self, query: str) -> list[tuple[float, float, Document]]:
        """Return (score, coverage, document) for every document that matches a slot, best first.

        The order also depends on how often reports mention each document and, for the first few documents, on their
        similarity to the query. Neither changes the score, which depends only on the matched words.
        """
        slots = self.slots(query)
        first, _, rest = query.partition("\n")
        titled = set(tokens(first)) if rest.strip() else set()
        whole = min(sum(slot.rarity for slot in slots), ENOUGH) or 1.0
        score: dict[int, float] = defaultdict(float)
        met: dict[int, float] = defaultdict(float)
        for slot in slots:
            for number, (gain, weight) in self._gains(slot).items():
                score[number] += gain * (TITLED if slot.ways[0][0] in titled else 1.0)
                met[number] += slot.rarity * weight
        stems = [s for s in tokens(query) if "_" not in s]
        for pair in dict.fromkeys(f"{a} {b}" for a, b in pairwise(stems)):
            for number, weight in self._weighed(pair).items():
                score[number] += PAIR * weight
        rows = []
        asked: list[float] = []
        heads: list[int] = []
        for number, value in score.items():
            document = self.documents[number]
            covered = min(met[number] / whole, 1.0)
            factor = (SECTION if document.hit.kind == "page" else 1.0) * (1 - COVERED + COVERED * covered)
            rows.append((value * factor, covered, document))
            asked.append(value * factor * self._often[number])
            heads.append(number)
        order = sorted(range(len(rows)), key=lambda n: (-asked[n], rows[n][2].hit.id))
        close = {n: asked[n] * self._closer(slots, heads[n]) for n in order[:CANDIDATES]}
        top = sorted(close, key=lambda n: (-close[n], rows[n][2].hit.id))
        return [rows[n] for n in (*top, *order[CANDIDATES:])]

    def _closer(self, slots: list[Slot], number: int) -> float:
        """Return a factor of at least 1, which grows with the similarity of a title, alias or sentence to the query."""
        if number not in self._units:
            units = [self.slots(text) for text in self.documents[number].passages]
            self._units[number] = [(unit, frozenset[str]().union(*(slot.terms for slot in unit))) for unit in units]
        asked, likeness = frozenset[str]().union(*(slot.terms for slot in slots)), 0.0
        most = min(sum(slot.rarity for slot in slots), ENOUGH_OF_A_PASSAGE)
        for passage, terms_of in self._units[number]:
            # Similarity from 0 to 1: the share of words that are in both the query and the passage, weighted by rarity.
            if both := asked & terms_of:
                shared = sum(slot.rarity for slot in (*slots, *passage) if not both.isdisjoint(slot.terms))
                total = most + sum(slot.rarity for slot in passage)
                likeness = max(likeness, min(shared / total, 1.0))
        return 1 + CLOSENESS * likeness


@lru_cache(maxsize=1)
def frequencies() -> dict[str, float]:
    """Return the number of public failure reports that mention each entry, keyed by its id."""
    text = resources.files("gpuwarden.knowledge").joinpath("frequency.txt").read_text(encoding="utf-8")
    rows = (line.split() for line in text.splitlines() if line and not line.startswith("#"))
    return {key: float(count) for key, count in rows}


@lru_cache(maxsize=4)
def index_of(catalogue: Catalogue) -> Index:
    """Return a catalog's search index, built on the first call."""
    return Index(catalogue)


def search(catalogue: Catalogue, query: str, limit: int = 5) -> tuple[Hit, ...]:
    """Return the best entries and sections for `query`, or an empty tuple if none matches.

    Entries whose id is in the query come first, then those with a signature that matches the query, then those with the
    best matching words. If an entry's matched line also follows other failures and the words do not support the entry,
    the best match by words precedes it. If a text exceeds 64,000 characters or 4,000 lines, only its beginning and end
    are read, because the title is at the beginning and the error at the end.
    """
    query = both_ends(query)
    reading = Reading(query)
    by_id = index_of(catalogue).hits
    named = [key for key in dict.fromkeys(_ID.findall(query.upper())) if key in catalogue.gotchas]
    causes: list[Hit] = []
    follow_ups: list[Hit] = []
    went_well = nothing_failed(reading)
    failed = None if went_well else True
    for rank, match in enumerate(
        diagnose(catalogue, query, failed=failed, limit=limit, excerpt=not went_well, reading=reading)
    ):
        update = {
            "score": SIGNATURE_SCORE - rank,
            "how": "signature",
            "lines": match.lines,
            "certainty": match.certainty,
            "telling": match.telling,
        }
        # In a complete report, a warning is weaker evidence than the user's description.
        aside = match.weight < Weight.SAID and len(reading.lines) > FEW_LINES
        found = follow_ups if catalogue.gotchas[match.id].secondary or aside else causes
        found.append(by_id[match.id].model_copy(update=update))
    if not causes and not went_well:
        causes += _of_a_release(by_id, reading)
    words = "" if went_well else _searched_part(query, reading)
    worded = list(islice(_matches_by_words(index_of(catalogue), words), max(2 * limit, SPEAK_FOR)))
    spoken_for = {hit.id for hit in worded[:SPEAK_FOR]} & {hit.id for hit in follow_ups}
    ahead = [] if causes or spoken_for else worded[:1]
    ids = [
        by_id[key].model_copy(update={"score": SIGNATURE_SCORE, "how": "id", "certainty": "likely"}) for key in named
    ]
    hits: dict[str, Hit] = {}
    for hit in (*ids, *causes, *ahead, *follow_ups, *worded):
        hits.setdefault(hit.id, hit)
    return tuple(hits.values())[:limit]


def nothing_failed(reading: Reading) -> bool:
    """Return whether a text is a log that contains neither a failure nor a question from a user."""
    failure = reading.failure
    if not failure.is_log or failure.outcome is Outcome.FAILED:
        return False
    if failure.outcome is Outcome.UNKNOWN:
        progress = failure.progress is not None and len(reading.lines) >= FEW_LINES
        return (progress or len(reading.lines) >= LEAST_LOG) and not (reading.odd or reading.last_words)
    return len(reading.lines) > 1


def _of_a_release(by_id: dict[str, Hit], reading: Reading) -> Iterator[Hit]:
    """Yield the entry that explains a missing name, if the name exists only in some releases of the library."""
    raised, skew = reading.failure.exception, explain(reading.failure)
    if raised is None or skew is None or skew.change in {Change.PRESENT, Change.NEVER}:
        return
    # Lightning has its own entry for removed hooks. A keyword error is often caused by two incompatible libraries.
    key = "STK-042" if skew.package == "lightning" else "STK-016" if skew.kind in {"keyword", "argument"} else "STK-001"
    if key in by_id:
        line = MatchedLine(number=raised.line, text=f"{raised.type}: {raised.message}"[:400])
        yield by_id[key].model_copy(update={"score": SIGNATURE_SCORE, "how": "signature", "lines": (line,)})


def _searched_part(query: str, reading: Reading) -> str:
    """Return the part of a text to search by words: the end of a plain log, or the main part of any other text."""
    failure = reading.failure
    if failure.exception is not None and all(line.text[:1].isspace() for line in reading.lines[:-1]):
        return reading.lines[-1].text  # the lines above it are code
    if not failure.is_log or len(reading.lines) < LEAST_LOG:
        bare = failure.exception is not None and not failure.exception.message
        return f"{gist(query)}\n{reading.source}" if bare else gist(query)
    if failure.exception is None:
        return "\n".join(dict.fromkeys((*(line.text for line in failure.device), *reading.last_words))) or gist(query)
    raised = (failure.exception, *reversed(failure.chain))
    # Also search for the library functions that were called, because a message such as "timed out" does not name the
    # operation.
    frames = reading.primary.frames if reading.primary else ()
    calls = dict.fromkeys(f"{one.package} {one.function}" for one in frames[-MAX_CALLS:] if one.package)
    raised_by = "" if failure.exception.message else reading.source
    return "\n".join((*(f"{one.type}: {one.message[:400]}" for one in raised), raised_by, " ".join(calls)))


def both_ends(query: str) -> str:
    """Shorten a long query to its beginning and its end."""
    query = query if len(query) <= MAX_QUERY else f"{query[:HEAD]}\n{query[HEAD - MAX_QUERY :]}"
    lines = query.splitlines()
    if len(lines) <= MAX_LINES:
        return query
    return "\n".join((*lines[: MAX_LINES // 2], *lines[-MAX_LINES // 2 :]))


def _matches_by_words(index: Index, words: str) -> Iterator[Hit]:
    """Yield the matches by words, best first, with only the best section of each page."""
    pages: set[str] = set()
    for score, coverage, document in index.ranked(words):
        hit = document.hit
        # A result needs a high score and some coverage of the query, or a lower score and coverage of most of the
        # query.
        fits = any(score >= least and coverage >= share for least, share in FITS)
        if not fits or (hit.kind == "page" and hit.page in pages):
            continue
        if hit.kind == "page":
            pages.add(hit.page)
        yield hit.model_copy(update={"score": round(score, 2)})


def _texts(catalogue: Catalogue) -> Iterator[tuple[Hit, dict[str, str], dict[str, float]]]:
    """Yield (result, text by field, weight by field) for every entry, and for every level-2 section of other pages."""
    for g in catalogue.gotchas.values():
        hit = Hit(
            id=g.id, kind="gotcha", title=g.title, page=g.page, score=0, how="words", summary=g.symptom, fix=g.fix
        )
        yield (
            hit,
            {
                "title": g.title,
                "aliases": " . ".join(g.aliases),
                "symptom": g.symptom,
                "examples": " . ".join(g.examples),
                "scope": " ".join(g.scope),
                "cause": g.cause,
                "fix": g.fix,
                "prose": g.prose,
            },
            GOTCHA_FIELDS,
        )
    for page in catalogue.pages.values():
        # For a page with entries, only the entries are indexed. `decisions.py` finds decision lists by words or by
        # entries.
        for heading, body in _sections(page.body) if page.prefix is None and page.path != DECISIONS else ():
            key = page.path if not heading else f"{page.path}#{'-'.join(heading.lower().split())}"
            title, lead = heading or page.title, " ".join(body.split())[:300]
            hit = Hit(id=key, kind="page", title=title, page=page.path, score=0, how="words", summary=lead)
            titled = f"{page.title} . {'' if heading else page.summary}"
            yield hit, {"title": titled, "heading": heading, "body": body}, SECTION_FIELDS


def _sections(body: str) -> Iterator[tuple[str, str]]:
    """Yield (heading, text) for the level-2 sections; the text before the first heading has an empty heading."""
    heading = ""
    lines: list[str] = []
    for line in body.splitlines():
        if line.startswith("## "):
            yield heading, "\n".join(lines)
            heading, lines = line[3:].strip(), []
        else:
            lines.append(line)
    yield heading, "\n".join(lines)
