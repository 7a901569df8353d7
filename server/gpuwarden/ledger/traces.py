"""Find files in a home folder which show that jobs were submitted from it, independent of its ledger."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_FOLDERS: Final = ("inputs", "pulls", "artifacts", "providers/hf_jobs")
"""Folders with files that only a job in the ledger creates."""
_OURS: Final = re.compile(r'"token":\s*"j[0-9a-f]{10}-i\d')
"""The token of a machine that was rented for a job."""


def traces(home: Path) -> list[str]:
    """Return the paths in a home folder which show that jobs were submitted from it."""
    found = [name for name in _FOLDERS if (home / name).is_dir() and any((home / name).iterdir())]
    if (home / "seal.key").exists():
        found.append("seal.key")
    for state in home.glob("providers/rehearsal/*/state.json"):
        try:
            if _OURS.search(state.read_text("utf-8")):
                found.append(state.parent.relative_to(home).as_posix())
        except (OSError, ValueError):
            continue
    return sorted(found)
