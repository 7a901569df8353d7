"""Find traces of lost or misdirected writes in dense tensors: zero pages, zeros up to the file's end, repeated pages.

An interrupted download to a preallocated file, a crashed file system or a broken disk leaves such traces. A format
without checksums can't detect them. Intended zeros fill complete tensors, rows or blocks of rows, so they end at a row
boundary; damage ends at a page boundary. The findings are reported as doubts, unless the file matches a digest that was
recorded when it was saved.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuwarden.checkpoints.file_model import BLOCK_SCALES, DTYPES, Anatomy, Tensor, short
from gpuwarden.checkpoints.safe_file import Source
from gpuwarden.checkpoints.values import checksums

PAGE = 4096
_MARK = 16  # bytes at the start of each page, compared first
_HEADED = [("mark", "<u8", 2), ("rest", f"V{PAGE - _MARK}")]
_SLICE = 256  # bytes; smaller rows would have too many boundaries
_RUNS = 200
_BULK = 16 * PAGE
_READ = 256 << 20
_PIECE = 1 << 20
_BLOCK_EDGE = 8  # bytes at the boundary of a quantized block that may be zero by chance


@dataclass
class PageMarks:
    """The first bytes of every page in [start, end)."""

    numpy: Any
    start: int
    end: int
    line: int = -1
    found: list[Any] = field(default_factory=list)  # arrays with two 64-bit integers per page
    at: int = -1
    carry: bytes = b""

    def take(self, piece: memoryview) -> None:
        """Process a piece of the file. The piece may begin or end inside the first bytes of a page."""
        at = self.start if self.at < 0 else self.at
        self.at = at + len(piece)
        if self.carry:
            self.carry += bytes(piece[: _MARK - len(self.carry)])
            if len(self.carry) == _MARK:
                self.found.append(self.numpy.frombuffer(self.carry, "<u8").reshape(1, 2))
                self.carry = b""
        first = -at % PAGE
        if first >= len(piece):
            return
        whole = (len(piece) - first) // PAGE
        if whole:
            self.found.append(self.numpy.frombuffer(piece, _HEADED, whole, first)["mark"].copy())
        last = bytes(piece[first + whole * PAGE :][:_MARK])
        if len(last) == _MARK:
            self.found.append(self.numpy.frombuffer(last, "<u8").reshape(1, 2))
        else:
            self.carry = last

    def folded(self) -> Any:
        """Return a 64-bit hash of the first bytes of each page; 0 if all are zero. Collisions are rare."""
        pairs = self.numpy.concatenate(self.found)
        left, right = pairs[:, 0], pairs[:, 1]
        marks = (left * self.numpy.uint64(0x9E3779B97F4A7C15)) ^ right | self.numpy.uint64(1)
        marks[(left | right) == 0] = 0
        return marks

    def part(self, start: int, end: int) -> PageMarks:
        """Return empty marks for a part of the file that begins and ends at page boundaries."""
        return PageMarks(self.numpy, max(start, self.start), min(end, self.end))

    def join(self, parts: Sequence[PageMarks]) -> None:
        """Copy the marks of the parts into this object, in order."""
        self.found = [marks for p in parts for marks in p.found]


def watch(anatomy: Anatomy) -> list[PageMarks]:
    """Return the marks to collect for a file; an empty list if the format has checksums or numpy is missing."""
    numpy = checksums.numpy_or_none()
    dense = _dense(anatomy)
    if numpy is None or anatomy.spans or not dense:
        return []
    return [PageMarks(numpy, dense[0].start, max(t.start + t.extent for t in dense))]


def suspicions(source: Source, anatomy: Anatomy, marks: PageMarks, zero: Iterable[Tensor]) -> list[str]:
    """Return a line for each tensor with a suspected lost write. `zero` lists the tensors that contain only zeros."""
    if not marks.found:
        return []
    blank_tensors = {id(t) for t in zero}
    dense = _dense(anatomy)
    if len(dense) > 1 and all(id(t) in blank_tensors for t in dense) and sum(t.extent for t in dense) >= _BULK:
        return [f"all of its {len(dense):,} tensors contain only zeros: the bytes were probably never written"]
    numpy = marks.numpy
    pages = marks.folded()
    look = _Look(source, dense, blank_tensors)
    base = -(-marks.start // PAGE)
    blank = numpy.flatnonzero(pages == 0)
    starts = blank[numpy.diff(blank, prepend=-2) > 1]
    look.zeros([(base + int(i)) * PAGE for i in starts[:_RUNS]])
    order = numpy.sort(pages[pages != 0])
    twice = numpy.unique(order[1:][order[1:] == order[:-1]])[:_RUNS]
    if twice.size:
        look.repeats([numpy.flatnonzero(pages == mark)[:3] for mark in twice], base)
    return look.lines()


def _dense(anatomy: Anatomy) -> list[Tensor]:
    """Return the floating-point and quantized tensors that are stored without gaps, in file order."""
    kinds = (t for t in anatomy.tensors if t.start >= 0 and t.stride is None and t.extent)
    return sorted(
        (t for t in kinds if t.dtype in BLOCK_SCALES or (t.dtype in DTYPES and DTYPES[t.dtype].kind in "fc")),
        key=lambda t: (t.start, t.extent),
    )


@dataclass
class _Look:
    """Check the bytes of pages that may be zero or equal. `budget` is the number of bytes that may still be read."""

    source: Source
    tensors: list[Tensor]
    zero: set[int]
    budget: int = _READ
    runs: Counter[str] = field(default_factory=Counter)
    odd: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.starts = [t.start for t in self.tensors]

    def lines(self) -> list[str]:
        """Return the findings, except for sparse tensors, in which most runs of zeros end at row boundaries."""
        return [
            f"{short(name, 80)} {odd[0]}{f' and {len(odd) - 1:,} more' if odd[1:] else ''}: probably a lost write"
            for name, odd in self.odd.items()
            if 2 * len(odd) >= self.runs[name]
        ][:5]

    def zeros(self, places: Iterable[int]) -> None:
        """Find the start and the end of each run of zeros, and record the runs that indicate damage."""
        done = 0
        for place in places:
            t = self.around(place)
            if t is None or place < done or id(t) in self.zero or self.budget <= 0:
                continue
            low, high = self.blank_before(place), self.blank_after(place)
            done = high
            if high - low < PAGE:
                continue
            low, high = self.gridded(low, up=True), self.gridded(high, up=False)
            self.runs[t.name] += 1
            tail = high >= self.source.size - 8 and not self.natural(low)
            if tail or self.damaged(low, high):
                what = (
                    f"is zero from byte {low:,} to the file's end" if tail else f"has zeros in bytes {low:,}-{high:,}"
                )
                self.odd.setdefault(t.name, []).append(what)

    def repeats(self, groups: Iterable[Any], base: int) -> None:
        """Find the repeated range around each repeated page, and record the ranges that indicate damage."""
        done = 0
        for group in groups:
            for i, j in zip(group, group[1:]):  # noqa: B905, RUF007
                first, second = (base + int(i)) * PAGE, (base + int(j)) * PAGE
                t = self.around(second)
                if t is None or self.around(first) is None or second < done or self.budget <= 0:
                    continue
                page = self.take(second, PAGE)
                if page != self.take(first, PAGE) or page == page[:_MARK] * (len(page) // _MARK):
                    continue
                low, high = self.equal(first, second)
                done = high
                self.runs[t.name] += 1
                low, high = self.gridded(low, up=True), self.gridded(high, up=False)
                pages = all(self.paged(edge) for edge in (low, high))
                away = second - first
                shaped = all(self.natural(e) and self.natural(e - away) for e in (low, high))
                if pages and not shaped and high - low >= PAGE - 8:
                    self.odd.setdefault(t.name, []).append(
                        f"has bytes {low:,}-{high:,} that repeat the bytes from {low - away:,} on"
                    )

    def damaged(self, low: int, high: int) -> bool:
        """Return true if one end of a run is a page boundary, and the other end is a page or row boundary."""
        natural = [self.natural(edge) for edge in (low, high)]
        paged = [self.paged(edge) for edge in (low, high)]
        return not all(natural) and all(p or n for p, n in zip(paged, natural))  # noqa: B905

    def around(self, place: int) -> Tensor | None:
        """Return the tensor that contains the byte at an offset; None if there is none."""
        i = bisect.bisect_right(self.starts, place) - 1
        t = self.tensors[i] if i >= 0 else None
        return t if t is not None and place < t.start + t.extent else None

    def gridded(self, edge: int, *, up: bool) -> int:
        """Round an edge to an element boundary, because the lowest bytes of an element may be zero by chance."""
        t = self.around(edge)
        if t is None or t.dtype in BLOCK_SCALES:
            return edge
        size = max(DTYPES[t.dtype].bits // 8, 1)
        within = (edge - t.start) % size
        return edge + (size - within if up and within else 0) - (0 if up else within)

    def paged(self, edge: int) -> bool:
        t = self.around(edge)
        near = _BLOCK_EDGE if t is None or t.dtype in BLOCK_SCALES else max(DTYPES[t.dtype].bits // 8, 1)
        return min(edge % PAGE, -edge % PAGE) < near

    def natural(self, edge: int) -> bool:
        """Return true if an edge is a boundary of a tensor, or of a row, a channel or a larger part of the tensor."""
        t = self.around(edge)
        if t is None or edge == t.start:
            return True
        near = _BLOCK_EDGE if t.dtype in BLOCK_SCALES else 0
        part = t.extent
        for d in t.shape[:-1]:
            part //= max(d, 1)
            within = (edge - t.start) % part if part >= _SLICE else -1
            if part >= _SLICE and min(within, part - within) <= near:
                return True
        return False

    def take(self, at: int, length: int) -> bytes:
        length = min(length, self.source.size - at)
        self.budget -= length
        return self.source.at(at, length)

    def pieces(self, at: int) -> Iterator[tuple[int, bytes]]:
        """Yield the bytes from `at` on, first one page and then larger pieces. Skip tensors that contain only zeros."""
        size = PAGE
        while at < self.source.size and self.budget > 0:
            t = self.around(at)
            if t is not None and id(t) in self.zero:
                at = t.start + t.extent
                continue
            piece = self.take(at, size)
            yield at, piece
            at += len(piece)
            size = min(2 * size, _PIECE)

    def blank_after(self, place: int) -> int:
        """Return the end offset of the run of zeros that contains `place`."""
        for at, piece in self.pieces(place):
            if piece.count(0) != len(piece):
                return at + len(piece) - len(piece.lstrip(b"\0"))
        return self.source.size

    def blank_before(self, place: int) -> int:
        """Return the start offset of a run of zeros. `place` is the offset of the run's first full page."""
        at = max(0, place - PAGE)
        piece = self.take(at, place - at)
        kept = len(piece.rstrip(b"\0"))
        return at + kept

    def equal(self, first: int, second: int) -> tuple[int, int]:
        """Return the range around `second` that equals the range around `first`."""
        back = min(first, PAGE)
        left, right = self.take(first - back, back), self.take(second - back, back)
        same = next((i for i in range(back) if left[back - 1 - i] != right[back - 1 - i]), back)
        high = second
        for at, piece in self.pieces(second):
            other = self.take(first + at - second, len(piece))
            if other != piece:
                return second - same, at + next(i for i, (a, b) in enumerate(zip(other, piece)) if a != b)  # noqa: B905
            high = at + len(piece)
        return second - same, high
