"""Check a sharded model. Its index maps tensors to files; the libraries that load models do not check the index."""

from __future__ import annotations

import re
from typing import Any

from gpuwarden.checkpoints.file_model import DTYPES, short, some
from gpuwarden.checkpoints.findings import Findings, Judgement
from gpuwarden.checkpoints.tree import Folder

NAME = "sharded model"
_INDEX = ".index.json"
_SHARD = re.compile(r"(.+)-(\d{1,9})-of-(\d{1,9})(\.\w+)")


def claims(folder: Folder) -> bool:
    """Return true for a folder that contains an index or numbered shards."""
    return any(n.endswith(_INDEX) for n in folder.files) or bool(_numbered(folder))


def judge(folder: Folder, found: Findings) -> Judgement:
    """Compare each index with the content of the shards, and report tensors that are missing from either."""
    judgement = Judgement(NAME, folder.rel)
    listed: set[str] = set()
    aliases = found.tree.aliases if found.tree else {}
    for name in sorted(n for n in folder.files if n.endswith(_INDEX)):
        entry = found[folder.join(name)]
        content = entry.anatomy.content if entry and entry.anatomy else None
        table = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(table, dict) or not all(isinstance(v, str) for v in table.values()):
            if entry and not entry.problems:
                judgement.problems.append(f"{short(name)} lacks a valid weight_map")
            continue
        shards = sorted(set(table.values()))
        listed.update(shards)
        missing = [s for s in shards if s not in folder.files and folder.join(s) not in aliases]
        if missing:
            judgement.problems.append(f"{short(name)} lists {len(missing)} shards that are missing: {some(missing)}")
            continue
        stems = {_stem(s) for s in shards} - {None}
        # Include unlisted shards with the same stem, because the index may omit a shard.
        present = [n for n in folder.files if n in table.values() or _stem(n) in stems]
        _both_ways(folder, name, table, present, found, judgement)
        _total(folder, name, content, present, found, judgement)
    for stem, (total, numbers) in sorted(_numbered(folder).items()):
        first = 0 if 0 in numbers else 1
        gone = total - len(numbers)
        if gone > 0:
            lowest = next(i for i in range(first, first + total) if i not in numbers)
            judgement.problems.append(
                f"{gone} of {total} shards of {short(stem)} are missing; the lowest missing number is {lowest}"
            )
        if not listed and stem.endswith((".safetensors", ".bin")):
            judgement.problems.append(f"{short(stem)} consists of {total} shards, but no index maps tensors to them")
    return judgement


def _both_ways(
    folder: Folder, name: str, table: dict[str, str], shards: list[str], found: Findings, judgement: Judgement
) -> None:
    """Compare the tensors that an index lists with those in the shards."""
    held: dict[str, str] = {}
    twice: list[str] = []
    for shard in shards:
        entry = found[folder.join(shard)]
        if entry is None or entry.anatomy is None or not entry.anatomy.tensors:
            return  # already reported in the findings about the shard
        for t in entry.anatomy.tensors:
            if t.name in held:
                twice.append(t.name)
            held[t.name] = shard
    for what, names in (
        ("lists tensors that none of the shards has", [t for t in table if t not in held]),
        ("does not list tensors that the shards have", [t for t in held if t not in table]),
        ("assigns tensors to the wrong shard", [t for t, s in table.items() if held.get(t, s) != s]),
        ("has shards that contain the same tensor", twice),
    ):
        if names:
            judgement.problems.append(f"{short(name)} {what}: {some(names)}")
    if not judgement.problems:
        judgement.proved.append(f"{short(name)} and {len(shards)} shards agree on {len(table):,} tensors")


def _total(folder: Folder, name: str, content: Any, shards: list[str], found: Findings, judgement: Judgement) -> None:
    """Compare the model size in an index with the total size of the shards' tensors."""
    meta = content.get("metadata")
    total = meta.get("total_size") if isinstance(meta, dict) else None
    tensors = found.tensors(folder.join(s) for s in shards).values()
    size = sum(t.numel * DTYPES[t.dtype].bits // 8 if t.dtype in DTYPES else t.extent for t in tensors)
    if isinstance(total, (int, float)) and not isinstance(total, bool) and size and size != total:
        judgement.problems.append(f"{short(name)} lists {total:,} bytes for the model, but the shards have {size:,}")


def _parts(name: str) -> tuple[str, int, int] | None:
    """Return (stem, number, total) for a name such as model-00001-of-00004.safetensors."""
    match = _SHARD.fullmatch(name)
    return (match.group(1) + match.group(4), int(match.group(2)), int(match.group(3))) if match else None


def _stem(name: str) -> str | None:
    parts = _parts(name)
    return parts[0] if parts else None


def _numbered(folder: Folder) -> dict[str, tuple[int, set[int]]]:
    """Map each stem to the expected number of shards and the numbers of the existing shards."""
    found: dict[str, tuple[int, set[int]]] = {}
    for stem, number, total in filter(None, map(_parts, folder.files)):
        most, present = found.get(stem, (total, set()))
        found[stem] = (max(most, total), present | {number})
    return found
