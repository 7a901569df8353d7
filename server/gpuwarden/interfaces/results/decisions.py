"""Replies about decision lists: the checks to run, and the outcomes of checks on a job's machine."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field

from gpuwarden.core.sanitize import line

if TYPE_CHECKING:
    from gpuwarden.knowledge.decisions import DecisionList
    from gpuwarden.lifecycle.monitoring.decision_checks import CheckOutcome


class OutcomeReply(BaseModel):
    """One possible outcome of a check: its condition `when`, its meaning, and the entries to read."""

    id: str
    when: str
    means: str
    see: list[str] = Field(default_factory=list)


class DecisionCheckReply(BaseModel):
    """One check: its command as a list of arguments, and the machine that runs it: `machine` (the job's machine),
    `login` (the login node) or `here`.
    """

    id: str
    question: str
    command: list[str]
    on: str
    reads: bool = False
    """Whether check_job runs this read-only check automatically while the job has problems."""
    outcomes: list[OutcomeReply]


class DecisionReply(BaseModel):
    """Ordered checks for a symptom with several causes. Stop at the first outcome that explains it."""

    id: str
    title: str
    checks: list[DecisionCheckReply]


class CheckOutcomeReply(BaseModel):
    """The outcome of one check on the job's machine. `list`, `check` and `outcome` are ids; `outcome` is unknown if the
    command returned no result.
    """

    list: str
    check: str
    outcome: str
    means: str = ""
    see: Sequence[str] = ()
    value: float | None = None
    why: str = ""


def decision_reply(found: DecisionList | None) -> DecisionReply | None:
    """Return a decision list as a reply."""
    if found is None:
        return None
    fields = {"id", "question", "command", "on", "reads", "outcomes"}
    checks = [check.model_dump(mode="json", include=fields) for check in found.checks]
    return DecisionReply(id=found.id, title=found.title, checks=[DecisionCheckReply.model_validate(c) for c in checks])


def outcome_reply(found: CheckOutcome) -> CheckOutcomeReply:
    """Return an outcome with its reason sanitized."""
    return CheckOutcomeReply(**{**found.model_dump(), "why": line(found.why, 100)})


def steps_of(reply: DecisionReply) -> Iterator[str]:
    """Yield a decision list as lines for a terminal."""
    for number, check in enumerate(reply.checks, 1):
        yield f"{number}. {check.question}"
        yield f"     {shlex.join(check.command)}" + ("" if check.on == "machine" else f"   ({check.on})")
        for outcome in check.outcomes:
            see = f" ({', '.join(outcome.see)})" if outcome.see else ""
            yield f"     {outcome.when}: {outcome.means}{see}"


def outcome_line(reply: CheckOutcomeReply) -> str:
    """Return an outcome as one line for a terminal."""
    value = "" if reply.value is None else f" at {reply.value:g}"
    message = reply.means or reply.why
    see = f" ({', '.join(reply.see)})" if reply.see else ""
    return f"{reply.list}/{reply.check}: {reply.outcome}{value}. {message}{see}"
