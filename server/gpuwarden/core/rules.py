"""Rules in the style of lint rules: a rule is a decorated generator over frozen facts.

A rule's module contains one rule. Its docstring is its documentation: a title line, then the sections `Why:`,
`Example:` (Python that the rule reports) and `Instead:` (Python that passes). Rules do no I/O: a use case collects the
facts, and the rules read them.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, field_serializer, field_validator

from gpuwarden.core.guidance import Hint, NextStep, for_job, steps

Gate = Literal["submit", "teardown"]
F = TypeVar("F")


class Severity(StrEnum):
    """The severity of a finding.

    ERROR and UNKNOWN block the gate; UNKNOWN means that the check could not be performed.
    """

    ERROR = "error"
    UNKNOWN = "unknown"
    WARNING = "warning"
    INFO = "info"


BLOCKING = frozenset({Severity.ERROR, Severity.UNKNOWN})


class Failure(Protocol):
    """An error that can be converted to a finding, such as a `WardenError`."""

    message: str
    next_steps: tuple[NextStep, ...]
    retry: ClassVar[bool]


class Finding(BaseModel):
    """One result from a rule: the rule's id, the problem, and the steps that fix it."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    rule: str
    severity: Severity
    message: str
    fix: tuple[NextStep, ...] = ()

    @classmethod
    def of(cls, error: Failure, *, rule: str) -> Finding:
        """Return the finding for a check that failed with an error. Its severity is UNKNOWN if a retry may succeed."""
        severity = Severity.UNKNOWN if error.retry else Severity.ERROR
        return cls(rule=rule, severity=severity, message=error.message, fix=error.next_steps)

    @field_validator("fix", mode="before")
    @classmethod
    def _steps(cls, value: Any) -> Any:
        """Accept a plain sentence as a manual step, because older ledgers contain sentences."""
        return steps(value) if isinstance(value, (str, NextStep)) else value

    @field_serializer("fix")
    def _as_dicts(self, value: tuple[NextStep, ...]) -> list[dict[str, Any]]:
        return [step.as_dict() for step in value]

    @property
    def blocks(self) -> bool:
        """Return whether this finding alone makes the gate refuse the request."""
        return self.severity in BLOCKING


@dataclass(frozen=True)
class Found:
    """The raw result that a rule yields.

    `Rule.run` adds the id, and also the severity and the fix if they are not set here.
    """

    message: str
    fix: Hint = ""
    severity: Severity | None = None


@dataclass(frozen=True)
class Rule(Generic[F]):
    """One check in one gate. `why`, `example` and `instead` are sections of its docstring.

    Both examples are optional, because a rule from another package may have none.
    """

    id: str
    gate: Gate
    severity: Severity
    fix: tuple[NextStep, ...]
    title: str
    why: str
    example: str
    instead: str
    check: Callable[[F], Iterable[Found]]

    def run(self, facts: F) -> Iterator[Finding]:
        """Yield the rule's findings for `facts`.

        A step that refers to a job but has no job id gets the id from the facts.
        """
        for found in self.check(facts):
            yield Finding(
                rule=self.id,
                severity=found.severity or self.severity,
                message=found.message,
                fix=for_job(steps(found.fix) or self.fix, getattr(facts, "job_id", None)),
            )


_ID = re.compile(r"(PF|TD)-[A-Z]{2,6}-\d{3}")
_DOC = re.compile(
    r"(?P<title>.+?)\n\nWhy: (?P<why>.+?)(?:\n\nExample:\n(?P<example>.+?)\n\nInstead:\n(?P<instead>.+))?", re.DOTALL
)


def rule(id: str, *, gate: Gate, severity: Severity, fix: Hint) -> Callable[[Callable[[F], Iterable[Found]]], Rule[F]]:  # noqa: A002
    """Turn a generator function over facts into a `Rule`.

    Raises ValueError for an invalid id or an incomplete docstring.
    """
    if not _ID.fullmatch(id) or id.startswith("PF") != (gate == "submit"):
        form = f"{'PF' if gate == 'submit' else 'TD'}-AREA-000, where AREA has 2 to 6 capital letters"
        raise ValueError(f"{id!r} is not a valid rule id for the {gate} gate: use {form}")

    def wrap(check: Callable[[F], Iterable[Found]]) -> Rule[F]:
        doc = _DOC.fullmatch(inspect.getdoc(check) or "")
        if doc is None:
            raise ValueError(f"rule {id} needs a docstring with a title line and a Why: section")
        return Rule(
            id=id,
            gate=gate,
            severity=severity,
            fix=steps(fix),
            title=" ".join(doc["title"].split()),
            why=doc["why"].strip(),
            example=textwrap.dedent(doc["example"] or ""),
            instead=textwrap.dedent(doc["instead"] or ""),
            check=check,
        )

    return wrap


def run_rules(rules: Iterable[Rule[Any]], facts: object) -> list[Finding]:
    """Return all findings, most severe first, in a stable order."""
    order = list(Severity)
    findings = [finding for r in rules for finding in r.run(facts)]
    return sorted(findings, key=lambda f: (order.index(f.severity), f.rule, f.message))
