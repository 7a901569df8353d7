"""A checkpoint folder that carries its step in its name: the name, the trainer's state and the roster must agree."""

from __future__ import annotations

import re
from typing import Any

from gpuwarden.checkpoints.anatomy import short, some
from gpuwarden.checkpoints.findings import Findings, Judgement, temporary
from gpuwarden.checkpoints.walk import Folder

NAME = "checkpoint"
_STEP = re.compile(r"(?:^|.*[-_])(?:checkpoint|ckpt|step|global_step|iter)[-_=]?0*(\d{1,15})")
_STATE = "trainer_state.json"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".npz", ".distcp", ".msgpack", ".onnx")


def step_of(name: str) -> int | None:
    """The step that a folder's or file's name states: checkpoint-10, step_500, ckpt-000007."""
    match = _STEP.fullmatch(name.lower())
    return int(match.group(1)) if match else None


def claims(folder: Folder) -> bool:
    """By the folder's name, or by a trainer's state inside."""
    return (step_of(folder.path.name) is not None or _STATE in folder.files) and not temporary(folder.rel)


def judge(folder: Folder, found: Findings) -> Judgement:
    """The step is what the name says; there are weights; a trainer's checkpoint can be resumed."""
    said = Judgement(NAME, folder.rel, step=step_of(folder.path.name), checkpoint=True)
    inside = found.within(folder.rel)
    if not inside:
        said.problems.append("the folder is empty: a save that never happened, and resume=True would stop at it")
        return said
    if not any(e.path.endswith(WEIGHTS) and not e.temporary for e in inside):
        said.problems.append("holds no weights")
    if _STATE in folder.files:
        _trainer(folder, found, said)
    return said


def _trainer(folder: Folder, found: Findings, said: Judgement) -> None:
    state = content(found, folder.join(_STATE))
    if not isinstance(state, dict) or type(state.get("global_step")) is not int:
        said.problems.append(f"{_STATE} has no global_step")
        return
    step: int = state["global_step"]
    if said.step is not None and said.step != step:
        said.problems.append(f"the folder is called {short(folder.path.name, 60)}, but {_STATE} stands at step {step}")
    else:
        said.proved.append(f"{_STATE} stands at step {step}")
    said.step = step
    gone = [n for n in ("optimizer.pt", "scheduler.pt") if n not in folder.files and not _elsewhere(folder)]
    if gone:
        said.resume.append(f"{some(gone)} missing: a resume would silently start the optimizer afresh")
    if not any(n.startswith("rng_state") for n in folder.files):
        said.resume.append("no rng_state file: data order and dropout would differ after a resume")


def _elsewhere(folder: Folder) -> bool:
    """DeepSpeed and FSDP keep the optimizer in folders of their own."""
    return any(n.startswith(("global_step", "optimizer_", "pytorch_model_fsdp")) for n in folder.folders)


def content(found: Findings, path: str) -> Any:
    """The parsed value of a JSON file, None where there is none."""
    entry = found[path]
    return entry.anatomy.content if entry and entry.anatomy else None
