"""Check a folder in which each file may be a complete training state. The file with the highest step is used."""

from __future__ import annotations

from gpuwarden.checkpoints import state_file
from gpuwarden.checkpoints.findings import Entry, Findings, Judgement, temporary
from gpuwarden.checkpoints.layouts.stepped import step_of
from gpuwarden.checkpoints.tree import Folder

NAME = "training state"
_FILES = (".pt", ".pth", ".ckpt", ".bin", ".tar")


def claims(folder: Folder) -> bool:
    """Return true for a folder whose name has no step and whose files may contain a training state."""
    files = any(n.endswith(_FILES) for n in folder.files)
    return files and step_of(folder.path.name) is None and not temporary(folder.rel)


def judge(folder: Folder, found: Findings) -> Judgement:
    """Return the findings about the file with the highest step; an empty `Judgement` if there is none."""
    entries = (found[folder.join(n)] for n in sorted(folder.files) if n.endswith(_FILES))
    made = [j for j in (of_entry(e, found) for e in entries if e is not None) if j is not None]
    return max(made, key=lambda j: (j.step or 0, not j.problems, not j.resume), default=Judgement(NAME, folder.rel))


def of_entry(entry: Entry, found: Findings) -> Judgement | None:
    """Return the findings about one file, or None if the file contains no training state."""
    stem = entry.path.rsplit("/", 1)[-1].split(".", 1)[0]
    return state_file.of_file(entry, found, step_of(stem))
