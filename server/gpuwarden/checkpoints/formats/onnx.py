"""ONNX: a protobuf without a checksum. Its lengths must nest exactly, and its weights have the size of their shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gpuwarden.checkpoints.anatomy import DTYPES, Anatomy, Broken, Doubtful, Limits, Tensor, short
from gpuwarden.checkpoints.source import Source

NAME = "onnx"
LOAD = "tensors"
_TYPES = {
    1: "F32", 2: "U8", 3: "I8", 4: "U16", 5: "I16", 6: "I32", 7: "I64", 9: "BOOL", 10: "F16", 11: "F64", 12: "U32",
    13: "U64", 14: "C64", 15: "C128", 16: "BF16", 17: "F8_E4M3", 18: "F8_E4M3FNUZ", 19: "F8_E5M2", 20: "F8_E5M2FNUZ",
}  # fmt: skip
_FIELDS = 2_000_000


def claims(name: str, head: bytes) -> bool:
    """By name."""
    return name.endswith(".onnx")


def read(source: Source, limits: Limits) -> Anatomy:
    """The model's fields, its graph's fields, and each initializer."""
    found = Anatomy(NAME)
    walker = _Walker(source)
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


class _Walker:
    """Walks protobuf fields without decoding what they hold."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.count = 0
        self.base = 0
        self.window = b""

    def varint(self, at: int, end: int) -> tuple[int, int]:
        value = shift = 0
        for i in range(10):
            if at + i >= end:
                break
            byte = self.byte(at + i)
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value, at + i + 1
        raise Broken(f"its protobuf makes no sense at byte {at:,}, or is cut off")

    def byte(self, at: int) -> int:
        if not self.base <= at < self.base + len(self.window):
            self.base = at
            self.window = self.source.at(at, min(1 << 14, self.source.size - at))
        return self.window[at - self.base]

    def fields(self, at: int, end: int) -> Iterator[tuple[int, int, int | tuple[int, int]]]:
        """(number, wire type, value or (start, end)) of each field between two offsets."""
        while at < end:
            self.count += 1
            if self.count > _FIELDS:
                raise Doubtful(f"has more than {_FIELDS:,} fields; the rest was not read")
            key, at = self.varint(at, end)
            number, wire = key >> 3, key & 7
            if wire == 0:
                value, at = self.varint(at, end)
                yield number, wire, value
                continue
            if wire == 2:
                size, at = self.varint(at, end)
            elif wire in (1, 5):
                size = 8 if wire == 1 else 4
            else:
                raise Broken(f"its protobuf has the unknown wire type {wire} near byte {at:,}")
            if at + size > end:
                raise Broken(f"a field needs bytes up to {at + size:,}, but ends at {end:,}")
            yield number, wire, (at, at + size)
            at += size


def _initializer(found: Anatomy, walker: _Walker, place: tuple[int, int]) -> None:
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
    """Weights kept as raw bytes; `t.extent` still holds where they end."""
    have, need = t.extent - t.start, t.numel * DTYPES[t.dtype].bits // 8
    if any(d > 1 << 60 for d in t.shape) or have != need:
        raise Broken(f"weight {short(t.name, 60)} has {have:,} bytes; its shape needs {need:,}")
    found.tensors.append(replace(t, extent=need))


def _packed(walker: _Walker, place: tuple[int, int]) -> list[int]:
    at, out = place[0], []
    while at < place[1]:
        value, at = walker.varint(at, place[1])
        out.append(value)
        if len(out) > 64:
            raise Broken("has a weight of more than 64 dimensions")
    return out
