"""Insert faults into training jobs, run the jobs, and print the share that ends well, without and with gpuwarden.

    python tools/seeded_faults.py [--only REGEX] [--seen | --unseen] [--write PAGE] [--at FOLDER]

Each fault in `tests/corpus/seeded_faults.jsonl` is inserted into a plain script, which is run directly, and into the
shipped trainer of the same method, which must pass the submit gate first. Both run on the CPU with tiny models against
the rehearsal Hub. A job ends well if, within the timeout, it completes all steps with a proven last checkpoint and a
proven copy outside the machine. A job that is refused before an instance is rented ends well if it completes in this
way after the change that the refusal names. `--seen` omits the held-out third, which is not used to develop the
trainers and the gate; `--unseen` runs only that third. `--write` inserts the tables into a page between its markers.
All cases together take about half an hour on two idle cores. The exit code is 1 if a control fails or the share with
the gate is below 95 %.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path.insert(0, str(TESTS / "kits"))

from seeded import GATE, LOST, MACHINE, REHEARSAL, SURVIVES, Case, cases  # noqa: E402
from seeded.jobs import ARGS, Outcome, jobs_in  # noqa: E402

MARKS = ("<!-- generated:seeded-faults -->", "<!-- /generated -->")
GOAL = 0.95
SOUND = [Case(f"no fault, {method}", "control", method, "", {}, SURVIVES) for method in ARGS]
SAID = {
    SURVIVES: "survives it",
    GATE: "refused by the gate",
    REHEARSAL: "refused by the rehearsal",
    MACHINE: "ends on the machine, fix named",
    LOST: "lost",
}


@dataclass(frozen=True)
class Row:
    """The outcomes of one case."""

    case: Case
    plain: Outcome
    guarded: Outcome


def main(words: Sequence[str] | None = None) -> int:
    """Run the cases and print the tables."""
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--only", default="", help="a regular expression for the names and kinds of the cases")
    ask.add_argument("--seen", action="store_true", help="omit the held-out third")
    ask.add_argument("--unseen", action="store_true", help="run only the held-out third")
    ask.add_argument("--recorded", action="store_true", help="run no cases; print the outcomes in the --at folder")
    ask.add_argument("--write", type=Path, default=None, help="a page whose marked block is replaced")
    ask.add_argument(
        "--at", type=Path, default=None, help="folder for the jobs and outcomes; an interrupted run resumes from it"
    )
    asked = ask.parse_args(words)
    left_out = {True} if asked.seen else {False} if asked.unseen else set()
    if asked.recorded and asked.at is None:
        ask.error("--recorded needs --at")
    chosen = [c for c in cases() if re.search(asked.only, f"{c.kind}: {c.name}") and c.unseen not in left_out]
    with tempfile.TemporaryDirectory() as made:
        folder = asked.at or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        controls, rows = recorded(folder, chosen) if asked.recorded else measured(folder, chosen)
    text = tables(controls, rows)
    if asked.write:
        page = asked.write.read_text(encoding="utf-8")
        before, rest = page.split(MARKS[0], 1)
        asked.write.write_text(f"{before}{MARKS[0]}\n{text}{MARKS[1]}{rest.split(MARKS[1], 1)[1]}", encoding="utf-8")
    print(text)
    whole = all(row.plain.well and row.guarded.well for row in controls)
    return int(not whole or share(row.guarded for row in rows) < GOAL)


def recorded(folder: Path, chosen: list[Case]) -> tuple[list[Row], list[Row]]:
    """Return the outcomes recorded in a folder: those of the jobs without a fault, and those of the cases."""
    log = folder / "outcomes.jsonl"
    done = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    known = {row["name"]: (Outcome(**row["plain"]), Outcome(**row["guarded"])) for row in done}
    sound, faulty = ([Row(c, *known[c.name]) for c in group if c.name in known] for group in (SOUND, chosen))
    return sound, faulty


def measured(folder: Path, chosen: list[Case]) -> tuple[list[Row], list[Row]]:
    """Run the cases without a recorded outcome; return the outcomes of the jobs without a fault, and of the cases."""
    had = {row.case.name for rows in recorded(folder, chosen) for row in rows}
    with jobs_in(folder) as jobs:
        for case in [c for c in (*SOUND, *chosen) if c.name not in had]:
            row = Row(case, jobs.plain(case), jobs.guarded(case))
            with (folder / "outcomes.jsonl").open("a") as file:
                line = {"name": case.name, "plain": asdict(row.plain), "guarded": asdict(row.guarded)}
                file.write(json.dumps(line) + "\n")
            print(f"{case.kind}: {case.name}: {shown(row.plain)} | {shown(row.guarded)}", file=sys.stderr, flush=True)
    return recorded(folder, chosen)


def shown(outcome: Outcome) -> str:
    """Return an outcome as text for the log."""
    return f"{outcome.how}{'' if outcome.agrees else ' (NOT AS EXPECTED)'} {outcome.words[:300]}"


def share(outcomes: Iterable[Outcome]) -> float:
    """Return the share that ended well."""
    ended = [outcome.well for outcome in outcomes]
    return sum(ended) / len(ended) if ended else 1.0


def tables(controls: list[Row], rows: list[Row]) -> str:
    """Return the shares by kind, then every case, in Markdown."""
    lines = ["| kind of fault | cases | plain script ends well | trainer and gate end well |", "|---|--:|--:|--:|"]
    groups = [(kind, [r for r in rows if r.case.kind == kind]) for kind in dict.fromkeys(r.case.kind for r in rows)]
    groups += [("**all**", rows), ("the third that was not looked at", [r for r in rows if r.case.unseen])]
    groups += [("no fault", controls)]
    for kind, some in groups:
        well, guarded = sum(r.plain.well for r in some), sum(r.guarded.well for r in some)
        lines.append(f"| {kind} | {len(some)} | {of(well, len(some))} | {of(guarded, len(some))} |")
    lines += ["", "| fault | method | plain script | trainer and gate | source |", "|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda r: (r.case.kind, r.case.name)):
        case, source = row.case, row.case.source
        link = f"[{source.removeprefix('https://github.com/')}]({source})" if "://" in source else f"`{source}`"
        plain, guarded = "ends well" if row.plain.well else "lost", SAID[row.guarded.how]
        lines.append(f"| {case.kind}: {case.name} | {case.method} | {plain} | {guarded} | {link} |")
    return "\n".join(lines) + "\n"


def of(part: int, whole: int) -> str:
    """Return a number of cases with its share."""
    return f"{part} ({part / whole:.0%})" if whole else "0"


if __name__ == "__main__":
    raise SystemExit(main())
