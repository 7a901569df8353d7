"""Check a split GGUF model. Each part records its number, the number of parts, and the total number of tensors."""

from __future__ import annotations

import re
from typing import Any

from gpuwarden.checkpoints.file_model import Anatomy, gaps, short, some
from gpuwarden.checkpoints.findings import Findings, Judgement
from gpuwarden.checkpoints.tree import Folder

NAME = "split gguf"
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def claims(folder: Folder) -> bool:
    """Return true if the folder contains a part of a split model."""
    return any(_PART.fullmatch(name) for name in folder.files)


def judge(folder: Folder, found: Findings) -> Judgement:
    """Check that no part is missing, and that the numbers recorded in each model's parts match the file names."""
    judgement = Judgement(NAME, folder.rel)
    models: dict[tuple[str, int], dict[int, str]] = {}
    for name in folder.files:
        match = _PART.fullmatch(name)
        if match:
            models.setdefault((match.group(1), int(match.group(3))), {})[int(match.group(2))] = name
    for (stem, count), parts in sorted(models.items()):
        gone, missing = gaps(range(1, count + 1), parts)
        if gone:
            lost = some((f"{n:05}" for n in gone), count=missing)
            judgement.problems.append(f"{missing:,} of {count:,} parts of {short(stem, 60)} are missing: {lost}")
            continue
        read = {}
        for number, name in sorted(parts.items()):
            entry = found[folder.join(name)]
            if entry and entry.anatomy and entry.anatomy.meta and not entry.anatomy.problems:
                read[number] = entry.anatomy
        # An unreadable part is already reported in the findings about its file.
        if len(read) == count:
            _agree(stem, count, read, judgement)
    return judgement


def _agree(stem: str, count: int, read: dict[int, Anatomy], judgement: Judgement) -> None:
    """Check the numbers that the parts record, and that no tensor is in two parts."""
    before = len(judgement.problems)
    for number, part in read.items():
        stated: tuple[Any, Any] = part.meta.get("split.no"), part.meta.get("split.count")
        if stated != (number - 1, count):
            named = "no number" if stated == (None, None) else f"number {stated[0]} (counted from 0) of {stated[1]}"
            judgement.problems.append(f"part {number:,} of {count:,} of {short(stem, 60)} records {named}")
    totals = {part.meta.get("split.tensors.count") for part in read.values()}
    names = [t.name for part in read.values() for t in part.tensors]
    if totals != {len(names)}:
        stated_totals = some(sorted(map(str, totals)))
        judgement.problems.append(
            f"the parts of {short(stem, 60)} have {len(names):,} tensors, but record {stated_totals}"
        )
    if len(set(names)) != len(names):
        judgement.problems.append(f"two parts of {short(stem, 60)} have tensors with the same name")
    if len(judgement.problems) == before:
        judgement.proved.append(f"all {count:,} parts of {short(stem, 60)} exist, with {len(names):,} tensors in total")
