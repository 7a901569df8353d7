"""The guard's corpora: spellings that a hasty agent types, and innocent ones. One a line; `␤` is a line break.

They were written from the vendors' documentation before the guard that judges them, labels included. A line that
starts with `@tool` is a call of a tool: its name, then its input as JSON.
"""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import peers
from gpuwarden.interfaces.hooks.guard.calls import Rules, judged
from gpuwarden.interfaces.hooks.guard.declared import table
from gpuwarden.interfaces.hooks.guard.patterns import Patterns
from peers import shlex_s

FOLDER = Path(__file__).with_name("guard_spellings")
USER = "/home/me"
HOME = f"{USER}/.local/share/gpuwarden"
CONFIG = f"{USER}/.config/gpuwarden"


@cache
def patterns() -> Patterns:
    return Patterns.of(json.loads(json.dumps(table())))


RULES = Rules(
    home="/data/gw",
    files=("/data/gw/ledger.db", "/etc/gw/policy.toml", "/etc/gw/profiles", "/data/gw/hooks"),
    runs=("/runs/live-1",),
    patterns=patterns(),
    user="/home/me",
)
"""Rules for commands that a test writes itself; `rules` are for the corpora."""


def rules(**more: Any) -> Rules:
    return Rules(
        home=HOME,
        files=(f"{HOME}/ledger.db", f"{CONFIG}/policy.toml", f"{CONFIG}/profiles", f"{HOME}/hooks"),
        runs=(f"{USER}/runs/live-1",),
        settings=(f"{USER}/.claude/settings.json", f"{USER}/.codex/hooks.json", f"{USER}/.cursor/hooks.json"),
        patterns=patterns(),
        user=USER,
        **more,
    )


def spellings(name: str) -> list[str]:
    rows = (FOLDER / f"{name}.txt").read_text("utf-8").splitlines()
    return [row.replace("␤", "\n") for row in rows if row.strip()]


def event(spelling: str) -> dict[str, Any]:
    if spelling.startswith("@tool "):
        _, name, given = spelling.split(" ", 2)
        return {"tool_name": name, "tool_input": json.loads(given), "cwd": f"{USER}/project"}
    return {"tool_name": "Bash", "tool_input": {"command": spelling}, "cwd": f"{USER}/project"}


def verdict(spelling: str) -> str | None:
    return judged(event(spelling), rules())


def shell(command: str, rules: Rules) -> str | None:
    return judged({"tool_name": "Bash", "tool_input": {"command": command}, "cwd": "/home/me"}, rules)


MOST_SHLEX = 8
"""How many times as long as `shlex` for 132 kB a verdict on any text may take; the slowest known takes 2.6 times."""


@cache
def most_cpu_s() -> float:
    """Return the most processor seconds that a verdict may take on this machine."""
    return MOST_SHLEX * shlex_s()


def cpu_s(command: str) -> float:
    """Return the processor's seconds that a verdict takes, at best of five where it takes long."""
    best = math.inf
    for _ in range(5):
        best = min(best, peers.cpu_s(lambda: shell(command, RULES), 1))
        if best < most_cpu_s():
            break
    return best
