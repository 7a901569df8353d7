"""Represent next steps as values. The MCP server renders a step as a tool call, and the terminal as a command to paste.

Errors contain next steps, and the errors module is copied to machines, so this module must run on Python 3.8.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Iterable, List, Mapping, Tuple, Union  # noqa: UP035

Scalar = Union[str, int, float, bool, Tuple[str, ...], List[str]]  # noqa: UP006, UP007
"""A parameter's value. Lists are allowed in addition to tuples because JSON has only lists."""


class Action(str, Enum):  # noqa: UP042
    """Kinds of next steps."""

    __str__ = str.__str__

    SUBMIT = "submit"
    CHECK = "check"
    CANCEL = "cancel"
    PAUSE = "pause"
    RESUME = "resume"
    PULL = "pull"
    VERIFY = "verify"
    TEARDOWN = "teardown"
    APPROVE = "approve"
    HOLD = "hold"
    LIST_INSTANCES = "list_instances"
    SEARCH_REFERENCES = "search_references"
    LOOK_AT_REPO = "look_at_repo"
    SEARCH_DATASETS = "search_datasets"
    RETRY = "retry"
    SET_ARGUMENT = "set_argument"
    LEAVE_OUT_ARGUMENT = "leave_out_argument"
    SHOW_PROFILE = "show_profile"
    SHOW_NOTES = "show_notes"
    DOCTOR = "doctor"
    WATCH = "watch"
    USE_POLICY = "use_policy"
    SETUP = "setup"
    ALLOW_LOCAL = "allow_local"
    ADD_PASSKEY = "add_passkey"
    CONVERT_ROWS = "convert_rows"
    REHEARSE = "rehearse"
    MANUAL = "manual"


OF_A_JOB = frozenset(
    {Action.CHECK, Action.CANCEL, Action.PAUSE, Action.RESUME, Action.PULL, Action.VERIFY, Action.TEARDOWN}
)
"""Actions with a `job_id` parameter. VERIFY may have a `path` parameter instead."""


_FAN_OUT = re.compile(r"f[0-9a-f]{10}")


def is_fan_out(name: str) -> bool:
    """Return whether an id identifies a fan-out, and with it all of its jobs."""
    return _FAN_OUT.fullmatch(name) is not None


@dataclass(frozen=True)
class NextStep:
    """One recommended action.

    `purpose` is the end of the sentence that begins with the call, such as "to copy the existing outputs".
    `alternative` marks a step to take instead of the previous step. The `text` of a MANUAL step is a sentence for the
    user, without the name of a tool, option or command.
    """

    action: Action
    parameters: Mapping[str, Scalar] = field(default_factory=dict)
    purpose: str = ""
    alternative: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form, without empty fields."""
        whole = {
            "action": str(self.action),
            "parameters": {k: list(v) if isinstance(v, tuple) else v for k, v in self.parameters.items()},
            "purpose": self.purpose,
            "alternative": self.alternative,
        }
        return {name: value for name, value in whole.items() if value}


Hint = Union[str, NextStep, Iterable[Union[str, NextStep]]]  # noqa: UP007
"""The types of hints that callers may pass; a sentence becomes one MANUAL step."""


def do(action: Action, purpose: str = "", *, alternative: bool = False, **parameters: Scalar) -> NextStep:
    """Return the step for an action and its parameters."""
    return NextStep(action, parameters, purpose, alternative)


def steps(hint: Hint) -> tuple[NextStep, ...]:
    """Return a hint's next steps, without duplicates or empty sentences."""
    parts = (hint,) if isinstance(hint, (str, NextStep)) else tuple(hint)
    found: list[NextStep] = []
    for part in parts:
        step = do(Action.MANUAL, text=part) if isinstance(part, str) else part
        if part and step not in found:
            found.append(step)
    return tuple(found)


def read_steps(rows: Iterable[Mapping[str, Any]]) -> tuple[NextStep, ...]:
    """Return next steps from their JSON form. Steps whose action this version does not know are omitted."""
    known = (row for row in rows if row.get("action") in set(Action))
    return tuple(
        NextStep(Action(r["action"]), r.get("parameters", {}), r.get("purpose", ""), bool(r.get("alternative")))
        for r in known
    )


def for_job(found: Iterable[NextStep], job_id: str | None) -> tuple[NextStep, ...]:
    """Return the steps, with `job_id` added to those that refer to a job but have neither a job id nor a path."""
    return tuple(
        NextStep(s.action, {**s.parameters, "job_id": job_id}, s.purpose, s.alternative)
        if job_id and s.action in OF_A_JOB and not {"job_id", "path"} & set(s.parameters)
        else s
        for s in found
    )


def manual_text(found: Iterable[NextStep]) -> str:
    """Return the sentences of the MANUAL steps. Each interface renders the other steps in its own words."""
    return " ".join(str(step.parameters["text"]) for step in found if step.action is Action.MANUAL)


def approval(ticket: str | None) -> NextStep:
    """Return the step that asks the user to approve a ticket or a receipt."""
    return do(Action.APPROVE, ticket=ticket or "")
