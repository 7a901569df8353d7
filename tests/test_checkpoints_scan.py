"""The one pass over the bytes: exact for every bit pattern, wherever chunks fall, with and without numpy."""

from __future__ import annotations

import functools
import hashlib
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.checkpoints import kernels, oddity, scan
from gpuwarden.checkpoints.anatomy import DTYPES, Anatomy, Broken, Span, Tensor
from gpuwarden.checkpoints.source import Source

TESTS = [functools.cache(lambda t, b=False: kernels.numpy_test(np, t, b)), functools.cache(kernels.plain_test)]


def strange(bits: int, dtype: str) -> bool:
    """Whether a pattern is NaN or infinity, told by exponent and mantissa alone."""
    kind = DTYPES[dtype]
    if kind.nan is not None:
        return bits == kind.nan
    exponent = {"F16": 5, "BF16": 8, "F8_E5M2": 5, "F8_E4M3": 4}[dtype]
    mantissa = kind.bits - 1 - exponent
    full = bits >> mantissa & ((1 << exponent) - 1) == (1 << exponent) - 1
    return full and (dtype != "F8_E4M3" or bits & ((1 << mantissa) - 1) == (1 << mantissa) - 1)


@pytest.mark.parametrize("make", TESTS)
@pytest.mark.parametrize("dtype", ["F8_E5M2", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"])
def test_every_pattern_of_eight_bits(make: Any, dtype: str) -> None:
    for bits in range(256):
        data = bytes([1, bits, 1])
        assert make(dtype)(data)[0] == strange(bits, dtype), hex(bits)


@pytest.mark.parametrize("make", TESTS)
@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_every_pattern_of_sixteen_bits(make: Any, dtype: str) -> None:
    for bits in range(1 << 16):
        pattern = bits.to_bytes(2, "little")
        assert make(dtype)(pattern) == (strange(bits, dtype), bits > 0), hex(bits)


@pytest.mark.parametrize("make", TESTS)
@pytest.mark.parametrize(("dtype", "code"), [("F32", "f4"), ("F64", "f8")])
@pytest.mark.parametrize("big", [False, True])
@given(data=st.data())
def test_wide_floats_agree_with_numpy(make: Any, dtype: str, code: str, big: bool, data: st.DataObject) -> None:
    width = int(code[1]) * 8
    edges = [np.finfo(code).max, np.inf, -np.inf, np.nan, 0.0, -0.0, np.finfo(code).tiny]
    values = data.draw(st.lists(st.sampled_from(edges) | st.floats(width=width), min_size=1, max_size=20))
    array = np.array(values, f"{'>' if big else '<'}{code}")
    found, anything = make(dtype, big)(array.tobytes())
    assert found == (not np.isfinite(array).all())
    assert anything == any(array.tobytes())


@pytest.mark.parametrize("start", [0, 1, 3, 8])
@pytest.mark.parametrize("place", [0, 1, 62, 63, 64, 65, 127, 128, 999])
def test_chunks_may_cut_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: int, place: int) -> None:
    monkeypatch.setattr(scan, "CHUNK", 257)
    values = np.ones(1000, "f4")
    values[place] = np.inf
    data = b"\xff" * start + values.tobytes() + b"\xff" * 9
    (tmp_path / "x").write_bytes(data)
    tensors = [Tensor("bad", "F32", (1000,), start, 4000)]
    spans = [Span("all", 0, len(data), zlib.crc32(data)), Span("part", 5, 900, zlib.crc32(data[5:900]) ^ 1)]
    with Source(tmp_path / "x") as source:
        seen = scan.sweep(source, Anatomy("x", tensors=tensors, spans=spans), ("sha256", "xxh3_128"))
        assert [t.name for t in seen.strange] == ["bad"]
        assert str(oddity.oddity(source, tensors[0])) == "1 infinite of 1,000 values"
    assert seen.bad_spans == ["part"]
    assert seen.digests["sha256"] == hashlib.sha256(data).hexdigest()
    values[place] = 0
    (tmp_path / "x").write_bytes(b"\xff" * start + values.tobytes() + b"\xff" * 9)
    with Source(tmp_path / "x") as source:
        assert not scan.sweep(source, Anatomy("x", tensors=tensors)).strange


def test_tensors_that_share_bytes_are_scanned_once(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(np.zeros(1000, "f4").tobytes())
    many = [Tensor(f"t{i}", "F32", (1000,), 0, 4000) for i in range(5000)]
    with Source(tmp_path / "x") as source:
        seen = scan.sweep(source, Anatomy("x", tensors=many))
    assert (seen.scanned, len(seen.zero)) == (1, 5000)


def test_without_the_fast_wheels_the_answers_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.random.default_rng(0).normal(size=5000).astype("f2").tobytes()
    (tmp_path / "x").write_bytes(data)
    anatomy = Anatomy(
        "x", tensors=[Tensor("t", "F16", (5000,), 0, 10_000)], spans=[Span("s", 0, 10_000, zlib.crc32(data))]
    )
    with Source(tmp_path / "x") as source:
        fast = scan.sweep(source, anatomy, ("sha256",))
        for name in ("numpy", "isal", "xxhash"):
            monkeypatch.setitem(sys.modules, name, None)
        plain = scan.sweep(source, anatomy, ("sha256", "xxh3_128"))
    assert (plain.digests, plain.bad_spans, plain.strange, plain.zero) == (fast.digests, [], [], [])


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"1" * 1000)
    with Source(tmp_path / "x") as source:
        (tmp_path / "x").write_bytes(b"1" * 10)
        with pytest.raises(Broken):
            scan.sweep(source, Anatomy("x"))
        assert source.changed()
