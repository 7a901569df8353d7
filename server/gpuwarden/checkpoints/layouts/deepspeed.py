"""DeepSpeed ZeRO: `latest` names a folder in which every rank has left its part."""

from __future__ import annotations

import re

from gpuwarden.checkpoints.anatomy import short, some
from gpuwarden.checkpoints.findings import Findings, Judgement
from gpuwarden.checkpoints.walk import Folder

NAME = "deepspeed"
_RANK = re.compile(r"(?:bf16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_(optim|model)_states\.pt")
_MODEL = re.compile(r"mp_rank_(\d{1,6})_model_states\.pt")


def claims(folder: Folder) -> bool:
    """By the parts of the ranks, or by `latest` beside such folders."""
    return any(_RANK.fullmatch(n) or _MODEL.fullmatch(n) for n in folder.files) or (
        "latest" in folder.files and any(n.startswith("global_step") for n in folder.folders)
    )


def judge(folder: Folder, found: Findings) -> Judgement:
    """The ranks are complete; `latest` points at something that is there."""
    said = Judgement(NAME, folder.rel)
    if "latest" in folder.files:
        _latest(folder, found, said)
    groups: dict[tuple[str, str], set[int]] = {}
    for name in folder.files:
        match = _RANK.fullmatch(name)
        if match:
            groups.setdefault((match.group(3), match.group(2)), set()).add(int(match.group(1)))
    for (kind, model), ranks in sorted(groups.items()):
        gone = [r for r in range(max(ranks) + 1) if r not in ranks]
        if gone:
            said.problems.append(f"ranks without {kind} states for mp_rank {model}: {some(gone)}")
    sizes = {len(ranks) for ranks in groups.values()}
    if len(sizes) > 1:
        said.problems.append(f"the model-parallel parts have different numbers of ranks: {some(sorted(sizes))}")
    if groups and not said.problems:
        said.proved.append(f"{max(sizes)} ranks left their parts; a later rank that left none can't be known of")
    return said


def _latest(folder: Folder, found: Findings, said: Judgement) -> None:
    with found.open(found.place(folder.join("latest")), "") as source:
        name = source.head(200).decode("utf-8", "replace").strip()
    if name not in folder.folders:
        said.problems.append(f"latest names {short(name, 60)!r}, which is not there")
