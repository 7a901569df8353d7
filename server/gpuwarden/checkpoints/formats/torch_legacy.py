"""torch.save's format before zip: three small pickles, the object, then the storages, without any checksum."""

from __future__ import annotations

from gpuwarden.checkpoints.file_model import DTYPES, Anatomy, Broken, Limits
from gpuwarden.checkpoints.formats.torch_zip import ENDINGS
from gpuwarden.checkpoints.pickles import allow_list, symbolic, torch_objects
from gpuwarden.checkpoints.pickles.nodes import Tree
from gpuwarden.checkpoints.safe_file import Source

NAME = "torch legacy"
LOAD = "tensors"
_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001


def claims(name: str, head: bytes) -> bool:
    """Return true for torch's names unless the file is a zip: a plain pickle under such a name is read here too."""
    return name.endswith((*ENDINGS, ".pickle")) and head[:2] != b"PK"


def read(source: Source, limits: Limits) -> Anatomy:
    """Read the four pickles, the list of keys, then each storage with its length."""
    found = Anatomy(NAME)
    data = source.at(0, min(source.size, limits.pickle))
    names = allow_list.of_file(source.name)
    first = symbolic.Machine(data, limits, names=names).run()
    if first.root != _MAGIC:
        found.format = "pickle"
        torch_objects.fill(found, first, {}, source.name)
        found.doubts.append("is a pickle, but none of torch's")
        return found
    at = first.end
    trees = []
    for _ in range(4):
        tree = symbolic.Machine(data, limits, at, names).run()
        trees.append(tree)
        at = tree.end
    version, system, tree, keys = trees
    if version.root != _PROTOCOL or not isinstance(system.root, dict) or not isinstance(keys.root, list):
        raise Broken("has torch's magic number, but not what follows it")
    found.big_endian = system.root.get("little_endian") is False
    stored = _stored(source, tree, keys.root, at)
    for small in (version, system, keys):
        tree.named.update(small.named)
        tree.odd.update(small.odd)
        tree.opcodes.update(small.opcodes)
    torch_objects.fill(found, tree, stored, source.name)
    return found


def _stored(source: Source, tree: Tree, keys: list[object], at: int) -> dict[str, tuple[int, int]]:
    """Return key -> (offset, bytes) of each storage; they must end where the file ends."""
    kinds = {key: dtype for key, dtype, _ in map(torch_objects.storage, tree.persistent)}
    stored: dict[str, tuple[int, int]] = {}
    for key in keys:
        if not isinstance(key, str) or key not in kinds or key in stored:
            raise Broken("its list of storages does not fit its pickle")
        count = int.from_bytes(source.at(at, 8), "little")
        size = count * DTYPES[kinds[key]].bits // 8
        stored[key] = (at + 8, size)
        at += 8 + size
        if at > source.size:
            raise Broken(f"ends at byte {source.size:,}, inside storage {key[:40]}, which needs bytes up to {at:,}")
    if at != source.size:
        raise Broken(f"{source.size - at:,} bytes follow its last storage")
    return stored
