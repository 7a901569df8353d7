"""Compare two runs: find reusable trials and regressions, and check whether the difference is significant."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from evals.reports.summary import Summary
from evals.scoring.cases import Case
from evals.scoring.digests import of_case, of_prompt, of_scenario
from evals.scoring.stats import Interval, cluster_bootstrap, normalized_gain
from evals.scoring.trials import Run, Trial


class Exit(IntEnum):
    """Exit codes of `compare` and `score`."""

    PASS = 0
    REGRESSION = 1
    BAD_POLICY = 2
    INCONCLUSIVE = 3


class Plan(StrEnum):
    """The work that a trial still requires: none, a new score, or a new run."""

    REUSE = "REUSE"
    REGRADE = "REGRADE"
    RERUN = "RERUN"


def plan(trial: Trial, case: Case, *, pack: str, model: str, scorer: str, run: Run) -> Plan:
    """Return the work needed to make a recorded trial valid for the current inputs.

    Changes to the agent's inputs (prompt, scenario, pack, model) require a new run; changes to the scorer's inputs
    (checks, limits, the scorer itself) require a new score.
    """
    old = trial.digests
    if (run.pack, run.model) != (pack, model) or old.get("scenario") != of_scenario(case):
        return Plan.RERUN
    if old.get("prompt") != of_prompt(case):
        return Plan.RERUN
    return Plan.REUSE if (old.get("case"), old.get("scorer")) == (of_case(case), scorer) else Plan.REGRADE


@dataclass(frozen=True)
class Comparison:
    """A comparison of `after` with `before`.

    `difference` is the difference in pass rate over the common cases, with an interval from resampled clusters.
    """

    before: Summary
    after: Summary
    same_population: bool
    difference: Interval | None
    gain: float | None
    better: tuple[str, ...]
    worse: tuple[str, ...]
    flips: tuple[str, ...]
    new_vetoes: tuple[str, ...]
    idle_checks: tuple[str, ...]

    @property
    def exit(self) -> Exit:
        """Return the exit code.

        A case that always passed and now always fails is a regression. A new veto is also a regression.
        """
        if self.before.inconclusive or self.after.inconclusive:
            return Exit.INCONCLUSIVE
        if self.flips or self.new_vetoes:
            return Exit.REGRESSION
        if self.difference is not None and self.same_population and self.difference.high < 0:
            return Exit.REGRESSION
        return Exit.PASS


def compare(before: Summary, after: Summary, old: Sequence[Trial], new: Sequence[Trial]) -> Comparison:
    """Compare two runs case by case. The pass rates are compared only if both runs have the same cases and the same
    number of trials per case.
    """
    rows0, rows1 = {r.id: r for r in before.rows}, {r.id: r for r in after.rows}
    shared = sorted(rows0.keys() & rows1.keys())
    deltas: dict[str, list[float]] = defaultdict(list)
    better: list[str] = []
    worse: list[str] = []
    flips: list[str] = []
    vetoes: list[str] = []
    digests0, digests1 = _digests(old), _digests(new)
    for id in shared:  # noqa: A001
        a, b = rows0[id], rows1[id]
        if not a.n or not b.n:
            continue
        delta = b.passes / b.n - a.passes / a.n
        deltas[a.cluster].append(delta)
        (better if delta > 0 else worse if delta < 0 else []).append(id)
        if a.passes == a.n and b.passes == 0 and digests0[id] == digests1[id]:
            flips.append(id)
        if b.vetoed and not a.vetoed:
            vetoes.append(id)
    counts0, counts1 = Counter({r.id: r.n for r in before.rows}), Counter({r.id: r.n for r in after.rows})
    same = counts0 == counts1 and digests0 == digests1
    difference = cluster_bootstrap(deltas)
    base = _rate(before, shared)
    gain = normalized_gain(_rate(after, shared), base) if shared else None
    idle = tuple(sorted(_always_pass(old) & _always_pass(new)))
    lists = (tuple(better), tuple(worse), tuple(flips), tuple(vetoes))
    return Comparison(before, after, same, difference, gain, *lists, idle)


def _digests(trials: Sequence[Trial]) -> dict[str, str]:
    """Return the recorded digest of each case. Cases without a recorded digest count as unchanged."""
    return {t.case: t.digests.get("case", "") for t in trials}


def _rate(summary: Summary, ids: Sequence[str]) -> float:
    rates = [r.passes / r.n for r in summary.rows if r.id in set(ids) and r.n]
    return sum(rates) / len(rates) if rates else 0.0


def _always_pass(trials: Sequence[Trial]) -> set[str]:
    """Return the checks that passed in every trial of both arms.

    These checks do not distinguish the arms and can be removed.
    """
    seen: dict[str, bool] = {}
    for trial in trials:
        for check in trial.score.checks:
            key = f"{trial.case}/{check.id}"
            seen[key] = seen.get(key, True) and not check.fails
    return {key for key, passed in seen.items() if passed}
