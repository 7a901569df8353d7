"""Decision lists: ordered checks for symptoms with several causes.

A list is a block ```` ```yaml decision ```` under a level-2 heading in `references/decisions.md`. A check has a
command, given as an argument list and never as shell text, and a list of outcomes. The command of a check with `reads`
changes nothing and terminates without input; a number or a pattern in its output decides the outcome. The user decides
the outcome of all other checks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from functools import cache
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from gpuwarden.core.errors import BadRequest
from gpuwarden.core.models import Frozen
from gpuwarden.data import data_dir
from gpuwarden.frontmatter import parse_yaml, validate
from gpuwarden.knowledge.observations import Sign

PAGE = "decisions.md"
OPENING = "```yaml decision"
READERS = {
    "cat": r"/(?:proc|sys/fs/cgroup)/(?:[\w.]*\w/)*\w[\w.]*",
    "df": r"--output=\w+|\{folder\}|/tmp|/dev/shm",
    "dmesg": r"--level=[a-z,]+",
    "free": r"--bytes",
    "getent": r"hosts|\w[\w.-]*",
    "nvidia-smi": r"--query(?:-gpu=[\w.,]+)?|--display=[A-Z,]+|--format=csv,noheader(?:,nounits)?",
    "ps": r"-eo|[a-z]+=(?:,[a-z]+=)*",
}
"""The programs that check_job may run, with the arguments allowed for each.

They change nothing and always terminate.
"""
MAX_TEXT, MAX_ROW = 16 << 10, 400
"""The maximum number of characters that are searched at the end of the output, and in each line.

A machine may return any text, so these limits and the removal of blank lines bound the time for matching a pattern.
"""
PLACEHOLDERS = frozenset({"folder", "job", "engine", "pid", "script"})
_PLACEHOLDER = re.compile(r"(?<!%)\{(\w+)\}")
Words = Annotated[str, Field(min_length=3, max_length=200)]
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")]


class CommandHost(StrEnum):
    """The machine on which a command runs."""

    MACHINE = "machine"
    LOGIN = "login"
    HERE = "here"


class Outcome(Frozen):
    """One possible result of a check. `when` describes it for the user; `pattern`, `least` and `most` are tests, all of
    which must pass.

    In a check with `reads`, an outcome without a test applies if no other outcome matches.
    """

    id: Name
    when: Words
    means: Words
    see: tuple[str, ...] = ()
    pattern: str = ""
    least: float | None = None
    most: float | None = None

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, value: str) -> str:
        re.compile(value)
        return value

    def fits(self, text: str, number: float | None) -> bool:
        """Return whether a command's output, and the number in it, pass the tests."""
        limited = self.least is not None or self.most is not None
        if limited and number is None:
            return False
        above = self.least is None or (number is not None and number >= self.least)
        below = self.most is None or (number is not None and number <= self.most)
        return above and below and (not self.pattern or re.search(self.pattern, text) is not None)


class Check(Frozen):
    """One question, the command whose output answers it, and the outcomes in the order in which they are tested.

    `value` is a pattern that finds numbers in the output, the largest of which is used. It has one group, or the groups
    `part` and `whole` for a percentage.
    """

    id: Name
    question: Words
    command: tuple[str, ...] = Field(min_length=1)
    on: CommandHost = CommandHost.MACHINE
    reads: bool = False
    value: str = ""
    outcomes: tuple[Outcome, ...] = Field(min_length=2)

    @model_validator(mode="after")
    def _consistent(self) -> Check:
        names = {name for part in self.command for name in _PLACEHOLDER.findall(part)}
        if unknown := names - PLACEHOLDERS:
            raise ValueError(f"{self.id}: unknown placeholder {', '.join(sorted(unknown))}")
        if len({one.id for one in self.outcomes}) < len(self.outcomes):
            raise ValueError(f"{self.id}: two outcomes have the same id")
        if any(one.least is not None or one.most is not None for one in self.outcomes) != bool(self.value):
            raise ValueError(f"{self.id}: `value` must be set if, and only if, an outcome has `least` or `most`")
        if self.reads:
            program, *arguments = self.command
            allowed = READERS.get(program)
            known = allowed is not None and all(re.fullmatch(allowed, part) for part in arguments)
            if not (known and names <= {"folder"} and self.on is CommandHost.MACHINE):
                raise ValueError(f"{self.id}: this command may change something, or needs a value that is not known")
        return self

    def number(self, text: str) -> float | None:
        """Return the largest finite number in a command's output, or None if it has none."""
        found = []
        for match in re.finditer(self.value, text) if self.value else ():
            groups = match.groupdict()
            if "whole" not in groups:
                found.append(float(match[1]))
            elif whole := float(groups["whole"]):
                found.append(100 * float(groups["part"]) / whole)
        return max((number for number in found if math.isfinite(number)), default=None)

    def judge(self, text: str, exit_code: int = 0) -> tuple[Outcome | None, float | None]:
        """Return the first outcome that matches a command's output, and the number on which it is based.

        If the command failed, only outcomes with a pattern are tested.
        """
        text = "\n".join(row[:MAX_ROW] for row in text[-MAX_TEXT:].splitlines() if row.strip())
        number = self.number(text)
        tested = [one for one in self.outcomes if one.pattern or one.least is not None or one.most is not None]
        rest = next((one for one in self.outcomes if one not in tested), None)
        if exit_code:
            tested, rest = [one for one in tested if one.pattern], None
        if self.value and number is None:
            return None, None
        return next((one for one in tested if one.fits(text, number)), rest), number


class DecisionList(Frozen):
    """The checks for one symptom. `entries` lists entries whose diagnosis can't distinguish the symptom's causes."""

    id: Name
    title: str = ""
    words: tuple[Annotated[str, Field(min_length=2, max_length=60)], ...] = Field(min_length=1)
    signs: tuple[Sign, ...] = ()
    entries: tuple[str, ...] = Field(min_length=1)
    checks: tuple[Check, ...] = Field(min_length=2)

    @property
    def links(self) -> Iterator[str]:
        """Yield the ids of all linked entries."""
        yield from self.entries
        for check in self.checks:
            for outcome in check.outcomes:
                yield from outcome.see


def read_lists(text: str, name: str = PAGE) -> tuple[DecisionList, ...]:
    """Return the lists on a page. Raises BadRequest, with the file and line, if a list is invalid."""
    lines = text.splitlines()
    found: list[DecisionList] = []
    heading = ""
    for number, line in enumerate(lines):
        heading = line[3:].strip() if line.startswith("## ") else heading
        if line.strip() != OPENING:
            continue
        end = next((n for n in range(number, len(lines)) if lines[n].strip() == "```"), None)
        if end is None:
            raise BadRequest(f"{name}:{number + 1}: the block is not closed", f"Correct {name}.")
        data: Any = parse_yaml("\n".join(lines[number + 1 : end]), name=name, first_line=number + 2)
        found.append(validate(DecisionList, data, name=name).model_copy(update={"title": heading}))
    return tuple(found)


@cache
def decision_lists() -> tuple[DecisionList, ...]:
    """Return the bundled lists."""
    return read_lists((data_dir("references") / PAGE).read_text(encoding="utf-8"))


def for_signs(signs: Iterable[Sign]) -> tuple[DecisionList, ...]:
    """Return the lists for a job's observed signs."""
    seen = set(signs)
    return tuple(one for one in decision_lists() if seen & set(one.signs))


def for_words(text: str) -> DecisionList | None:
    """Return the list that matches a symptom described in words, or None if the text contains no word from any list."""
    lowered = text.lower()
    found = ((word.lower(), one) for one in decision_lists() for word in one.words)
    fitting = [(len(word), one) for word, one in found if re.search(rf"(?<![a-z]){re.escape(word)}(?![a-z])", lowered)]
    return max(fitting, key=lambda pair: pair[0], default=(0, None))[1]


def for_entries(ids: Sequence[str]) -> DecisionList | None:
    """Return the first list that is linked to one of the entries, or None.

    `ids` starts with the best match.
    """
    return next((one for key in ids for one in decision_lists() if key in one.entries), None)
