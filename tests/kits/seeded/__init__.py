"""Faults that make training jobs fail. Each is put into a plain script and into a bundled trainer, which are then run.

`corpus/seeded_faults.jsonl` has one case per line. A case includes the trainer's expected outcome, so that it is
decided before any run. A third of the cases, chosen by the digest of the name, is held out until the end.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paths import CORPUS

# Outcomes, the good ones first. `REHEARSAL` means that the job's own checks end it on this computer.
SURVIVES, GATE, REHEARSAL, MACHINE, LOST = "survives", "gate", "rehearsal", "machine", "lost"
WELL = frozenset({SURVIVES, GATE, REHEARSAL})


@dataclass(frozen=True)
class Case:
    """One fault, the trainer's expected outcome, and the change that the refusal asks for.

    `fault` and `fix` have these optional parts: `plain` and `text` (replacements in the plain script and in the
    trainer), `args` (the trainer's arguments; null removes one), `spec` (job fields), `machine` (conditions, see
    `machine.py`), `hub` (Hub faults), `token`, `restart` (the same command is run again), `cold` (a process that has
    imported no modules), `grant` (access to a repo).
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
        """Return whether the case is in the held-out third, which is not read before the figures are final."""
        return zlib.crc32(self.name.encode()) % 3 == 0


def cases(path: Path = CORPUS / "seeded_faults.jsonl") -> list[Case]:
    """Return all cases in the order of the file."""
    return [Case(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
