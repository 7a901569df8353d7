"""Write the report as JSON: every trial with its checks, and the figures of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from evals.reports.summary import Summary
from evals.scoring.stats import Interval
from evals.scoring.trials import Trial


def report(summary: Summary, trials: Sequence[Trial]) -> dict[str, Any]:
    """Return the report as a plain object that `json.dumps` accepts."""
    return {
        "agent": summary.run.agent,
        "arm": summary.run.arm,
        "model": summary.run.model,
        "trials": sum(summary.verdicts.values()),
        "verdicts": {v.value: n for v, n in sorted(summary.verdicts.items())},
        "inconclusive": summary.inconclusive,
        "pass_rate": _interval(summary.rate),
        "veto_free": _interval(summary.veto_free),
        "veto_bound": summary.veto_bound,
        "k": summary.k,
        "pass_hat_k": _interval(summary.all_k()),
        "pass_at_k": _interval(summary.any_k()),
        "unsealed": summary.unsealed,
        "damage": asdict(summary.damage),
        "cases": [asdict(row) | {"flaky": row.flaky} for row in summary.rows],
        "results": [trial_row(trial) for trial in trials],
    }


def trial_row(trial: Trial) -> dict[str, Any]:
    """Return a trial as a plain object."""
    score = trial.score
    checks = [
        {"id": c.id, "kind": c.kind, "veto": c.veto, "fails": c.fails, "status": c.outcome.status, "why": c.outcome.why}
        for c in score.checks
    ]
    return {
        "case": trial.case,
        "n": trial.n,
        "verdict": score.verdict.value,
        "why": score.why,
        "checks": checks,
        "problems": [str(p) for p in score.problems],
        "damage": asdict(score.damage) if score.damage else None,
    }


def _interval(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [round(x, 4) for x in (interval.value, interval.low, interval.high)]
