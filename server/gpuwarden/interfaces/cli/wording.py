"""Format next steps for the terminal, as commands and options that can be pasted."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Final

from gpuwarden.core.guidance import Action, NextStep, Scalar, is_fan_out
from gpuwarden.core.sanitize import line, plain
from gpuwarden.interfaces.results.base import sentence

COMMANDS: Final = {
    Action.CHECK: "check",
    Action.CANCEL: "cancel",
    Action.PAUSE: "pause",
    Action.RESUME: "resume",
    Action.PULL: "pull",
    Action.VERIFY: "verify",
    Action.TEARDOWN: "teardown",
    Action.APPROVE: "approve",
    Action.HOLD: "hold",
    Action.LIST_INSTANCES: "instances",
    Action.SEARCH_REFERENCES: "search",
    Action.SHOW_PROFILE: "profiles",
    Action.SHOW_NOTES: "notes",
    Action.DOCTOR: "doctor",
    Action.WATCH: "watch",
    Action.USE_POLICY: "policy use",
    Action.SETUP: "setup",
    Action.ALLOW_LOCAL: "policy allow local",
    Action.ADD_PASSKEY: "passkey add",
    Action.CONVERT_ROWS: "template convert",
}
OPTIONS: Final = {
    "timeout_s": "--timeout",
    "estimate_s": "--estimate",
    "max_cost_usd": "--max-cost",
    "gpu_count": "--gpus",
    "disk_gb": "--disk",
    "inputs": "--input",
    "options": "--option",
    "alternatives": "--or",
    "outputs": "--output",
    "secrets": "--secret",
}
"""Options whose names differ from their arguments' names, keyed by argument."""
_OF_A_FAN_OUT: Final = {Action.CHECK: "fan-out", Action.RESUME: "fan-out --resume", Action.CANCEL: "fan-out --end"}
"""The commands for actions whose `job_id` is a fan-out's id."""
_PLACES: Final = {"job_id": "JOB", "ticket": "TICKET", "file": "FILE", "query": "QUERY", "path": "PATH", "name": "NAME"}
_POSITIONAL: Final = {
    Action.VERIFY: ("path",),
    Action.APPROVE: ("ticket",),
    Action.SEARCH_REFERENCES: ("query",),
    Action.USE_POLICY: ("file",),
    Action.ALLOW_LOCAL: (),
    Action.SETUP: (),
    Action.ADD_PASSKEY: ("name",),
    Action.LIST_INSTANCES: (),
    Action.SHOW_PROFILE: ("name",),
    Action.SHOW_NOTES: (),
    Action.DOCTOR: (),
    Action.WATCH: (),
    Action.CONVERT_ROWS: ("name", "path"),
}


def in_commands(steps: Sequence[NextStep]) -> str:
    """Return next steps as sentences with commands that can be pasted."""
    return " ".join(map(in_command, steps))


def option(name: str) -> str:
    """Return the `gpuwarden submit` option that sets a job spec field or a platform option."""
    family, dot, own = name.partition(".")
    if dot:
        return f"{OPTIONS[family]} {own}="
    return OPTIONS.get(name, f"--{name.replace('_', '-')}")


def in_command(step: NextStep) -> str:
    """Return one next step as a sentence."""
    given = step.parameters
    match step.action:
        case Action.MANUAL:
            return line(given["text"], 800)
        case Action.RETRY:
            return sentence("run this again", step)
        case Action.SET_ARGUMENT | Action.LEAVE_OUT_ARGUMENT:
            return sentence(_argument(step), step)
        case Action.SUBMIT:
            # An empty value, such as an empty receipt, means that the option is omitted.
            changes = " ".join(_options({name: value for name, value in given.items() if value != ""}))
            if given.get("receipt") and len(given) == 1:  # the receipt already contains the arguments
                return sentence(f"run `gpuwarden submit {changes}`", step)
            call = "run the same `gpuwarden submit` again" + (f" with `{changes}`" if changes else "")
            return sentence(call + (" without --receipt" if given.get("receipt") == "" else ""), step)
        case Action.REHEARSE:
            return sentence("run the same `gpuwarden submit` again with `--rehearse --dry-run`", step)
        case Action.LOOK_AT_REPO | Action.SEARCH_DATASETS:
            return sentence("look on huggingface.co", step)
    return sentence(f"run `{command(step)}`", step)


def command(step: NextStep) -> str:
    """Return the command line for a step, quoted for a POSIX shell. Unknown values become placeholders in capital
    letters.
    """
    names = _POSITIONAL.get(step.action, ("job_id",))
    if "job_id" in step.parameters:
        names = ("job_id",)
    words = [_quoted_value(step.parameters[name]) if name in step.parameters else _PLACES[name] for name in names]
    options = _options({name: value for name, value in step.parameters.items() if name not in names})
    dash = ["--"] if any(word.startswith(("-", "'-")) for word in words) else []
    fan_out = is_fan_out(str(step.parameters.get("job_id", ""))) and step.action in _OF_A_FAN_OUT
    name = _OF_A_FAN_OUT[step.action] if fan_out else COMMANDS[step.action]
    return " ".join(["gpuwarden", name, *options, *dash, *words])


def _options(given: Mapping[str, Scalar]) -> list[str]:
    """Return each parameter as an option. A list becomes one option per item, and true becomes a flag."""
    return [
        option(name) if item is True else f"{option(name)} {_quoted_value(item)}"
        for name, value in given.items()
        for item in (value if isinstance(value, (tuple, list)) else (value,))
    ]


def _argument(step: NextStep) -> str:
    name = option(str(step.parameters["name"]))
    if step.action is Action.LEAVE_OUT_ARGUMENT:
        return f"leave out {name}"
    for key, verb in (("add", "add"), ("remove", "remove"), ("value", "set")):
        if key in step.parameters:
            return f"{verb} `{name} {_quoted_value(step.parameters[key])}`"
    if "at_least" in step.parameters:
        return f"set `{name} {_quoted_value(step.parameters['at_least'])}` or more"
    if "at_most" in step.parameters:
        joint = "" if name.endswith("=") else " "
        return f"set `{name}{joint}{_quoted_value(step.parameters['at_most'])}` or less"
    return f"set {name}"


def _quoted_value(value: Scalar) -> str:
    """Quote one value. Line breaks and escape characters are replaced by U+FFFD."""
    return shlex.quote(plain(str(value)).replace("\n", "\ufffd"))
