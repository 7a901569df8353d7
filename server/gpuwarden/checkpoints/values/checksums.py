"""Compute digests and CRC-32 checksums, and search bytes for NaN and infinity.

If numpy, isal and xxhash are installed, memory bandwidth limits the speed. Without them, the computation is
slower, and the XXH3 digest is omitted.
"""

from __future__ import annotations

import functools
import hashlib
import zlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from gpuwarden.checkpoints.file_model import BLOCK_SCALES, DTYPES

if TYPE_CHECKING:
    # A function that takes raw elements and returns (has NaN or infinity, has a nonzero bit).
    Test = Callable[[Any], tuple[bool, bool]]


def numpy_or_none() -> Any:
    """Return numpy, or None if it is not installed."""
    try:
        import numpy as np
    except ImportError:
        return None
    return np


# ------------------------------------------------------------------------------------------------- digests and CRC


def hashers() -> dict[str, Callable[[], Any]]:
    """Return the constructors of the hashes that can be computed here, keyed by their names in manifests."""
    made: dict[str, Callable[[], Any]] = {"sha256": hashlib.sha256}
    try:
        import xxhash
    except ImportError:
        return made
    made["xxh3_128"] = xxhash.xxh3_128
    return made


def digests() -> tuple[str, ...]:
    """Return the names of all digests that can be computed here, from the strongest to the fastest.

    They include CRC-32, because CRCs of a file's parts can be combined: several threads can process one file, and CRCs
    that the format requires are reused.
    """
    hashes = tuple(hashers())
    return (*hashes, CRC) if crc32() is not zlib.crc32 or len(hashes) == 1 else ("sha256", CRC, *hashes[1:])


def enough(recorded: Iterable[str], *, sure: bool) -> tuple[str, ...]:
    """Return the name of the recorded digest to compare: the strongest if `sure` is set, otherwise the fastest."""
    recorded = set(recorded)
    here = [name for name in digests() if name in recorded]
    return tuple(here[:1] if sure else here[-1:])


def crc32() -> Callable[..., int]:
    """Return a function of (bytes, CRC so far) that updates a CRC.

    isal's function is ten times as fast as zlib's.
    """
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib.crc32
    fast: Callable[..., int] = isal_zlib.crc32
    return fast


CRC = "crc32"
_POLYNOMIAL = 0xEDB88320  # the CRC-32 polynomial, with the lowest power in the highest bit
_ONE, _BYTE = 1 << 31, 1 << 23  # x^0 and x^8


def crc32_joined(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of two joined pieces, given the CRC of each. `length` is the size of the second piece in bytes.

    Appending n bytes multiplies the first CRC by x^(8n), modulo the CRC polynomial over GF(2).
    """
    factor, bit = _ONE, 0
    while length >> bit:
        if length >> bit & 1:
            factor = _times(factor, _power(bit))
        bit += 1
    return _times(factor, first) ^ second


@functools.lru_cache(maxsize=64)
def _power(bit: int) -> int:
    """Return x to the power of 8 * 2**bit, modulo the polynomial."""
    return _times(_power(bit - 1), _power(bit - 1)) if bit else _BYTE


def _times(a: int, b: int) -> int:
    product, bit = 0, _ONE
    while bit:
        if a & bit:
            product ^= b
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
        bit >>= 1
    return product


# ------------------------------------------------------------------------------------------------- NaN and infinity


def finite_test(dtype: str, big_endian: bool = False) -> Test:
    """Return the test for a real floating-point type in `file_model.DTYPES`, or for a quantized type's scales.

    The test's argument contains one or more complete elements or blocks.
    """
    numpy = numpy_or_none()
    if dtype not in BLOCK_SCALES:
        return plain_test(dtype, big_endian) if numpy is None else numpy_test(numpy, dtype, big_endian)
    each, kind, offsets = BLOCK_SCALES[dtype]
    finite, size = finite_test(kind), DTYPES[kind].bits // 8

    def test(data: Any) -> tuple[bool, bool]:
        if numpy is None:
            raw = bytes(data)
            picked = [b"".join(raw[i : i + size] for i in range(at, len(raw), each)) for at in offsets]
        else:
            blocks = numpy.frombuffer(data, numpy.uint8).reshape(-1, each)
            picked = [numpy.ascontiguousarray(blocks[:, at : at + size]).data.cast("B") for at in offsets]
        seen = [finite(scales) for scales in picked]
        return any(hit for hit, _ in seen), any(high for _, high in seen)

    return test


def numpy_test(numpy: Any, dtype: str, big_endian: bool = False) -> Test:
    """Return an exact test that computes at most two maxima over the raw bits, without masks or allocations.

    Read as unsigned integers, the negative non-finite values are the largest. Read as signed integers, the positive
    non-finite values are the largest.
    """
    kind = DTYPES[dtype]
    order, size = ">" if big_endian else "<", kind.bits // 8
    unsigned, signed = numpy.dtype(f"{order}u{size}"), numpy.dtype(f"{order}i{size}")
    largest, read = numpy.maximum.reduce, numpy.frombuffer
    if kind.nan is not None:
        nan = kind.nan

        def lone(data: Any) -> tuple[bool, bool]:
            bits = read(data, unsigned)
            return bool((bits == nan).any()), bool(largest(bits))

        return lone
    assert kind.top is not None
    top, negative = kind.top, kind.top + (1 << (kind.bits - 1))

    def test(data: Any) -> tuple[bool, bool]:
        bits = read(data, unsigned)
        if not bits.flags.aligned:
            bits = bits.copy()  # a copy is faster than computing two maxima over unaligned elements
        most = int(largest(bits))
        if most < top:
            return False, most > 0
        return most >= negative or int(largest(bits.view(signed))) >= top, True

    return test


def plain_test(dtype: str, big_endian: bool = False) -> Test:
    """Return a test that uses only the standard library. It searches for exponents with all bits set."""
    kind = DTYPES[dtype]
    size = kind.bits // 8
    if kind.nan is not None:
        nan = kind.nan
        return lambda data: (nan in bytes(data), any_bit(data))
    assert kind.top is not None
    order = range(size) if big_endian else range(size - 1, -1, -1)
    need = kind.top.to_bytes(size, "big")
    full = bytes((b & 0x7F >= need[0]) if size == 1 else (b & need[0] == need[0]) for b in range(256))

    def test(data: Any) -> tuple[bool, bool]:
        data = bytes(data)
        columns = [data[i::size] for i in order]
        marks = columns[0].translate(full)
        at = marks.find(1)
        while at >= 0:
            if size == 1 or columns[1][at] & need[1] == need[1]:
                return True, True
            at = marks.find(1, at + 1)
        return False, any_bit(data)

    return test


def any_bit(data: Any) -> bool:
    """Return true if any bit is set."""
    data = bytes(data)
    return bool(data.count(0) != len(data))
