"""One transcript as a picture: a lane for each tool, a bar for each call, a mark where a check fired."""

from __future__ import annotations

from evals.svg import LABEL, ROW, WIDTH, figure, text
from evals.trials import Trial
from evals.verdict import Scored

_MAX_CALLS = 120


def timeline(trial: Trial) -> str:
    """The calls in the order in which they were issued; filled where they succeeded, hollow where they failed."""
    calls = trial.transcript.calls[:_MAX_CALLS]
    fired: dict[int, list[str]] = {}
    for check in trial.score.checks:
        for seq in check.outcome.seqs if check.fails else ():
            fired.setdefault(seq, []).append(check.id)
    lanes = list(dict.fromkeys(_lane(c.server, c.tool) for c in calls))
    last = max((c.done_seq or c.seq for c in calls), default=1)
    unit = (WIDTH - LABEL - 30) / (last + 1)
    body = [_rail(i, lane) for i, lane in enumerate(lanes)]
    for call in calls:
        y = lanes.index(_lane(call.server, call.tool)) * ROW + 34
        x, width = LABEL + call.seq * unit, max(7.0, ((call.done_seq or last) - call.seq) * unit)
        kind = "failed" if call.ok is False else "ours" if call.ours else "other"
        body.append(_call(x, y, width, kind, f"{call.tool}({_short(call.args)}) gave {_short(call.result)}"))
        if call.seq in fired:
            body.append(_mark(x + width / 2, y, fired[call.seq]))
    described = f"{len(calls)} calls; " + "; ".join(f"{c.id}: {c.outcome.why}" for c in _fails(trial))
    return figure(body, len(lanes) * ROW + 36, f"Timeline of {trial.case}, trial {trial.n}", described)


def _fails(trial: Trial) -> list[Scored]:
    return [c for c in trial.score.checks if c.fails]


def _lane(server: str, tool: str) -> str:
    return tool if server or len(tool) < 4 else f"{tool} (harness)"


def _short(value: object) -> str:
    words = str(value)
    return words if len(words) <= 160 else words[:157] + "..."


def _rail(i: int, lane: str) -> str:
    y = i * ROW + 41
    line = f'<line x1="{LABEL}" x2="{WIDTH - 20}" y1="{y}" y2="{y}" class="grid"/>'
    return f'{line}<text x="{LABEL - 10}" y="{y + 4}" text-anchor="end">{text(lane[:22])}</text>'


def _call(x: float, y: float, width: float, kind: str, title: str) -> str:
    shape = f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="14" rx="3" class="call {kind}">'
    return f"{shape}<title>{text(title)}</title></rect>"


def _mark(x: float, y: float, ids: list[str]) -> str:
    words = ", ".join(ids)
    end = "end" if x > WIDTH * 0.75 else "start"
    shift = -8 if end == "end" else 8
    drawn = f'<path d="M{x:.1f} {y - 4} l-6 -10 h12 z" class="veto"><title>{text(words)}</title></path>'
    return f'{drawn}<text x="{x + shift:.1f}" y="{y - 6}" class="vetoed" text-anchor="{end}">{text(words)}</text>'
