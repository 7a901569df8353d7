"""Check an orbax checkpoint: its metadata must record a commit time, and every listed array must have data."""

from __future__ import annotations

from gpuwarden.checkpoints.file_model import some
from gpuwarden.checkpoints.findings import Findings, Judgement, temporary
from gpuwarden.checkpoints.tree import Folder

NAME = "orbax"
_TOP, _ITEM = "_CHECKPOINT_METADATA", "_METADATA"
_ARRAY_TYPES = ("np.ndarray", "jax.Array", "scalar")


def claims(folder: Folder) -> bool:
    """Return true for a folder that contains orbax's metadata files."""
    return (_TOP in folder.files or _ITEM in folder.files) and not temporary(folder.rel)


def judge(folder: Folder, found: Findings) -> Judgement:
    """Read the step from the folder's name. Check that a commit time is recorded, and that each array has data."""
    name = folder.path.name
    step = int(name) if name.isdecimal() and len(name) < 16 else None
    judgement = Judgement(NAME, folder.rel, step=step, checkpoint=_TOP in folder.files)
    if _TOP in folder.files:
        top = _content(folder, found, _TOP)
        if not isinstance(top, dict) or not isinstance(top.get("commit_timestamp_nsecs"), int):
            judgement.problems.append(f"{_TOP} does not record a commit time, so the save was not finished")
        if not any(_ITEM in f.files for f in (folder, *folder.folders.values())):
            judgement.problems.append(f"has no item with {_ITEM}")
    item = _content(folder, found, _ITEM) if _ITEM in folder.files else None
    if not isinstance(item, dict):
        return judgement
    tree = item.get("tree_metadata")
    arrays = _arrays(tree)
    if not isinstance(tree, dict) or not tree:
        judgement.problems.append(f"{_ITEM} lists no array")
    elif not arrays:
        judgement.doubts.append(f"{_ITEM} does not list an array of a known type")
    if item.get("use_ocdbt"):
        judgement.problems += _database(folder)
    elif absent := [name for name in arrays if not _stored(folder.folders.get(name))]:
        judgement.problems.append(f"the data for {some(absent)} is missing")
    if not judgement.problems and not judgement.doubts:
        judgement.proved.append(f"{len(arrays):,} arrays are listed, and their data exists")
    return judgement


def _arrays(tree: object) -> list[str]:
    """Return the array names in the metadata. Without a database, each array has a folder of the same name."""
    found = []
    for entry in tree.values() if isinstance(tree, dict) else ():
        keys = entry.get("key_metadata") if isinstance(entry, dict) else None
        value = entry.get("value_metadata") if isinstance(entry, dict) else None
        if isinstance(keys, list) and isinstance(value, dict) and value.get("value_type") in _ARRAY_TYPES:
            found.append(".".join(str(key.get("key")) if isinstance(key, dict) else "" for key in keys))
    return found


def _database(folder: Folder) -> list[str]:
    """Return the problems with the item's database and with the parts that each process wrote."""
    if "manifest.ocdbt" not in folder.files:
        return [f"{_ITEM} refers to a database, but manifest.ocdbt is missing"]
    if "d" not in folder.folders or not folder.folders["d"].files:
        return ["the database has no data"]
    parts = [f for n, f in folder.folders.items() if n.startswith("ocdbt.process_")]
    empty = [f.path.name for f in parts if "manifest.ocdbt" not in f.files]
    return [f"{some(empty)} has no manifest.ocdbt"] if empty else []


def _stored(array: Folder | None) -> bool:
    """Return true if an array's folder has metadata and at least one chunk."""
    if array is None or not {".zarray", "zarr.json"} & set(array.files):
        return False
    return len(array.files) > 1 or bool(array.folders)


def _content(folder: Folder, found: Findings, name: str) -> object:
    entry = found[folder.join(name)]
    return entry.anatomy.content if entry and entry.anatomy else None
