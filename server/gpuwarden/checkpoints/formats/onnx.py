"""Read ONNX files: a protobuf without a checksum.

Each field must end inside the field that contains it, and the size of a weight must match its shape. A weight is stored
as raw bytes, as packed numbers, or as a byte range in another file next to the model (external data).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import chain
from pathlib import PurePosixPath

from gpuwarden.checkpoints.file_model import DTYPES, Anatomy, Broken, Limits, Tensor, short, some
from gpuwarden.checkpoints.protobuf import Walker
from gpuwarden.checkpoints.safe_file import Source

NAME = "onnx"
LOAD = "tensors"
_TYPES = {
    1: "F32", 2: "U8", 3: "I8", 4: "U16", 5: "I16", 6: "I32", 7: "I64", 9: "BOOL", 10: "F16", 11: "F64", 12: "U32",
    13: "U64", 14: "C64", 15: "C128", 16: "BF16", 17: "F8_E4M3", 18: "F8_E4M3FNUZ", 19: "F8_E5M2", 20: "F8_E5M2FNUZ",
    21: "U4", 22: "I4", 23: "F4", 24: "F8_E8M0", 25: "U2", 26: "I2",
}  # fmt: skip
_BITS = {**{name: kind.bits for name, kind in DTYPES.items()}, "U4": 4, "I4": 4, "U2": 2, "I2": 2}
# The field numbers of a weight, and the types whose packed fields contain the elements unchanged.
_DIMS, _TYPE, _NAME, _RAW, _EXTERNAL, _LOCATION = 1, 2, 8, 9, 13, 14
_PACKED = {4: ("F32", "C64"), 10: ("F64", "C128")}
_VARINTS = (5, 7, 11)
_ONCE = (_NAME, _RAW, *_PACKED, *_VARINTS)
_HIGH = bytes(range(128, 256))


@dataclass
class External:
    """The byte range of one weight in another file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    location: str
    offset: int
    length: int


@dataclass
class _Fields:
    """The fields of one weight: its dimensions, its integers, and the offsets of its strings and bytes."""

    dims: list[int] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)
    external: dict[str, str] = field(default_factory=dict)


def claims(name: str, head: bytes) -> bool:
    """Return true for file names with this format's extension."""
    return name.endswith(".onnx")


def read(source: Source, limits: Limits) -> Anatomy:
    """Read the fields of the model, its graph and its weights. Check that the other files contain the external data."""
    found, external = walk(source)
    for location in sorted({e.location for e in external}):
        ranges = [e for e in external if e.location == location]
        other = source.beside(location)
        if other is None and source.path.name != PurePosixPath(source.name).name:
            found.unproved.append(f"{len(ranges):,} weights in {short(location, 60)}, which is not in this folder")
            continue
        if other is None:
            raise Broken(f"needs {len(ranges):,} weights in {short(location, 60)}, which is missing")
        with other:
            size = other.size
        short_of = [e.name for e in ranges if e.offset + e.length > size]
        if short_of:
            raise Broken(f"{short(location, 60)} has {size:,} bytes, too few for these weights: {some(short_of)}")
        found.proved.append(f"{short(location, 60)} contains all bytes of {len(ranges):,} weights")
    return found


def walk(source: Source) -> tuple[Anatomy, list[External]]:
    """Return the findings about the model itself, and the byte ranges of its weights in other files."""
    found = Anatomy(NAME)
    walker = Walker(source)
    versions = 0
    graphs: list[tuple[int, int]] = []
    for number, _, place in walker.fields(0, source.size):
        versions += number == 1
        if number == 7 and isinstance(place, tuple) and len(graphs) < 2:
            graphs.append(place)
    if len(graphs) != 1 or not versions:
        raise Broken("lacks a graph or a version, so it is truncated or not an ONNX model")
    nodes = 0
    external: list[External] = []
    for number, _, place in walker.fields(*graphs[0]):
        nodes += number == 1
        if number == 1 and isinstance(place, tuple):
            # A node's attributes may contain tensors.
            attributes = (at for n, _, at in walker.fields(*place) if n == 5 and isinstance(at, tuple))
            for inner, _, value in chain.from_iterable(walker.fields(*at) for at in attributes):
                if inner == 5 and isinstance(value, tuple):
                    _weight(found, walker, value, external)
        if number == 5 and isinstance(place, tuple):
            _weight(found, walker, place, external)
    found.proved.append(
        f"its fields have consistent lengths: {nodes:,} nodes, {len(found.tensors) + len(external):,} weights"
    )
    return found, external


def _fields(walker: Walker, place: tuple[int, int]) -> _Fields:
    seen = _Fields()
    for number, wire, value in walker.fields(*place):
        if number == _DIMS:
            at, last = (0, 0) if isinstance(value, int) else value
            seen.dims += [value] if isinstance(value, int) else []
            while at < last and len(seen.dims) <= 64:
                dim, at = walker.varint(at, last)
                seen.dims.append(dim)
            if len(seen.dims) > 64:
                raise Broken("has a weight with more than 64 dimensions")
        elif number == _EXTERNAL and isinstance(value, tuple):
            texts = {n: walker.text(v) for n, _, v in walker.fields(*value) if isinstance(v, tuple)}
            seen.external[texts.get(1, "")] = texts.get(2, "")
        elif isinstance(value, int):
            seen.numbers[number] = value
        elif number in _ONCE and (number in seen.spans or wire != 2):
            raise Broken("has a weight whose numbers are stored twice or are not packed")
        else:
            seen.spans[number] = value
    return seen


def _weight(found: Anatomy, walker: Walker, place: tuple[int, int], external: list[External]) -> None:
    """Add one weight, and check that it has as many bytes or numbers as its shape requires."""
    seen = _fields(walker, place)
    name = walker.text(seen.spans[_NAME]) if _NAME in seen.spans else ""
    label = short(name, 60)
    dtype = _TYPES.get(seen.numbers.get(_TYPE, 0))
    if any(d > 1 << 60 for d in seen.dims):
        raise Broken(f"weight {label} has an invalid shape")
    shape, numel = tuple(seen.dims), math.prod(seen.dims)
    need = -(-numel * _BITS.get(dtype or "", 0) // 8)
    if seen.numbers.get(_LOCATION) == 1:
        external.append(_external(name, dtype or "", shape, need, seen.external))
    elif dtype is None:
        found.unproved.append(f"the values of {label}, which are strings or have an unknown type")
    elif _RAW in seen.spans or any(n in seen.spans and dtype in types for n, types in _PACKED.items()):
        number = next(n for n in (_RAW, *_PACKED) if n in seen.spans)
        start, end = seen.spans[number]
        if end - start != need:
            raise Broken(f"weight {label} has {end - start:,} bytes, but its shape needs {need:,}")
        found.tensors.append(Tensor(name, dtype, shape, start, need))
    else:
        _counted(found, walker, seen, label, dtype, numel)


def _counted(found: Anatomy, walker: Walker, seen: _Fields, label: str, dtype: str, numel: int) -> None:
    """Check the number of variable-length integers in a weight. The last byte of each integer is below 128."""
    count = 0
    for number in _VARINTS:
        begin, end = seen.spans.get(number, (0, 0))
        for at in range(begin, end, 1 << 20):
            piece = walker.source.at(at, min(1 << 20, end - at))
            count += len(piece.translate(None, _HIGH))
    # If elements are smaller than a byte, each integer contains two or four of them.
    if count not in (numel, -(-numel * _BITS[dtype] // 8)):
        raise Broken(f"weight {label} has {count:,} numbers, but its shape needs {numel:,}")
    kind = DTYPES.get(dtype)
    if numel and kind is not None and (kind.top is not None or kind.nan is not None):
        found.unproved.append(f"whether {label} is finite: its values are stored as integers")


def _external(name: str, dtype: str, shape: tuple[int, ...], need: int, entry: dict[str, str]) -> External:
    """Return the byte range that a weight refers to. Raises Broken if the range is invalid."""
    location = PurePosixPath(entry.get("location", "").replace("\\", "/"))
    offset, length = entry.get("offset", "0"), entry.get("length", str(need))
    if not location.parts or location.is_absolute() or ".." in location.parts or ":" in location.parts[0]:
        raise Broken(
            f"weight {short(name, 60)} refers to {short(entry.get('location', ''), 60)!r}, outside of its folder"
        )
    if not (offset.isdecimal() and length.isdecimal() and len(offset + length) < 40):
        raise Broken(f"weight {short(name, 60)} has an invalid range of external data")
    if dtype and int(length) != need:
        raise Broken(f"weight {short(name, 60)} has {int(length):,} bytes of external data; its shape needs {need:,}")
    return External(name, dtype, shape, str(location), int(offset), int(length))
