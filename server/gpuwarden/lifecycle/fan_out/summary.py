"""Summarize a fan-out: each configuration's spread over its seeds, as rows and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Final
from xml.sax.saxutils import escape

from gpuwarden.core.fan_out import SEED
from gpuwarden.core.sanitize import line
from gpuwarden.lifecycle.fan_out.records import FanOutRecord

WIDTH: Final = 720
ROW: Final = 44
TOP: Final = 48
MARGIN: Final = 24
LETTERS: Final = 90
"""Maximum number of characters in a line of text, excluding the cell count."""


@dataclass(frozen=True)
class SeedSummary:
    """The results of one configuration over its seeds.

    `values` contains the objectives of its proven cells; `cells` is the total number of its cells.
    """

    settings: tuple[tuple[str, str], ...]
    cells: int
    values: tuple[float, ...]
    metric: str = ""

    @property
    def name(self) -> str:
        """Return the settings in one line."""
        return " ".join(f"{key}={value}" for key, value in self.settings) or "all"

    @property
    def mean(self) -> float | None:
        """Return the mean objective; None if no objective is known."""
        return fmean(self.values) if self.values else None

    @property
    def median(self) -> float | None:
        """Return the median objective; None if no objective is known."""
        return median(self.values) if self.values else None

    @property
    def deviation(self) -> float | None:
        """Return the sample standard deviation; None for fewer than two values."""
        return stdev(self.values) if len(self.values) > 1 else None


def spreads(fan: FanOutRecord) -> list[SeedSummary]:
    """Return one row for each configuration, regardless of the seed, in plan order."""
    rows: dict[tuple[tuple[str, str], ...], tuple[int, list[float], str]] = {}
    for cell in fan.cells:
        key = tuple((name, value) for name, value in cell.settings.items() if name != SEED)
        count, values, metric = rows.get(key, (0, [], ""))
        proof = fan.proven.get(cell.index)
        found = fan.found[proof.job, cell.index] if proof else None
        if found is not None and found.objective is not None:
            values, metric = [*values, found.objective], found.metric
        rows[key] = count + 1, values, metric
    return [SeedSummary(key, count, tuple(values), metric) for key, (count, values, metric) in rows.items()]


def plot(rows: Sequence[SeedSummary], title: str) -> str:
    """Return an SVG image with each configuration's settings, a point for each proven cell, and a bar at the mean.

    Raises ValueError if no cell has an objective.
    """
    values = [value for row in rows for value in row.values]
    if not values:
        raise ValueError("no proven cell has an objective")
    low, high = min(values), max(values)
    scale = (WIDTH - 2 * MARGIN) / (high - low) if high > low else 0.0

    def across(value: float) -> float:
        return MARGIN + (value - low) * scale if scale else WIDTH / 2

    def text(x: float, y: float, words: str, anchor: str = "start", size: int = 12) -> str:
        shown = escape(line(words, LETTERS * 12 // size))
        return f'<text x="{x}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{shown}</text>'

    height, right = TOP + ROW * len(rows) + MARGIN, WIDTH - MARGIN
    metric = next((row.metric for row in rows if row.metric), "objective")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif">',
        f"<title>{escape(line(title))}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        text(MARGIN, 20, title, size=15),
        text(MARGIN, 38, f"{metric}: a point for each proven cell, a bar at the mean"),
    ]
    for n, row in enumerate(rows):
        y = TOP + ROW * n + ROW - 10
        parts.append(text(MARGIN, y - 14, row.name))
        parts.append(text(right, y - 14, f"{len(row.values)}/{row.cells}", "end"))
        parts.append(f'<line x1="{MARGIN}" x2="{right}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts += [f'<circle cx="{across(v):.1f}" cy="{y}" r="4" fill="#2b6cb0" opacity="0.7"/>' for v in row.values]
        if row.mean is not None:
            x = across(row.mean)
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 8}" y2="{y + 8}" stroke="#c53030" stroke-width="2"/>'
            )
    y = height - 8
    ends = [(MARGIN, low, "start"), (right, high, "end")] if scale else [(WIDTH // 2, low, "middle")]
    parts += [text(x, y, f"{value:.4g}", anchor) for x, value, anchor in ends]
    return "\n".join([*parts, "</svg>", ""])
