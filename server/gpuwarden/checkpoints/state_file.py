"""Read a complete training state from one file: a dict that was saved with torch.save, as nanoGPT and Lightning do.

The step, the optimizer and the scheduler are values in the dict. Standard library only.
"""

from __future__ import annotations

from typing import Any, Iterator, Tuple  # noqa: UP035  (Python 3.8)

from gpuwarden.checkpoints.file_model import MODELS, Anatomy, some
from gpuwarden.checkpoints.findings import Entry, Findings, Judgement
from gpuwarden.checkpoints.pickles.torch_objects import tensor
from gpuwarden.checkpoints.values import optimizer

NAME = "training state"
# The usual keys for the step, the optimizer and the scheduler, most specific first.
STEPS = ("global_step", "step", "iter_num", "iteration", "iter", "it", "num_updates", "current_step", "n_iter")
_OPTIMIZER = (
    "optimizer", "optimizer_states", "optimizer_state_dict", "optimizer_state", "optim", "opt", "optim_state_dict",
    "optimizers",
)  # fmt: skip
_SCHEDULER = (
    "scheduler", "lr_schedulers", "lr_scheduler", "scheduler_state_dict", "lr_scheduler_state_dict", "sched",
    "schedulers",
)  # fmt: skip
_State = Tuple[str, Any]  # noqa: UP006  # the path in the file and the optimizer's state dict


def of_file(entry: Entry, found: Findings, named: int | None = None) -> Judgement | None:
    """Return the findings about a file with a model and a step; None for any other file.

    `named` is the step in the file's name. It is used if the file has an optimizer and does not record a step.
    """
    root = entry.anatomy.content if entry.anatomy and entry.verdict == "proven" and not entry.temporary else None
    if not isinstance(root, dict):
        return None
    models = [list(map(tensor, root[k].values())) for k in MODELS if isinstance(root.get(k), dict)]
    shapes = next(filter(None, ([ref.shape for ref in refs if ref is not None] for refs in models)), None)
    states = list(_optimizers(root))
    name = entry.path.rsplit("/", 1)[-1]
    given = (root.get(k) for k in STEPS)
    inside: int | None = next((v for v in given if type(v) is int and 0 <= v < 1 << 60), None)
    step = named if inside is None else inside
    if shapes is None or step is None or (not states and inside is None):
        return None
    judgement = Judgement(NAME, entry.path, step=step, checkpoint=True)
    judgement.proved.append(f"is at step {step:,}")
    if named is not None and named != step:
        judgement.warnings.append(f"is named {name}, but is at step {step:,}")
    if not states:
        judgement.resume.append("has no optimizer state, so a resume would restart the optimizer")
    for where, state in states:
        _optimizer(entry, found, where, state, shapes, judgement)
    if states and not any(root.get(k) for k in _SCHEDULER):
        judgement.warnings.append("has no scheduler state, so a resume needs another source for the learning rate")
    return judgement


def _optimizers(root: dict[Any, Any]) -> Iterator[_State]:
    """Yield the state dicts of the optimizers, which may be in a list or a dict."""
    for key in (k for k in _OPTIMIZER if k in root):
        value = root[key]
        several = value if isinstance(value, dict) else dict(enumerate(value)) if isinstance(value, list) else {}
        if "param_groups" in several:
            yield key, value
        else:
            yield from ((f"{key}.{k}", v) for k, v in several.items() if isinstance(v, dict) and "param_groups" in v)


def _optimizer(
    entry: Entry, found: Findings, where: str, state: Any, shapes: list[tuple[int, ...]], judgement: Judgement
) -> None:
    """Check that the optimizer's state matches the model and the step in the file."""
    made = optimizer.judge(state, shapes, [], where)
    judgement.resume += made.resume
    judgement.warnings += made.warnings
    judgement.proved += made.proved
    anatomy = entry.anatomy or Anatomy(entry.format)
    with found.open(found.place(entry.path), entry.path) as source:
        steps = optimizer.steps(source, anatomy.tensors, f"{where}.")
        mine = [t for t in anatomy.tensors if t.name.startswith(f"{where}.")]
        below = optimizer.negative(source, mine, anatomy.big_endian) if found.content else []
    if below:
        judgement.problems.append(f"the optimizer has negative second moments: {some(below)}")
    if steps is not None and judgement.step is not None and steps > judgement.step:
        judgement.warnings.append(f"the optimizer took {steps:,} steps, but the file is at step {judgement.step:,}")
