"""ONNX: a protobuf without a checksum. Its lengths must nest exactly, and its weights have the size of their shapes."""

from __future__ import annotations

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
    """Add a weight that is stored as raw bytes."""
    dims: list[int] = []
    spans: dict[int, tuple[int, int]] = {}
    numbers: dict[int, int] = {}
    for number, _, value in walker.fields(*place):
        if isinstance(value, tuple):
            spans[number] = value
            packed: list[int] = []
            at, last = value if number == 1 else (0, 0)
            while at < last:
                dim, at = walker.varint(at, last)
                packed.append(dim)
                if len(packed) > 64:
                    raise Broken("has a weight of more than 64 dimensions")
            dims += packed
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
        start, end = spans[9]
        tensor = Tensor(name, dtype, tuple(dims), start, end - start)
        need = tensor.numel * DTYPES[dtype].bits // 8
        if any(d > 1 << 60 for d in dims) or tensor.extent != need:
            raise Broken(f"weight {short(name, 60)} has {tensor.extent:,} bytes; its shape needs {need:,}")
        found.tensors.append(tensor)
