"""ONNX: a protobuf without a checksum. Its lengths must nest exactly, and its weights have the size of their shapes."""

from __future__ import annotations

from dataclasses import replace

from gpuwarden.checkpoints.file_model import DTYPES, Anatomy, Broken, Limits, Tensor, short
from gpuwarden.checkpoints.protobuf import Walker
from gpuwarden.checkpoints.safe_file import Source

NAME = "onnx"
LOAD = "tensors"
_TYPES = {
    1: "F32", 2: "U8", 3: "I8", 4: "U16", 5: "I16", 6: "I32", 7: "I64", 9: "BOOL", 10: "F16", 11: "F64", 12: "U32",
    13: "U64", 14: "C64", 15: "C128", 16: "BF16", 17: "F8_E4M3", 18: "F8_E4M3FNUZ", 19: "F8_E5M2", 20: "F8_E5M2FNUZ",
}  # fmt: skip


def claims(name: str, head: bytes) -> bool:
    """Return true for the names of this format."""
    return name.endswith(".onnx")


def read(source: Source, limits: Limits) -> Anatomy:
    """Walk the model's fields, its graph's fields, and each initializer."""
    found = Anatomy(NAME)
    walker = Walker(source)
    versions = 0
    graphs: list[tuple[int, int]] = []
    for number, _, place in walker.fields(0, source.size):
        versions += number == 1
        if number == 7 and isinstance(place, tuple) and len(graphs) < 2:
            graphs.append(place)
    if len(graphs) != 1 or not versions:
        raise Broken("has no graph or no version; it is cut off or no ONNX model")
    nodes = 0
    for number, _, place in walker.fields(*graphs[0]):
        nodes += number == 1
        if number == 5 and isinstance(place, tuple):
            _initializer(found, walker, place)
    found.proved.append(f"its fields nest exactly: {nodes:,} nodes, {len(found.tensors):,} weights")
    return found


def _initializer(found: Anatomy, walker: Walker, place: tuple[int, int]) -> None:
    dims: list[int] = []
    spans: dict[int, tuple[int, int]] = {}
    numbers: dict[int, int] = {}
    for number, _, value in walker.fields(*place):
        if isinstance(value, tuple):
            dims += _packed(walker, value) if number == 1 else []
            spans[number] = value
        elif number == 1:
            dims.append(value)
        else:
            numbers[number] = value
    begin, end = spans.get(8, (0, 0))
    name = walker.source.at(begin, min(end - begin, 1000)).decode("utf-8", "replace")
    dtype = _TYPES.get(numbers.get(2, 0))
    if numbers.get(14) == 1:
        found.unproved.append(f"the external data of {short(name, 60)}")
    elif 9 in spans and dtype:
        _raw(found, Tensor(name, dtype, tuple(dims), *spans[9]))


def _raw(found: Anatomy, t: Tensor) -> None:
    """Place weights that are stored as raw bytes; `t.extent` is the offset of their end until then."""
    have, need = t.extent - t.start, t.numel * DTYPES[t.dtype].bits // 8
    if any(d > 1 << 60 for d in t.shape) or have != need:
        raise Broken(f"weight {short(t.name, 60)} has {have:,} bytes; its shape needs {need:,}")
    found.tensors.append(replace(t, extent=need))


def _packed(walker: Walker, place: tuple[int, int]) -> list[int]:
    at, out = place[0], []
    while at < place[1]:
        value, at = walker.varint(at, place[1])
        out.append(value)
        if len(out) > 64:
            raise Broken("has a weight of more than 64 dimensions")
    return out
