"""Render next steps for a model, as tool names with arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Final

from gpuwarden.core.guidance import Action, NextStep, Scalar
from gpuwarden.core.sanitize import line, plain
from gpuwarden.interfaces.results.base import sentence

TOOLS: Final = {
    Action.SUBMIT: "submit_job",
    Action.CHECK: "check_job",
    Action.CANCEL: "cancel_job",
    Action.PAUSE: "cancel_job",
    Action.RESUME: "cancel_job",
    Action.PULL: "pull_artifacts",
    Action.VERIFY: "verify_checkpoint",
    Action.TEARDOWN: "teardown_request",
    Action.LIST_INSTANCES: "list_instances",
    Action.SEARCH_REFERENCES: "search_references",
    Action.LOOK_AT_REPO: "hub_repo_details",
    Action.SEARCH_DATASETS: "dataset_search",
}
FIXED: Final[dict[Action, dict[str, Scalar]]] = {
    Action.PAUSE: {"action": "pause"},
    Action.RESUME: {"action": "resume"},
    Action.REHEARSE: {"rehearse": "true", "dry_run": "true"},
}
"""Arguments that select the action in a tool with several actions."""
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
        case Action.HOLD | Action.RESUME if step.action is Action.HOLD or "max_cost_usd" in given:
            return sentence(f"ask the user to run gpuwarden {_decision(step)} in a terminal", step)
        case Action.SHOW_PROFILE:
            return sentence(f"read {PROFILE_URI.format(name=plain(str(given['name'])))}", step)
        case Action.DOCTOR | Action.SHOW_NOTES | Action.WATCH:
            watch = "watch --install" if given.get("install") else "watch"
            command = {Action.DOCTOR: "doctor", Action.WATCH: watch}.get(step.action, "notes")
            return sentence(f"ask the user to run gpuwarden {command}", step)
        case Action.ALLOW_LOCAL | Action.SETUP | Action.ADD_PASSKEY:
            commands = {Action.SETUP: "setup", Action.ADD_PASSKEY: "passkey add NAME"}
            command = commands.get(step.action, "policy allow local")
            return sentence(f"ask the user to run gpuwarden {command} in a terminal", step)
        case Action.CONVERT_ROWS:
            words = f"{_value(given.get('name', 'NAME'))} {_value(given.get('path', 'PATH'))}"
            return sentence(f"run gpuwarden template convert {words} in a terminal", step)
        case Action.USE_POLICY:
            return sentence(f"ask the user to run gpuwarden policy use {_value(given.get('file', 'FILE'))}", step)
        case Action.SUBMIT | Action.REHEARSE:
            return sentence(_submission({**given, **FIXED.get(step.action, {})}), step)
    combined = {**given, **FIXED.get(step.action, {})}
    arguments = ", ".join(f"{name}={_value(value)}" for name, value in combined.items())
    return sentence(f"call {TOOLS[step.action]}" + (f" with {arguments}" if arguments else ""), step)


def _submission(given: Mapping[str, Scalar]) -> str:
    """Return the submit_job call, with the earlier call's arguments or with only a receipt."""
    changes = [f"{name}={_value(value)}" for name, value in given.items() if name != "receipt"]
    changes += [f"receipt={_value(given['receipt'])}"] if given.get("receipt") else []
    if given.get("receipt") and len(given) == 1:
        return f"call submit_job with {changes[0]}"
    call = ", ".join(["call submit_job with the same arguments", *changes])
    return call + (" and no receipt" if given.get("receipt") == "" else "")


def _argument(step: NextStep) -> str:
    name = str(step.parameters["name"])
    if step.action is Action.LEAVE_OUT_ARGUMENT:
        return f"leave out {name}"
    for key, words in (("add", "add {} to {}"), ("remove", "remove {} from {}")):
        if key in step.parameters:
            return words.format(_value(step.parameters[key]), name)
    if "at_least" in step.parameters:
        return f"set {name} to {_value(step.parameters['at_least'])} or more"
    if "at_most" in step.parameters:
        return f"set {name} to {_value(step.parameters['at_most'])} or less"
    return f"set {name}" + (f" to {_value(step.parameters['value'])}" if "value" in step.parameters else "")


def _decision(step: NextStep) -> str:
    """Return the terminal command for a user's decision to hold a machine or to raise the limits of a fan-out."""
    given, job = step.parameters, _value(step.parameters.get("job_id", "JOB"))
    if step.action is Action.HOLD:
        return f"hold {job}"
    options = {"max_cost_usd": "--max-cost", "max_machines": "--max-machines", "receipt": "--receipt"}
    limits = [f"{option} {_value(given[name])}" for name, option in options.items() if name in given]
    return " ".join(["fan-out --resume", *limits, job])


def _value(value: Scalar) -> str:
    """Return a value as JSON, or a plain word unquoted. Control characters in untrusted names are removed."""
    if isinstance(value, (tuple, list)):
        return json.dumps([plain(item) for item in value], ensure_ascii=False)
    text = plain(str(value))
    return text if _BARE.fullmatch(text) or not isinstance(value, str) else json.dumps(text, ensure_ascii=False)
