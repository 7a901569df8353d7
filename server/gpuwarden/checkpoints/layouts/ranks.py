"""Check a distributed save with one file or folder per rank, such as FSDP and Megatron write.

If the names do not contain the number of ranks, missing parts from the highest ranks go undetected.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict

from gpuwarden.checkpoints.file_model import short, some
from gpuwarden.checkpoints.findings import Findings, Judgement, temporary
from gpuwarden.checkpoints.layouts.stepped import step_of
from gpuwarden.checkpoints.tree import Folder

NAME = "ranks"
_TRACKER = "latest_checkpointed_iteration.txt"  # written by Megatron and verl after each save
_PART = re.compile(
    # for example model_world_size_8_rank_0.pt, pytorch_model_fsdp_rank0.bin and consolidated.00.pth
    r"(?P<stem>(?:.*[._-])?rank[._-]?|consolidated\.)(?P<rank>\d{1,6})\.(?:bin|pt|pth|ckpt|safetensors)"
    # mp_rank_00 and mp_rank_00_001: the tensor-parallel and the pipeline-parallel rank
    r"|(?P<kind>mp_rank|tp_rank)_(?P<tensor>\d{2,4})(?:(?:_pp_rank)?_(?P<pipeline>\d{3,4}))?"
)
_WORLD = re.compile(r"world_size_(\d{1,6})_")
_FROM_0 = re.compile(r"fsdp|consolidated|[mt]p_rank")


def claims(folder: Folder) -> bool:
    """Return true for a folder that contains Megatron's tracker file or any rank's part."""
    return _TRACKER in folder.files or any(map(_PART.fullmatch, (*folder.files, *folder.folders)))


def judge(folder: Folder, found: Findings) -> Judgement:
    """Check that no lower rank's part is missing, and that the iteration in the tracker file was saved."""
    judgement = Judgement(NAME, folder.rel)
    if _TRACKER in folder.files:
        _tracked(folder, found, judgement)
    sets: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    filled = (name for name, inner in folder.folders.items() if inner.files or inner.folders)
    for match in filter(None, map(_PART.fullmatch, (*folder.files, *folder.links, *folder.odd, *filled))):
        numbers = [match["rank"]] if match["rank"] else [match["tensor"], match["pipeline"] or 0]
        sets[match["stem"] or match["kind"]].add(tuple(map(int, numbers)))
    lacking = []
    for stem, ranks in sorted(sets.items()):
        world = _WORLD.search(stem)
        total = math.prod(1 + max(axis) for axis in zip(*ranks))  # noqa: B905
        total = max(total, int(world.group(1)) if world else 0)
        # In a LoRA adapter's name, "rank" is the rank of its matrices, and these numbers do not begin at 0.
        spaced = math.gcd(*(n for rank in ranks for n in rank)) > 2  # for example, with one file per node
        if len(ranks) < total and (world or _FROM_0.search(stem) or (min(ranks)[0] == 0 and not spaced)):
            lacking.append(f"{total - len(ranks):,} of {total:,} {short(stem, 40)}")
    if lacking:
        judgement.doubts.append(f"the parts of some ranks are missing: {some(lacking)}")
    return judgement


def _tracked(folder: Folder, found: Findings, judgement: Judgement) -> None:
    """Check that the newest iteration exists. Megatron records it when the save is complete."""
    with found.open(found.place(folder.join(_TRACKER)), "") as source:
        name = source.head(200).decode("utf-8", "replace").strip()
    saves = {n: step_of(n) for n in (*folder.folders, *folder.links, *folder.odd) if not temporary(n)}
    steps = {step for step in saves.values() if step is not None}
    there = name in saves if name == "release" else re.fullmatch("[0-9]{1,15}", name) and int(name) in steps
    if not there:
        lines = judgement.problems if steps else judgement.doubts
        lines.append(f"{_TRACKER} names {short(name, 60)!r}, which does not exist")
