"""Draw one transcript: a lane for each tool, a bar for each call, and a mark for each check that fired."""

from __future__ import annotations

from dataclasses import dataclass, field

from evals.reports.svg import LABEL, ROW, WIDTH, figure, text
from evals.scoring.trials import Trial

_MAX_CALLS = 120
_LETTER = 8.0
"""An upper estimate of the width of a letter in a mark's name."""


def timeline(trial: Trial) -> str:
    """Draw the calls in the order in which they were issued: filled if they succeeded, hollow if they failed."""
    calls = trial.transcript.calls[:_MAX_CALLS]
    fired: dict[int, list[str]] = {}
    for check in trial.score.checks:
        for seq in check.outcome.seqs if check.fails else ():
            fired.setdefault(seq, []).append(check.id)
    lanes = list(dict.fromkeys(_lane(c.server, c.tool) for c in calls))
    last = max((c.done_seq or c.seq for c in calls), default=1)
    unit = (WIDTH - LABEL - 30) / (last + 1)
    body = []
    for i, lane in enumerate(lanes):
        at = i * ROW + 41
        body.append(f'<line x1="{LABEL}" x2="{WIDTH - 20}" y1="{at}" y2="{at}" class="grid"/>')
        body.append(f'<text x="{LABEL - 10}" y="{at + 4}" text-anchor="end">{text(lane[:22])}</text>')
    named = [_LaneMarks() for _ in lanes]
    for call in calls:
        row = lanes.index(_lane(call.server, call.tool))
        y = row * ROW + 34
        x, width = LABEL + call.seq * unit, max(7.0, ((call.done_seq or last) - call.seq) * unit)
        kind = "failed" if call.ok is False else "ours" if call.ours else "other"
        title = f"{call.tool}({_short(call.args)}) gave {_short(call.result)}"
        body.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="14" rx="3" class="call {kind}">')
        body.append(f"<title>{text(title)}</title></rect>")
        if call.seq in fired:
            body.append(named[row].mark(x + width / 2, y, fired[call.seq]))
    described = f"{len(calls)} calls; " + "; ".join(f"{c.id}: {c.outcome.why}" for c in trial.score.checks if c.fails)
    return figure(body, len(lanes) * ROW + 36, f"Timeline of {trial.case}, trial {trial.n}", described)


def _lane(server: str, tool: str) -> str:
    return tool if server or len(tool) < 4 else f"{tool} (harness)"


def _short(value: object) -> str:
    words = str(value)
    return words if len(words) <= 160 else words[:157] + "..."


@dataclass
class _LaneMarks:
    """The names already drawn next to the marks of a lane, and the right edge of the last name."""

    words: set[str] = field(default_factory=set)
    end: float = 0.0

    def mark(self, x: float, y: float, ids: list[str]) -> str:
        """Draw a mark that shows its checks on hover. Their names are written next to it if they are new and there is
        space.
        """
        words = ", ".join(ids)
        drawn = f'<path d="M{x:.1f} {y - 4} l-6 -10 h12 z" class="veto"><title>{text(words)}</title></path>'
        before = x - 8 - _LETTER * len(words)  # to the left of the mark, where no later mark can cover the names
        left = before if before >= LABEL else x + 8
        if words in self.words or left < self.end:
            return drawn
        self.words.add(words)
        self.end = left + _LETTER * len(words)
        return f'{drawn}<text x="{left:.1f}" y="{y - 6}" class="vetoed">{text(words)}</text>'
