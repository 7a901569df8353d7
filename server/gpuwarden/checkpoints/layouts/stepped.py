"""Check that the step in a checkpoint folder's name equals the step in its state file."""

from __future__ import annotations

import re
from itertools import chain, islice
from typing import Any

from gpuwarden.checkpoints import siblings, state_file, trainer_state
from gpuwarden.checkpoints.file_model import short
from gpuwarden.checkpoints.findings import Entry, Findings, Judgement, temporary
from gpuwarden.checkpoints.tree import Folder
from gpuwarden.checkpoints.values import optimizer

NAME = "checkpoint"
_STEP = re.compile(r"(?:^|.*[-_])(?:checkpoint|ckpt|step|global_step|iter)[-_=]?0*(\d{1,15})")
_STATE = "trainer_state.json"
_ARGS = "training_args.bin"
_OPTIMIZER = "optimizer.pt"
_MODEL_CONFIGS = {"config.json", "adapter_config.json"}
_BESIDE = ("optimizer", "scheduler", "rng_state", "random_states", "training_args", "scaler")
_POSITION = ("data", "sampler", "loader", "rng", "epoch", "position")
_HELPER = "checkpoint.json"  # written by save_helper.py
# accelerate's save_state writes these files. It numbers folders by save, not by step.
_ACCELERATE = re.compile(r"random_states_\d{1,6}\.pkl")
_SAVES = re.compile(r"checkpoint_\d{1,9}")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".npz", ".distcp", ".msgpack", ".onnx")


def step_of(name: str) -> int | None:
    """Return the step in a folder or file name, such as checkpoint-10, step_500 or ckpt-000007."""
    match = _STEP.fullmatch(name.lower())
    return int(match.group(1)) if match else None


def like_weights(path: str) -> bool:
    """Return true for a weight file's name, even with a temporary suffix, and for parts of an orbax save."""
    name = path.rsplit("/", 1)[-1].lower().replace("~", "")
    named = any(f"{kind}." in f"{name}." for kind in WEIGHTS) and not name.startswith(_BESIDE)
    return named or ".orbax-checkpoint-tmp" in path


def claims(folder: Folder) -> bool:
    """Return true if the folder's name or a state file in the folder contains a step."""
    named = step_of(folder.path.name) is not None or _STATE in folder.files or _HELPER in folder.files
    named = named or any(map(_ACCELERATE.fullmatch, folder.files))
    return named and not temporary(folder.rel)


def judge(folder: Folder, found: Findings) -> Judgement:
    """Check that the recorded step equals the step in the name, that weights exist, and that a resume is possible."""
    judgement = Judgement(NAME, folder.rel, step=step_of(folder.path.name), checkpoint=True)
    inside = found.within(folder.rel)
    if not inside:
        judgement.problems.append("the folder is empty: the save failed, and a resume with resume=True would fail")
        return judgement
    names = [e.path.rsplit("/", 1)[-1] for e in inside if not e.temporary]
    below = any(step_of(name) is not None for name in folder.folders)
    if below and judgement.step is None and _STATE in folder.files and _OPTIMIZER not in folder.files:
        # The folder contains checkpoints, and the final weights and log from save_model and save_state.
        judgement.checkpoint = False
        _agree(folder, found.parsed(folder.join(_STATE)), _STATE, "global_step", judgement)
        return judgement
    if not any(n.endswith(WEIGHTS) and not n.startswith(_BESIDE) for n in names):
        judgement.problems.append("has no weights")
    if _STATE in folder.files:
        _agree(folder, found.parsed(folder.join(_STATE)), _STATE, "global_step", judgement)
        trainer_state.resumable(folder, found, judgement)
        _follows(folder, found, judgement)
    elif _HELPER in folder.files:
        state = found.parsed(folder.join(_HELPER))
        _agree(folder, state, _HELPER, "step", judgement)
        parts = state.get("parts") if isinstance(state, dict) else None
        if not isinstance(parts, list) or not any("optim" in str(p) for p in parts):
            judgement.resume.append(f"{_HELPER} does not list an optimizer among its components")
        elif not any(w in str(p).lower() for p in parts for w in _POSITION):
            judgement.warnings.append(f"{_HELPER} does not list a component that records the position in the data")
    elif any(map(_ACCELERATE.fullmatch, folder.files)):
        _accelerated(folder, inside, found, judgement)
    else:
        _stateless(folder, inside, found, judgement)
    return judgement


def _follows(folder: Folder, found: Findings, judgement: Judgement) -> None:
    """Compare a checkpoint with the previous one of the same run."""
    others = found.tree.beside(folder) if found.tree else []
    steps = ((step_of(f.path.name), f) for f in others if _STATE in f.files and not temporary(f.rel))
    earlier = [(s, f) for s, f in steps if s is not None and judgement.step is not None and s < judgement.step]
    if earlier:
        step, before = max(earlier, key=lambda pair: pair[0])
        siblings.compare((judgement.step or 0, folder), (step, before), found, judgement)


def _accelerated(folder: Folder, inside: list[Entry], found: Findings, judgement: Judgement) -> None:
    """Read the step from the optimizer, or else the scheduler, in a folder written by accelerate's `save_state`."""
    saved = [e for e in inside if e.path[len(folder.join("")) :].startswith("optimizer")]
    made = optimizer.most_steps(saved, found)
    if made is None:
        schedule = found.parsed(folder.join("scheduler.bin"))
        last = schedule.get("last_epoch") if isinstance(schedule, dict) else None
        made = last if type(last) is int and last >= 0 else None
    if not saved:
        judgement.resume.append("has no optimizer state")
    if made is None:
        return
    if judgement.step is None or _SAVES.fullmatch(folder.path.name):
        judgement.step = made
        judgement.proved.append(f"is at step {made:,}")
    elif judgement.step != made:
        judgement.warnings.append(
            f"the folder is named {short(folder.path.name, 60)}, but its optimizer took {made:,} steps"
        )


def _stateless(folder: Folder, inside: list[Entry], found: Findings, judgement: Judgement) -> None:
    """Report a missing trainer state. The Trainer writes its state last, so the save may be unfinished."""
    stopped = f"lacks {_STATE}: the Trainer was stopped during this save"
    try:
        beside = list(islice(folder.path.parent.iterdir(), 10_000))
    except OSError:
        beside = []
    # Look for other checkpoints of the same run, even if only this folder is examined.
    siblings = [p for p in beside if p.name != folder.path.name and step_of(p.name) is not None and p.is_dir()]
    if _ARGS in folder.files or any((s / _STATE).exists() for s in siblings):
        judgement.problems.append(stopped)
    elif not siblings and folder.files.keys() & _MODEL_CONFIGS and folder.path.name.startswith("checkpoint-"):
        judgement.doubts.append(f"{stopped}, or another program wrote the folder")
    states = [j for j in (state_file.of_file(e, found) for e in inside) if j is not None]
    for state in states:
        judgement.resume += state.resume
        judgement.proved += state.proved
        judgement.warnings += state.warnings
        if judgement.step is not None and state.step != judgement.step:
            judgement.warnings.append(
                f"the folder is named {short(folder.path.name, 60)}, but {state.path} is at step {state.step}"
            )
    if states:
        return
    roots = [e.anatomy.content for e in inside if e.anatomy and isinstance(e.anatomy.content, dict)]
    tensors = (t.name for e in inside if e.anatomy for t in e.anatomy.tensors)
    saved = chain((e.path for e in inside), (str(key) for root in roots for key in root), tensors)
    if not any("optim" in name.lower() for name in saved):
        judgement.resume.append("has no optimizer state")


def _agree(folder: Folder, state: Any, file: str, key: str, judgement: Judgement) -> None:
    if not isinstance(state, dict) or type(state.get(key)) is not int:
        judgement.problems.append(f"{file} lacks {key}")
        return
    step: int = state[key]
    if judgement.step is not None and judgement.step != step:
        judgement.problems.append(f"the folder is named {short(folder.path.name, 60)}, but {file} is at step {step}")
    else:
        judgement.proved.append(f"{file} is at step {step}")
    judgement.step = step
