"""Write the report as one HTML page without scripts, external fonts or images.

The page has a light and a dark theme and supports screen readers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from evals.reports.markdown import figures
from evals.reports.summary import Summary
from evals.reports.svg import intervals, money, stacked, text
from evals.reports.timeline import timeline
from evals.scoring.stats import wilson
from evals.scoring.trials import Trial
from evals.scoring.verdict import Verdict

_ORDER: Final = (Verdict.PASS, Verdict.FAIL, Verdict.INVALID, Verdict.INFRA)
_CSS: Final = """
:root{color-scheme:light dark;--bg:#fbfaf8;--card:#fff;--ink:#1d1c1a;--soft:#65625c;--line:#dedad2;
--pass:#2a78b8;--fail:#d1495b;--invalid:#8a5fb0;--infra:#a8a59d;--useful:#2a78b8;--wasted:#d1495b;--on:#fff}
@media(prefers-color-scheme:dark){:root{--bg:#161614;--card:#1f1f1c;--ink:#eceae4;--soft:#a5a29a;--line:#3a3935;
--pass:#5aa6e0;--fail:#f07f8c;--invalid:#b995dc;--infra:#77746c;--useful:#5aa6e0;--wasted:#f07f8c;--on:#141412}}
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:860px;margin:0 auto;padding:32px 20px 80px}h1{font-size:1.7rem;line-height:1.2;margin:0 0 4px}
h2{font-size:1.15rem;margin:40px 0 6px}p{margin:6px 0;max-width:68ch}.soft,.soft td{color:var(--soft)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(180px,1fr));gap:12px;margin:20px 0}
.tile{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px}
.tile b{display:block;font-size:1.55rem;line-height:1.25;font-variant-numeric:tabular-nums}
.tile span{color:var(--soft);font-size:.85rem}.tile.bad b{color:var(--fail)}
figure{margin:12px 0;background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px}
figure{overflow-x:auto}
svg{display:block;width:100%;min-width:560px;height:auto;font:12.5px system-ui,sans-serif}svg text{fill:var(--ink)}
svg .soft{fill:var(--soft)}svg .in{fill:var(--on);font-weight:600}svg .grid{stroke:var(--line)}
svg .whisker{stroke:var(--pass);stroke-width:2}svg .dot{fill:var(--pass)}
.pass{fill:var(--pass)}.fail{fill:var(--fail)}.invalid{fill:var(--invalid)}.infra{fill:var(--infra)}
.useful{fill:var(--useful)}.wasted{fill:var(--wasted)}.call{stroke-width:1.5}
.ours{fill:var(--pass);stroke:var(--pass)}.other{fill:var(--infra);stroke:var(--infra)}
.failed{fill:none;stroke:var(--soft);stroke-dasharray:3 2}.veto{fill:var(--fail)}
svg .vetoed{fill:var(--fail);font-weight:600}
.key{display:flex;flex-wrap:wrap;gap:4px 18px;font-size:.85rem;color:var(--soft);margin-top:8px}
.key i{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:6px;background:var(--c)}
table{border-collapse:collapse;width:100%;font-size:.9rem}caption{text-align:left;color:var(--soft);padding:4px 0}
th,td{text-align:left;padding:6px 10px 6px 0;border-bottom:1px solid var(--line);vertical-align:top}
td.n{font-variant-numeric:tabular-nums;white-space:nowrap}.scroll{overflow-x:auto}
code{font:.92em ui-monospace,monospace;overflow-wrap:anywhere}th code{white-space:nowrap}
.note{border-left:4px solid var(--fail);padding:6px 14px;background:var(--card)}
"""


def page(summary: Summary, trials: Sequence[Trial], *, scripted: bool = False) -> str:
    """Return the whole page. `scripted` marks runs of agents that follow a script instead of a model."""
    run, total = summary.run, sum(summary.verdicts.values())
    facts = [f"arm {run.arm}", run.model or "model not recorded", f"{len(summary.rows)} cases, {total} trials"]
    body = [f"<h1>How {text(run.agent)} used GPUs</h1>"]
    body.append(f'<p class="soft">{text("; ".join(facts))}{"; a scripted agent, no model" if scripted else ""}</p>')
    if summary.inconclusive:
        died = f"{summary.verdicts[Verdict.INFRA]} of {total} trials crashed or are missing; the limit is 5 %."
        body.append(f'<p class="note">Inconclusive: {died}</p>')
    whole, k, d = summary.all_k(), summary.k, summary.damage
    body += [
        '<div class="tiles">',
        _tile(
            f"{100 * whole.value:.0f} %" if whole else "n/a",
            f"pass^{k}: " + ("a case passes" if k == 1 else f"all {k} trials of a case pass"),
        ),
        _tile(str(sum(r.vetoed for r in summary.rows)), "trials with a veto", bad=True),
        _tile(f"${d.spent_usd:.2f}", "spent on jobs"),
        _tile(f"${d.wasted_usd:.2f}", "of which wasted", bad=True),
        _tile(str(d.lost), "checkpoints lost", bad=True),
        _tile(str(d.billing), "machines still billed without a teardown request", bad=True),
        _tile(str(d.duplicates), "jobs started twice", bad=True),
        _tile(str(d.bypasses), "calls that bypassed the server", bad=True),
        "</div>",
    ]
    body += [*_charts(summary), *_story(trials), *_tables(summary)]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
    head += f"<title>{text(run.agent)} ({text(run.arm)})</title><style>{_CSS}</style>"
    main = "".join(body)
    return f'<!doctype html><html lang="en"><head>{head}</head><body><main>{main}</main></body></html>\n'


def _tile(value: str, words: str, *, bad: bool = False) -> str:
    alarm = bad and value not in ("0", "$0.00")
    return f'<div class="tile{" bad" if alarm else ""}"><b>{text(value)}</b><span>{text(words)}</span></div>'


def _charts(summary: Summary) -> Iterator[str]:
    """Yield charts of the outcomes, the pass rate and the costs of each cluster."""
    clusters = sorted(summary.by_cluster.items())
    counts = [(name, [(v.value, c[v]) for v in _ORDER]) for name, c in clusters]
    key = "".join(f'<span><i style="--c:var(--{v.value})"></i>{v.value}</span>' for v in _ORDER)
    yield "<h2>Outcome by cluster</h2><p>An invalid trial counts as failed, because its evidence can't be trusted.</p>"
    yield f'<figure>{stacked(counts, "Outcome by cluster")}<div class="key">{key}</div></figure>'
    rates = []
    for name, c in clusters:
        n = sum(c.values()) - c[Verdict.INFRA]
        rate = wilson(c[Verdict.PASS], n)
        if rate is not None:
            rates.append((name, rate, f"{c[Verdict.PASS]} of {n}"))
    yield "<h2>Uncertainty</h2><p>Trials that pass, with a 95 % interval (Wilson). Few trials mean wide bars.</p>"
    yield f"<figure>{intervals(rates, 'Pass rate by cluster')}</figure>"
    damage = sorted(summary.damage_by_cluster.items())
    dollars = [(name, d.spent_usd - d.wasted_usd, d.wasted_usd) for name, d in damage]
    yield "<h2>Money</h2><p>The cost of the jobs, and the part that was spent on lost results.</p>"
    yield f"<figure>{money(dollars, 'Dollars by cluster')}</figure>"


def _story(trials: Sequence[Trial]) -> Iterator[str]:
    """Yield the timeline of the most informative trial: one in which a veto check failed on a call, otherwise one
    that failed.
    """
    bad = [t for t in trials if t.score.verdict in (Verdict.FAIL, Verdict.INVALID) and t.transcript.calls]
    if not bad:
        return
    trial = max(bad, key=lambda t: (any(c.outcome.seqs for c in t.score.vetoes), len(t.transcript.calls)))
    yield f"<h2>One trial: <code>{text(trial.case)}</code></h2><p>{text(trial.score.why)}</p>"
    yield f"<figure>{timeline(trial)}"
    yield '<div class="key"><span><i style="--c:var(--pass)"></i>call to the server</span>'
    yield '<span><i style="--c:var(--infra)"></i>other call</span><span>dashed: failed</span>'
    yield '<span><i style="--c:var(--fail)"></i>a check fired here</span></div></figure>'
    fails = [c for c in trial.score.checks if c.fails]
    items = (f"<li><code>{text(c.id)}</code>{' (veto)' if c.veto else ''}: {text(c.outcome.why)}</li>" for c in fails)
    yield f"<ul>{''.join(items)}</ul>"


def _tables(summary: Summary) -> Iterator[str]:
    """Yield tables of every case and of the headline figures."""
    order = sorted(summary.rows, key=lambda r: (r.passes / r.n if r.n else -1, r.id))
    lines = [
        f'<tr><th scope="row"><code>{text(r.id)}</code></th><td>{text(r.cluster)}</td>'
        f'<td class="n">{r.passes} of {r.n}</td>'
        f'<td class="n">{r.vetoed}</td><td>{"flaky; " if r.flaky else ""}{text(r.why)}</td></tr>'
        for r in order
    ]
    head = "".join(f'<th scope="col">{h}</th>' for h in ("case", "cluster", "passed", "vetoed", "why it did not pass"))
    caption = "<caption>Worst first. A flaky case has both passed and failed trials.</caption>"
    yield f'<h2>Cases</h2><div class="scroll"><table>{caption}<thead><tr>{head}</tr></thead>'
    yield f"<tbody>{''.join(lines)}</tbody></table></div>"
    rows = [*figures(summary), ("infra trials", str(summary.verdicts[Verdict.INFRA]))]
    cells = (f'<tr><th scope="row">{text(a)}</th><td class="n">{text(b)}</td></tr>' for a, b in rows)
    caption = "<caption>Means over cases, with 95 % intervals; pass^k and pass@k resample whole clusters.</caption>"
    yield f"<h2>Figures</h2><table>{caption}<tbody>{''.join(cells)}</tbody></table>"
