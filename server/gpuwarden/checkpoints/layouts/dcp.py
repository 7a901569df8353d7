"""Check a torch.distributed.checkpoint folder: every file that its metadata lists must exist."""

from __future__ import annotations

from gpuwarden.checkpoints.file_model import some
from gpuwarden.checkpoints.findings import Findings, Judgement
from gpuwarden.checkpoints.layouts.stepped import step_of
from gpuwarden.checkpoints.state_file import STEPS
from gpuwarden.checkpoints.tree import Folder
from gpuwarden.checkpoints.values import optimizer

NAME = "distributed checkpoint"


def claims(folder: Folder) -> bool:
    """Return true for a folder that contains this layout's files."""
    return ".metadata" in folder.files or any(n.endswith(".distcp") for n in folder.files)


def judge(folder: Folder, found: Findings) -> Judgement:
    """Compare the metadata with the folder, and find the recorded step."""
    judgement = Judgement(NAME, folder.rel)
    entry = found[folder.join(".metadata")]
    rows = entry.anatomy.content if entry and entry.anatomy and not entry.problems else None
    if not isinstance(rows, list):
        if entry is None:
            judgement.problems.append(
                "has no .metadata: the save was never finished, so the checkpoint can't be loaded"
            )
        return judgement
    files = {r.file for r in rows}
    gone = sorted(f for f in files if f not in folder.files)
    if gone:
        judgement.problems.append(f".metadata lists files that are missing: {some(gone)}")
    else:
        judgement.proved.append(f"all {len(files):,} files in .metadata exist, with {len(rows):,} records")
    optimizers = [r for r in rows if "optim" in r.name.lower()]
    # A folder with only an optimizer is part of another checkpoint. `stepped.py` reads a step from the folder's name.
    if len(optimizers) < len(rows) and step_of(folder.path.name) is None:
        entries = [e for n in folder.files if (e := found[folder.join(n)]) and e.anatomy and n.endswith(".distcp")]
        numbers = {n.rpartition(".")[2]: v for e in entries if e.anatomy for n, v in e.anatomy.meta.items()}
        named = next((numbers[key] for key in STEPS if 0 <= numbers.get(key, -1) < 1 << 60), None)
        judgement.step = optimizer.most_steps(entries, found) if named is None else named
        judgement.checkpoint = judgement.step is not None
        if judgement.checkpoint and not optimizers:
            judgement.resume.append("has no optimizer state")
    return judgement
