"""Read a file once, compute its digests and the format's CRCs, and search for NaN and infinity.

Each block is read into a buffer that stays in the processor's cache, and every watch processes the block before the
next one is read. Memory use does not depend on the file size. Several threads may share a large file, which is then
split into segments whose CRCs can be joined. Other digests can't be joined, so one thread computes them over the
complete file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from gpuwarden.checkpoints.file_model import BLOCK_SCALES, DTYPES, PARTS, Anatomy, Span, Tensor
from gpuwarden.checkpoints.safe_file import Source
from gpuwarden.checkpoints.values import checksums, pages

CHUNK = 1 << 23  # fits in the last-level cache; smaller blocks would make threads wait for each other more often
SEGMENT = 1 << 26  # bytes of a large file that one thread processes at a time
_NEWS = 1 << 23  # bytes between two calls to `progress`
_JOIN = 1 << 22  # bytes; computing the CRC of this many takes about as long as joining two CRCs
_LINE = 16  # bytes; the size of the largest element


@dataclass
class ScanResult:
    """The results of a scan. `digests` are in hex; `strange` lists the tensors that may contain NaN or infinity, and
    `zero` those that contain only zeros.
    """

    digests: dict[str, str] = field(default_factory=dict)
    bad_spans: list[str] = field(default_factory=list)
    strange: list[Tensor] = field(default_factory=list)
    zero: list[Tensor] = field(default_factory=list)
    marks: list[pages.PageMarks] = field(default_factory=list)
    spans: int = 0
    scanned: int = 0


def sweep(
    source: Source,
    anatomy: Anatomy,
    wanted: tuple[str, ...] = (),
    progress: Callable[[int], None] | None = None,
    threads: int = 1,
    extra: Mapping[str, Any] | None = None,
) -> ScanResult:
    """Read the complete file once. Raises Broken or Doubtful if the file can't be read.

    `extra` maps names in `digests` to additional hashes. `progress` is called with the number of bytes read since the
    last call, possibly from several threads. If it raises an exception, reading stops. With more than one thread, a
    large file is read a second time for the digests.
    """
    known = checksums.hashers()
    hashes = {**{name: known[name]() for name in wanted if name in known}, **(extra or {})}
    floats = _floats(anatomy)
    checks = [_Checked(s.start, s.end, s) for s in anatomy.spans]
    cover = _cover(checks, source.size) if checksums.CRC in wanted else []
    more = [c for c in cover if c.span is None]
    marks = pages.watch(anatomy)
    watches: list[_Watch] = sorted([*floats, *checks, *more, *marks], key=lambda w: w.start)
    note = progress or (lambda count: None)
    if threads > 1 and source.size >= 2 * SEGMENT:
        _share_out(source, watches, hashes, note, threads)
    else:
        _read(source, 0, source.size, watches, hashes, note)
    seen = ScanResult(
        {name: h.hexdigest() for name, h in hashes.items()}, spans=len(checks), scanned=len(floats), marks=marks
    )
    seen.bad_spans = [c.span.label for c in checks if c.span and c.crc != c.span.crc]
    if cover:
        whole = _Checked(0, source.size)
        whole.join(cover)
        seen.digests[checksums.CRC] = f"{whole.crc:08x}"
    for f in floats:
        if f.hit:
            seen.strange += f.tensors
        elif not f.high:
            seen.zero += [t for t in f.tensors if t.numel]
    return seen


# --------------------------------------------------------------------------------------------------------- watches


class _Watch(Protocol):
    """An object that processes the bytes in a range [start, end) of the file in order."""

    start: int
    end: int

    @property
    def line(self) -> int: ...
    def take(self, piece: memoryview) -> None: ...
    def part(self, start: int, end: int) -> _Watch: ...
    def join(self, parts: Sequence[Any]) -> None: ...


@dataclass
class _Checked:
    """A range of bytes whose CRC is computed, to check a span with a stored CRC or to compute a digest."""

    start: int
    end: int
    span: Span | None = None
    crc: int = 0
    crc32: Callable[..., int] = field(default_factory=checksums.crc32)
    line: int = -1

    def take(self, piece: memoryview) -> None:
        self.crc = self.crc32(piece, self.crc)

    def part(self, start: int, end: int) -> _Checked:
        return _Checked(max(start, self.start), min(end, self.end), self.span)

    def join(self, parts: Sequence[_Checked]) -> None:
        for p in parts:
            self.crc = checksums.crc32_joined(self.crc, p.crc, p.end - p.start)


def _cover(checks: Sequence[_Checked], size: int) -> list[_Checked]:
    """Return ranges whose joined CRCs are the CRC of the complete file: the format's spans and the gaps between them.

    If the spans overlap, or are so small that joining the CRCs costs more than it saves, return one range for the
    complete file.
    """
    cover, at = [], 0
    for c in sorted(checks, key=lambda c: c.start):
        if c.start < at or len(checks) * _JOIN > size:
            return [_Checked(0, size)]
        cover += [_Checked(at, c.start), c]
        at = c.end
    return [*cover, _Checked(at, size)]


@dataclass
class _Floats:
    """The floating-point elements of a tensor, or of several tensors that have the same type and share bytes."""

    start: int
    end: int
    dtype: str
    test: checksums.Test
    tensors: list[Tensor] = field(default_factory=list)
    hit: bool = False
    high: bool = False  # whether any bit is set
    carry: bytes = b""

    @property
    def size(self) -> int:
        return BLOCK_SCALES[self.dtype][0] if self.dtype in BLOCK_SCALES else DTYPES[self.dtype].bits // 8

    @property
    def line(self) -> int:
        """Return the offset of the elements, modulo the size of the largest element."""
        return self.start % _LINE

    def take(self, piece: memoryview) -> None:
        """Process a piece, which may begin or end inside an element."""
        if self.hit:
            return
        if self.carry:
            need = self.size - len(self.carry)
            self.carry += bytes(piece[:need])
            piece = piece[need:]
            if len(self.carry) < self.size:
                return
            self._look(self.carry)
        whole = len(piece) - len(piece) % self.size
        self.carry = bytes(piece[whole:])
        if whole:
            self._look(piece[:whole])

    def _look(self, data: Any) -> None:
        hit, high = self.test(data)
        self.hit, self.high = self.hit or hit, self.high or high

    def part(self, start: int, end: int) -> _Floats:
        """Return a watch for the elements that begin in [start, end). The last one may end after `end`."""
        first, last = (
            self.start + max(0, at - self.start + self.size - 1) // self.size * self.size for at in (start, end)
        )
        return _Floats(first, min(last, self.end), self.dtype, self.test)

    def join(self, parts: Sequence[_Floats]) -> None:
        self.hit, self.high = any(p.hit for p in parts), any(p.high for p in parts)


def _floats(anatomy: Anatomy) -> list[_Floats]:
    """Return the byte ranges of all floating-point tensors. Bytes that tensors share are scanned once."""
    found: list[_Floats] = []
    latest: dict[str, _Floats] = {}  # by type, because tensors of different types may share the same bytes
    tests: dict[str, checksums.Test] = {}
    for t in sorted(anatomy.tensors, key=lambda t: (t.start, -t.extent)):
        dtype = PARTS.get(t.dtype, t.dtype)
        kind = DTYPES.get(dtype)
        finite = dtype not in BLOCK_SCALES and (kind is None or (kind.top is None and kind.nan is None))
        if finite or t.start < 0 or not t.extent:
            continue
        last = latest.get(dtype)
        if last and t.start < last.end:
            last.end = max(last.end, t.start + t.extent)
            last.tensors.append(t)
            continue
        if dtype not in tests:
            tests[dtype] = checksums.finite_test(dtype, anatomy.big_endian)
        latest[dtype] = _Floats(t.start, t.start + t.extent, dtype, tests[dtype], [t])
        found.append(latest[dtype])
    return found


# --------------------------------------------------------------------------------------------------------- reading


def _read(
    source: Source,
    begin: int,
    end: int,
    watches: Sequence[_Watch],
    hashes: dict[str, Any],
    note: Callable[[int], None],
) -> None:
    """Pass the bytes [begin, end) to the watches, which must be sorted by start.

    Blocks end at element boundaries and are placed in the buffer so that the elements are aligned.
    """
    buffer = memoryview(bytearray(CHUNK + _LINE))
    updates = [h.update for h in hashes.values()]
    live: list[_Watch] = []
    at, next_up, noted, line = begin, 0, begin, 0
    while at < end:
        while next_up < len(watches) and watches[next_up].start < at + CHUNK:
            live.append(watches[next_up])
            line = line if live[-1].line < 0 else live[-1].line
            next_up += 1
        stop = at + CHUNK - (at + CHUNK - line) % _LINE
        lead = (at - line) % _LINE
        block = buffer[lead : lead + min(stop, end) - at]
        stop = at + source.into(block, at)
        if stop - at < len(block):
            block = block[: stop - at]
        for update in updates:
            update(block)
        for w in live:
            w.take(block if w.start <= at and stop <= w.end else block[max(w.start - at, 0) : max(w.end - at, 0)])
        if any(w.end <= stop for w in live):
            live = [w for w in live if w.end > stop]
        at = stop
        if at - noted >= _NEWS or at >= end:
            note(at - noted)
            noted = at


def _share_out(
    source: Source, watches: Iterable[_Watch], hashes: dict[str, Any], note: Callable[[int], None], threads: int
) -> None:
    """Read one file with several threads. The first one computes the digests; the others scan the values."""
    count = -(-source.size // SEGMENT)
    pieces: list[list[_Watch]] = [[] for _ in range(count)]
    joined: list[tuple[_Watch, list[_Watch]]] = []
    for w in watches:
        mine = []
        for i in range(w.start // SEGMENT, min(-(-w.end // SEGMENT), count)):
            part = w.part(i * SEGMENT, (i + 1) * SEGMENT)
            if part.start < part.end:
                mine.append(part)
                pieces[i].append(part)
        joined.append((w, mine))
    silent: Callable[[int], None] = lambda count: None  # noqa: E731
    with ThreadPoolExecutor(threads) as pool:
        jobs = [pool.submit(_read, source, 0, source.size, (), hashes, note)] if hashes else []
        for i, parts in enumerate(pieces):
            end = max([min((i + 1) * SEGMENT, source.size), *(p.end for p in parts)])
            begin = i * SEGMENT
            if parts or not hashes:
                jobs.append(pool.submit(_read, source, begin, end, parts, {}, silent if hashes else note))
        try:
            for job in jobs:
                job.result()
        finally:
            for job in jobs:
                job.cancel()
    for w, mine in joined:
        w.join(mine)
