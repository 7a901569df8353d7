"""The guard's corpora: dangerous and harmless commands that an agent may type, one per line. `␤` is a line break.

Commands of a platform with an emulator may be in its `PLATFORM` instead.

They were written with their labels from the vendors' documentation, before the guard existed. A line that starts with
`@tool` is a tool call: the tool's name, then its input as JSON.
"""

from __future__ import annotations

import json
from functools import cache
from itertools import count
from typing import Any
from unittest import mock

from clouds.platform import platforms
from counting import lines_run
from gpuwarden.interfaces.hooks.guard import limits
from gpuwarden.interfaces.hooks.guard.calls import Question, Rules, judged
from gpuwarden.interfaces.hooks.guard.declared import table
from gpuwarden.interfaces.hooks.guard.patterns import Patterns
from paths import TESTS

FOLDER = TESTS / "guard_spellings"
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
"""Rules for commands that are written in a test; the corpora use `rules`."""


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
    rows += [row for p in platforms() for row in {"hasty": p.hasty, "innocent": p.innocent}.get(name, ())]
    return [row.replace("␤", "\n") for row in rows if row.strip()]


def decisions(name: str) -> list[tuple[str, str]]:
    rows = (row.partition("\t") for row in spellings(name))
    return [(wanted, spelling) for wanted, _, spelling in rows]


def decided(spelling: str, rules: Rules) -> str:
    why = judged(event(spelling), rules)
    return "ask" if isinstance(why, Question) else "deny" if why else "allow"


def event(spelling: str) -> dict[str, Any]:
    if spelling.startswith("@tool "):
        _, name, given = spelling.split(" ", 2)
        return {"tool_name": name, "tool_input": json.loads(given), "cwd": f"{USER}/project"}
    return {"tool_name": "Bash", "tool_input": {"command": spelling}, "cwd": f"{USER}/project"}


def verdict(spelling: str) -> str | None:
    return judged(event(spelling), rules())


def bash(command: str) -> dict[str, Any]:
    return {"tool_name": "Bash", "tool_input": {"command": command}, "cwd": USER}


def shell(command: str, rules: Rules) -> str | None:
    return judged(bash(command), rules)


MOST_STEPS = 2_000_000
"""The maximum cost of a verdict; the most expensive known text costs 660,000."""


def steps(command: str) -> int:
    """Return the cost of a verdict: executed lines of Python, plus 100 per report of the parser."""
    counters: list[count[int]] = []

    def counter(start: int) -> count[int]:
        counters.append(count(start))
        return counters[-1]

    with mock.patch.object(limits, "count", counter):
        lines = lines_run(lambda: judged(bash(command), RULES))
    return lines + 100 * sum(next(counter) - 1 for counter in counters)
