"""Our sentences in the words of the command line. They are written for an agent, who has tools and their arguments.

Who types has commands and options, and who reads `--json` as well: at that door every sentence of ours goes through
`said`, so that what it says to do next can be typed as it stands.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, TypeVar

from pydantic import BaseModel

R = TypeVar("R", bound=BaseModel)

COMMANDS: Final = {
    "submit_job": "submit", "check_job": "check", "cancel_job": "cancel", "pull_artifacts": "pull",
    "verify_checkpoint": "verify", "teardown_request": "teardown", "list_instances": "instances",
    "search_references": "search",
}  # fmt: skip
OF_A_JOB: Final = frozenset({"check", "cancel", "pull", "verify", "teardown"})
OPTIONS: Final = {
    "timeout_s": "--timeout", "estimate_s": "--estimate", "max_cost_usd": "--max-cost", "gpu_count": "--gpus",
    "disk_gb": "--disk", "durable_storage": "--durable-storage", "max_restarts": "--max-restarts",
    "dry_run": "--dry-run", "job_id": "the job's id",
}  # fmt: skip
"""Arguments whose names are no ordinary words; the others are called alike."""
_TOOL: Final = re.compile(rf"(?:\b(C|c)all )?\b({'|'.join(COMMANDS)})\b(?: with this job_id)?")
_OPTION: Final = re.compile(rf"\b({'|'.join(OPTIONS)})\b")
_PHRASES: Final = (
    (re.compile(r"\b(?:with )?hub_repo_details or dataset_search\b|\bwith (?:hub_repo_details|dataset_search)\b"),
     "on huggingface.co"),
    (re.compile(r"\b(?:hub_repo_details|dataset_search)\b"), "huggingface.co"),
    (re.compile(r"\bsubmit the same arguments again with (?:this|the) receipt\b"),
     "run the same command again with --receipt{receipt}"),
    (re.compile(r"\bsubmit again with this receipt\b"), "run the same command again with --receipt{receipt}"),
    (re.compile(r"\bin(?:to)? `(output|input|secret)s`"), r"with --\1"),
    (re.compile(r"\bwith these paths in `also`"), "with --also for each of these paths"),
    (re.compile(r"`(output|input|secret)s`"), r"--\1"),
    (re.compile(r"`(env|gpu|receipt|platform)`"), r"--\1"),
    (re.compile(r"\bCall (?:this )?again\b"), "Run this again"),
    (re.compile(r"\bcall (?:this )?again\b"), "run this again"),
)  # fmt: skip
_TEXTS: Final = ("message", "hint", "fix", "not_checked", "findings")
"""The fields of a reply that are ours to word. A log, a name or a reason is somebody else's."""


def said(text: str, job_id: str = "", receipt: str = "") -> str:
    """One sentence, with the job or the receipt that it is about where that is known."""

    def command(found: re.Match[str]) -> str:
        call, name = found[1], COMMANDS[found[2]]
        words = " ".join(["gpuwarden", name, *([job_id] if job_id and name in OF_A_JOB else [])])
        return f"{'Run ' if call == 'C' else 'run ' if call else ''}`{words}`"

    for phrase, words in _PHRASES:
        text = phrase.sub(words.format(receipt=f" {receipt}" if receipt else ""), text)
    return _OPTION.sub(lambda found: OPTIONS[found[1]], _TOOL.sub(command, text))


def in_commands(reply: R) -> R:
    """A reply with all its sentences as who types commands reads them."""
    return _worded(reply, {name: getattr(reply, name, None) or "" for name in ("job_id", "receipt")})


def _worded(model: R, about: dict[str, str]) -> R:
    return model.model_copy(update={k: _said(getattr(model, k), about) for k in _TEXTS if hasattr(model, k)})


def _said(value: Any, about: dict[str, str]) -> Any:
    if isinstance(value, str):
        return said(value, **about)
    if isinstance(value, BaseModel):
        return _worded(value, about)
    return [_said(item, about) for item in value] if isinstance(value, Sequence) else value
