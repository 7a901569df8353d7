"""README's evidence, reproduced: every scripted agent plays the scenarios with and without the gates.

`make prove` plays some cases with every agent, and `make evidence` plays all of them. The outcome of each trial is
compared with the committed results, and the table in README.md with their sum.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
from pathlib import Path

import pytest
from evals.reports.evidence import (
    PERSONS,
    README,
    RUNS,
    Result,
    cases_of,
    play,
    read_results,
    results,
    sample,
)
from evals.scoring.cases import load_cases
from evals.scoring.verdict import Verdict

from real_parts import REQUIRE_REAL

CASES = load_cases()
KNOWN = read_results()
ALL = os.environ.get("GPUWARDEN_EVIDENCE") == "all"
# CI plays the same cases each time; a manual run draws new ones.
SEED = os.environ.get("GPUWARDEN_EVIDENCE_SEED") or ("1" if REQUIRE_REAL else secrets.token_hex(4))


def known(agent: str, arm: str, person: str = "") -> dict[str, Result]:
    name = "-".join(filter(None, (agent, arm, person)))
    return {row.case: row for row in KNOWN if row.run == name}


@pytest.mark.long
@pytest.mark.prove
@pytest.mark.skipif(sys.platform == "win32", reason="scenarios run POSIX processes")
@pytest.mark.parametrize("key", RUNS, ids="-".join)
def test_every_trial_matches_its_committed_result(key: tuple[str, str, str], tmp_path: Path) -> None:
    agent, arm, person = key
    cases = cases_of(person, CASES)
    if not ALL:
        cases = sample(cases, f"{SEED}-{key}")
        print(f"GPUWARDEN_EVIDENCE_SEED={SEED}")
    run, trials = play(agent, arm, tmp_path / "-".join(filter(None, key)), cases)
    assert [(t.case, t.score.why) for t in trials if t.score.verdict is Verdict.INFRA] == []
    wanted = known(*key)
    now = results(run.folder.name, trials)
    assert [(wanted[row.case], row) for row in now if wanted[row.case].differs(row)] == []
    assert [row.case for row in now] == list(cases)


def test_every_run_and_case_is_committed_and_some_of_each_are_played() -> None:
    for agent, arm, person in RUNS:
        cases = cases_of(person, CASES)
        assert list(known(agent, arm, person)) == list(cases), "run `python -m evals evidence --jobs 2 --write-readme`"
        drawn = sample(cases, "any")
        assert drawn == sample(cases, "any") and drawn.items() <= cases.items()
        assert len({case.cluster for case in drawn.values()}) == len(drawn) == (1 if person else 3)


def test_the_readme_table_sums_the_committed_results() -> None:
    block = README.read_text("utf-8").partition("<!-- generated:evidence -->")[2].partition("<!-- /generated -->")[0]
    shown = [
        [cell.strip() for cell in row.strip("|").split("|")] for row in re.findall(r"^\| .*\d.*$", block, re.MULTILINE)
    ]
    rows = [list(known(*key).values()) for key in RUNS]
    assert len(shown) == len(RUNS)
    for cells, trials, (agent, arm, person) in zip(shown, rows, RUNS, strict=True):
        spent, wasted = (sum(getattr(r, k) for r in trials) for k in ("spent_usd", "wasted_usd"))
        counts = [str(sum(getattr(r, k) for r in trials)) for k in ("lost", "billing", "duplicates")]
        share = "-" if arm == "raw" else f"{100 * sum(r.verdict == 'pass' for r in trials) / len(trials):.0f} %"
        over = sum(max(0.0, r.spent_usd - float(CASES[r.case].limits["job_usd"])) for r in trials)
        if person:
            money = [f"{spent:.1f}", f"{wasted:.1f}", f"{100 * wasted / spent:.1f}"]
            assert cells[1:] == [agent, "no" if arm == "raw" else "yes", str(len(trials)), *money, *counts[:2]]
        else:
            money = [f"{spent:.0f}", f"{wasted:.0f}", f"{over:.0f}"]
            assert cells == [agent, "no" if arm == "raw" else "yes", str(len(trials)), share, *money, *counts]


def test_the_evidence_shows_less_damage_with_gates() -> None:
    for agent, arm, person in RUNS:
        if agent == "oracle":
            assert {row.verdict for row in known(agent, arm, person).values()} == {"pass"}
        if arm == "gated":
            assert sum(row.lost for row in known(agent, arm, person).values()) == 0
    for control in ("nop", "parrot"):
        assert "pass" not in {row.verdict for row in known(control, "raw").values()}

    def over(arm: str) -> float:
        return sum(max(0.0, r.spent_usd - float(CASES[r.case].limits["job_usd"])) for r in known("pushy", arm).values())

    # A cap asks before a launch. While canceled jobs' machines wait for the user, they bill in addition.
    assert over("gated") < 1 and sum(row.duplicates for row in known("pushy", "gated").values()) == 0
    assert over("raw") > 100 and sum(row.lost for row in known("pushy", "raw").values()) > 10
    assert sum(row.lost for row in known("naive", "raw").values()) > 0
    nights = {person: list(known("oracle", "gated", person).values()) for person in PERSONS}
    wasted = {p: sum(r.wasted_usd for r in rows) / sum(r.spent_usd for r in rows) for p, rows in nights.items()}
    assert wasted["ordered"] < 0.05 < wasted["answers"] < wasted["asleep"]


def test_a_different_outcome_counts_but_a_few_cents_do_not() -> None:
    row = Result("oracle-gated", "a", "pass", 10.0, 1.0, 0, 1, 0)
    assert not row.differs(Result("oracle-gated", "a", "pass", 10.4, 1.1, 0, 1, 0))
    for other in (
        Result("oracle-gated", "a", "fail", 10.0, 1.0, 0, 1, 0),
        Result("oracle-gated", "a", "pass", 12.0, 1.0, 0, 1, 0),
        Result("oracle-gated", "a", "pass", 10.0, 2.0, 0, 1, 0),
        Result("oracle-gated", "a", "pass", 10.0, 1.0, 1, 1, 0),
        Result("oracle-gated", "a", "pass", -1.0, -1.0, -1, -1, -1),
    ):
        assert row.differs(other)
