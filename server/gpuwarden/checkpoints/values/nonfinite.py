"""Count the non-finite elements of a tensor in which `content_scan.py` has found signs of such elements."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gpuwarden.checkpoints.file_model import DTYPES, PARAMETER, PARTS, DType, Tensor
from gpuwarden.checkpoints.safe_file import Source
from gpuwarden.checkpoints.values import checksums

_BLOCK = 1 << 20
_MASK = re.compile(r"mask|alibi|causal|attn_bias|attention_bias|position_bias|logits_bias")


@dataclass
class NonFinite:
    """The numbers of NaN, infinite and finite elements in a tensor. `positive` counts positive infinities."""

    tensor: Tensor
    nan: int = 0
    inf: int = 0
    positive: int = 0
    finite: int = 0
    low: int = 1 << 64
    high: int = -1

    def count(self, bits: Any, kind: DType) -> None:
        """Count the elements in an array. `bits` contains their bits as unsigned integers."""
        if kind.nan is not None:
            bad = bits == kind.nan
            self.nan += int(bad.sum())
        else:
            assert kind.top is not None
            size = bits & bits.dtype.type((1 << (kind.bits - 1)) - 1)
            bad = size >= kind.top
            inf = 0 if kind.top == 0x7F else int((size == kind.top).sum())  # E4M3 has no infinity
            self.inf += inf
            self.positive += int((bits == kind.top).sum()) if inf else 0
            self.nan += int(bad.sum()) - inf
        rest = bits[~bad]
        self.finite += int(rest.size)
        if rest.size:
            self.low, self.high = min(self.low, int(rest.min())), max(self.high, int(rest.max()))

    @property
    def masklike(self) -> bool:
        """Return true if the tensor looks like an attention mask or a single counter, in which infinity is intended.

        A mask contains negative infinities and one other constant value, or has a mask's name or shape.
        """
        name, lone = self.tensor.name, not self.finite and self.inf == 1
        constant = self.low == self.high and not PARAMETER.fullmatch(name)
        # In a causal mask, even with an added bias, all elements above the diagonal are infinite.
        *_, rows, columns = (0, 0, *self.tensor.shape)
        triangle = rows == columns > 1 and self.inf * 2 == self.tensor.numel // rows * (rows - 1)
        masked = constant or triangle or _MASK.search(name.lower()) is not None
        return not self.nan and self.inf > 0 and (lone or (masked and not self.positive))

    def __str__(self) -> str:
        parts = [f"{n:,} {word}" for n, word in ((self.nan, "NaN"), (self.inf, "infinite")) if n]
        return f"{' and '.join(parts)} of {self.nan + self.inf + self.finite:,} values"


def count_nonfinite(source: Source, tensor: Tensor, big_endian: bool = False) -> NonFinite | None:
    """Count a tensor's NaN and infinite elements, using its strides. Return None if they can't be counted.

    The file scan is less exact, because it includes the gaps in a strided tensor.
    """
    numpy = checksums.numpy_or_none()
    dtype = PARTS.get(tensor.dtype, tensor.dtype)
    kind = DTYPES.get(dtype)
    if numpy is None or kind is None or kind.bits % 8:
        return None
    found = NonFinite(tensor)
    for bits in _blocks(source, tensor, numpy, f"{'>' if big_endian else '<'}u{kind.bits // 8}"):
        found.count(bits, kind)
    return found


def _blocks(source: Source, t: Tensor, numpy: Any, code: str) -> Iterator[Any]:
    """Yield the elements as unsigned integers, in arrays of limited size, without reading the gaps.

    Elements that a stride of zero repeats, and bytes that overlapping windows share, are yielded only once. Otherwise,
    a small file could declare any number of elements.
    """
    size = numpy.dtype(code).itemsize
    each = DTYPES[t.dtype].bits // 8
    lane = each // size  # 2 for complex numbers
    both = zip(t.shape, t.stride or ())  # noqa: B905
    kept = [(n, stride) for n, stride in both if stride]
    if t.stride is None or math.prod(n for n, _ in kept) * each > t.extent:
        for at in range(t.start, t.start + t.extent, _BLOCK):
            yield numpy.frombuffer(source.at(at, min(_BLOCK, t.start + t.extent - at)), code)
        return
    mapped = numpy.memmap(source.path, numpy.uint8, "r", t.start, (t.extent,))
    base = numpy.ndarray((t.extent // size,), code, mapped)
    view = numpy.lib.stride_tricks.as_strided(
        base, (*(n for n, _ in kept), lane), (*(s * each for _, s in kept), size), writeable=False
    )
    yield from _pieces(view)


def _pieces(view: Any) -> Iterator[Any]:
    """Yield the elements of a view as flat arrays of at most `_BLOCK` elements."""
    if view.size <= _BLOCK:
        yield view.reshape(-1)
        return
    row = view.size // view.shape[0]
    if row > _BLOCK:
        for part in view:
            yield from _pieces(part)
        return
    step = _BLOCK // row
    for at in range(0, view.shape[0], step):
        yield view[at : at + step].reshape(-1)
