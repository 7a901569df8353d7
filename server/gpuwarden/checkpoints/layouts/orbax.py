"""Check an orbax checkpoint: its commit must be recorded, and the database that its metadata names must exist."""

from __future__ import annotations

from gpuwarden.checkpoints.findings import Findings, Judgement, temporary
from gpuwarden.checkpoints.tree import Folder

NAME = "orbax"
_TOP, _ITEM = "_CHECKPOINT_METADATA", "_METADATA"


def claims(folder: Folder) -> bool:
    """Return true for a folder with orbax's metadata files."""
    return (_TOP in folder.files or _ITEM in folder.files) and not temporary(folder.rel)


def judge(folder: Folder, found: Findings) -> Judgement:
    """Read the step from the folder's name; check that the commit time is recorded and that the database exists."""
    name = folder.path.name
    step = int(name) if name.isdecimal() and len(name) < 16 else None
    said = Judgement(NAME, folder.rel, step=step, checkpoint=_TOP in folder.files)
    if _TOP in folder.files:
        top = _content(folder, found, _TOP)
        if not isinstance(top, dict) or not isinstance(top.get("commit_timestamp_nsecs"), int):
            said.problems.append(f"{_TOP} has no commit time, so the save was not finished")
        if not any(_ITEM in f.files for f in (folder, *folder.folders.values())):
            said.problems.append(f"has no item with {_ITEM}")
    item = _content(folder, found, _ITEM) if _ITEM in folder.files else None
    if not isinstance(item, dict):
        return said
    if item.get("use_ocdbt") and "manifest.ocdbt" not in folder.files:
        said.problems.append(f"{_ITEM} refers to a database, but manifest.ocdbt is missing")
    parts = [f for n, f in folder.folders.items() if n.startswith("ocdbt.process_")]
    empty = [f.path.name for f in parts if "manifest.ocdbt" not in f.files]
    if empty:
        said.problems.append(f"{', '.join(empty[:3])} has no manifest.ocdbt")
    if not said.problems:
        said.proved.append(f"{len(item.get('tree_metadata', {})):,} arrays are listed, and their database exists")
    return said


def _content(folder: Folder, found: Findings, name: str) -> object:
    entry = found[folder.join(name)]
    return entry.anatomy.content if entry and entry.anatomy else None
