"""README's evidence, made again: every scripted agent through every world, with the gates and without them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from evals.environments.worlds import load_worlds
from evals.reports.evidence import ARMS, PERSONS, differences, table
from evals.scoring.cases import load_cases
from evals.scoring.outcome import outcome
from evals.scoring.trials import read_run, score_run
from evals.scoring.verdict import Verdict

pytestmark = [pytest.mark.prove, pytest.mark.skipif(sys.platform == "win32", reason="worlds run POSIX processes")]

CASES = load_cases()


def test_the_readme_says_what_happens(tmp_path: Path) -> None:
    folder = Path(os.environ.get("GPUWARDEN_EVIDENCE_DIR") or tmp_path)
    text = table(folder, CASES, load_worlds(CASES), jobs=2)
    runs = {(a, s): score_run(read_run(folder / f"{a}-{s}"), CASES) for a, s in ARMS}
    died = [(k, t.case, t.score.why) for k, trials in runs.items() for t in trials if t.score.verdict is Verdict.INFRA]
    assert died == []
    done = {key: outcome(trials, CASES) for key, trials in runs.items()}
    assert [(t.case, t.score.why) for t in runs["oracle", "gated"] if t.score.verdict is not Verdict.PASS] == []
    assert done["nop", "raw"].passes == done["parrot", "raw"].passes == 0
    pushed, free = done["pushy", "gated"], done["pushy", "raw"]
    assert pushed.damage.lost == 0
    # A cap asks before a launch; what canceled jobs' machines bill while they wait for a person comes on top.
    assert pushed.over_usd < 1 and pushed.damage.duplicates == 0
    assert free.damage.lost > 10 and free.over_usd > 100
    careless = done["naive", "gated"], done["naive", "raw"]
    assert careless[0].damage.lost == 0 < careless[1].damage.lost
    nights = {p: score_run(read_run(folder / f"oracle-gated-{p}"), CASES) for p in PERSONS}
    assert [(p, t.case) for p, ts in nights.items() for t in ts if t.score.verdict is not Verdict.PASS] == []
    night = {p: outcome(trials, CASES) for p, trials in nights.items()}
    assert sum(n.damage.lost for n in night.values()) == 0
    assert night["ordered"].wasted_percent < 5 < night["answers"].wasted_percent < night["asleep"].wasted_percent
    assert differences(text) == []
