"""Parse a command that starts a job on several nodes: launcher, restarts and timeouts. The command is not run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Final, Literal

from gpuwarden.static_analysis.script import ScriptFacts
from gpuwarden.static_analysis.script_usage import Uses
from gpuwarden.static_analysis.static_eval import UNKNOWN

TORCHRUN: Final = frozenset({"torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate"})
HOROVOD: Final = frozenset({"horovodrun"})
LOADS: Final = (
    "load", "load_file", "load_state", "load_state_dict", "load_checkpoint", "load_model", "load_from_checkpoint",
    "from_checkpoint", "safe_open", "resume", "get_last_checkpoint", "get_checkpoint", "restore",
)  # fmt: skip
"""Unqualified names of functions and methods that read saved state."""
RESUMES: Final = frozenset({"resume_from_checkpoint", "ckpt_path", "resume", "resume_from", "load_checkpoint"})
"""Function arguments and command options that select saved state."""
TRAINER_TIMEOUT_S: Final = 1800.0
"""The default `ddp_timeout` in transformers."""


@dataclass(frozen=True)
class GroupLaunch:
    """The launch of a job on several nodes, parsed from its command. None means unknown or not given."""

    launcher: Literal["torchrun", "horovodrun", ""] = ""
    nodes: int | None = None
    restarts: int | None = None
    restores: bool | None = None
    timeout_s: float | None = None
    fewest: int | None = None
    workers: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)


def read_launch(words: Sequence[str], env: Mapping[str, str], script: ScriptFacts | None = None) -> GroupLaunch:
    """Return the launch that a command, its variables and its script describe."""
    names = {word.rpartition("/")[2] for word in words}
    launcher: Literal["torchrun", "horovodrun", ""] = (
        "torchrun" if names & TORCHRUN else "horovodrun" if names & HOROVOD else ""
    )
    given: dict[str, str] = {}
    for word, after in zip_longest(words, words[1:], fillvalue=""):
        if word.startswith("-") and len(word) > 1:
            name, equals, value = word.lstrip("-").partition("=")
            given[name.replace("-", "_")] = value if equals else after
    # The facts contain no imports if the command does not run a script.
    uses = script.uses if script is not None and not script.error and script.uses.imports else None
    return GroupLaunch(
        launcher=launcher,
        nodes=_most(given.get("nnodes") or given.get("num_machines")),
        restarts=_most(given.get("max_restarts")) if launcher == "torchrun" else None,
        restores=restores_state(uses, given),
        timeout_s=collective_timeout(uses, given),
        fewest=_most(given.get("min_np")),
        workers=_most(given.get("np") or given.get("num_proc")),
        env=dict(env),
    )


def _most(text: str | None) -> int | None:
    """Parse a number, or the upper end of a range such as `1:4`; None for other text."""
    found = re.fullmatch(r"(?:\d{1,6}:)?(\d{1,6})", text or "")
    return int(found[1]) if found else None


def restores_state(uses: Uses | None, given: Mapping[str, str]) -> bool | None:
    """Return whether a run loads saved state when it starts; None if no script was read."""
    if RESUMES & set(given):
        return True
    if uses is None:
        return None
    # `from_pretrained` loads only weights, and `load_dataset` loads only data; neither restores a run.
    asks = (c.kwargs.get(name) for c in uses.calls for name in RESUMES if name in c.kwargs)
    return any(value not in (None, False) for value in asks) or any(
        c.last in LOADS and "yaml" not in c.name and "json" not in c.name for c in uses.calls
    )


def collective_timeout(uses: Uses | None, given: Mapping[str, str]) -> float | None:
    """Return the timeout for collective operations in seconds; None if it is computed or is PyTorch's default."""
    value = given.get("ddp_timeout", "")
    if value.isdigit():
        return float(value)
    if uses is None:
        return None
    setting = uses.settings.get("ddp_timeout")
    if setting is not None:
        return float(setting.value) if isinstance(setting.value, int | float) else None
    for call in uses.calls:
        if call.last == "timedelta":
            unit = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0, "days": 86400.0}
            parts = [(unit[k], v) for k, v in call.kwargs.items() if k in unit]
            starts = [c for c in uses.calls if c.last == "init_process_group" and "timeout" in c.kwargs]
            if parts and starts and all(v is not UNKNOWN and isinstance(v, int | float) for _, v in parts):
                return sum(factor * float(v) for factor, v in parts)
    return TRAINER_TIMEOUT_S if uses.trainers and not uses.called("init_process_group") else None
