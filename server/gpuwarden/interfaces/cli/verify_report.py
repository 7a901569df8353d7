"""Print a verification report as a table. Problems come first; proven rows may be left out."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from gpuwarden.core.models import CheckpointEvidence, FileEvidence, Report, Verdict
from gpuwarden.core.plural import counted
from gpuwarden.core.sanitize import plain
from gpuwarden.interfaces.cli import console

SHOWN = 40
_UNITS = ("B", "KB", "MB", "GB", "TB")


def show(report: Report) -> None:
    """Print the verdict, the problems, the checkpoints and files, and the checks that were not done."""
    newest = (
        f", newest complete checkpoint {safe(report.newest)} (step {report.step:,})" if report.step is not None else ""
    )
    count = f"{counted(len(report.files), 'file')}, {report.bytes:,} bytes"
    console.out.print(
        f"{console.colored(report.verdict)} at level {report.level}: {safe(report.path)}, {count}{newest}"
    )
    _print_lines(report.problems, "red", "")
    _print_lines(report.doubts, "magenta", "unknown: ")
    _print_lines(report.warnings, "yellow", "")
    rows: list[CheckpointEvidence | FileEvidence] = [*report.checkpoints, *report.files]
    rows.sort(key=lambda r: (r.verdict is Verdict.PROVEN, isinstance(r, FileEvidence), r.path))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("verdict", no_wrap=True)
    table.add_column("path", overflow="fold", ratio=3)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("problems or proof", overflow="fold", ratio=5)
    for row in rows[:SHOWN]:
        lines = [f"[red]{safe(t)}[/]" for t in row.problems] + [f"[magenta]{safe(t)}[/]" for t in row.doubts]
        if row.verdict is Verdict.PROVEN:
            lines += [safe(t) for t in row.proved]
        lines += [f"[yellow]{safe(t)}[/]" for t in row.warnings]
        if isinstance(row, FileEvidence):
            kind, size = row.format, sized(row.size)
        else:
            kind, size = row.layout + ("" if row.step is None else f", step {row.step:,}"), ""
            lines += [f"[yellow]resume: {safe(t)}[/]" for t in row.resume]
        table.add_row(console.colored(row.verdict), f"{safe(row.path)} [dim]({safe(kind)})[/]", size, "\n".join(lines))
    if rows:
        console.out.print(table)
    if len(rows) > SHOWN:
        bad = sum(r.verdict is not Verdict.PROVEN for r in rows[SHOWN:])
        console.out.print(f"and {len(rows) - SHOWN:,} more, {bad:,} of them not proven")
    _print_lines(report.proved, "green", "")
    _print_lines(report.not_checked, "dim", "not checked: ")


def _print_lines(lines: Sequence[str], style: str, before: str) -> None:
    for text in lines[:SHOWN]:
        console.out.print(f"  [{style}]{before}{safe(text)}[/]")
    if len(lines) > SHOWN:
        console.out.print(f"  and {len(lines) - SHOWN:,} more")


def safe(text: str) -> str:
    """Escape untrusted text for printing at a terminal."""
    return escape(plain(text))


def sized(count: int) -> str:
    """Format a number of bytes in a suitable unit, such as 1.2 GB."""
    size, unit = float(count), 0
    while size >= 1000 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{count} B" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"
