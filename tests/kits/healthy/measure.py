"""Write the configurations, verify them at every level, and count the refuted and unknown files."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gpuwarden.checkpoints.build import build
from gpuwarden.checkpoints.examine import examine
from gpuwarden.checkpoints.findings import ExamineOptions, Findings
from gpuwarden.checkpoints.load import load
from gpuwarden.checkpoints.verify import report
from gpuwarden.core.models import Level, Report, Verdict
from healthy import Configuration, Unreadable, configurations

WRITTEN = ".written"


@dataclass
class Tally:
    """The counts of one level, and a line for each unexpected verdict."""

    files: int = 0
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    # The verdicts on whole configurations, including those on folders.
    whole: Counter[Verdict] = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)

    @property
    def unknown_share(self) -> float:
        """Return the share of unknown files."""
        return self.verdicts[Verdict.UNKNOWN] / max(1, self.files)


def write(at: Path, wanted: list[Configuration]) -> tuple[list[Configuration], dict[str, str]]:
    """Write each configuration into a separate folder. Return the written ones, and the reasons for the others."""
    done, failed = [], {}
    for one in wanted:
        folder = place(at, one)
        if one.lacks:
            failed[one.name] = f"needs {', '.join(one.lacks)}"
            continue
        if not (folder.parent / (folder.name + WRITTEN)).exists():
            folder.mkdir(parents=True, exist_ok=True)
            try:
                with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
                    warnings.simplefilter("ignore")
                    one.write(folder)
            except Unreadable as why:
                failed[one.name] = str(why)[:160]
                continue
            except Exception as why:  # a write failure is the library's fault, not a wrong verdict
                failed[one.name] = f"{type(why).__name__}: {str(why)[:160]}"
                continue
            (folder.parent / (folder.name + WRITTEN)).touch()
        done.append(one)
    return done, failed


def place(at: Path, one: Configuration) -> Path:
    """Return the folder of a configuration."""
    return at / re.sub(r"[^\w.-]+", "_", one.name)


class _Union(Findings):
    """The findings on all configurations, so that one process loads all of their files."""

    def place(self, path: str) -> Path:
        return self.root / path


def examine_all(at: Path, written: list[Configuration], level: Level) -> dict[str, Findings]:
    """Examine every configuration separately, but load all of their files in one process."""
    ask = ExamineOptions(level is not Level.STRUCTURE)
    found = {one.name: examine(place(at, one), ask) for one in written}
    if level in (Level.LOAD, Level.RESUME):
        entries = [(f, e, e.path) for f in found.values() for e in f.entries.values() if e.verdict == "proven"]
        for f, entry, path in entries:
            entry.path = str(f.place(path).relative_to(os.path.realpath(at)))
        load(_Union(Path(os.path.realpath(at)), {}, None, []), [e for _, e, _ in entries])
        for _, entry, path in entries:
            entry.path = path
        build(list(found.values()))
    return found


def tally(at: Path, written: list[Configuration], found: dict[str, Findings], level: Level) -> Tally:
    """Count the verdicts on every configuration at one level."""
    total = Tally()
    for one in written:
        if level is Level.RESUME and one.step is None:
            continue
        made = report(found[one.name], level, str(place(at, one)))
        total.files += len(made.files)
        total.verdicts.update(f.verdict for f in made.files)
        total.whole[made.verdict] += 1
        total.lines += [f"{one.name}: {line}" for line in surprises(one, made, level)]
    return total


def surprises(one: Configuration, report: Report, level: Level) -> Iterator[str]:
    """Yield a line for every unexpected verdict."""
    for file in report.files:
        if file.verdict != one.expected(file.path):
            yield f"{file.path} ({file.format}) is {file.verdict}: {'; '.join(file.problems + file.doubts)[:300]}"
    for folder in report.checkpoints:
        lines = folder.problems + folder.doubts
        if lines:
            yield f"folder {folder.path} is {folder.verdict}: {'; '.join(lines)[:300]}"
    lines = report.problems + report.doubts
    if lines:
        yield f"the whole is {report.verdict}: {'; '.join(lines)[:300]}"
    if level is Level.RESUME and report.step != one.step:
        yield f"the newest step is {report.step} in {report.newest!r}, not {one.step}"
    if level is Level.RESUME:
        newest = next((c for c in report.checkpoints if c.path == report.newest), None)
        for line in newest.warnings if newest else ():
            yield f"warning: {line[:200]}"


def line(level: Level, part: list[Configuration], got: Tally) -> str:
    """Return one row of counts."""
    seen = "unseen" if part and part[0].unseen else "seen"
    return (
        f"{level:<10} {seen:<7} {len(part):>4} configurations {got.files:>5} files: "
        f"{got.verdicts[Verdict.REFUTED]:>3} refuted, {got.verdicts[Verdict.UNKNOWN]:>3} unknown "
        f"({got.unknown_share:.1%}); configurations: {got.whole[Verdict.REFUTED]} refuted, "
        f"{got.whole[Verdict.UNKNOWN]} unknown"
    )


def main(at: Path, only: str, levels: list[str], seen: bool) -> int:
    """Print the counts of each level, and return 1 if a healthy file is refuted."""
    wanted = [c for c in configurations() if re.search(only, c.name) and not (seen and c.unseen)]
    written, failed = write(at, wanted)
    print(f"{len(written)} configurations, {len(wanted) - len(written)} not written")
    for name, why in failed.items():
        print(f"  not written: {name}: {why}")
    bad = 0
    found: dict[str, Findings] = {}
    for level in map(Level, levels):
        if level is not Level.RESUME or not found:  # the resume level reuses the load level's findings
            found = examine_all(at, written, level)
        for unseen in (False, True):
            part = [c for c in written if c.unseen is unseen]
            got = tally(at, part, found, level)
            bad += got.verdicts[Verdict.REFUTED] + got.whole[Verdict.REFUTED]
            print(line(level, part, got))
            if not unseen:
                print("".join(f"    {text}\n" for text in got.lines), end="")
    return min(bad, 1)
