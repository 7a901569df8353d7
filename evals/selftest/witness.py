"""Read the witness of each case, a transcript that must pass (`witness/<case>.jsonl`), and its variants.

`<case>.ok-<name>.jsonl` must pass too, and `<case>.bad-<name>.jsonl` must fail. A witness is a canonical transcript
with an additional last line that contains the matching end state: `{"type": "world", "views": ..., "facts": ...}`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from evals.errors import EvalError
from evals.scoring.cases import Case, json_lines
from evals.scoring.endstate import EndState, parse
from evals.scoring.surface import HERE
from evals.transcripts.canonical import OURS, Transcript
from evals.transcripts.load_canonical import of_rows

WITNESSES: Final = HERE / "witness"
MAX_BYTES: Final = 4 << 20  # witnesses are written by hand and short, unlike recorded transcripts
Row = dict[str, Any]


@dataclass(frozen=True)
class Script:
    """A witness as rows that operators can rewrite. Rows are never changed in place."""

    rows: tuple[Row, ...]
    end: dict[str, Any]

    def transcript(self) -> Transcript:
        """Parse the rows as a transcript, with the usual loader."""
        return of_rows(list(enumerate(self.rows, 1)))

    def end_state(self) -> EndState:
        """Parse the end state with the usual parser."""
        return parse(self.end, "witness")

    def our_ids(self) -> list[str]:
        """Return the ids of the calls to the server under test, in order."""
        return [r["id"] for r in self.rows if r["type"] == "call" and r["server"] in OURS]


def read_script(path: Path) -> Script:
    """Read a witness file. Raises EvalError if it is incomplete."""
    rows = [row for _, row in json_lines(path)]
    if not rows or rows[-1].get("type") != "world":
        raise EvalError("the last line is not of the type `world`", "Add the end state: see evals/README.md", file=path)
    script = Script(tuple(rows[:-1]), {k: v for k, v in rows[-1].items() if k != "type"})
    parse(script.end, path)
    problems = script.transcript().problems
    if problems:
        raise EvalError(f"the witness can't be read: {problems[0]}", "Write it as a canonical transcript", file=path)
    return script


def is_script(path: Path) -> bool:
    """Return true if a file's last line has the format of a witness's last line. The other lines are not checked."""
    try:
        rows = [row for _, row in json_lines(path)] if path.stat().st_size <= MAX_BYTES else []
    except (EvalError, OSError):
        return False
    return bool(rows) and rows[-1].get("type") == "world"


def witness(case: Case, folder: Path = WITNESSES) -> Script:
    """Return the witness of a case. Raises EvalError if the case has none."""
    path = folder / f"{case.id}.jsonl"
    if not path.is_file():
        remedy = f"Write {path.name}: a transcript that passes, and a last line with the end state"
        raise EvalError(f"the case {case.id} has no witness", remedy, file=path)
    return read_script(path)


def variants(case: Case, mark: str, folder: Path = WITNESSES) -> Iterator[tuple[str, Script]]:
    """Return (file name, script) for each stored variant of a case; `mark` is `ok` or `bad`."""
    for path in sorted(folder.glob(f"{case.id}.{mark}-*.jsonl")):
        yield path.name, read_script(path)


def orphans(cases: dict[str, Case], folder: Path = WITNESSES) -> list[str]:
    """Return the files that don't belong to any case, such as the witness of a renamed case."""
    return sorted(p.name for p in folder.iterdir() if p.name.partition(".")[0] not in cases)
