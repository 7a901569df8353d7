"""Draw SVG plots as text, without libraries or scripts. Colors come from the page's style sheet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from evals.scoring.stats import Interval

ROW, LABEL, WIDTH = 26, 150, 720


def text(value: object) -> str:
    """Escape a value, so that it can't be interpreted as markup."""
    return escape(str(value), quote=True)


def figure(body: Iterable[str], height: float, title: str, description: str) -> str:
    """Return an SVG image as wide as the page, with a title and a description."""
    head = f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{text(title)}: {text(description)}">'
    return head + "".join(body) + "</svg>"


def _words(x: float, y: float, value: object, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{text(value)}</text>'


def _box(x: float, y: float, width: float, height: float, kind: str, title: str) -> str:
    shape = f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:g}" rx="2" class="{kind}">'
    return f"{shape}<title>{text(title)}</title></rect>"


def stacked(rows: Sequence[tuple[str, Sequence[tuple[str, int]]]], title: str) -> str:
    """Draw one stacked bar of counts per row. A row is (label, [(class, count), ...]).

    Counts are drawn inside the bars if they fit.
    """
    most = max((sum(n for _, n in parts) for _, parts in rows), default=1) or 1
    unit = (WIDTH - LABEL - 50) / most
    body: list[str] = []
    for i, (label, parts) in enumerate(rows):
        y, x = i * ROW + 4, float(LABEL)
        body.append(_words(LABEL - 10, y + 14, label, anchor="end"))
        for kind, n in parts:
            if n:
                body.append(_box(x, y, max(1.0, n * unit - 2), 18, kind, f"{label}: {n} {kind}"))
                body.append(_words(x + n * unit / 2 - 1, y + 13.5, n, "in", "middle") if n * unit > 18 else "")
                x += n * unit
        body.append(_words(x + 6, y + 14, sum(n for _, n in parts), "soft"))
    described = "; ".join(f"{label}: " + ", ".join(f"{n} {k}" for k, n in parts if n) for label, parts in rows)
    return figure(body, len(rows) * ROW + 8, title, described)


def intervals(rows: Sequence[tuple[str, Interval, str]], title: str) -> str:
    """Draw rates with their confidence intervals on one axis from 0 to 100 %."""
    span = WIDTH - LABEL - 110
    bottom = len(rows) * ROW + 6
    body = []
    for tick in (0, 25, 50, 75, 100):
        x = LABEL + span * tick / 100
        body.append(f'<line x1="{x:g}" x2="{x:g}" y1="0" y2="{bottom}" class="grid"/>')
        body.append(_words(x, bottom + 14, f"{tick} %", "soft", "middle"))
    for i, (label, at, note) in enumerate(rows):
        y = i * ROW + 14
        a, m, b = (LABEL + span * v for v in (at.low, at.value, at.high))
        body.append(_words(LABEL - 10, y + 4, label, anchor="end"))
        body.append(f'<line x1="{a:.1f}" x2="{b:.1f}" y1="{y}" y2="{y}" class="whisker"/>')
        body.append(f'<circle cx="{m:.1f}" cy="{y}" r="5" class="dot"><title>{text(note)}</title></circle>')
        body.append(_words(LABEL + span + 14, y + 4, note, "soft"))
    described = "; ".join(f"{label}: {note}" for label, _, note in rows)
    return figure(body, bottom + 22, title, described)


def money(rows: Sequence[tuple[str, float, float]], title: str) -> str:
    """Draw one bar of dollar amounts per row. A row is (label, useful, wasted)."""
    most = max((a + b for _, a, b in rows), default=1.0) or 1.0
    unit = (WIDTH - LABEL - 190) / most
    body: list[str] = []
    for i, (label, useful, wasted) in enumerate(rows):
        y = i * ROW + 4
        body.append(_words(LABEL - 10, y + 14, label, anchor="end"))
        body.append(_box(LABEL, y, useful * unit, 18, "useful", f"{label}: ${useful:.2f} useful"))
        body.append(
            _box(LABEL + useful * unit + (2 if useful else 0), y, wasted * unit, 18, "wasted", f"${wasted:.2f}")
        )
        note = f"${useful + wasted:.2f}" + (f", ${wasted:.2f} wasted" if wasted else "")
        body.append(_words(LABEL + (useful + wasted) * unit + 10, y + 14, note, "soft"))
    described = "; ".join(f"{label}: ${a + b:.2f}, of which ${b:.2f} was wasted" for label, a, b in rows)
    return figure(body, len(rows) * ROW + 8, title, described)
