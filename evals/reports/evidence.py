"""The product's evidence in README.md: every scripted agent through every world, with the gates and without them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from evals.environments.stage import stage
from evals.environments.worlds import World
from evals.errors import EvalError
from evals.harness.runner import agent, new_run, run
from evals.harness.setup import Setup
from evals.scoring.cases import Case
from evals.scoring.digests import of_pack
from evals.scoring.outcome import by_agent
from evals.scoring.surface import HERE
from evals.scoring.trials import Run, Trial, read_run, score_run

ARMS: Final = (
    ("oracle", "gated"),
    ("naive", "gated"),
    ("naive", "raw"),
    ("pushy", "gated"),
    ("pushy", "raw"),
    ("nop", "raw"),
    ("parrot", "raw"),
)
"""`nop` and `parrot` call nothing, so gates make no difference to them."""
README: Final = HERE.parent / "README.md"
_BLOCK: Final = re.compile(r"(<!-- generated:evidence -->\n)(.*?)(<!-- /generated -->)", re.DOTALL)
_FIGURES: Final = 3
"""The first column that was measured."""
_NUMBER: Final = re.compile(r"\d+(?:\.\d+)?")
TOLERANCE: Final = 0.03
NEAR: Final = 2
"""Dollars pass with real seconds too, and how far a careless agent gets before a real process ends differs from machine
to machine: a figure of the table may be off by this much. What must never be anything but zero, a test asserts."""


def play(
    name: str, arm: str, folder: Path, cases: dict[str, Case], worlds: dict[str, World], chosen: list[str],
    *, trials: int = 1, jobs: int = 1, setup: Setup | None = None,
) -> tuple[Run, list[Trial]]:  # fmt: skip
    """Play one agent on one stage, and score what it did. The arm of a real agent is the one it is set up for."""
    root = setup.pack.root if setup else HERE.parent
    head = new_run(folder, name, setup.pack.arm if setup else arm, chosen, trials, of_pack(root), setup)
    run(head, agent(name, setup), stage(arm), cases, worlds, jobs=jobs)
    done = read_run(folder)
    return done, score_run(done, cases)


def table(folder: Path, cases: dict[str, Case], worlds: dict[str, World], *, jobs: int) -> str:
    """The table of all arms over all cases; runs that are in the folder already are gone on with."""
    runs = [
        play(name, arm, folder / f"{name}-{arm}", cases, worlds, list(cases), jobs=jobs) for name, arm in ARMS
    ]  # fmt: skip
    return "\n".join(by_agent(runs, cases)) + "\n"


def write(text: str, readme: Path = README) -> None:
    """Put the table between the marks."""
    old = readme.read_text("utf-8")
    if not _BLOCK.search(old):
        raise EvalError("missing block <!-- generated:evidence -->", "Put the two marks back", file=readme)
    readme.write_text(_BLOCK.sub(lambda m: m[1] + text + m[3], old), "utf-8")


def differences(text: str, readme: Path = README) -> list[str]:
    """Where the table in the README is not this one, row by row: what was measured may differ a little."""
    match = _BLOCK.search(readme.read_text("utf-8"))
    shown = match[2].splitlines() if match else []
    rows = text.splitlines()
    if len(shown) != len(rows):
        return [f"{len(shown)} lines in the README, {len(rows)} now"]
    return [f"README: {a}\n   now: {b}" for a, b in zip(shown, rows, strict=True) if not _alike(a, b)]


def _alike(shown: str, now: str) -> bool:
    old, new = ([cell.strip() for cell in row.strip("|").split("|")] for row in (shown, now))
    if len(old) != len(new):
        return False
    for n, (a, b) in enumerate(zip(old, new, strict=True)):
        if a != b:
            a, b = a.removesuffix(" %"), b.removesuffix(" %")
            if n < _FIGURES or not (_NUMBER.fullmatch(a) and _NUMBER.fullmatch(b)):
                return False
            if abs(float(a) - float(b)) > NEAR + TOLERANCE * float(a):
                return False
    return True
