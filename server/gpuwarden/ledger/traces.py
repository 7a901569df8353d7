"""Find what in a home folder shows that jobs were submitted from it, whatever its ledger says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_FOLDERS: Final = ("inputs", "pulls", "artifacts", "providers/hf_jobs")
"""What only a job that is in the ledger leaves here."""
_OURS: Final = re.compile(r'"token":\s*"j[0-9a-f]{10}-i\d')
"""The token of a machine that was rented for a job."""


def traces(home: Path) -> list[str]:
    """Return what in a home folder shows that jobs were submitted from it."""
    return sorted(_traces(home))


def _traces(home: Path) -> Iterator[str]:
    for name in _FOLDERS:
        folder = home / name
        if folder.is_dir() and any(folder.iterdir()):
            yield name
    if (home / "seal.key").exists():
        yield "seal.key"
    for state in home.glob("providers/rehearsal/*/state.json"):
        try:
            if _OURS.search(state.read_text("utf-8")):
                yield state.parent.relative_to(home).as_posix()
        except (OSError, ValueError):
            continue
