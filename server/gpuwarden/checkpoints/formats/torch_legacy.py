"""Read torch.save's older format, which is not a zip archive: pickles, then the storages, without any checksum.

This module also reads plain pickles. Other programs use torch's file extensions too, so a file counts as damaged only
if its bytes show that torch wrote it.
"""

from __future__ import annotations

from gpuwarden.checkpoints import zips
from gpuwarden.checkpoints.file_model import DTYPES, Anatomy, Broken, Doubtful, Limits, Unread
from gpuwarden.checkpoints.formats.torch_zip import ENDINGS
from gpuwarden.checkpoints.pickles import allow_list, symbolic, torch_objects
from gpuwarden.checkpoints.pickles.code_runners import runs_code
from gpuwarden.checkpoints.pickles.nodes import Global, Tree
from gpuwarden.checkpoints.safe_file import Source
from gpuwarden.core.evidence import Cause

NAME = "torch legacy"
LOAD = "tensors"
_PICKLES = (".pkl", ".pickle")
_MAGIC = 0x1950A86A20F9469CFC6C
_MARK = _MAGIC.to_bytes(10, "little")
_PROTOCOL = 1001
_MOST = 100  # consecutive pickles


def claims(name: str, head: bytes) -> bool:
    """Return true for torch's file extensions, which plain pickles also use, unless the file is a zip archive."""
    return name.endswith((*ENDINGS, ".pickle")) and head[:2] != b"PK"


def read(source: Source, limits: Limits) -> Anatomy:
    """Read the five pickles, the last of which lists the storage keys, and then each storage."""
    data = source.at(0, min(source.size, limits.pickle))
    names = allow_list.of_file(source.name)
    machine = symbolic.Machine(data, limits, names=names)
    try:
        first = machine.run()
    except (Broken, Doubtful) as why:
        return _no_pickle(source, data, machine.tree, why)
    if first.root != _MAGIC:
        return _pickles(source, data, first, limits)
    found = Anatomy(NAME)
    at = first.end
    trees = []
    for _ in range(4):
        tree = symbolic.Machine(data, limits, at, names).run()
        trees.append(tree)
        at = tree.end
    version, system, tree, keys = trees
    if version.root != _PROTOCOL or not isinstance(system.root, dict) or not isinstance(keys.root, list):
        raise Broken("has torch's magic number, but the pickles that must follow it are missing")
    found.big_endian = system.root.get("little_endian") is False
    stored = _stored(source, tree, keys.root, at)
    for small in (version, system, keys):
        _merge(tree, small)
    torch_objects.fill(found, tree, stored, source.name, limits)
    return found


def _merge(tree: Tree, other: Tree) -> None:
    tree.persistent += other.persistent
    tree.named.update(other.named)
    tree.odd.update(other.odd)
    tree.opcodes.update(other.opcodes)


def _pickles(source: Source, data: bytes, tree: Tree, limits: Limits) -> Anatomy:
    """Return the findings about one or more consecutive plain pickles."""
    found = Anatomy("pickle")
    count, at = 1, tree.end
    while at < source.size and count < _MOST:
        try:
            other = symbolic.Machine(data, limits, at, allow_list.of_file(source.name)).run()
        except (Broken, Doubtful):
            break
        _merge(tree, other)
        count, at = count + 1, other.end
    if at < source.size:
        found.doubt(f"the {source.size - at:,} bytes after its {count:,} pickles are not a pickle")
    if tree.persistent:
        torch_objects.judge(found, tree, allow_list.of_file(source.name))
        found.doubt("refers to values outside of the file, which only the program that wrote it can supply")
    else:
        torch_objects.fill(found, tree, {}, source.name, limits)
    found.meta["inert"] = True
    if not source.name.endswith(_PICKLES):
        found.doubt("is named like a torch file, but is a plain pickle, which torch.load rejects")
    return found


def _no_pickle(source: Source, data: bytes, tree: Tree, why: Broken | Doubtful) -> Anatomy:
    """Return the findings about a file that could not be read completely as a pickle."""
    found = Anatomy("pickle")
    torch_objects.judge(found, tree, allow_list.of_file(source.name))
    if any(runs_code(n) for n in tree.named) or Global("joblib.numpy_pickle", "NumpyArrayWrapper") in tree.named:
        found.doubt(f"could not be read completely: {why}", Cause.NEEDS_CODE)
        return found
    if isinstance(why, Doubtful):
        raise why
    head = data[:4096]
    if source.size > len(data):
        raise Doubtful(f"begins with a pickle of more than {len(data):,} bytes, which is not read", Cause.LIMIT)
    if head[:1] == b"\x80" and head[1:2] <= b"\x05":
        raise why
    if zips.is_complete(source):
        raise Broken("ends like a zip archive but does not begin like one: its beginning was overwritten")
    if _MARK in head:
        raise Broken("has torch's magic number, but the bytes before it were overwritten")
    if not any(head):
        raise Broken(f"begins with {len(head):,} zero bytes: its beginning was never written")
    if head.lstrip()[:9].lower() in (b"<!doctype", b"<html>") or head.lstrip()[:5].lower() == b"<html":
        raise Broken("is an HTML page: the server returned an error page for the download")
    raise Unread("is named like a torch file, but is neither a torch file nor a pickle") from why


def _stored(source: Source, tree: Tree, keys: list[object], at: int) -> dict[str, tuple[int, int]]:
    """Map each storage key to the storage's offset and size. The last storage must end at the end of the file."""
    kinds = {key: dtype for key, dtype, _ in torch_objects.storages(tree)}
    stored: dict[str, tuple[int, int]] = {}
    for key in keys:
        if not isinstance(key, str) or key not in kinds or key in stored:
            raise Broken("its list of storages does not match its pickle", Cause.CONTRADICTION)
        count = int.from_bytes(source.at(at, 8), "little")
        size = count * DTYPES[kinds[key]].bits // 8
        stored[key] = (at + 8, size)
        at += 8 + size
        if at > source.size:
            raise Broken(f"ends at byte {source.size:,}, inside storage {key[:40]}, which needs bytes up to {at:,}")
    if at != source.size:
        raise Broken(f"{source.size - at:,} bytes follow its last storage", Cause.CONTRADICTION)
    return stored
