"""Read GGUF, llama.cpp's file format: metadata, a tensor table and plain or quantized tensors, without a checksum."""

from __future__ import annotations

import struct
from typing import Any

from gpuwarden.checkpoints.file_model import (
    BLOCK_SCALES,
    DTYPES,
    Anatomy,
    Broken,
    Doubtful,
    Limits,
    Tensor,
    short,
    some,
)
from gpuwarden.checkpoints.safe_file import Source

NAME = "gguf"
LOAD = "tensors"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_PLAIN = {0: "F32", 1: "F16", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 30: "BF16"}
# ggml type -> (name, elements per block, bytes per block), from ggml.h
BLOCKS = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
_KEEP = 4096


def claims(name: str, head: bytes) -> bool:
    """Return true for file names with this format's extension."""
    return name.endswith(".gguf")


class _Cursor:
    """Read the header sequentially, one buffered window at a time."""

    def __init__(self, source: Source, limits: Limits) -> None:
        self.source = source
        self.at = 0
        self.end = min(source.size, limits.header)
        self.window = b""
        self.base = 0

    def take(self, n: int) -> bytes:
        if n > self.end - self.at:
            raise Broken(f"its header needs {n:,} bytes at byte {self.at:,}, which exceeds the file or the limit")
        if self.at + n > self.base + len(self.window):
            self.base, length = self.at, max(n, min(1 << 20, self.end - self.at))
            self.window = self.source.at(self.at, length)
        begin = self.at - self.base
        self.at += n
        return self.window[begin : begin + n]

    def number(self, form: str) -> Any:
        return struct.unpack("<" + form, self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        length = self.number("Q")
        if length > 1 << 24:
            raise Broken(f"has a string of {length:,} bytes in its header")
        return self.take(length).decode("utf-8", "replace")

    def row(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return the name, shape, type and offset of a tensor."""
        name, dims = self.text(), self.number("I")
        if dims > 8:
            raise Broken(f"tensor {short(name, 60)} has {dims:,} dimensions; at most 8 are allowed")
        # ggml lists the fastest-varying dimension first.
        shape = tuple(reversed([self.number("Q") for _ in range(dims)]))
        return name, shape, self.number("I"), self.number("Q")


def read(source: Source, limits: Limits) -> Anatomy:
    """Read the metadata and the tensor table, and compare every tensor's location with the file's size."""
    cursor = _Cursor(source, limits)
    if cursor.take(4) != b"GGUF":
        raise Broken("does not begin with GGUF")
    version, tensors, pairs = cursor.number("I"), cursor.number("Q"), cursor.number("Q")
    if version not in (2, 3):
        raise Doubtful(f"has GGUF version {version:,} or is big-endian; only little-endian 2 and 3 are supported")
    if tensors > limits.tensors or pairs > 1_000_000:
        raise Broken(f"declares {tensors:,} tensors and {pairs:,} metadata entries, which is more than the limit")
    found = Anatomy(NAME)
    for _ in range(pairs):
        key = cursor.text()
        if key in found.meta:
            raise Broken(f"has the metadata key {short(key, 60)} twice")
        found.meta[key] = _value(cursor, cursor.number("I"), 0)
    table = [cursor.row() for _ in range(tensors)]
    align = found.meta.get("general.alignment", 32)
    if type(align) is not int or not 8 <= align <= 1 << 20 or align & (align - 1):
        raise Broken(f"has the invalid alignment {short(align, 30)}")
    _place(found, table, -(-cursor.at // align) * align, align, source.size)
    _kind(found)
    tokens = found.meta.get("tokenizer.ggml.tokens")
    embedding = next((t for t in found.tensors if t.name == "token_embd.weight"), None)
    if isinstance(tokens, dict) and embedding is not None:
        if tokens["count"] == embedding.shape[0]:
            found.proved.append(f"all of its {tokens['count']:,} tokens have an embedding")
        else:
            found.problems.append(f"has {tokens['count']:,} tokens but embeddings for {embedding.shape[0]:,}")
    bare = sorted({t.dtype for t in found.tensors} - set(DTYPES) - set(BLOCK_SCALES))
    if bare:
        found.unproved.append(f"whether the scales in blocks of type {some(bare)} are finite")
    return found


def _kind(found: Anatomy) -> None:
    """Check that the metadata specifies the architecture. In a split model, only the first part specifies it."""
    part, parts = (found.meta.get(f"split.{key}") for key in ("no", "count"))
    if isinstance(part, int) and isinstance(parts, int) and parts > 1:
        if part >= parts:
            found.problems.append(f"is marked as part {part + 1:,} of {parts:,}")
            return
        found.unproved.append(f"the other parts, because this file is part {part + 1:,} of {parts:,}")
    if not part and not isinstance(found.meta.get("general.architecture"), str):
        found.problems.append("has no general.architecture, so it can't be loaded")


def _value(cursor: _Cursor, kind: int, depth: int) -> Any:
    if kind in _SCALARS:
        return cursor.number(_SCALARS[kind])
    if kind == _STRING:
        return cursor.text()
    if kind != _ARRAY or depth > 4:
        raise Broken(f"has metadata of the unknown type {kind}")
    inner, count = cursor.number("I"), cursor.number("Q")
    # A string or an array needs at least 8 bytes, because its length is stored in 8 bytes.
    size = struct.calcsize(_SCALARS[inner]) if inner in _SCALARS else 8
    if count * size > cursor.end - cursor.at:
        raise Broken(f"has a metadata array of {count:,} entries, more than the file can contain")
    if inner in _SCALARS:
        raw, keep = cursor.take(count * size), min(count, _KEEP)
        return {"count": count, "first": list(struct.unpack(f"<{keep}{_SCALARS[inner]}", raw[: keep * size]))}
    kept = []
    for i in range(count):
        value = _value(cursor, inner, depth + 1)
        if i < _KEEP:
            kept.append(value)
    return {"count": count, "first": kept}


def _place(
    found: Anatomy, table: list[tuple[str, tuple[int, ...], int, int]], start: int, align: int, size: int
) -> None:
    """Check that only padding separates the tensors and that the last one ends at the end of the file."""
    if len({name for name, *_ in table}) != len(table):
        raise Broken("lists a tensor twice")
    at = 0
    for name, shape, kind, offset in sorted(table, key=lambda row: row[3]):
        if kind not in BLOCKS:
            raise Doubtful(f"tensor {short(name, 60)} has the unknown type {kind}")
        label, block, each = BLOCKS[kind]
        t = Tensor(name, _PLAIN.get(kind, label), shape, start + offset, 0)
        row = shape[-1] if shape else 1
        if row % block:
            raise Broken(
                f"tensor {short(name, 60)} has rows of {row:,} elements, not a multiple of its block size {block}"
            )
        extent = t.numel // block * each
        if offset != -(-at // align) * align:
            raise Broken(f"tensor {short(name, 60)} overlaps the previous tensor or follows a gap")
        at = offset + extent
        found.tensors.append(Tensor(name, t.dtype, shape, t.start, extent))
    if not at <= size - start <= -(-at // align) * align:
        raise Broken(f"its tensors end at byte {start + at:,}, but the file ends at byte {size:,}")
    found.proved.append(f"{len(table):,} tensors fill the rest of the file")
