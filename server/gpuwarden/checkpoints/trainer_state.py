"""Check the files that a transformers Trainer needs to resume, including details that the Trainer does not check.

The Trainer silently restarts the optimizer if optimizer.pt or scheduler.pt is missing, and accepts any step in
trainer_state.json. Standard library only.
"""

from __future__ import annotations

import re
from typing import Any

from gpuwarden.checkpoints.file_model import Anatomy, some
from gpuwarden.checkpoints.findings import Findings, Judgement
from gpuwarden.checkpoints.tree import Folder
from gpuwarden.checkpoints.values import optimizer

_WEIGHTS = ("model", "adapter_model", "pytorch_model")
_RANK = re.compile(r"rng_state_(\d{1,6})\.pth")


def resumable(folder: Folder, found: Findings, judgement: Judgement) -> None:
    """Add to `judgement` the problems that prevent an exact resume (`resume`) and the passed checks (`proved`)."""
    gone = [n for n in ("optimizer.pt", "scheduler.pt") if n not in folder.files]
    # DeepSpeed and FSDP keep the optimizer in a separate folder.
    elsewhere = any(n.startswith(("global_step", "optimizer_", "pytorch_model_fsdp")) for n in folder.folders)
    if gone and not elsewhere:
        judgement.resume.append(f"lacks {some(gone)}, so a resume would silently restart the optimizer")
    # The Trainer computes the position in the data from the epoch, the step and each rank's random state.
    state = _anatomy(folder, found, "trainer_state.json")
    content = state.content if state and isinstance(state.content, dict) else None
    if content is not None:
        epoch = content.get("epoch")
        if not isinstance(epoch, (int, float)) or isinstance(epoch, bool) or not 0 <= epoch < float("inf"):
            judgement.resume.append("trainer_state.json has no epoch, so the position in the data can't be restored")
        else:
            judgement.proved.append(f"the position in the data can be restored from epoch {epoch:g} and the step")
        _log(content.get("log_history"), judgement)
    dice = [n for n in folder.files if n.startswith("rng_state")]
    if not dice:
        judgement.resume.append("has no rng_state file, so data order and dropout would differ after a resume")
    ranks = {int(m.group(1)) for m in map(_RANK.fullmatch, dice) if m}
    without = [r for r in range(max(ranks, default=-1) + 1) if r not in ranks]
    if without:
        judgement.resume.append(
            f"has no rng_state for the ranks {some(without)}, so their data order and dropout would differ"
        )
    if "optimizer.pt" in folder.files:
        _optimizer(folder, found, judgement)
    if "scheduler.pt" in folder.files:
        anatomy = _anatomy(folder, found, "scheduler.pt")
        root = anatomy.content if anatomy else None
        last = root.get("last_epoch") if isinstance(root, dict) else None
        if type(last) is int and judgement.step is not None and last != judgement.step:
            judgement.warnings.append(f"the scheduler is at step {last}, but the trainer is at step {judgement.step}")


def _log(history: Any, judgement: Judgement) -> None:
    """Check that the steps in the log increase and do not exceed the checkpoint's step."""
    rows = history if isinstance(history, list) else []
    steps = [r["step"] for r in rows if isinstance(r, dict) and type(r.get("step")) is int]
    back = next((f"{a} to {b}" for a, b in zip(steps, steps[1:]) if b < a), "")  # noqa: B905, RUF007
    if back:
        judgement.problems.append(f"the logged steps in trainer_state.json decrease from {back}")
    elif steps and judgement.step is not None and steps[-1] > judgement.step:
        judgement.problems.append(
            f"the log in trainer_state.json is at step {steps[-1]}, but the checkpoint is at step {judgement.step}"
        )


def _anatomy(folder: Folder, found: Findings, name: str) -> Anatomy | None:
    entry = found[folder.join(name)]
    return entry.anatomy if entry and not entry.problems else None


def _optimizer(folder: Folder, found: Findings, judgement: Judgement) -> None:
    """Check that the optimizer's state matches the model and the step."""
    entry = found[folder.join("optimizer.pt")]
    anatomy = _anatomy(folder, found, "optimizer.pt")
    names = [n for n in folder.files if n.startswith(_WEIGHTS) and n.endswith((".safetensors", ".bin"))]
    tensors = list(found.tensors(folder.join(n) for n in names).values())
    adapter = [t.shape for t in tensors if ".lora_" in t.name]
    made = optimizer.judge(anatomy.content if anatomy else None, [t.shape for t in tensors], adapter, "optimizer.pt")
    judgement.resume += made.resume
    judgement.warnings += made.warnings
    judgement.proved += made.proved
    if anatomy is None or entry is None or judgement.step is None:
        return
    with found.open(found.place(entry.path), entry.path) as source:
        made_steps = optimizer.steps(source, anatomy.tensors)
        below = optimizer.negative(source, anatomy.tensors, anatomy.big_endian) if found.content else []
    if below:
        judgement.problems.append(f"optimizer.pt has negative second moments: {some(below)}")
    if made_steps is not None and made_steps > judgement.step:
        judgement.resume.append(
            f"the optimizer took {made_steps:,} steps, but the checkpoint is at step {judgement.step:,}"
        )
    elif made_steps is not None and made_steps < judgement.step:
        judgement.warnings.append(
            f"the optimizer took only {made_steps:,} steps, but the checkpoint is at step {judgement.step:,}"
        )
