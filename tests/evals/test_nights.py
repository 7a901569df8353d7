"""The evals' overnight runs, replayed: with automatic teardown, nothing is lost and little is wasted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from evals.environments.scenarios import PEOPLE
from evals.reports.evidence import NIGHT_ARMS, PERSONS, cases_of, night_runs
from evals.scoring.cases import load_cases
from evals.scoring.outcome import by_people, outcome
from evals.scoring.verdict import Verdict

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="scenarios run POSIX processes")

CASES = load_cases()


@pytest.mark.prove
def test_gated_ordered_nights_lose_nothing_and_waste_under_five_percent(tmp_path: Path) -> None:
    arms = {("oracle", "gated"): ("ordered",), ("naive", "raw"): ("ordered",)}
    runs = night_runs(tmp_path, CASES, jobs=2, arms=arms)
    (_, _, careful), (_, _, free) = runs
    assert [(t.case, t.score.why) for t in careful if t.score.verdict is not Verdict.PASS] == []
    for trial in careful:
        found = outcome([trial], CASES)
        assert found.damage.lost == found.damage.billing == 0, trial.case
        assert found.damage.spent_usd > 10 and found.wasted_percent < 5, trial.case
    ordered, without = outcome(careful, CASES).damage, outcome(free, CASES).damage
    assert without.lost > ordered.lost == 0 and without.wasted_usd > 5 * ordered.wasted_usd
    assert len(list(by_people(runs, CASES))) == 4


def test_every_ordered_scenario_and_every_user_type_has_a_night() -> None:
    ordered = {name for name, case in CASES.items() if case.scenario.people == "ordered"}
    assert ordered == cases_of("ordered", CASES).keys() != set()
    assert set(PERSONS) < PEOPLE.keys() and NIGHT_ARMS["oracle", "gated"] == PERSONS
    assert {c.scenario.people for c in cases_of("asleep", CASES).values()} == {"asleep"}
