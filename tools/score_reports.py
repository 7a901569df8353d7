"""Score the diagnosis and the search on reports of failures: files in the format of docs/blind-set.md.

    python tools/score_reports.py tests/corpus/reports/blind-2026-11.jsonl
    python tools/score_reports.py --misses tests/corpus/reports/*.jsonl
    python tools/score_reports.py --frequencies tests/corpus/reports/open-*.jsonl
    python tools/score_reports.py --records tests/corpus/reports/{open,judged}-*.jsonl tests/corpus/issues.jsonl

For each file, and for each kind and language, it prints the share of reports whose first answer is right, the share
with a right answer among the first three, and the share of likely answers that are right. If no entry matches a report,
the answer counts as right unless it is marked as likely. With --frequencies, it prints how often each entry answers a
report, as in `knowledge/frequency.txt`. With --records, it prints how often each signature that selected the first
answer was right, as in `knowledge/signature_record.txt`.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gpuwarden.knowledge import Hit, search, shipped

KINDS = ("log", "words")
LANGUAGES = ("en", "zh")
FIELDS = {"address": str, "date": str, "lang": str, "kind": str, "lines": str, "label": list, "why": str}
MAX_LINES = 2_000
"""Maximum number of characters that a report may quote from a third-party text."""


@dataclass(frozen=True)
class Report:
    """One report: its address, its relevant lines, and the entries that answer it, if any."""

    address: str
    date: str
    lang: str
    kind: str
    lines: str
    label: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Answer:
    """A report with the ids of its answers, best first. `likely` and `telling` (signatures) refer to the first."""

    report: Report
    ids: tuple[str, ...]
    likely: bool
    telling: tuple[str, ...] = ()

    @property
    def first(self) -> bool:
        """Return whether the first answer is right or, if no entry matches the report, not marked as likely."""
        return self.ids[:1] != () and self.ids[0] in self.report.label if self.report.label else not self.likely

    @property
    def in_three(self) -> bool:
        """Return whether one of the first three answers is right."""
        return bool({*self.ids[:3]} & {*self.report.label}) if self.report.label else not self.likely


def read(path: Path) -> list[Report]:
    """Read a file of reports. Raises ValueError, which names the file and line, if a field is missing or wrong."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        row = json.loads(line)
        if path.name == "issues.jsonl":  # public issues, used as queries
            wanted = tuple(key for key in row["want"] if key in shipped().gotchas)
            found.append(Report("", "", "en", "words", row["query"], wanted, ""))
            continue
        wrong = [name for name, kind in FIELDS.items() if not isinstance(row.get(name), kind)]
        wrong += [] if row.get("kind") in KINDS else ["kind"]
        wrong += [] if row.get("lang") in LANGUAGES else ["lang"]
        wrong += ["lines"] if len(row.get("lines", "")) > MAX_LINES else []
        wrong += [key for key in row.get("label", ()) if key not in shipped().gotchas]
        if wrong or set(row) - set(FIELDS):
            raise ValueError(f"{path.name}:{number}: wrong or missing: {wrong or sorted(set(row) - set(FIELDS))}")
        found.append(Report(**{**row, "label": tuple(row["label"])}))
    return found


def answers(reports: Iterable[Report]) -> Iterator[Answer]:
    """Search for each report, and yield the answers."""
    for report in reports:
        hits: tuple[Hit, ...] = search(shipped(), report.lines, 5)
        ids = tuple(hit.id for hit in hits)
        yield Answer(report, ids, bool(hits) and hits[0].certainty == "likely", hits[0].telling if hits else ())


def share(rows: list[Answer], what: str) -> str:
    """Return a percentage with its counts."""
    good = sum(getattr(row, what) for row in rows)
    return f"{100 * good / len(rows):5.1f} % ({good}/{len(rows)})" if rows else "      -"


def table(name: str, rows: list[Answer]) -> str:
    """Return the figures of one file."""
    groups = {"all": rows}
    groups |= {kind: [row for row in rows if row.report.kind == kind] for kind in KINDS}
    groups |= {lang: [row for row in rows if row.report.lang == lang] for lang in LANGUAGES}
    lines = [name]
    for group, members in groups.items():
        likely = [row for row in members if row.likely]
        lines.append(
            f"  {group:6} first {share(members, 'first')}  in three {share(members, 'in_three')}"
            f"  likely right {share(likely, 'first')}"
        )
    return "\n".join(lines)


def frequencies(reports: Iterable[Report]) -> dict[str, float]:
    """Count how often each entry answers. The first entry of a label counts as 1, the second as 1/2, and all others as
    1/4.
    """
    found: dict[str, float] = defaultdict(float)
    for report in reports:
        for at, key in enumerate(report.label):
            found[key] += 1 / (1, 2, 4)[min(at, 2)]
    return found


def records(rows: Iterable[Answer]) -> dict[tuple[str, str], tuple[int, int]]:
    """Count the right first answers and all first answers by entry and signature."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for row in rows:
        for signature in row.telling:
            right, total = found.get((row.ids[0], signature), (0, 0))
            found[row.ids[0], signature] = (right + (row.ids[0] in row.report.label), total + 1)
    return found


def main(args: list[str]) -> int:
    """Print the figures of each file, and with --misses the wrong answers."""
    paths = [Path(arg) for arg in args if not arg.startswith("--")]
    if "--frequencies" in args:
        counted = frequencies(report for path in paths for report in read(path))
        print("\n".join(f"{key} {count:g}" for key, count in sorted(counted.items())))
        return 0
    if "--records" in args:
        counted_rows = records(answers(report for path in paths for report in read(path)))
        for (entry, signature), (right, total) in sorted(counted_rows.items()):
            print(entry, right, total, signature)
        return 0
    for path in paths:
        rows = list(answers(read(path)))
        print(table(path.name, rows))
        for row in rows if "--misses" in args else ():
            if not row.first:
                shown = " | ".join(row.report.lines.splitlines())[:120]
                print(f"    {row.report.address}: {row.ids[:3]} instead of {row.report.label}: {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
