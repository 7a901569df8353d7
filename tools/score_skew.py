"""Score the explanations for missing names on public reports, which are in tests/corpus/skew/.

    python tools/score_skew.py [--misses] tests/corpus/skew/open.jsonl

An answer is correct if its package, the releases with and without the name, and the replacement (if any) are the same
as in the report. If no release explains the report, a *likely* answer is wrong.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from gpuwarden.knowledge.failure import read_failure
from gpuwarden.knowledge.version_skew import Change, Skew, explain

EXPLAINED = frozenset({"removed", "added"})


@dataclass(frozen=True)
class Case:
    """One report, and gpuwarden's explanation for it."""

    row: dict[str, Any]
    skew: Skew | None

    @property
    def explained(self) -> bool:
        """Return whether differences between releases explain the report."""
        return self.row["answer"]["change"] in EXPLAINED

    @property
    def likely(self) -> bool:
        """Return whether the answer is marked as likely."""
        return self.skew is not None and self.skew.certainty == "likely"

    @property
    def right(self) -> bool:
        """Return whether the answer is correct."""
        wanted, skew = self.row["answer"], self.skew
        if not self.explained:
            return not self.likely
        if skew is None or skew.package != wanted["package"] or skew.change in {Change.PRESENT, Change.NEVER}:
            return False
        has = all(not _lacks(skew, Version(v)) for v in wanted["has"])
        return (
            has and all(_lacks(skew, Version(v)) for v in wanted["lacks"]) and wanted["renamed_to"] in skew.renamed_to
        )


def _lacks(skew: Skew, release: Version) -> bool:
    """Return whether a release lacks the name according to an answer."""
    past = bool(skew.gone_in) and release >= Version(skew.gone_in)
    return past or (bool(skew.since) and release < Version(skew.since))


def read(path: Path) -> list[dict[str, Any]]:
    """Read the reports in a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def cases(rows: Iterable[dict[str, Any]]) -> Iterator[Case]:
    """Explain each report."""
    return (Case(row, explain(read_failure(row["lines"]))) for row in rows)


def main(args: list[str]) -> int:
    """Print the scores for each file, and with --misses also the wrong answers."""
    for path in map(Path, (arg for arg in args if not arg.startswith("--"))):
        rows = list(cases(read(path)))
        explained = [case for case in rows if case.explained]
        likely = [case for case in rows if case.likely]
        print(
            f"{path.name}: explained {sum(c.right for c in explained)}/{len(explained)},"
            f" left alone {sum(c.right for c in rows if not c.explained)}/{len(rows) - len(explained)},"
            f" likely right {sum(c.right for c in likely)}/{len(likely)}"
        )
        for case in rows if "--misses" in args else ():
            if not case.right:
                print(f"  {case.row['address']}: {case.row['lines'].splitlines()[-1][:110]}\n    {case.skew!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
