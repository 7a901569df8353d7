"""Keeping the knowledge true: what needs a look, and drafts of new entries. Nothing here writes into the references."""

from __future__ import annotations

from datetime import date

from pydantic import BaseModel, Field

from gpuwarden.core.errors import BadRequest
from gpuwarden.data import data_dir
from gpuwarden.knowledge import shipped
from gpuwarden.knowledge.freshness import check
from gpuwarden.knowledge.proposal import Bar, draft
from gpuwarden.serve.replies import Reply


class IssueReply(BaseModel):
    """One thing to look at, at a place. `urgent` marks facts about money and destruction."""

    kind: str
    urgent: bool
    file: str
    line: int
    message: str


class IssuesReply(Reply):
    """What needs a person, the urgent first. Not ok when there is anything."""

    issues: list[IssueReply] = Field(default_factory=list)


class DraftReply(Reply):
    """A draft of an entry for a page, and the ids of entries that explain its lines already."""

    page: str
    text: str
    known: list[str] = Field(default_factory=list)


def look_over(today: date, months: int) -> IssuesReply:
    """Old facts, dead references, missing sources and broken entries in the references, the profiles and the skills."""
    if months < 0:
        raise BadRequest(f"months is {months}", "Give 0 or more.")
    found = check(data_dir("references"), today=today, months=months, more=(data_dir("profiles"), data_dir("skills")))
    rows = [IssueReply(**issue.model_dump()) for issue in found]
    if not rows:
        return IssuesReply(message=f"Nothing is older than {months} months, broken, or without a source.")
    return IssuesReply(
        ok=False,
        code="needs_attention",
        message=f"{len(rows)} thing(s) to look at, {sum(r.urgent for r in rows)} of them urgent.",
        hint="Ask the source again, correct the line, and set its month anew.",
        issues=rows,
    )


def propose(page: str, title: str, fields: dict[str, object], lines: tuple[str, ...], bar: Bar) -> DraftReply:
    """A draft for `page`, shown and never written. Raises BadRequest when the lesson is below the bar."""
    made = draft(shipped(), page, title, fields, lines, bar)
    told = f"{', '.join(made.known)} explain these lines already; is it really another failure?" if made.known else ""
    hint = f"When it is right, add it to {made.page} by hand."
    return DraftReply(page=made.page, text=made.text, known=list(made.known), message=told, hint=hint)
