"""Next steps in the words of a model: tools and their arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final

from gpuwarden.core.guidance import Action, NextStep, Scalar
from gpuwarden.core.sanitize import line, plain
from gpuwarden.interfaces.results.base import sentence

TOOLS: Final = {
    Action.SUBMIT: "submit_job",
    Action.CHECK: "check_job",
    Action.CANCEL: "cancel_job",
    Action.PULL: "pull_artifacts",
    Action.VERIFY: "verify_checkpoint",
    Action.TEARDOWN: "teardown_request",
    Action.LIST_INSTANCES: "list_instances",
    Action.SEARCH_REFERENCES: "search_references",
    Action.LOOK_AT_REPO: "hub_repo_details",
    Action.SEARCH_DATASETS: "dataset_search",
}
PROFILE_URI: Final = "gpuwarden://profiles/{name}.md"
_BARE: Final = re.compile(r"[\w./:@~+-]+")


def in_calls(steps: Sequence[NextStep]) -> str:
    """Return next steps as sentences that name tools and arguments."""
    return " ".join(map(in_call, steps))


def in_call(step: NextStep) -> str:
    """Return one next step as a sentence."""
    given = step.parameters
    match step.action:
        case Action.MANUAL:
            return line(given["text"], 800)
        case Action.RETRY:
            return sentence("call this again", step)
        case Action.SET_ARGUMENT | Action.LEAVE_OUT_ARGUMENT:
            return sentence(_argument(step), step)
        case Action.APPROVE:
            proof = "--without-proof " if given.get("without_proof") else ""
            return sentence(
                f"ask the user to run gpuwarden approve {proof}{_value(given['ticket'])} in a terminal", step
            )
        case Action.KEEP:
            return sentence(
                f"ask the user to run gpuwarden keep {_value(given.get('job_id', 'JOB'))} in a terminal", step
            )
        case Action.SHOW_PROFILE:
            return sentence(f"read {PROFILE_URI.format(name=plain(str(given['name'])))}", step)
        case Action.DOCTOR | Action.SHOW_NOTES:
            command = "doctor" if step.action is Action.DOCTOR else "notes"
            return sentence(f"ask the user to run gpuwarden {command}", step)
        case Action.ALLOW_LOCAL:
            return sentence("ask the user to run gpuwarden policy allow local in a terminal", step)
        case Action.CONVERT_ROWS:
            words = f"{_value(given.get('name', 'NAME'))} {_value(given.get('path', 'PATH'))}"
            return sentence(f"run gpuwarden template convert {words} in a terminal", step)
        case Action.USE_POLICY:
            return sentence(f"ask the user to run gpuwarden policy use {_value(given.get('file', 'FILE'))}", step)
        case Action.SUBMIT:
            # The arguments are those of the earlier call; an empty receipt means that it is left out.
            changes = [f"{name}={_value(value)}" for name, value in given.items() if name != "receipt"]
            changes += [f"receipt={_value(given['receipt'])}"] if given.get("receipt") else []
            call = ", ".join(["call submit_job with the same arguments", *changes])
            return sentence(call + (" and no receipt" if given.get("receipt") == "" else ""), step)
    arguments = ", ".join(f"{name}={_value(value)}" for name, value in given.items())
    return sentence(f"call {TOOLS[step.action]}" + (f" with {arguments}" if arguments else ""), step)


def _argument(step: NextStep) -> str:
    name = str(step.parameters["name"])
    if step.action is Action.LEAVE_OUT_ARGUMENT:
        return f"leave out {name}"
    for key, words in (("add", "add {} to {}"), ("remove", "remove {} from {}")):
        if key in step.parameters:
            return words.format(_value(step.parameters[key]), name)
    if "at_least" in step.parameters:
        return f"set {name} to {_value(step.parameters['at_least'])} or more"
    return f"set {name}" + (f" to {_value(step.parameters['value'])}" if "value" in step.parameters else "")


def _value(value: Scalar) -> str:
    """Return a value as JSON; a plain word stays as it is. Foreign names can't move a cursor."""
    if isinstance(value, (tuple, list)):
        return json.dumps([plain(item) for item in value], ensure_ascii=False)
    text = plain(str(value))
    return text if _BARE.fullmatch(text) or not isinstance(value, str) else json.dumps(text, ensure_ascii=False)
