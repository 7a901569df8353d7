"""Read safetensors files: an 8-byte header length, a JSON header, then the tensors, without any checksum."""

from __future__ import annotations

import json
from typing import Any

from gpuwarden.checkpoints.file_model import (
    DTYPES,
    Anatomy,
    Broken,
    Doubtful,
    Limits,
    Tensor,
    short,
)
from gpuwarden.checkpoints.formats.json import modest
from gpuwarden.checkpoints.safe_file import Source

NAME = "safetensors"
LOAD = "tensors"


_BITS = {name: kind.bits for name, kind in DTYPES.items()}


def claims(name: str, head: bytes) -> bool:
    """Return true for this format's file names. The content is ignored."""
    return name.endswith(".safetensors")


def read(source: Source, limits: Limits) -> Anatomy:
    """Read the header and locate every tensor. The tensors must cover the file without gaps or overlaps."""
    header, start = _header(source, limits)
    found = Anatomy(NAME)
    meta = header.pop("__metadata__", {})
    if not isinstance(meta, dict) or not all(isinstance(v, str) for v in meta.values()):
        raise Broken("its __metadata__ is not a map of strings")
    found.meta = meta
    if len(header) > limits.tensors:
        raise Doubtful(f"lists {len(header):,} tensors; the limit is {limits.tensors:,}")
    found.tensors = sorted((_tensor(n, entry, start) for n, entry in header.items()), key=lambda t: (t.start, t.extent))
    at = start
    for t in found.tensors:
        if t.start != at:
            what = "overlaps the previous tensor" if t.start < at else "follows a gap"
            raise Broken(f"tensor {short(t.name, 60)} {what}")
        at += t.extent
    size = source.size
    if at != size:
        what = f"{at - size:,} bytes are missing" if at > size else f"{size - at:,} bytes are not part of any tensor"
        raise Broken(f"its tensors end at byte {at:,}, but the file ends at byte {size:,}: {what}")
    found.proved.append(f"{len(found.tensors):,} tensors cover the file exactly")
    return found


def _header(source: Source, limits: Limits) -> tuple[dict[str, Any], int]:
    """Return the header and the offset of the first tensor."""
    if source.size < 8:
        raise Broken(f"has {source.size} bytes, too few to contain the header's length")
    length = int.from_bytes(source.at(0, 8), "little")
    if length > limits.header:
        raise Broken(f"declares a header of {length:,} bytes; the format allows at most {limits.header:,}")
    if 8 + length > source.size:
        raise Broken(f"declares a header of {length:,} bytes, but the file has only {source.size:,} bytes")
    raw = source.at(8, length)
    if not modest(raw, limits):
        raise Doubtful(f"its header has more than {limits.containers:,} lists and objects; it is not parsed")
    try:
        header = json.loads(raw.decode("utf-8"))
        # Each entry has each of these keys once, so any other count may mean a repeated name. Calling a hook for every
        # object always detects repeated names, but takes twice as long.
        entries = len(header) - ("__metadata__" in header) if isinstance(header, dict) else -1
        once = all(raw.count(key) == entries for key in (b'"dtype"', b'"shape"', b'"data_offsets"'))
        if not once or b"\\" in raw or raw.count(b'"__metadata__"') > 1:
            header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as why:
        raise Broken(f"its header is not valid JSON: {short(why, 80)}") from why
    if not isinstance(header, dict):
        raise Broken("its header is not a JSON object")
    return header, 8 + length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name occurs twice")
    return made


def _tensor(name: str, entry: Any, start: int) -> Tensor:
    """Return the tensor of one entry, whose offsets are relative to `start`. Raises Broken for an invalid entry."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        raise Broken(f"the entry of tensor {short(name, 60)} lacks dtype, shape or data_offsets")
    dtype, shape, place = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise Doubtful(f"tensor {short(name, 60)} has the unknown dtype {short(dtype, 20)}")
    if not _naturals(shape) or not _naturals(place) or len(place) != 2 or len(shape) > 64:
        raise Broken(f"tensor {short(name, 60)} has a shape or offsets that are not a list of non-negative integers")
    bits = _BITS[dtype]
    for d in shape:
        bits *= d
        if bits > 1 << 66:
            raise Broken(f"tensor {short(name, 60)} has an invalid shape")
    begin, end = place
    if bits % 8 or end - begin != bits // 8:
        raise Broken(f"tensor {short(name, 60)} needs {bits // 8:,} bytes, but its offsets span {end - begin:,}")
    return Tensor(name, dtype, tuple(shape), start + begin, end - begin)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in value)
