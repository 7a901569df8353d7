"""Create tables of costs and lost checkpoints by cluster and agent, derived only from end states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from evals.reports.markdown import table
from evals.scoring.cases import Case
from evals.scoring.endstate import Damage
from evals.scoring.trials import Run, Trial
from evals.scoring.verdict import Verdict

HEAD = ("cases", "pass", "$ spent", "$ wasted", "$ over budget", "checkpoints lost", "left billing", "duplicate jobs")
PEOPLE_HEAD = (
    "the user",
    "agent",
    "gates",
    "scenarios",
    "$ spent",
    "$ wasted",
    "% wasted",
    "checkpoints lost",
    "left billing",
)
RAW = "raw"
"""The arm without gates. It has no server, so no trial can pass; only the effects of each trial are reported."""


@dataclass(frozen=True)
class Outcome:
    """The totals over a set of trials."""

    trials: int
    passes: int
    damage: Damage
    over_usd: float

    def cells(self, *, raw: bool) -> tuple[object, ...]:
        """Return the values as table cells, in the order of `HEAD`."""
        d, passed = self.damage, "-" if raw else f"{100 * self.passes / max(1, self.trials):.0f} %"
        money = (f"{usd:.0f}" for usd in (d.spent_usd, d.wasted_usd, self.over_usd))
        return (self.trials, passed, *money, d.lost, d.billing, d.duplicates)

    def people_cells(self) -> tuple[object, ...]:
        """Return the values as table cells, in the order of `PEOPLE_HEAD`, starting with the number of scenarios."""
        d = self.damage
        return (
            self.trials,
            f"{d.spent_usd:.1f}",
            f"{d.wasted_usd:.1f}",
            f"{self.wasted_percent:.1f}",
            d.lost,
            d.billing,
        )

    @property
    def wasted_percent(self) -> float:
        """Return the percentage of the spent money that was wasted."""
        return 100 * self.damage.wasted_usd / self.damage.spent_usd if self.damage.spent_usd else 0.0


def outcome(trials: Sequence[Trial], cases: dict[str, Case]) -> Outcome:
    """Add up trials."""
    found = [(t, t.score.damage) for t in trials]
    seen = [d for _, d in found if d is not None]
    over = (max(0.0, d.spent_usd - float(cases[t.case].limits["job_usd"])) for t, d in found if d is not None)
    total = Damage(
        spent_usd=sum(d.spent_usd for d in seen),
        wasted_usd=sum(d.wasted_usd for d in seen),
        lost=sum(d.lost for d in seen),
        billing=sum(d.billing for d in seen),
        duplicates=sum(d.duplicates for d in seen),
    )
    return Outcome(len(trials), sum(t.score.verdict is Verdict.PASS for t in trials), total, sum(over))


def by_cluster(run: Run, trials: Sequence[Trial], cases: dict[str, Case]) -> Iterator[str]:
    """Yield the table of one run: a row for each cluster, and a row with the total."""
    clusters = dict.fromkeys(t.score.cluster for t in trials)
    rows: list[Sequence[object]] = [("cluster", *HEAD)]
    for name in (*clusters, ""):
        mine = [t for t in trials if name in ("", t.score.cluster)]
        rows.append((name or "all", *outcome(mine, cases).cells(raw=run.arm == RAW)))
    yield from table(rows)


def by_agent(runs: Sequence[tuple[Run, Sequence[Trial]]], cases: dict[str, Case]) -> Iterator[str]:
    """Yield the table of several runs: a row for each agent in each arm."""
    rows: list[Sequence[object]] = [("agent", "gates", *HEAD)]
    for run, trials in runs:
        raw = run.arm == RAW
        rows.append((run.agent, "no" if raw else "yes", *outcome(trials, cases).cells(raw=raw)))
    yield from table(rows)


def by_people(runs: Sequence[tuple[str, Run, Sequence[Trial]]], cases: dict[str, Case]) -> Iterator[str]:
    """Yield the table of runs by simulated user: a row for each run."""
    rows: list[Sequence[object]] = [PEOPLE_HEAD]
    for person, run, trials in runs:
        rows.append((person, run.agent, "no" if run.arm == RAW else "yes", *outcome(trials, cases).people_cells()))
    yield from table(rows)
