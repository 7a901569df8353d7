"""Check a DeepSpeed ZeRO checkpoint folder: `latest` names a subfolder in which every rank has saved its part.

Every rank's model states record the number of ranks, the step and the model's shapes. In ZeRO-3, the model states
contain no weights; instead, each rank's optimizer states contain the rank's share of the weights as 32-bit floats. The
sizes of the shares are checked by the rules that DeepSpeed's converter (zero_to_fp32.py) uses.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from gpuwarden.checkpoints.file_model import Broken, Doubtful, gaps, short, some
from gpuwarden.checkpoints.findings import Findings, Judgement
from gpuwarden.checkpoints.layouts.stepped import like_weights
from gpuwarden.checkpoints.pickles.torch_objects import sizes, tensor
from gpuwarden.checkpoints.tree import Folder
from gpuwarden.checkpoints.values import optimizer

NAME = "deepspeed"
_RANK = re.compile(r"(?:bf16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_(optim|model)_states\.pt")
_MODEL = re.compile(r"mp_rank_(\d{1,6})_model_states\.pt")
_TAG = re.compile(r"global_step(\d{1,15})")
_ELSEWHERE = ("layer_", "expert_")  # pipeline-parallel and expert weights are in separate files
_MOST = 1_000_000
_NO_MODEL = 1 << 60  # parameters
_SHOWN = 5


@dataclass
class _Parts:
    """The ranks' files by (kind, model-parallel rank), then by rank, and the content of each model state file."""

    ranks: dict[tuple[str, int], dict[int, str]]
    heads: list[dict[Any, Any]]
    whole: list[int] = field(default_factory=list)  # model-parallel ranks whose weights are in one file

    @classmethod
    def of(cls, folder: Folder, found: Findings) -> _Parts:
        """Assign the files in a folder to the ranks."""
        ranks: dict[tuple[str, int], dict[int, str]] = defaultdict(dict)
        parts = cls(ranks, [])
        for name in sorted(folder.files):
            rank, whole = _RANK.fullmatch(name), _MODEL.fullmatch(name)
            if rank:
                ranks[rank.group(3), int(rank.group(2))][int(rank.group(1))] = name
            elif whole:
                parts.whole.append(int(whole.group(1)))
            content = _content(folder, found, name) if name.endswith("_model_states.pt") else {}
            if content:
                parts.heads.append(content)
        return parts

    def stated(self, key: str) -> list[int]:
        """Return the distinct valid integers that the model states record under a key."""
        return sorted({h[key] for h in self.heads if type(h.get(key)) is int and 0 <= h[key] <= _MOST})

    @property
    def stage(self) -> int | None:
        """Return the ZeRO stage, or None if it is not recorded or the ranks disagree."""
        found = set()
        for head in self.heads:
            config = head.get("ds_config")
            zero = config.get("zero_optimization") if isinstance(config, dict) else None
            stage = zero.get("stage", 0) if isinstance(zero, dict) else None
            found.add(stage if type(stage) is int else None)
        return found.pop() if len(found) == 1 else None

    @property
    def numels(self) -> list[list[list[int]]]:
        """Return the sizes of each model state's trained parameters by group; empty if not recorded."""
        made: list[list[list[int]]] = []
        for head in self.heads:
            groups = head.get("param_shapes")
            if not isinstance(groups, list) or not all(isinstance(g, dict) for g in groups):
                groups = []
            shapes = [[sizes(s) for s in g.values()] for g in groups]
            whole = all(None not in group for group in shapes)
            made.append([[math.prod(s) for s in group if s is not None] for group in shapes] if whole else [])
        return made


def claims(folder: Folder) -> bool:
    """Return true if the folder contains any rank's part or `latest`."""
    return "latest" in folder.files or _has_parts(folder)


def _has_parts(folder: Folder) -> bool:
    return any(_RANK.fullmatch(n) or _MODEL.fullmatch(n) for n in folder.files)


def judge(folder: Folder, found: Findings) -> Judgement:
    """Check that all ranks' parts exist and belong to one save, the shares add up, and `latest` is valid."""
    judgement = Judgement(NAME, folder.rel)
    if "latest" in folder.files:
        _latest(folder, found, judgement)
    parts = _Parts.of(folder, found)
    if not parts.ranks and not parts.whole:
        return judgement
    steps = parts.stated("global_steps")
    if len(steps) > 1:
        judgement.problems.append(
            f"the ranks' parts are at different steps ({some(steps)}), so they belong to different saves"
        )
    named = _TAG.fullmatch(folder.path.name)
    if len(steps) == 1:
        judgement.step = steps[0]
        if named and int(named.group(1)) != steps[0]:
            judgement.problems.append(f"the folder is named {folder.path.name}, but its parts are at step {steps[0]}")
    _complete(folder, parts, judgement)
    if not judgement.problems:
        for key, ranks in sorted(parts.ranks.items()):
            if key[0] == "optim":
                _shares(folder, found, parts, ranks, judgement)
    return judgement


def _latest(folder: Folder, found: Findings, judgement: Judgement) -> None:
    """Check that the save in `latest` exists, and report newer saves."""
    with found.open(found.place(folder.join("latest")), "") as source:
        name = source.head(200).decode("utf-8", "replace").strip()
    tag = _TAG.fullmatch(name)
    later = [n for n in folder.folders if (m := _TAG.fullmatch(n)) and tag and int(m.group(1)) > int(tag.group(1))]
    if name in folder.folders or name in folder.links or name in folder.odd:
        if later:
            judgement.warnings.append(f"latest names {name}, so a resume would ignore {some(sorted(later))}")
    elif any(n.startswith("global_step") or _has_parts(f) for n, f in folder.folders.items()):
        judgement.problems.append(f"latest names {short(name, 60)!r}, which does not exist")
    elif tag and not any(map(like_weights, folder.files)):  # other programs also write files with this name
        judgement.doubts.append(f"latest names {name}, but no save exists")


def _content(folder: Folder, found: Findings, name: str) -> dict[Any, Any]:
    entry = found[folder.join(name)]
    content = entry.anatomy.content if entry and entry.anatomy and not entry.problems else None
    return content if isinstance(content, dict) else {}


def _complete(folder: Folder, parts: _Parts, judgement: Judgement) -> None:
    """Check that every rank has saved its parts."""
    worlds, models = parts.stated("dp_world_size"), parts.stated("mp_world_size")
    for what, numbers in (("ranks", worlds), ("model-parallel parts", models)):
        if len(numbers) > 1:
            judgement.problems.append(
                f"the parts record different numbers of {what} ({some(numbers)}), so they belong to different saves"
            )
    before = len(judgement.problems)
    world = worlds[0] if len(worlds) == 1 else None
    for (kind, model), ranks in sorted(parts.ranks.items()):
        gone, count = gaps(range(max([*ranks, (world or 0) - 1]) + 1), ranks)
        if gone:
            lost = some(gone, count=count)
            judgement.problems.append(f"some ranks have no {kind} states for mp_rank {model:02}: {lost}")
        elif world and len(ranks) > world:
            judgement.problems.append(
                f"{len(ranks)} ranks saved {kind} states for mp_rank {model:02}; expected {world}"
            )
    known = {m for _, m in parts.ranks} | set(parts.whole)
    absent, count = gaps(range(models[0] if len(models) == 1 and not _apart(folder) else 0), known)
    if absent:
        judgement.problems.append(f"all files for the model-parallel parts {some(absent, count=count)} are missing")
    states = {m for kind, m in parts.ranks if kind == "model"} | set(parts.whole)
    lowest = next(m for m in range(len(states) + 1) if m not in states)
    if not absent and lowest <= max(known):
        judgement.doubts.append(f"mp_rank {lowest:02} has no model states")
    # ZeRO stores the optimizer states in a separate file for each rank.
    bare = [m for m in sorted(known) if ("optim", m) not in parts.ranks]
    if parts.stage == 3 and bare:
        judgement.problems.append("ZeRO-3 stores the weights in the ranks' optim states, which are missing")
    elif bare and (parts.stage or any(kind == "optim" for kind, _ in parts.ranks)):
        judgement.resume.append("the ranks' optim states are missing, so a resume would restart the optimizer")
    counts = {len(ranks) for ranks in parts.ranks.values()}
    if len(counts) > 1 and not world:
        judgement.problems.append(f"the model-parallel parts have different numbers of ranks: {some(sorted(counts))}")
    if parts.ranks and len(judgement.problems) == before:
        count = max(map(len, parts.ranks.values()))
        all_of = f"all {count} ranks have saved their parts"
        unsure = f"{count} ranks have saved their parts; it is unknown whether there were more ranks"
        judgement.proved.append(all_of if world else unsure)


def _apart(folder: Folder) -> bool:
    return any(n.startswith(_ELSEWHERE) for n in folder.files)


# ---------------------------------------------------------------------------------------------------------- shares


def _shares(folder: Folder, found: Findings, parts: _Parts, ranks: dict[int, str], judgement: Judgement) -> None:
    """Check that the ranks' shares add up to the model, and that the optimizers are complete and at the same step."""
    steps: set[int | None] = set()
    flat: list[list[int | None]] = []
    for rank, name in sorted(ranks.items()):
        state = _content(folder, found, name).get("optimizer_state_dict")
        if not isinstance(state, dict):
            return
        flat.append(_groups(state))
        key = next((k for k in ("optimizer_state_dict", "base_optimizer_state") if isinstance(state.get(k), dict)), "")
        if key:
            made = optimizer.judge(state[key], [], [], f"rank {rank}'s optim states")
            judgement.resume += made.resume[: max(0, _SHOWN - len(judgement.resume))]
            entry = found[folder.join(name)]
            if entry and entry.anatomy:
                with found.open(found.place(entry.path), entry.path) as source:
                    steps.add(optimizer.steps(source, entry.anatomy.tensors, f"optimizer_state_dict.{key}."))
    made_steps = sorted(n for n in steps if n is not None)
    if len(made_steps) > 1:
        judgement.problems.append(f"the ranks' optimizers are at different steps: {some(made_steps)}")
    most = max(made_steps, default=0)
    if judgement.step is not None and most > judgement.step:
        judgement.resume.append(f"the optimizers took {most:,} steps, but the checkpoint is at step {judgement.step:,}")
    numels = parts.numels
    if numels and numels[0] and all(n == numels[0] for n in numels) and not _apart(folder):
        _sum(flat, numels[0], parts.stage, judgement)
    elif any(n != numels[0] for n in numels):
        judgement.problems.append("the ranks' parts belong to models with different shapes")


def _groups(state: dict[Any, Any]) -> list[int | None]:
    """Return the size of a rank's share of the weights in each group; None for a group without a tensor."""
    groups = state.get("fp32_flat_groups") or state.get("single_partition_of_fp32_groups")
    numels: list[int | None] = []
    for group in groups if isinstance(groups, list) else ():
        try:
            ref = tensor(group)
        except (Broken, Doubtful):
            ref = None
        numels.append(None if ref is None else math.prod(ref.shape))
    return numels


def _sum(flat: list[list[int | None]], wanted: list[list[int]], stage: int | None, judgement: Judgement) -> None:
    """Add up the shares as zero_to_fp32.py does.

    ZeRO-3 splits each parameter; earlier stages split groups of parameters.
    """
    world, total = len(flat), sum(map(sum, wanted))
    if any(n is None for groups in flat for n in groups) or not all(flat) or total >= _NO_MODEL:
        return
    held = [[n or 0 for n in groups] for groups in flat]
    if stage == 3:
        share = sum(-(-n // world) for group in wanted for n in group)
        bad = [r for r, groups in enumerate(held) if sum(groups) != share]
    elif stage in (1, 2) and all(len(groups) == len(wanted) for groups in held):
        sums = zip(wanted, map(sum, zip(*held)))  # noqa: B905
        each = 2 * world  # the size of a group is padded to a multiple of this number
        bad = [g for g, (want, have) in enumerate(sums) if -(-have // each) != -(-sum(want) // each)]
    else:
        return
    if bad:
        who = "ranks" if stage == 3 else "parameter groups"
        judgement.problems.append(f"the shares of {who} {some(bad)} do not add up to the model's {total:,} parameters")
    else:
        judgement.proved.append(f"the shares of {world} ranks add up to the model's {total:,} parameters")
