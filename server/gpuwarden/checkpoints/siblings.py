"""Compare a run's checkpoints: if one has a higher step, each of its parts must have advanced.

A Trainer reads each part of a checkpoint separately, so it does not detect a part from another step. Standard library
only.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Dict, Tuple  # noqa: UP035  (Python 3.8)

from gpuwarden.checkpoints.file_model import Tensor, some
from gpuwarden.checkpoints.findings import Findings, Judgement
from gpuwarden.checkpoints.layouts import model
from gpuwarden.checkpoints.safe_file import Source
from gpuwarden.checkpoints.tree import Folder
from gpuwarden.checkpoints.values import optimizer
from gpuwarden.core.evidence import Evidence

_SAMPLE = 4096
_MOVES = 1024  # elements; a smaller tensor may stay unchanged because of rounding
_PIECE = 1 << 20
_ADAPTER = "adapter_model.safetensors"


@dataclass
class Sibling:
    """The steps that a checkpoint records; None for a step that is not recorded."""

    name: str
    step: int
    optimizer_steps: int | None
    # The number of tensors that have an optimizer state.
    trained: int
    scheduler: int | None
    # False if all optimizer moments are zero.
    moved: bool = True


def read(folder: Folder, step: int, found: Findings) -> Sibling:
    """Return the steps that a checkpoint's optimizer and scheduler record."""
    made, trained, moved = None, 0, True
    entry = found[folder.join("optimizer.pt")]
    if entry and entry.anatomy and not entry.problems:
        content = entry.anatomy.content
        trained = len(content.get("state") or ()) if isinstance(content, dict) else 0
        with found.open(found.place(entry.path), entry.path) as source:
            made = optimizer.steps(source, entry.anatomy.tensors)
            moved = not found.content or optimizer.moved(source, entry.anatomy.tensors)
    entry = found[folder.join("scheduler.pt")]
    state: Any = entry.anatomy.content if entry and entry.anatomy and not entry.problems else None
    # ReduceLROnPlateau counts evaluations, not steps.
    counts = isinstance(state, dict) and "num_bad_epochs" not in state and type(state.get("last_epoch")) is int
    return Sibling(folder.path.name, step, made, trained, state["last_epoch"] if counts else None, moved)


def compare(now: tuple[int, Folder], before: tuple[int, Folder], found: Findings, judgement: Judgement) -> None:
    """Compare a checkpoint with an earlier checkpoint of the same run. Each is a (step, folder) pair."""
    later, earlier = read(now[1], now[0], found), read(before[1], before[0], found)
    compare_progress(later, earlier, judgement)
    if found.content:
        compare_weights(later, held(now[1], found), earlier, held(before[1], found), found, judgement)


def compare_progress(now: Sibling, before: Sibling, evidence: Evidence) -> None:
    """Check that the optimizer and the scheduler have advanced between two checkpoints of one run."""
    parts = (
        ("optimizer", now.optimizer_steps, before.optimizer_steps),
        ("scheduler", now.scheduler, before.scheduler),
    )
    for what, later, earlier in parts:
        if later is None or earlier is None:
            continue
        if later == earlier:
            evidence.problems.append(f"its {what} is from another step: it is at step {later:,}, as in {before.name}")
        elif earlier == before.step and later > now.step:
            evidence.problems.append(f"its {what} is at step {later:,}, which is higher than the checkpoint's step")
        elif later < earlier:
            evidence.doubts.append(
                f"its {what} is at step {later:,}, but at {earlier:,} in {before.name}: "
                "it was restarted or is from another step"
            )


Held = Dict[str, Tuple[str, Tensor]]  # noqa: UP006  # maps a tensor's name to its file's path and the tensor


def held(folder: Folder, found: Findings) -> Held:
    """Return a checkpoint's model or adapter tensors, with the paths of their files."""
    names = model.weights(folder) or [n for n in (_ADAPTER,) if n in folder.files]
    made: Held = {}
    for path in map(folder.join, names):
        entry = found[path]
        if entry and entry.anatomy and not entry.problems:
            made.update((t.name, (path, t)) for t in entry.anatomy.tensors)
    return made


def compare_weights(
    now: Sibling, mine: Held, before: Sibling, earlier: Held, found: Findings, judgement: Judgement
) -> None:
    """Report weights that are equal at two steps: all weights, or all weights of one shard."""
    shards: dict[str, list[str]] = {}
    for name, (path, t) in mine.items():
        other = earlier[name][1] if name in earlier else None
        alike = other and (other.dtype, other.shape, other.extent) == (t.dtype, t.shape, t.extent)
        if t.numel >= _MOVES and other and alike and min(t.start, other.start) >= 0:
            shards.setdefault(path, []).append(name)
    still = [path for path, names in shards.items() if _same(path, names, mine, earlier, found)]
    if not still:
        return
    if len(still) == len(shards):
        line = f"all of its large weights are the same as in {before.name}"
    else:
        files = some(path.rsplit("/", 1)[-1] for path in still)
        line = f"the weights in {files} are the same as in {before.name}, but the other shards have changed"
    if not now.moved and not before.moved:
        judgement.warnings.append(
            f"{line}: every gradient was zero, for example because all completions had the same reward"
        )
        return
    # If the optimizer has moments for every tensor, it must have changed every tensor between two steps.
    went_on = (now.optimizer_steps or 0) > (before.optimizer_steps or 0) > 0
    if went_on and now.trained >= len(mine):
        judgement.problems.append(f"{line}, although the optimizer has trained these weights")
    else:
        judgement.doubts.append(f"{line}: the weights are frozen or from another step")


def _same(path: str, names: list[str], mine: Held, earlier: Held, found: Findings) -> bool:
    """Return true if all tensors in a file are unchanged. All bytes are compared only if no sample differs."""
    with ExitStack() as stack:
        files = {path, *(earlier[n][0] for n in names)}
        sources = {p: stack.enter_context(found.open(found.place(p), p)) for p in files}
        pairs = [(sources[path], mine[n][1], sources[earlier[n][0]], earlier[n][1]) for n in names]
        return all(equal(*pair, most=_SAMPLE) for pair in pairs) and all(equal(*pair) for pair in pairs)


def equal(left: Source, a: Tensor, right: Source, b: Tensor, most: int = 1 << 62) -> bool:
    """Return true if two tensors of the same size have equal bytes, up to `most` bytes."""
    end = min(a.extent, most)
    steps = ((at, min(_PIECE, end - at)) for at in range(0, end, _PIECE))
    return all(left.at(a.start + at, size) == right.at(b.start + at, size) for at, size in steps)
