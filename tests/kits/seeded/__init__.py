"""Faults that make training jobs fail, each put into a plain script and into a shipped trainer, and run.

`corpus/seeded_faults.jsonl` has one case a line. The expected outcome of the trainer is part of the case, so that it
is decided before any run. A third of the cases, by the digest of the name, is held out until the end.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paths import CORPUS

# Outcomes, the good ones first. The rehearsal refuses a job if the job's own checks end it on this computer.
SURVIVES, GATE, REHEARSAL, MACHINE, LOST = "survives", "gate", "rehearsal", "machine", "lost"
WELL = frozenset({SURVIVES, GATE, REHEARSAL})


@dataclass(frozen=True)
class Case:
    """One fault, the expected outcome of the trainer, and the change that the refusal requests.

    `fault` and `fix` have these parts, each optional: `plain` and `text` (replacements in the
    plain script and in the trainer), `args` (the trainer's arguments; null removes one), `spec` (fields of the job),
    `machine` (conditions, see `machine.py`), `hub` (faults of the Hub), `token`, `restart` (the same command is run
    again), `cold` (a process without imported modules), `grant` (access to a repo).
    """

    name: str
    kind: str
    method: str
    source: str
    fault: dict[str, Any]
    expect: str
    names: str = ""
    fix: dict[str, Any] = field(default_factory=dict)

    @property
    def unseen(self) -> bool:
        """Return whether this is in the held-out third, which is not read before the figures are final."""
        return zlib.crc32(self.name.encode()) % 3 == 0


def cases(path: Path = CORPUS / "seeded_faults.jsonl") -> list[Case]:
    """Return all cases in the order of the file."""
    return [Case(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
