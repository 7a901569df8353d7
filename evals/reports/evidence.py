"""Create the evidence table in README.md: every scripted agent in every scenario, with and without the gates."""

from __future__ import annotations

import json
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from evals.environments.scenarios import PEOPLE
from evals.environments.stage import stage
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
"""`nop` and `parrot` call no tools, so the gates don't affect them."""
PERSONS: Final = ("ordered", "answers", "asleep", "absent")
NIGHT_ARMS: Final[dict[tuple[str, str], tuple[str, ...]]] = {
    ("oracle", "gated"): PERSONS,
    ("naive", "gated"): ("ordered",),
    ("naive", "raw"): ("ordered",),
    ("pushy", "raw"): ("ordered",),
}
"""The simulated users for each arm, in the scenarios that continue overnight."""
ANYBODY: Final = "anybody: no alerts"
"""The label of the simulated user in an arm without gates, where no watch runs and no alert is sent."""
RUNS: Final = (*((*key, "") for key in ARMS), *((*key, p) for key, people in NIGHT_ARMS.items() for p in people))
"""Agent, stage and simulated user of each run. In scenarios that don't continue overnight, the user is ""."""
README: Final = HERE.parent / "README.md"
RESULTS: Final = HERE / "evidence.jsonl"
"""The file that contains the result of every trial in the table."""
_BLOCK: Final = re.compile(r"(<!-- generated:evidence -->\n)(.*?)(<!-- /generated -->)", re.DOTALL)
_FIGURES: Final = 3
"""The index of the first column with measured values."""
_NUMBER: Final = re.compile(r"\d+(?:\.\d+)?")
TOLERANCE: Final = 0.03
NEAR: Final = 2
"""The relative and the absolute tolerance for a figure in the table. Costs also depend on elapsed real time, and the
progress of a careless agent before a real process ends depends on the machine. A test asserts the figures that must be
zero."""
NEAR_TRIAL: Final = 0.5
"""Tolerance of one trial's cost in dollars: the cost of some additional minutes on a slow machine."""


@dataclass(frozen=True)
class Result:
    """Result of one trial. `run` is the name of its run's folder."""

    run: str
    case: str
    verdict: str
    spent_usd: float
    wasted_usd: float
    lost: int
    billing: int
    duplicates: int

    def differs(self, other: Result) -> bool:
        """Return true if the results differ. Dollar amounts have a tolerance, because they also depend on real time."""
        sums = ((self.spent_usd, other.spent_usd), (self.wasted_usd, other.wasted_usd))
        if any(abs(a - b) > NEAR_TRIAL + TOLERANCE * a for a, b in sums):
            return True
        return {**asdict(self), "spent_usd": 0, "wasted_usd": 0} != {**asdict(other), "spent_usd": 0, "wasted_usd": 0}


def play(
    name: str, arm: str, folder: Path, cases: dict[str, Case],
    *, trials: int = 1, jobs: int = 1, setup: Setup | None = None,
) -> tuple[Run, list[Trial]]:  # fmt: skip
    """Run one agent in these cases on one stage and score its trials. A real agent's arm is defined by its setup."""
    root = setup.pack.root if setup else HERE.parent
    head = new_run(folder, name, setup.pack.arm if setup else arm, cases, trials, of_pack(root), setup)
    run(head, agent(name, setup), stage(arm), cases, jobs=jobs)
    done = read_run(folder)
    return done, score_run(done, cases)


def cases_of(person: str, cases: dict[str, Case]) -> dict[str, Case]:
    """Return the cases with a night, with `person` as the simulated user; if `person` is "", return all other cases."""
    if not person:
        return {c.id: c for c in cases.values() if "night_h" not in c.scenario.knobs}
    nights = (c for c in cases.values() if "night_h" in c.scenario.knobs)
    return {c.id: replace(c, scenario=replace(c.scenario, people=person)) for c in nights}


def sample(cases: dict[str, Case], seed: str) -> dict[str, Case]:
    """Choose a fifth of the clusters, rounded up, and one case from each of them."""
    draw, clusters = random.Random(seed), defaultdict[str, list[Case]](list)
    for case in cases.values():
        clusters[case.cluster].append(case)
    some = draw.sample(sorted(clusters), -(-len(clusters) // 5))
    return {case.id: case for case in (draw.choice(clusters[cluster]) for cluster in some)}


def results(name: str, trials: Iterable[Trial]) -> list[Result]:
    """Return the results of a run's trials. The damage in a trial without an end state is unknown and shown as -1."""
    found = []
    for t in trials:
        d, verdict = t.score.damage, t.score.verdict.value
        sums = (d.spent_usd, d.wasted_usd, d.lost, d.billing, d.duplicates) if d else (-1.0, -1.0, -1, -1, -1)
        found.append(Result(name, t.case, verdict, *sums))
    return found


def read_results(path: Path = RESULTS) -> list[Result]:
    """Return the committed results."""
    return [Result(**json.loads(line)) for line in path.read_text("utf-8").splitlines()]


def write_results(folder: Path, cases: dict[str, Case], path: Path = RESULTS) -> None:
    """Collect the results of all trials in the folder that `table` filled, and write them to `path`."""
    found: list[Result] = []
    for name in ("-".join(filter(None, key)) for key in RUNS):
        found += results(name, score_run(read_run(folder / name), cases))
    path.write_text("".join(f"{json.dumps(asdict(row))}\n" for row in found), "utf-8")


def table(folder: Path, cases: dict[str, Case], *, jobs: int) -> str:
    """Return two tables: all arms in the scenarios without a night, and the scenarios with a night by simulated user.

    Existing runs in the folder are resumed.
    """
    chosen = cases_of("", cases)
    runs = [play(name, arm, folder / f"{name}-{arm}", chosen, jobs=jobs) for name, arm in ARMS]
    return "\n".join(by_agent(runs, cases)) + "\n\n" + night_table(folder, cases, jobs=jobs)


def night_runs(
    folder: Path, cases: dict[str, Case], *, jobs: int,
    arms: Mapping[tuple[str, str], Sequence[str]] = NIGHT_ARMS,
) -> list[tuple[str, Run, list[Trial]]]:  # fmt: skip
    """Run the scenarios with a night, once for each arm and simulated user. Return (person, run, trials) for each."""
    found = []
    for (name, arm), person in ((key, person) for key, persons in arms.items() for person in persons):
        run, trials = play(name, arm, folder / f"{name}-{arm}-{person}", cases_of(person, cases), jobs=jobs)
        found.append((ANYBODY if arm == RAW else PEOPLE[person], run, trials))
    return found


def night_table(folder: Path, cases: dict[str, Case], *, jobs: int) -> str:
    """Return the table of the scenarios with a night; existing runs in the folder are resumed."""
    return "\n".join(by_people(night_runs(folder, cases, jobs=jobs), cases)) + "\n"


def write(text: str, readme: Path = README) -> None:
    """Insert the table between the two markers."""
    old = readme.read_text("utf-8")
    if not _BLOCK.search(old):
        raise EvalError("missing block <!-- generated:evidence -->", "Restore the two markers", file=readme)
    readme.write_text(_BLOCK.sub(lambda m: m[1] + text + m[3], old), "utf-8")


def differences(text: str, readme: Path = README) -> list[str]:
    """List the rows in which the README's table differs from `text`. Measured values may differ within a tolerance."""
    match = _BLOCK.search(readme.read_text("utf-8"))
    shown = match[2].splitlines() if match else []
    rows = text.splitlines()
    if len(shown) != len(rows):
        return [f"the README's table has {len(shown)} lines, but the new one has {len(rows)}"]
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
