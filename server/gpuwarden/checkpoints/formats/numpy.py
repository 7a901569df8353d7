"""Read numpy's .npy files (a header in Python syntax, then an array) and .npz files (a zip of .npy files with CRCs)."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable
from typing import Any

from gpuwarden.checkpoints import zips
from gpuwarden.checkpoints.file_model import (
    DTYPES,
    PARTS,
    Anatomy,
    Broken,
    Doubtful,
    Limits,
    Tensor,
    short,
)
from gpuwarden.checkpoints.safe_file import Source
from gpuwarden.checkpoints.values import checksums
from gpuwarden.core.evidence import Cause

NAME = "numpy"
LOAD = "tensors"
_MAGIC = b"\x93NUMPY"
_HEADER = 1 << 16
_KINDS = {
    "f8": "F64", "f4": "F32", "f2": "F16", "c8": "C64", "c16": "C128", "b1": "BOOL",
    "i8": "I64", "i4": "I32", "i2": "I16", "i1": "I8", "u8": "U64", "u4": "U32", "u2": "U16", "u1": "U8",
    "V2": "U16", "V1": "U8",  # numpy stores bfloat16 and 8-bit floats as these types
}  # fmt: skip
_DESCR = re.compile(r"([<>|=])([a-zA-Z]\d+)")
# Strings, bytes, times, and platform-dependent long doubles. Only their sizes are checked.
_OTHER = re.compile(r"[<>|=]([USVaMm]|f(?=16|12)|c(?=32|24))(\d{1,9})(\[\w+\])?")


def claims(name: str, head: bytes) -> bool:
    """Return true for this format's file names."""
    return name.endswith((".npy", ".npz"))


def read(source: Source, limits: Limits) -> Anatomy:
    """Compare the type and shape of every array with its number of bytes."""
    found = Anatomy(NAME)
    if source.name.endswith(".npy"):
        start, found.big_endian = _array(found, "array", source.head(_HEADER), source.size, 0)
        found.proved.append(f"one array of shape {found.tensors[0].shape} fills the file from byte {start:,} on")
        return found
    orders = set()
    members = zips.members(source, limits)
    large = _too_large(sum(m.size for m in members.values() if not m.stored), source.size, limits)
    for m in members.values():
        if not m.name.endswith(".npy"):
            raise Doubtful(f"contains {short(m.name, 60)}, which is not an array")
        name = m.name[:-4]
        if m.stored:
            found.spans.append(zips.span(m))
            head = source.at(m.start, min(m.size, _HEADER))
            _, big = _array(found, name, head, m.size, m.start)
        else:
            head = b""
            for piece in zips.inflate(source, m, limits):
                head += piece
                if len(head) >= min(_HEADER, m.size):
                    break
            start, big = _array(found, name, head[:_HEADER], m.size, 0)
            t = found.tensors.pop()
            found.tensors.append(Tensor(t.name, t.dtype, t.shape, -1, t.extent))
            found.later.append(large or _unpack(found, t, source, m, limits, start, big))
        if DTYPES.get(found.tensors[-1].dtype, DTYPES["U8"]).bits > 8:
            orders.add(big)
    found.big_endian = True in orders
    if len(orders) > 1:
        raise Doubtful("mixes byte orders")
    found.proved.append(f"has {len(members):,} arrays whose sizes match their headers")
    return found


def _too_large(size: int, packed: int, limits: Limits) -> Callable[[], None] | None:
    """Return None if the size is within the limits, otherwise a check that raises Doubtful."""
    most = max(limits.unpacked, limits.unpack_ratio * packed)
    if size <= most:
        return None

    def decline() -> None:
        raise Doubtful(f"has {size:,} bytes when decompressed; the limit is {most:,}", Cause.LIMIT)

    return decline


def _unpack(
    found: Anatomy, t: Tensor, source: Source, m: zips.Member, limits: Limits, start: int, big: bool
) -> Callable[[], None]:
    """Return a check that decompresses one member, compares its CRC, and searches it for NaN and infinity."""

    def work() -> None:
        dtype = PARTS.get(t.dtype, t.dtype)
        kind = DTYPES.get(dtype, DTYPES["U8"])
        test = None if kind.top is None else checksums.finite_test(dtype, big)
        size, rest, skip, strange = kind.bits // 8, b"", start, False
        for piece in zips.inflate(source, m, limits):
            data = rest + piece[skip:]
            skip = max(0, skip - len(piece))
            whole = len(data) - len(data) % size
            rest = data[whole:]
            if test and whole and not strange:
                strange = test(data[:whole])[0]
        found.proved.append(f"the CRC of compressed member {short(t.name, 60)} matches")
        if strange:
            found.not_finite.append(short(t.name, 60))

    return work


def _array(found: Anatomy, name: str, head: bytes, size: int, at: int) -> tuple[int, bool]:
    """Add the array to `found`. Return the offset of its data, and true if its numbers are big-endian."""
    if head[:6] != _MAGIC or len(head) < 12:
        raise Broken(f"{short(name, 60)} does not begin with the signature of a numpy array")
    wide = 2 if head[6] == 1 else 4
    length = int.from_bytes(head[8 : 8 + wide], "little")
    start = 8 + wide + length
    if head[6] not in (1, 2, 3) or start > len(head):
        raise Broken(f"{short(name, 60)} has a header that is truncated, too long or of an unknown version")
    try:
        header = ast.literal_eval(head[8 + wide : start].decode("utf-8" if head[6] == 3 else "latin-1").strip())
        descr, shape = header["descr"], header["shape"]
    except (ValueError, SyntaxError, LookupError, TypeError, MemoryError, RecursionError) as why:
        raise Broken(f"{short(name, 60)} has a header that can't be read") from why
    if not isinstance(shape, tuple) or not all(type(n) is int and 0 <= n < 1 << 62 for n in shape) or len(shape) > 64:
        raise Broken(f"{short(name, 60)} has an invalid shape")
    dtype, each, big = _element(name, descr)
    tensor = Tensor(name, dtype, shape, at + start, 0)
    extent = tensor.numel * each
    if start + extent != size:
        raise Broken(f"{short(name, 60)} needs {start + extent:,} bytes, but has {size:,}")
    found.tensors.append(Tensor(name, dtype, shape, at + start, extent))
    return start, big


def _element(name: str, descr: Any, depth: int = 0) -> tuple[str, int, bool]:
    """Return an element's type, its size in bytes, and true if it is a big-endian number."""
    match = _DESCR.fullmatch(descr) if isinstance(descr, str) else None
    if match and match.group(2) in _KINDS:
        dtype = _KINDS[match.group(2)]
        return dtype, DTYPES[dtype].bits // 8, match.group(1) == ">"
    other = _OTHER.fullmatch(descr) if isinstance(descr, str) else None
    if other:
        return descr, int(other.group(2)) * (4 if other.group(1) == "U" else 1), False
    if isinstance(descr, list) and descr and len(descr) <= 1000 and depth < 8:
        size = 0
        for field in descr:  # (name, type) or (name, type, shape)
            if not isinstance(field, tuple) or len(field) not in (2, 3):
                raise Broken(f"{short(name, 60)} has a record with the invalid field {short(field, 40)}")
            shape = field[2] if len(field) == 3 else ()
            good = isinstance(shape, tuple) and len(shape) <= 64
            if not good or not all(type(n) is int and 0 <= n < 1 << 31 for n in shape):
                raise Broken(f"{short(name, 60)} has a record with the invalid field {short(field, 40)}")
            size += math.prod(shape) * _element(name, field[1], depth + 1)[1]
        return "record", size, False
    raise Doubtful(
        f"{short(name, 60)} has the element type {short(descr, 40)}; objects are not read, because unpickling runs code"
    )
