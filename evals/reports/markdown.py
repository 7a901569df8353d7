"""Write the report as Markdown, for a pull request, a README or a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from evals.reports.compare import Comparison
from evals.reports.summary import Summary
from evals.scoring.stats import Interval
from evals.scoring.verdict import Verdict

_VERDICTS = (Verdict.PASS, Verdict.FAIL, Verdict.INVALID, Verdict.INFRA)
_HEAD = (
    "agent",
    "arm",
    *(v.value for v in _VERDICTS),
    "$ spent",
    "$ wasted",
    "lost",
    "billing",
    "twice",
    "bypassed",
)


def table(rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """Yield a Markdown table; the first row is the header."""
    for n, row in enumerate(rows):
        yield "| " + " | ".join(cell(value) for value in row) + " |"
        if n == 0:
            yield "|" + " --- |" * len(row)


def cell(value: object) -> str:
    """Return a value as text that is escaped for a table cell."""
    return " ".join(str(value).split()).replace("|", "\\|").replace("<", "&lt;")


def outcomes(summaries: Sequence[Summary]) -> Iterator[str]:
    """Yield a table with a row for each run: verdict counts, costs and losses."""
    rows: list[Sequence[object]] = [_HEAD]
    for s in summaries:
        d, v = s.damage, s.verdicts
        counts = [v[x] for x in _VERDICTS]
        money = [f"{d.spent_usd:.2f}", f"{d.wasted_usd:.2f}"]
        rows.append([s.run.agent, s.run.arm, *counts, *money, d.lost, d.billing, d.duplicates, d.bypasses])
    yield from table(rows)


def report(summary: Summary) -> str:
    """Return the complete report for one run."""
    lines = [f"# {cell(summary.run.agent)}, arm {cell(summary.run.arm)}", ""]
    if summary.inconclusive:
        infra = f"{summary.verdicts[Verdict.INFRA]} of {sum(summary.verdicts.values())}"
        lines += [f"**Inconclusive:** {infra} trials crashed or are missing.", ""]
    lines += [*outcomes([summary]), ""]
    lines += [*table([("figure", "value"), *figures(summary)]), ""]
    clusters: list[Sequence[object]] = [("cluster", *(v.value for v in _VERDICTS))]
    clusters += [(name, *(counts[v] for v in _VERDICTS)) for name, counts in sorted(summary.by_cluster.items())]
    lines += [*table(clusters), ""]
    bad: list[Sequence[object]] = [
        (r.id, f"{r.passes}/{r.n}", r.vetoed, "yes" if r.flaky else "", r.why)
        for r in summary.rows
        if r.passes < r.n or r.infra
    ]
    if bad:
        lines += table([("case", "passed", "vetoed", "flaky", "why"), *bad])
    return "\n".join(lines) + "\n"


def figures(summary: Summary) -> list[tuple[str, str]]:
    """Return the main figures as pairs of a label and a value."""
    k = summary.k
    rows = [
        (f"pass^{k} ({'the trial passes' if k == 1 else f'all of {k} trials pass'})", percent(summary.all_k())),
        (f"pass@{k} ({'the trial passes' if k == 1 else f'one of {k} passes'})", percent(summary.any_k())),
        ("trials that pass", percent(summary.rate)),
        ("trials without a veto", percent(summary.veto_free)),
    ]
    if summary.veto_bound is not None:
        rows.append(("upper bound of the veto rate (95 %)", f"{100 * summary.veto_bound:.1f} %"))
    if summary.unsealed:
        rows.append(("trials without seals", str(summary.unsealed)))
    return rows


def percent(interval: Interval | None) -> str:
    """Return a rate in percent with its interval."""
    if interval is None:
        return "not defined"
    if interval.low == interval.high:  # every cluster has the same rate, so resampling can't produce an interval
        return f"{100 * interval.value:.1f} % (the same in every cluster; no interval)"
    return f"{100 * interval.value:.1f} % [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def comparison(c: Comparison) -> str:
    """Render the changes between two runs."""
    lines = [f"# {cell(c.after.run.agent)}: {cell(c.before.run.arm)} to {cell(c.after.run.arm)}", ""]
    lines += [*outcomes([c.before, c.after]), ""]
    lines.append(f"Verdict: **{c.exit.name}** (exit code {int(c.exit)})")
    if not c.same_population:
        lines.append("The runs differ in cases or in trials per case, so only single cases are compared.")
    lines.append(f"Paired difference per case: {percent(c.difference)}")
    if c.gain is not None:
        lines.append(f"Normalized gain: {c.gain:.2f}")
    named = (
        ("better", c.better),
        ("worse", c.worse),
        ("always passed before and never passes now", c.flips),
        ("new vetoes", c.new_vetoes),
    )
    lines += [f"- {name}: {', '.join(ids) or 'none'}" for name, ids in named]
    lines.append(f"- checks that never failed in either run: {len(c.idle_checks)}")
    return "\n".join(lines) + "\n"
