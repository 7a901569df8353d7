"""A folder of torch.distributed.checkpoint: every file of the roster is there, and no other."""

from __future__ import annotations

from gpuwarden.checkpoints.file_model import some
from gpuwarden.checkpoints.findings import Findings, Judgement
from gpuwarden.checkpoints.tree import Folder

NAME = "distributed checkpoint"


def claims(folder: Folder) -> bool:
    """Return true for a folder with this layout's files."""
    return ".metadata" in folder.files or any(n.endswith(".distcp") for n in folder.files)


def judge(folder: Folder, found: Findings) -> Judgement:
    """Compare the roster with the folder."""
    said = Judgement(NAME, folder.rel)
    entry = found[folder.join(".metadata")]
    rows = entry.anatomy.content if entry and entry.anatomy and not entry.problems else None
    if not isinstance(rows, list):
        if entry is None:
            said.problems.append("has no .metadata: the save was never finished, and nothing can load it")
        return said
    files = {r.file for r in rows}
    gone = sorted(f for f in files if f not in folder.files)
    if gone:
        said.problems.append(f".metadata lists files that are not there: {some(gone)}")
    else:
        said.proved.append(f"all {len(files):,} files of .metadata are there, with {len(rows):,} records")
    return said
