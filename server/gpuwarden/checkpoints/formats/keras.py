"""Read Keras archives (.keras): a zip of two JSON files and an HDF5 file with the weights, each with a CRC."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpuwarden.checkpoints import zips
from gpuwarden.checkpoints.file_model import Anatomy, Broken, Doubtful, Limits, some
from gpuwarden.checkpoints.formats import hdf5
from gpuwarden.checkpoints.formats.json import parse
from gpuwarden.checkpoints.pickles.code_runners import runs_code
from gpuwarden.checkpoints.pickles.nodes import Global
from gpuwarden.checkpoints.safe_file import Source, Window
from gpuwarden.core.evidence import Cause

NAME = "keras"
LOAD = "tensors"
_WEIGHTS = "model.weights.h5"
_PARTS = ("config.json", "metadata.json", _WEIGHTS)


def claims(name: str, head: bytes) -> bool:
    """Return true for file names with this format's extension."""
    return name.endswith(".keras")


def read(source: Source, limits: Limits) -> Anatomy:
    """Read the archive's members, parse the two JSON files, and locate the weights."""
    if source.head(4) == b"\x89HDF":  # Before Keras 3, an HDF5 model could have this extension.
        return hdf5.read(source, limits)
    found = Anatomy(NAME)
    members = zips.members(source, limits)
    missing = [name for name in _PARTS if name not in members]
    if missing:
        raise Broken(f"lacks {some(missing)}")
    parse(zips.read(source, members["metadata.json"], limits.json), found)
    _layers(found, parse(zips.read(source, members["config.json"], limits.json), found))
    found.spans = [zips.span(m) for m in members.values() if m.stored]
    weights = members[_WEIGHTS]
    if not weights.stored:
        raise Doubtful("its weights are compressed, which Keras never does")
    inner = hdf5.read(Window(source, weights.start, weights.size), limits)
    found.tensors = [replace(t, start=t.start + weights.start if t.start >= 0 else -1) for t in inner.tensors]
    found.big_endian, found.meta = inner.big_endian, inner.meta
    found.unproved += inner.unproved
    found.proved += inner.proved
    found.adopt(inner)
    others = sorted(set(members) - set(_PARTS))
    if others:
        found.unproved.append(f"the content of {some(others)}")
    return found


def _layers(found: Anatomy, config: Any) -> None:
    """Report layers with code that Keras would run."""
    stack, named = [config], set()
    while stack:
        part = stack.pop()
        if isinstance(part, dict):
            module, own = part.get("module"), part.get("class_name")
            named.add((str(module or ""), str(own or "")))
            stack += part.values()
        elif isinstance(part, list):
            stack += part
    evil = [f"{module}.{own}" for module, own in sorted(named) if own and runs_code(Global(module, own))]
    if evil:
        found.refute(f"would run code when it is loaded: its config.json refers to {some(evil)}", Cause.RUNS_CODE)
    if any(own in ("Lambda", "__lambda__") for _, own in named):
        found.doubt("has a Lambda layer, whose code runs when the model is loaded", Cause.NEEDS_CODE)
