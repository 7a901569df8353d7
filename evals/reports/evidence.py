"""The product's evidence in README.md: every scripted agent through every world, with the gates and without them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from evals.environments.stage import stage
from evals.environments.worlds import PEOPLE, World, with_people
from evals.errors import EvalError
from evals.harness.runner import agent, new_run, run
from evals.harness.setup import Setup
from evals.scoring.cases import Case
from evals.scoring.digests import of_pack
from evals.scoring.outcome import RAW, by_agent, by_people
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
PERSONS: Final = ("ordered", "answers", "asleep", "absent")
NIGHT_ARMS: Final[dict[tuple[str, str], tuple[str, ...]]] = {
    ("oracle", "gated"): PERSONS,
    ("naive", "gated"): ("ordered",),
    ("naive", "raw"): ("ordered",),
    ("pushy", "raw"): ("ordered",),
}
"""Which persons each arm meets in the worlds that have a night."""
ANYBODY: Final = "anybody: no alerts"
"""The person of an arm without gates: no watch runs, so no alert is sent."""
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
    """Return two tables: of all arms in worlds without a night, and of the nights by what the person does.

    Runs that the folder already has are resumed.
    """
    nights = with_people(worlds, "absent")
    chosen = [c.id for c in cases.values() if c.world not in nights]
    runs = [play(name, arm, folder / f"{name}-{arm}", cases, worlds, chosen, jobs=jobs) for name, arm in ARMS]
    return "\n".join(by_agent(runs, cases)) + "\n\n" + night_table(folder, cases, worlds, jobs=jobs)


def night_runs(
    folder: Path, cases: dict[str, Case], worlds: dict[str, World], *, jobs: int,
    arms: Mapping[tuple[str, str], Sequence[str]] = NIGHT_ARMS,
) -> list[tuple[str, Run, list[Trial]]]:  # fmt: skip
    """Play the worlds that have a night with each of an arm's persons. Return (person, run, trials) of each."""
    found = []
    for (name, arm), person in ((key, person) for key, persons in arms.items() for person in persons):
        night = with_people(worlds, person)
        chosen = [c.id for c in cases.values() if c.world in night]
        run, trials = play(name, arm, folder / f"{name}-{arm}-{person}", cases, night, chosen, jobs=jobs)
        found.append((ANYBODY if arm == RAW else PEOPLE[person], run, trials))
    return found


def night_table(folder: Path, cases: dict[str, Case], worlds: dict[str, World], *, jobs: int) -> str:
    """Return the table of the nights; runs that the folder already has are resumed."""
    return "\n".join(by_people(night_runs(folder, cases, worlds, jobs=jobs), cases)) + "\n"


def write(text: str, readme: Path = README) -> None:
    """Put the table between the marks."""
    old = readme.read_text("utf-8")
    if not _BLOCK.search(old):
        raise EvalError("missing block <!-- generated:evidence -->", "Put the two marks back", file=readme)
    readme.write_text(_BLOCK.sub(lambda m: m[1] + text + m[3], old), "utf-8")


def differences(text: str, readme: Path = README) -> list[str]:
    """List where the table in the README differs from this one, row by row; measured values may differ a little."""
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
