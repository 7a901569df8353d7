"""Find tensors without elements. ZeRO-3 or FSDP saves such tensors if the parameters were not gathered first."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from gpuwarden.checkpoints.file_model import DTYPES, MODELS, PARAMETER, Tensor, role, some
from gpuwarden.checkpoints.findings import Entry, Findings
from gpuwarden.core.evidence import Cause

# DeepSpeed's own files contain empty placeholders, because the values are in its optimizer files. The shards of a
# distributed checkpoint may be empty on some ranks, and a data array may be empty.
_MAY_BE_EMPTY = re.compile(r".*(?:_(?:model|optim)_states\.pt|\.distcp|\.npy|\.npz|\.h5|\.hdf5|\.onnx)")
_PARTNERS = {"weight": "bias", "bias": "weight", "exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}


def judge(found: Findings) -> None:
    """Report a problem if a file has no tensors, or an empty tensor that needs elements according to other tensors.

    Other empty tensors are recorded as doubts. All files in a folder are checked together, because a model may
    be split across several files.
    """
    folders: dict[str, list[Entry]] = defaultdict(list)
    for path, entry in found.entries.items():
        # If a reader stopped early, it recorded a doubt, and the list of tensors may be incomplete.
        unsettled = entry.problems or entry.doubts
        if entry.format == "safetensors" and entry.anatomy and not (entry.anatomy.tensors or unsettled):
            entry.refute("has no tensors", Cause.CONTRADICTION)
        if entry.format.startswith("torch") and not _MAY_BE_EMPTY.fullmatch(path):
            _state(entry, entry.anatomy.content if entry.anatomy else None)
        if entry.anatomy and entry.anatomy.tensors and not _MAY_BE_EMPTY.fullmatch(path):
            folders[path.rpartition("/")[0]].append(entry)
    for entries in folders.values():
        if any(not t.numel for e in entries for t in _floating(e)):
            _judge(entries)


def _state(entry: Entry, root: Any) -> None:
    """Report a problem if a state file has tensors but an empty model. If it has no tensors, only record a doubt."""
    if not isinstance(root, dict):
        return
    models = [root[key] for key in MODELS if isinstance(root.get(key), dict)]
    if models and not any(models) and entry.anatomy and entry.anatomy.tensors:
        entry.refute("its model has no tensors", Cause.CONTRADICTION)
    elif (models and not any(models)) or not root:
        entry.doubt("has no tensors in its model", Cause.UNREAD)


def _judge(entries: list[Entry]) -> None:
    filled = {role(t.name) for e in entries for t in _floating(e) if t.numel}
    for entry in entries:
        tensors = _floating(entry)
        empty = [t.name for t in tensors if not t.numel]
        named = [n for n in empty if PARAMETER.fullmatch(n)]
        certain = [n for n in named if role(n) in filled or _partner(n) in filled or len(empty) == len(tensors)]
        if certain:
            entry.refute(f"{len(certain):,} tensors have no elements: {some(certain)}", Cause.CONTRADICTION)
        elif named or len(empty) == len(tensors) > 1:
            entry.doubt(f"{len(empty):,} tensors have no elements: {some(empty)}", Cause.UNREAD)


def _floating(entry: Entry) -> list[Tensor]:
    tensors = entry.anatomy.tensors if entry.anatomy else []
    return [t for t in tensors if t.dtype in DTYPES and DTYPES[t.dtype].kind in "fc"]


def _partner(name: str) -> str:
    """Return the role of a tensor's partner, such as the bias for a weight; "" if the tensor has no partner."""
    stem, dot, last = role(name).rpartition(".")
    return f"{stem}{dot}{_PARTNERS[last]}" if last in _PARTNERS else ""
