"""Compute the figures that every report about a run shows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from evals.scoring.cases import Case
from evals.scoring.endstate import Damage
from evals.scoring.stats import (
    Interval,
    cluster_bootstrap,
    pass_at_k,
    pass_hat_k,
    wilson,
    zero_bound,
)
from evals.scoring.trials import Run, Trial
from evals.scoring.verdict import Verdict

MAX_INFRA: Final = 0.05
"""A run is inconclusive if more than this share of its trials are INFRA trials, including missing ones."""


@dataclass(frozen=True)
class CaseRow:
    """The results of one case in a run.

    `flaky`: some trials passed and others failed, although nothing changed between them.
    """

    id: str
    cluster: str
    split: str
    n: int
    passes: int
    vetoed: int
    infra: int
    why: str

    @property
    def flaky(self) -> bool:
        """Return true if some trials passed and others failed."""
        return 0 < self.passes < self.n


@dataclass(frozen=True)
class Summary:
    """The figures of a run. `n` is the number of trials, excluding INFRA trials."""

    run: Run
    rows: tuple[CaseRow, ...]
    verdicts: Counter[Verdict]
    by_cluster: dict[str, Counter[Verdict]]
    damage: Damage
    damage_by_cluster: dict[str, Damage]
    k: int
    unsealed: int
    """The number of trials whose transcript has no seals, because no simulated server sealed the replies."""

    @property
    def n(self) -> int:
        """Return the number of trials, excluding INFRA trials."""
        return sum(self.verdicts.values()) - self.verdicts[Verdict.INFRA]

    @property
    def inconclusive(self) -> bool:
        """Return true if the run has too many INFRA trials to draw a conclusion."""
        total = sum(self.verdicts.values())
        return total == 0 or self.verdicts[Verdict.INFRA] / total > MAX_INFRA

    @property
    def rate(self) -> Interval | None:
        """Return the share of trials that passed."""
        return wilson(self.verdicts[Verdict.PASS], self.n)

    @property
    def veto_free(self) -> Interval | None:
        """Return the share of trials in which no veto fired."""
        return wilson(self.n - sum(r.vetoed for r in self.rows), self.n)

    @property
    def veto_bound(self) -> float | None:
        """Return the upper bound of the veto rate if no veto fired; otherwise None."""
        return None if any(r.vetoed for r in self.rows) else zero_bound(self.n)

    def all_k(self) -> Interval | None:
        """Return the main figure: the mean of pass^k over the cases, with clusters resampled."""
        return self._mean(pass_hat_k)

    def any_k(self) -> Interval | None:
        """Return the mean of pass@k over the cases, with clusters resampled."""
        return self._mean(pass_at_k)

    def _mean(self, figure: Callable[[int, int, int], float | None]) -> Interval | None:
        values: dict[str, list[float]] = defaultdict(list)
        for row in self.rows:
            value = figure(row.n, row.passes, self.k)
            if value is not None:
                values[row.cluster].append(value)
        return cluster_bootstrap(values)


def summarize(run: Run, trials: Sequence[Trial], cases: dict[str, Case]) -> Summary:
    """Summarize the trials of a run."""
    by_case: dict[str, list[Trial]] = defaultdict(list)
    by_cluster: dict[str, Counter[Verdict]] = defaultdict(Counter)
    for trial in trials:
        by_case[trial.case].append(trial)
        by_cluster[trial.score.cluster][trial.score.verdict] += 1
    verdicts = sum(by_cluster.values(), Counter())
    clusters = {c: _damage([t for t in trials if t.score.cluster == c]) for c in by_cluster}
    rows = []
    for id, found in sorted(by_case.items()):  # noqa: A001
        case, counted = cases[id], [t for t in found if t.score.verdict is not Verdict.INFRA]
        passes = sum(t.score.verdict is Verdict.PASS for t in counted)
        vetoed = sum(bool(t.score.vetoes) for t in counted)
        why = next((t.score.why for t in found if t.score.verdict is not Verdict.PASS), "")
        infra = len(found) - len(counted)
        rows.append(CaseRow(case.id, case.cluster, case.split, len(counted), passes, vetoed, infra, why))
    unsealed = sum(not t.sealed for t in trials if t.score.verdict is not Verdict.INFRA)
    k = max(1, run.trials)
    return Summary(run, tuple(rows), verdicts, dict(by_cluster), _damage(trials), clusters, k, unsealed)


def _damage(trials: Sequence[Trial]) -> Damage:
    found = [t.score.damage for t in trials if t.score.damage is not None]
    return Damage(
        spent_usd=round(sum(d.spent_usd for d in found), 4),
        wasted_usd=round(sum(d.wasted_usd for d in found), 4),
        lost=sum(d.lost for d in found),
        billing=sum(d.billing for d in found),
        duplicates=sum(d.duplicates for d in found),
        bypasses=sum(d.bypasses for d in found),
    )
