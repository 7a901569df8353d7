"""Measure the value of a skill pack: compare runs without the pack, with it, with its text in the context, and with an
older pack.

`forced - none` measures the value of the content; `pack - forced` measures the loss from trials in which no skill was
loaded in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from evals.errors import EvalError
from evals.reports.compare import Comparison, compare
from evals.reports.markdown import outcomes, percent, table
from evals.reports.summary import Summary
from evals.scoring.trials import Trial

ARMS: Final = ("none", "pack", "forced", "old")
_PAIRS: Final = (
    ("none", "pack", "uplift of the pack"),
    ("none", "forced", "value of the content"),
    ("forced", "pack", "loss from skills that were not found"),
    ("old", "pack", "change since the old pack"),
)


@dataclass(frozen=True)
class Arm:
    """One arm, with its summary and its trials."""

    summary: Summary
    trials: Sequence[Trial]

    @property
    def trigger_rate(self) -> float | None:
        """Return the share of trials in which at least one skill was loaded."""
        if not self.trials:
            return None
        loaded = 0
        for trial in self.trials:
            calls = [(c.tool, c.args if isinstance(c.args, dict) else {}) for c in trial.transcript.calls]
            paths = [v for _, args in calls for v in args.values() if isinstance(v, str) and "SKILL.md" in v]
            loaded += bool(paths) or any(tool == "Skill" for tool, _ in calls)
        return loaded / len(self.trials)


def pairs(arms: Sequence[Arm]) -> list[tuple[str, Comparison]]:
    """Return every possible comparison between these arms. Raises EvalError if an arm is unknown or repeated, or if
    there are fewer than two.
    """
    by_name = {arm.summary.run.arm: arm for arm in arms}
    if len(by_name) != len(arms) or not by_name.keys() <= set(ARMS) or len(arms) < 2:
        raise EvalError(f"these arms can't be compared: {', '.join(a.summary.run.arm for a in arms)}", _ARMS_REMEDY)
    return [
        (words, compare(by_name[a].summary, by_name[b].summary, by_name[a].trials, by_name[b].trials))
        for a, b, words in _PAIRS
        if a in by_name and b in by_name
    ]


_ARMS_REMEDY: Final = f"Specify at least two runs with different arms: {', '.join(ARMS)}"


def report(arms: Sequence[Arm]) -> str:
    """Return a Markdown table of the arms side by side."""
    lines = ["# Uplift", "", *outcomes([arm.summary for arm in arms]), ""]
    use: list[Sequence[object]] = [("arm", "skill loaded", "tokens", "agent $")]
    for arm in arms:
        rate = arm.trigger_rate
        tokens = sum(t.transcript.meta.tokens or 0 for t in arm.trials)
        usd = sum(t.transcript.meta.usd or 0.0 for t in arm.trials)
        use.append((arm.summary.run.arm, "n/a" if rate is None else f"{100 * rate:.0f} %", tokens, f"{usd:.2f}"))
    lines += [*table(use), ""]
    rows: list[Sequence[object]] = [("pair", "difference per case", "gain", "cases worse", "idle checks", "exit")]
    for words, c in pairs(arms):
        gain = "n/a" if c.gain is None else f"{c.gain:.2f}"
        rows.append((words, percent(c.difference), gain, len(c.worse), len(c.idle_checks), c.exit.name))
    return "\n".join([*lines, *table(rows)]) + "\n"
