"""Read flax's MessagePack files, which map names to arrays. An array is an extension with a shape, a type and bytes."""

from __future__ import annotations

import struct
from typing import Any

from gpuwarden.checkpoints.file_model import DTYPES, Anatomy, Broken, Doubtful, Limits, Tensor, short
from gpuwarden.checkpoints.safe_file import Reader, Source
from gpuwarden.core.evidence import Cause

NAME = "msgpack"
LOAD = "tensors"
_DEPTH = 200
_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3  # flax's extensions
_KINDS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16",
    "uint8": "U8", "bool": "BOOL", "complex64": "C64", "complex128": "C128",
}  # fmt: skip
_NUMBERS = {
    0xCA: "f",
    0xCB: "d",
    0xCC: "B",
    0xCD: "H",
    0xCE: "I",
    0xCF: "Q",
    0xD0: "b",
    0xD1: "h",
    0xD2: "i",
    0xD3: "q",
}
_BINARY, _EXTENSION, _TEXT = (0xC4, 0xC5, 0xC6), (0xC7, 0xC8, 0xC9), (0xD9, 0xDA, 0xDB)
_WIDTHS = {0: "B", 1: "H", 2: "I"}


def claims(name: str, head: bytes) -> bool:
    """Return true for this format's file names."""
    return name.endswith(".msgpack")


def read(source: Source, limits: Limits) -> Anatomy:
    """Read every value up to the end of the file, and locate each array."""
    walk = _Walk(Reader(source), limits)
    root = walk.value("", 0)
    if walk.reader.at != source.size:
        raise Broken(f"{source.size - walk.reader.at:,} bytes follow its top-level value")
    found = walk.found
    found.content = root
    found.proved.append(f"its values fill the file exactly; {len(found.tensors):,} of them are arrays")
    return found


class _Walk:
    def __init__(self, reader: Reader, limits: Limits) -> None:
        self.reader, self.limits, self.found, self.count = reader, limits, Anatomy(NAME), 0

    def number(self, form: str) -> Any:
        return struct.unpack(">" + form, self.reader.take(struct.calcsize(form)))[0]

    def value(self, name: str, depth: int) -> Any:
        """Return the next value. Bytes are returned as (offset, length), and an array as None."""
        self.count += 1
        if self.count > self.limits.containers:
            raise Doubtful(f"has more than {self.limits.containers:,} values; the rest was not read", Cause.LIMIT)
        if depth > _DEPTH:
            raise Broken(f"is nested deeper than {_DEPTH} levels")
        code = self.reader.take(1)[0]
        if code < 0x80 or code >= 0xE0:
            return code if code < 0x80 else code - 256
        if code < 0xC0:
            if code < 0xA0:
                return (self._map if code < 0x90 else self._list)(code & 15, name, depth)
            return self._text(code & 31)
        if code in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[code]
        if code in _NUMBERS:
            return self.number(_NUMBERS[code])
        return self._sized(code, name, depth)

    def _sized(self, code: int, name: str, depth: int) -> Any:
        """Read a length-prefixed value."""
        for codes in (_BINARY, _EXTENSION, _TEXT):
            if code in codes:
                length = self.number(_WIDTHS[codes.index(code)])
                break
        else:
            if 0xD4 <= code <= 0xD8:
                return self._extension(1 << (code - 0xD4), name)
            if code not in (0xDC, 0xDD, 0xDE, 0xDF):
                raise Broken(f"has the invalid type code 0x{code:02x} before byte {self.reader.at:,}")
            length = self.number("H" if code in (0xDC, 0xDE) else "I")
            return (self._list if code < 0xDE else self._map)(length, name, depth)
        if code in _TEXT:
            return self._text(length)
        if code in _EXTENSION:
            return self._extension(length, name)
        return self.reader.skip(length), length

    def _text(self, length: int) -> str:
        if length > self.limits.header:
            raise Doubtful(f"has a string of {length:,} bytes", Cause.LIMIT)
        return self.reader.take(length).decode("utf-8", "replace")

    def _list(self, length: int, name: str, depth: int) -> list[Any]:
        return [self.value(f"{name}.{i}", depth + 1) for i in range(self._fits(length))]

    def _map(self, length: int, name: str, depth: int) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        for _ in range(self._fits(length)):
            key = self.value(name, depth + 1)
            if not isinstance(key, (str, int, float, bool, type(None))):
                raise Broken(f"has a key in {short(name, 60)!r} that is not a valid name")
            if key in made:
                raise Broken(f"has the name {short(key, 60)} twice", Cause.CONTRADICTION)
            made[key] = self.value(f"{name}.{key}".lstrip("."), depth + 1)
        return made

    def _fits(self, length: int) -> int:
        """Return the length. Raises Broken if it exceeds the remaining bytes."""
        if length > self.reader.end - self.reader.at:
            raise Broken(f"declares {length:,} values at byte {self.reader.at:,}, more than the file can contain")
        return length

    def _extension(self, length: int, name: str) -> None:
        """Add an array. Raises Broken if its size does not match its shape and type."""
        kind = self.number("b")
        start = self.reader.skip(length)
        if kind not in (_ARRAY, _SCALAR):
            if kind != _COMPLEX:
                self.found.unproved.append(f"the value of {short(name, 60)}, an extension of the unknown kind {kind}")
            return
        inner = _Walk(Reader(self.reader.source, start, start + length), self.limits)
        inner.count = self.count
        parts = inner.value("", _DEPTH - 3)
        if inner.reader.at != start + length or not isinstance(parts, list) or len(parts) != 3:
            raise Broken(f"array {short(name, 60)} does not consist of a shape, a type and bytes")
        shape, dtype, data = parts
        if not (isinstance(shape, list) and all(type(n) is int and 0 <= n < 1 << 48 for n in shape)):
            raise Broken(f"array {short(name, 60)} has an invalid shape")
        if not isinstance(data, tuple) or not isinstance(dtype, str) or len(self.found.tensors) >= self.limits.tensors:
            raise Broken(f"array {short(name, 60)} does not consist of a shape, a type and bytes")
        tensor = Tensor(name, _KINDS.get(dtype, dtype), tuple(shape), data[0], data[1])
        if tensor.dtype in DTYPES and tensor.numel * DTYPES[tensor.dtype].bits // 8 != data[1]:
            raise Broken(f"array {short(name, 60)} of shape {tensor.shape} and type {dtype} has {data[1]:,} bytes")
        self.found.tensors.append(tensor)
