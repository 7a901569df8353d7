"""One pass over a file's bytes: digests, CRCs of the format, and a search for NaN and infinity.

Memory stays flat whatever the size. numpy, isal and xxhash make it fast where they are installed; without them
the same answers come from the standard library.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from gpuwarden.checkpoints.anatomy import DTYPES, PARTS, Anatomy, Broken, DType, Span, Tensor
from gpuwarden.checkpoints.source import Source

CHUNK = 1 << 19  # fits the second-level cache, so that every pass but the first is free of memory traffic


def _crc32() -> Callable[..., int]:
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib.crc32
    fast: Callable[..., int] = isal_zlib.crc32
    return fast


def _numpy() -> Any:
    try:
        import numpy as np
    except ImportError:
        return None
    return np


def digesters() -> dict[str, Callable[[], Any]]:
    """The digests that can be computed here, by the name they have in a manifest."""
    made: dict[str, Callable[[], Any]] = {"sha256": hashlib.sha256}
    try:
        import xxhash
    except ImportError:
        return made
    made["xxh3_128"] = xxhash.xxh3_128
    return made


@dataclass
class Seen:
    """What the pass saw. `digests` are hex; `strange` are tensors with NaN or infinity; `zero` are all zero."""

    digests: dict[str, str] = field(default_factory=dict)
    bad_spans: list[str] = field(default_factory=list)
    strange: list[Tensor] = field(default_factory=list)
    zero: list[Tensor] = field(default_factory=list)
    spans: int = 0
    scanned: int = 0


@dataclass
class _Range:
    start: int
    end: int
    dtype: str
    tensors: list[Tensor]
    carry: bytes = b""
    hit: bool = False
    high: bool = False  # any bit set at all
    crc: int = 0
    span: Span | None = None


def sweep(
    source: Source, anatomy: Anatomy, wanted: tuple[str, ...] = (), progress: Callable[[int], None] | None = None
) -> Seen:
    """Read the file once from end to end. Raises Broken or Doubtful where it can't be read."""
    known = digesters()
    hashes = {name: known[name]() for name in wanted if name in known}
    ranges = _scan_ranges(anatomy)
    spans = [_Range(s.start, s.end, "", [], span=s) for s in anatomy.spans]
    todo = sorted(ranges + spans, key=lambda r: r.start)
    crc32, test = _crc32(), kernel(anatomy.big_endian)
    live: list[_Range] = []
    at = next_up = 0
    with open(source.fd, "rb", buffering=0, closefd=False) as raw:
        raw.seek(0)
        buffer = bytearray(CHUNK)
        whole = memoryview(buffer)
        while at < source.size:
            got = raw.readinto(buffer)
            if not got:
                raise Broken(f"could be read only up to byte {at:,} of {source.size:,}")
            view, end = whole[:got], at + got
            for h in hashes.values():
                h.update(view)
            while next_up < len(todo) and todo[next_up].start < end:
                live.append(todo[next_up])
                next_up += 1
            for r in live:
                piece = view[max(r.start - at, 0) : r.end - at]
                if r.span is not None:
                    r.crc = crc32(piece, r.crc)
                elif not r.hit:
                    _look(r, piece, test)
            live = [r for r in live if r.end > end]
            at = end
            if progress:
                progress(got)
    return _sum_up(source, anatomy, hashes, ranges, spans)


def _sum_up(
    source: Source, anatomy: Anatomy, hashes: dict[str, Any], ranges: list[_Range], spans: list[_Range]
) -> Seen:
    seen = Seen({name: h.hexdigest() for name, h in hashes.items()}, spans=len(spans), scanned=len(ranges))
    seen.bad_spans = [r.span.label for r in spans if r.span is not None and r.crc != r.span.crc]
    for r in ranges:
        if r.hit:
            seen.strange += r.tensors
        elif not r.high:
            seen.zero += [t for t in r.tensors if t.numel]
    return seen


def _scan_ranges(anatomy: Anatomy) -> list[_Range]:
    """The byte ranges of all floating tensors; tensors that share bytes are scanned once."""
    ranges: list[_Range] = []
    for t in sorted(anatomy.tensors, key=lambda t: (t.start, -t.extent)):
        dtype = PARTS.get(t.dtype, t.dtype)
        kind = DTYPES.get(dtype)
        if kind is None or (kind.top is None and kind.nan is None) or t.start < 0 or not t.extent:
            continue
        last = ranges[-1] if ranges else None
        if last and t.start < last.end and last.dtype == dtype:
            last.end = max(last.end, t.start + t.extent)
            last.tensors.append(t)
        else:
            ranges.append(_Range(t.start, t.start + t.extent, dtype, [t]))
    return ranges


def _look(r: _Range, piece: memoryview, test: Callable[[Any, str], tuple[bool, bool]]) -> None:
    size = DTYPES[r.dtype].bits // 8
    data: Any = piece
    if r.carry:
        need = size - len(r.carry)
        hit, high = test(r.carry + bytes(piece[:need]), r.dtype) if len(piece) >= need else (False, False)
        r.hit, r.high = hit, r.high or high
        if len(piece) < need:
            r.carry += bytes(piece)
            return
        data, r.carry = piece[need:], b""
    spare = len(data) % size
    if spare:
        r.carry = bytes(data[len(data) - spare :])
        data = data[: len(data) - spare]
    if len(data):
        hit, high = test(data, r.dtype)
        r.hit, r.high = r.hit or hit, r.high or high


# ------------------------------------------------------------------------------------------------------- kernels


def kernel(big_endian: bool = False) -> Callable[[Any, str], tuple[bool, bool]]:
    """A function of (bytes, dtype) that answers (holds NaN or infinity, holds anything but zero bits)."""
    numpy = _numpy()
    if numpy is None:
        return lambda data, dtype: plain_kernel(data, dtype, big_endian)
    return lambda data, dtype: numpy_kernel(numpy, data, dtype, big_endian)


def numpy_kernel(numpy: Any, data: Any, dtype: str, big_endian: bool = False) -> tuple[bool, bool]:
    """Two maxima over the raw bits: no masks, nothing allocated, exact for every pattern."""
    kind = DTYPES[dtype]
    size = kind.bits // 8
    bits = numpy.frombuffer(data, f"{'>' if big_endian else '<'}u{size}")
    if not bits.flags.aligned:
        bits = bits.copy()  # a copy is far cheaper than arithmetic on unaligned elements
    top = int(bits.max())
    if kind.nan is not None:
        return bool((bits == kind.nan).any()), top > 0
    assert kind.top is not None
    if top < kind.top:
        return False, top > 0
    sign = 1 << (kind.bits - 1)
    return top >= sign + kind.top or int(bits.view(f"{bits.dtype.str[0]}i{size}").max()) >= kind.top, True


def _table(test: Callable[[int], bool]) -> bytes:
    return bytes(1 if test(b) else 0 for b in range(256))


def plain_kernel(data: Any, dtype: str, big_endian: bool = False) -> tuple[bool, bool]:
    """The same answers from the standard library: slice out the exponent's bytes and look for the full ones."""
    kind = DTYPES[dtype]
    size = kind.bits // 8
    data = bytes(data)
    high = data.count(0) != len(data)
    if kind.nan is not None:
        return kind.nan in data, high
    assert kind.top is not None
    order = range(size) if big_endian else range(size - 1, -1, -1)
    columns = [data[i::size] for i in order]
    need = kind.top.to_bytes(size, "big")
    mask0 = need[0]
    marks = columns[0].translate(_table(lambda b: b & 0x7F >= mask0 if size == 1 else b & mask0 == mask0))
    at = marks.find(1)
    while at >= 0:
        if size == 1 or columns[1][at] & need[1] == need[1]:
            return True, True
        at = marks.find(1, at + 1)
    return False, high


_BLOCK = 1 << 20


@dataclass
class Oddity:
    """What a tensor's elements hold that is not finite. `masklike`: infinities over otherwise constant values."""

    nan: int = 0
    inf: int = 0
    finite: int = 0
    low: int = 1 << 64
    high: int = -1

    @property
    def masklike(self) -> bool:
        """Whether it looks like an attention mask or a lone counter, where infinity is meant."""
        constant = self.low == self.high if self.finite else self.inf == 1
        return not self.nan and self.inf > 0 and constant

    def __str__(self) -> str:
        said = [f"{n:,} {word}" for n, word in ((self.nan, "NaN"), (self.inf, "infinite")) if n]
        return f"{' and '.join(said)} of {self.nan + self.inf + self.finite:,} values"


def oddity(source: Source, tensor: Tensor, big_endian: bool = False) -> Oddity | None:
    """Count a tensor's NaN and infinite elements exactly, following its strides; None where they can't be counted.

    Looked at only after the pass raised suspicion: the gaps of a strided tensor may hold anything.
    """
    numpy = _numpy()
    dtype = PARTS.get(tensor.dtype, tensor.dtype)
    kind = DTYPES[dtype]
    if numpy is None or kind.bits % 8:
        return None
    found = Oddity()
    for bits in _blocks(source, tensor, numpy, f"{'>' if big_endian else '<'}u{kind.bits // 8}"):
        _count(found, bits, kind)
    return found


def _blocks(source: Source, t: Tensor, numpy: Any, code: str) -> Iterator[Any]:
    """The elements as unsigned integers, a bounded number at a time, without touching the gaps."""
    size = numpy.dtype(code).itemsize
    each = DTYPES[t.dtype].bits // 8
    lane = each // size  # 2 for complex numbers
    if t.stride is None:
        for at in range(t.start, t.start + t.extent, _BLOCK):
            yield numpy.frombuffer(source.at(at, min(_BLOCK, t.start + t.extent - at)), code)
        return
    mapped = numpy.memmap(source.path, numpy.uint8, "r", t.start, (t.extent,))
    base = numpy.ndarray((t.extent // size,), code, mapped)
    view = numpy.lib.stride_tricks.as_strided(
        base, (*t.shape, lane), (*(s * each for s in t.stride), size), writeable=False
    )
    yield from _pieces(view)


def _pieces(view: Any) -> Iterator[Any]:
    if view.ndim <= 1 or view.size <= _BLOCK:
        yield view.reshape(-1)
        return
    for part in view:
        yield from _pieces(part)


def _count(found: Oddity, bits: Any, kind: DType) -> None:
    if kind.nan is not None:
        bad = bits == kind.nan
        found.nan += int(bad.sum())
    else:
        assert kind.top is not None
        size = bits & bits.dtype.type((1 << (kind.bits - 1)) - 1)
        bad = size >= kind.top
        inf = 0 if kind.top == 0x7F else int((size == kind.top).sum())  # E4M3 has no infinity
        found.inf += inf
        found.nan += int(bad.sum()) - inf
    rest = bits[~bad]
    found.finite += int(rest.size)
    if rest.size:
        found.low, found.high = min(found.low, int(rest.min())), max(found.high, int(rest.max()))
