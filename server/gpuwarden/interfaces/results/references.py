"""Search the references, for the `search_references` tool and `gpuwarden search`."""

from __future__ import annotations

from pydantic import BaseModel, Field

from gpuwarden.core.errors import BadRequest
from gpuwarden.core.guidance import steps
from gpuwarden.core.sanitize import line
from gpuwarden.interfaces.mcp.resources import ENTRY_TEMPLATE, page_uri
from gpuwarden.interfaces.results import Result
from gpuwarden.interfaces.results.decisions import DecisionReply, decision_reply
from gpuwarden.interfaces.results.version_skew import SkewReply, skew_reply

MAX_HITS = 10
FEW = 3
"""Maximum number of lines in a symptom. A longer text counts as a log, and its words do not select a decision list."""
LEAD = "A match is a hint, not a proof."


class HitReply(BaseModel):
    """One search result in short form.

    `why` is the reason for the match, and `uri` is the full page's address. A `likely` match is right in most cases.
    """

    id: str
    title: str
    why: str
    certainty: str = "possible"
    summary: str
    fix: str = ""
    uri: str


class EntryReply(Result):
    """One known failure with all fields."""

    id: str
    title: str
    symptom: str
    cause: str
    fix: str
    examples: list[str]
    scope: list[str]
    source: list[str]
    verified: str
    see: dict[str, str]
    """Related entries: title by id."""
    uri: str


class SearchReply(Result):
    """The best matches, best first; empty if nothing matches."""

    hits: list[HitReply] = Field(default_factory=list)
    skew: SkewReply | None = None
    """The releases that contain a name that the log reports as missing."""
    decision: DecisionReply | None = None
    """Ordered checks for a symptom with several causes."""


def entry(key: str) -> EntryReply | None:
    """Return the entry with the given id or URI; None if the entry does not exist."""
    from gpuwarden.knowledge import shipped

    catalogue = shipped()
    found = catalogue.gotchas.get(key.strip().upper().removeprefix(ENTRY_TEMPLATE.format(id="").upper()))
    if found is None:
        return None
    return EntryReply(
        **{name: getattr(found, name) for name in ("id", "title", "symptom", "cause", "fix", "verified")},
        examples=list(found.examples),
        scope=list(found.scope),
        source=list(found.source),
        see={other: catalogue.gotcha(other).title for other in found.see},
        uri=page_uri(found.page),
        next=steps("A match is a hint, not a proof: confirm it in your log and script."),
    )


def look_up(query: str, limit: int = 5) -> SearchReply:
    """Search the bundled references. If a text is very long, only its beginning and end are read.

    Raises BadRequest for an empty query or a limit out of range.
    """
    from gpuwarden.knowledge import search, shipped
    from gpuwarden.knowledge.decisions import for_entries, for_words
    from gpuwarden.knowledge.failure import Reading
    from gpuwarden.knowledge.search import both_ends, nothing_failed
    from gpuwarden.knowledge.version_skew import explain

    if not query.strip():
        raise BadRequest("the query is empty", "Describe a symptom in any words, or pass an entry's id or log lines.")
    if not 1 <= limit <= MAX_HITS:
        raise BadRequest(f"limit is {limit}", f"Pass a limit from 1 to {MAX_HITS}.")
    query = both_ends(query)
    hits = search(shipped(), query, limit)
    reading = Reading(query)
    skew = skew_reply(explain(reading.failure))
    if not hits and nothing_failed(reading):
        return SearchReply(
            code="nothing_failed",
            message="The log contains no failure.",
            next=steps("If the run hangs or slows down, search for a description of that symptom."),
        )
    best = [hit.id for hit in hits[:1] if hit.certainty != "likely"]
    decision = decision_reply(for_entries(best) or (for_words(query) if len(reading.lines) <= FEW else None))
    if not hits and skew is None and decision is None:
        return SearchReply(
            code="nothing_fits",
            message="Nothing in the references matches. This does not mean that nothing is wrong.",
            next=steps("Search for the exact log line, or describe the symptom in other words."),
        )
    rows = []
    for hit in hits:
        why = f"its words match (score {hit.score:g})"
        if hit.how == "id":
            why = "the query contains its id"
        elif hit.how == "signature" and hit.lines:
            why = f"its signature matches: {line(hit.lines[0].text, 160)}"
        summary, fix = line(hit.summary, 300), line(hit.fix, 400)
        rows.append(
            HitReply(
                id=hit.id,
                title=hit.title,
                why=why,
                certainty=hit.certainty,
                summary=summary,
                fix=fix,
                uri=page_uri(hit.page),
            )
        )
    return SearchReply(hits=rows, skew=skew, decision=decision, next=steps(LEAD))
