"""Report issues in the references, and draft new entries, without changing the references."""

from __future__ import annotations

from dataclasses import replace
from datetime import date

from pydantic import BaseModel, Field

from gpuwarden.core.errors import BadRequest
from gpuwarden.core.plural import counted
from gpuwarden.core.sanitize import fence, named
from gpuwarden.data import data_dir
from gpuwarden.interfaces.results import Result
from gpuwarden.knowledge import shipped
from gpuwarden.knowledge.freshness import check
from gpuwarden.knowledge.proposal import TO_SAY, LessonClaims, draft, home_of, sketch
from gpuwarden.lifecycle.monitoring.postmortem import Lesson


class IssueReply(BaseModel):
    """One issue on one line of a file. `urgent` is true if the fact is about costs or data loss."""

    kind: str
    urgent: bool
    file: str
    line: int
    message: str


class IssuesReply(Result):
    """Issues, urgent ones first. `ok` is false if there are any issues."""

    issues: list[IssueReply] = Field(default_factory=list)


class DraftReply(Result):
    """A draft entry for a page, and the ids of the entries that already explain the same log lines."""

    page: str
    text: str
    known: list[str] = Field(default_factory=list)


class LessonReply(DraftReply):
    """The evidence about a failed job, and a draft entry that is based on it. Untrusted text is fenced.

    `complete` is true if the draft is a complete entry. `missing` lists the criteria that the draft does not meet, and
    `doubts` lists the gaps in the evidence.
    """

    complete: bool
    job: str
    platform: str
    lines: str
    versions: list[str] = Field(default_factory=list)
    again: list[str] = Field(default_factory=list)
    fixed_by: str | None = None
    changes: str = ""
    missing: list[str] = Field(default_factory=list)
    doubts: list[str] = Field(default_factory=list)


def check_references(today: date, months: int) -> IssuesReply:
    """List outdated facts, broken links, missing sources and invalid entries in references, profiles and skills."""
    if months < 0:
        raise BadRequest(f"months is {months}", "Pass 0 or more.")
    found = check(data_dir("references"), today=today, months=months, more=(data_dir("profiles"), data_dir("skills")))
    rows = [IssueReply(**issue.model_dump()) for issue in found]
    if not rows:
        return IssuesReply(message=f"All entries are valid, have a source and are at most {months} months old.")
    return IssuesReply(
        ok=False,
        code="needs_attention",
        message=f"{counted(len(rows), 'issue')} to check, {sum(r.urgent for r in rows)} of them urgent.",
        hint="Check the source, correct the line, and update its month.",
        issues=rows,
    )


def propose_from(
    lesson: Lesson, page: str | None, title: str, fields: dict[str, object], claims: LessonClaims
) -> LessonReply:
    """Return the evidence about a job and a draft entry that is based on it, without writing any file.

    The draft is a complete entry if title, symptom, cause, fix and source are given and all criteria are met.
    """
    claims = replace(claims, reproduced=claims.reproduced or bool(lesson.again))
    catalogue, given = shipped(), {key: value for key, value in fields.items() if value}
    home = page or home_of(catalogue, lesson.lines)
    missing = claims.missing() + [f"{key} is not given" for key in TO_SAY if key not in given]
    missing += [] if title else ["title is not given"]
    if missing:
        made = sketch(catalogue, home, given, lesson.lines)
    else:
        made = draft(catalogue, home, title, given, lesson.lines[:1], claims)
    label = f"job {lesson.job.id}"
    known = list(dict.fromkeys((*lesson.known, *made.known)))
    return LessonReply(
        page=made.page,
        text=fence(made.text, f"a draft with lines of {label}", limit=8_000, keep="start"),
        known=known,
        message=f"{', '.join(known)} already explain this; check that this failure is different" if known else "",
        hint=f"Review the draft, then add it to {made.page}."
        if not missing
        else "Pass the missing fields, then retry.",
        complete=not missing,
        job=lesson.job.id,
        platform=lesson.job.spec.platform,
        lines=fence("\n".join(lesson.lines), f"the log of {label}") if lesson.lines else "",
        versions=[named(v) for v in lesson.versions],
        again=list(lesson.again),
        fixed_by=lesson.fixed_by.id if lesson.fixed_by else None,
        changes=fence(lesson.changes, "changes between the jobs", limit=6_000, keep="start") if lesson.changes else "",
        missing=missing,
        doubts=lesson.doubts,
    )


def propose(
    page: str, title: str, fields: dict[str, object], lines: tuple[str, ...], claims: LessonClaims
) -> DraftReply:
    """Return a draft for `page`, without writing it. Raises BadRequest if the entry does not meet the criteria."""
    made = draft(shipped(), page, title, fields, lines, claims)
    message = (
        f"{', '.join(made.known)} already explain these lines; check that this failure is different"
        if made.known
        else ""
    )
    hint = f"Review the draft, then add it to {made.page} by hand."
    return DraftReply(page=made.page, text=made.text, known=list(made.known), message=message, hint=hint)
