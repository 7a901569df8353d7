"""What a transformers Trainer needs to resume from a checkpoint, beyond what it says when something is amiss.

The Trainer restarts the optimizer in silence where optimizer.pt or scheduler.pt is missing, and takes any step from
trainer_state.json. Standard library only.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from gpuwarden.checkpoints.anatomy import Anatomy, some
from gpuwarden.checkpoints.findings import Findings, Judgement
from gpuwarden.checkpoints.pickles import Call
from gpuwarden.checkpoints.torch_pickle import Ref, tensor
from gpuwarden.checkpoints.walk import Folder

_WEIGHTS = ("model", "adapter_model", "pytorch_model")
_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "max_exp_avg_sq")


def resumable(folder: Folder, found: Findings, said: Judgement) -> None:
    """Add to `said.resume` all that stands in the way of a true resume, to `said.proved` what fits."""
    gone = [n for n in ("optimizer.pt", "scheduler.pt") if n not in folder.files]
    if gone and not _elsewhere(folder):
        said.resume.append(f"{some(gone)} missing: a resume would silently start the optimizer afresh")
    if not any(n.startswith("rng_state") for n in folder.files):
        said.resume.append("no rng_state file: data order and dropout would differ after a resume")
    state = _anatomy(folder, found, "trainer_state.json")
    if state and isinstance(state.content, dict) and not isinstance(state.content.get("epoch"), (int, float)):
        said.resume.append("trainer_state.json has no epoch, from which the position in the data is found again")
    if "optimizer.pt" in folder.files:
        _optimizer(folder, found, said)
    if "scheduler.pt" in folder.files:
        _scheduler(folder, found, said)


def _elsewhere(folder: Folder) -> bool:
    """DeepSpeed and FSDP keep the optimizer in folders of their own."""
    return any(n.startswith(("global_step", "optimizer_", "pytorch_model_fsdp")) for n in folder.folders)


def _anatomy(folder: Folder, found: Findings, name: str) -> Anatomy | None:
    entry = found[folder.join(name)]
    return entry.anatomy if entry and not entry.problems else None


def _optimizer(folder: Folder, found: Findings, said: Judgement) -> None:
    """Every parameter of its groups has its moments, in the shape of a tensor of the model."""
    anatomy = _anatomy(folder, found, "optimizer.pt")
    root = anatomy.content if anatomy else None
    groups, state = (root.get("param_groups"), root.get("state")) if isinstance(root, dict) else (None, None)
    if not isinstance(groups, list) or not isinstance(state, dict):
        said.resume.append("optimizer.pt holds no param_groups and state")
        return
    params = [p for g in groups if isinstance(g, dict) for p in (g.get("params") or [])]
    if params and not state:
        said.resume.append("optimizer.pt has parameters but no state: it was saved before its first step")
        return
    moments = [ref for entry in state.values() for ref in _moments(entry)]
    model = Counter(_model_shapes(folder, found))
    if not moments or not model:
        return
    strange = Counter(r.shape for r in moments) - model
    if strange:
        said.resume.append(f"the optimizer has moments of shapes that the model lacks: {some(strange)}")
    else:
        said.proved.append(f"the optimizer's {len(moments):,} moments have the shapes of the model's tensors")


def _moments(entry: Any) -> list[Ref]:
    """The first moment of one parameter, where the optimizer keeps one in the parameter's shape."""
    if isinstance(entry, dict):
        for key in _MOMENTS:
            value = entry.get(key)
            ref = tensor(value) if isinstance(value, Call) else None
            if ref is not None:
                return [ref]
    return []


def _model_shapes(folder: Folder, found: Findings) -> list[tuple[int, ...]]:
    names = [n for n in folder.files if n.startswith(_WEIGHTS) and n.endswith((".safetensors", ".bin"))]
    return [t.shape for t in found.tensors(folder.join(n) for n in names).values()]


def _scheduler(folder: Folder, found: Findings, said: Judgement) -> None:
    anatomy = _anatomy(folder, found, "scheduler.pt")
    root = anatomy.content if anatomy else None
    last = root.get("last_epoch") if isinstance(root, dict) else None
    if type(last) is int and said.step is not None and last != said.step:
        said.warnings.append(f"the scheduler stands at {last}, the trainer at step {said.step}")
