"""Read the reference transcript of each case, a transcript that must pass (`reference_transcripts/<case>.jsonl`).

`<case>.ok-<name>.jsonl` must pass too, and `<case>.bad-<name>.jsonl` must fail. These files are canonical transcripts
with an additional last line that contains the matching end state: `{"type": "end_state", "views": ..., "facts": ...}`.
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

REFERENCES: Final = HERE / "reference_transcripts"
MAX_BYTES: Final = 4 << 20  # reference transcripts are written by hand and short, unlike recorded transcripts
Row = dict[str, Any]


@dataclass(frozen=True)
class Script:
    """A reference transcript as rows that operators can rewrite. Rows are never changed in place."""

    rows: tuple[Row, ...]
    end: dict[str, Any]

    def transcript(self) -> Transcript:
        """Parse the rows as a transcript, with the usual loader."""
        return of_rows(list(enumerate(self.rows, 1)))

    def end_state(self) -> EndState:
        """Parse the end state with the usual parser."""
        return parse(self.end, "reference transcript")

    def our_ids(self) -> list[str]:
        """Return the ids of the calls to the server under test, in order."""
        return [r["id"] for r in self.rows if r["type"] == "call" and r["server"] in OURS]


def read_script(path: Path) -> Script:
    """Read a reference transcript from a file. Raises EvalError if it is incomplete."""
    rows = [row for _, row in json_lines(path)]
    if not rows or rows[-1].get("type") != "end_state":
        remedy = "Add the end state: see evals/README.md"
        raise EvalError("the last line is not of the type `end_state`", remedy, file=path)
    script = Script(tuple(rows[:-1]), {k: v for k, v in rows[-1].items() if k != "type"})
    parse(script.end, path)
    problems = script.transcript().problems
    if problems:
        fault = f"the reference transcript can't be read: {problems[0]}"
        raise EvalError(fault, "Write it as a canonical transcript", file=path)
    return script


def is_script(path: Path) -> bool:
    """Return true if a file's last line is an end state, as in a reference transcript. Other lines are not checked."""
    try:
        rows = [row for _, row in json_lines(path)] if path.stat().st_size <= MAX_BYTES else []
    except (EvalError, OSError):
        return False
    return bool(rows) and rows[-1].get("type") == "end_state"


def reference(case: Case, folder: Path = REFERENCES) -> Script:
    """Return the reference transcript of a case. Raises EvalError if the case has none."""
    path = folder / f"{case.id}.jsonl"
    if not path.is_file():
        remedy = f"Write {path.name}: a transcript that passes, and a last line with the end state"
        raise EvalError(f"the case {case.id} has no reference transcript", remedy, file=path)
    return read_script(path)


def stored_scripts(case: Case, mark: str, folder: Path = REFERENCES) -> Iterator[tuple[str, Script]]:
    """Return (file name, script) for each further stored transcript of a case; `mark` is `ok` or `bad`."""
    for path in sorted(folder.glob(f"{case.id}.{mark}-*.jsonl")):
        yield path.name, read_script(path)


def orphans(cases: dict[str, Case], folder: Path = REFERENCES) -> list[str]:
    """Return the files that don't belong to any case, such as the reference transcript of a renamed case."""
    return sorted(p.name for p in folder.iterdir() if p.name.partition(".")[0] not in cases)
