"""The single pass over the bytes: exact for every bit pattern and chunk boundary, with and without numpy."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.checkpoints.file_model import DTYPES, Anatomy, Broken, Doubtful, Span, Tensor
from gpuwarden.checkpoints.safe_file import Source
from gpuwarden.checkpoints.values import checksums, content_scan, nonfinite
from real_parts import need

TESTS = [functools.cache(lambda t, b=False: checksums.numpy_test(np, t, b)), functools.cache(checksums.plain_test)]


def real_torch() -> Any:
    need("torch", importlib.util.find_spec("torch") is not None)
    import torch

    return torch


def strange(bits: int, dtype: str) -> bool:
    """Return whether a bit pattern is NaN or infinity, judging by exponent and mantissa alone."""
    kind = DTYPES[dtype]
    if kind.nan is not None:
        return bits == kind.nan
    exponent = {"F16": 5, "BF16": 8, "F8_E5M2": 5, "F8_E4M3": 4}[dtype]
    mantissa = kind.bits - 1 - exponent
    full = bits >> mantissa & ((1 << exponent) - 1) == (1 << exponent) - 1
    return full and (dtype != "F8_E4M3" or bits & ((1 << mantissa) - 1) == (1 << mantissa) - 1)


@pytest.mark.parametrize("make", TESTS)
@pytest.mark.parametrize("dtype", ["F8_E5M2", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"])
def test_every_8_bit_pattern_is_classified(make: Any, dtype: str) -> None:
    for bits in range(256):
        data = bytes([1, bits, 1])
        assert make(dtype)(data)[0] == strange(bits, dtype), hex(bits)


@pytest.mark.parametrize("make", TESTS)
@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_every_16_bit_pattern_is_classified(make: Any, dtype: str) -> None:
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
def test_chunk_boundaries_do_not_change_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: int, place: int
) -> None:
    monkeypatch.setattr(content_scan, "CHUNK", 257)
    values = np.ones(1000, "f4")
    values[place] = np.inf
    data = b"\xff" * start + values.tobytes() + b"\xff" * 9
    (tmp_path / "x").write_bytes(data)
    tensors = [Tensor("bad", "F32", (1000,), start, 4000)]
    spans = [Span("all", 0, len(data), zlib.crc32(data)), Span("part", 5, 900, zlib.crc32(data[5:900]) ^ 1)]
    with Source(tmp_path / "x") as source:
        seen = content_scan.sweep(source, Anatomy("x", tensors=tensors, spans=spans), ("sha256", "xxh3_128"))
        assert [t.name for t in seen.strange] == ["bad"]
        found = nonfinite.count_nonfinite(source, tensors[0])
        assert found is not None and (found.nan, found.inf, found.finite) == (0, 1, 999)
    assert seen.bad_spans == ["part"]
    assert seen.digests["sha256"] == hashlib.sha256(data).hexdigest()
    values[place] = 0
    (tmp_path / "x").write_bytes(b"\xff" * start + values.tobytes() + b"\xff" * 9)
    with Source(tmp_path / "x") as source:
        assert not content_scan.sweep(source, Anatomy("x", tensors=tensors)).strange


def test_tensors_that_share_bytes_are_scanned_once(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(np.zeros(1000, "f4").tobytes())
    many = [Tensor(f"t{i}", "F32", (1000,), 0, 4000) for i in range(5000)]
    with Source(tmp_path / "x") as source:
        seen = content_scan.sweep(source, Anatomy("x", tensors=many))
    assert (seen.scanned, len(seen.zero)) == (1, 5000)


def test_bytes_shared_by_two_types_are_scanned_once_per_type(tmp_path: Path) -> None:
    """A small pickle can refer to one large storage ten thousand times."""
    (tmp_path / "f").write_bytes(bytes(1 << 16))
    tensors = [Tensor(str(i), ("F32", "F16")[i % 2], (1,), 0, 1 << 16) for i in range(1000)]
    with Source(tmp_path / "f") as source:
        seen = content_scan.sweep(source, Anatomy("x", tensors=tensors))
    assert seen.scanned == 2 and len(seen.zero) == 1000


def test_results_do_not_depend_on_optional_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.random.default_rng(0).normal(size=5000).astype("f2").tobytes()
    (tmp_path / "x").write_bytes(data)
    anatomy = Anatomy(
        "x", tensors=[Tensor("t", "F16", (5000,), 0, 10_000)], spans=[Span("s", 0, 10_000, zlib.crc32(data))]
    )
    with Source(tmp_path / "x") as source:
        fast = content_scan.sweep(source, anatomy, ("sha256",))
        for name in ("numpy", "isal", "xxhash"):
            monkeypatch.setitem(sys.modules, name, None)
        plain = content_scan.sweep(source, anatomy, ("sha256", "xxh3_128"))
    assert (plain.digests, plain.bad_spans, plain.strange, plain.zero) == (fast.digests, [], [], [])


def test_a_file_shrinking_during_a_read_raises(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"1" * 1000)
    with Source(tmp_path / "x") as source:
        (tmp_path / "x").write_bytes(b"1" * 10)
        with pytest.raises(Broken):
            content_scan.sweep(source, Anatomy("x"))
        assert source.changed()


# ------------------------------------------------------------------------------------------------- compared with torch


@pytest.mark.parametrize("make", TESTS)
@pytest.mark.parametrize(
    ("dtype", "name"),
    [("F16", "float16"), ("BF16", "bfloat16"), ("F32", "float32"), ("F64", "float64"), ("F8_E5M2", "float8_e5m2"),
     ("F8_E4M3", "float8_e4m3fn"), ("F8_E4M3FNUZ", "float8_e4m3fnuz"), ("F8_E5M2FNUZ", "float8_e5m2fnuz")],
)  # fmt: skip
def test_arbitrary_bytes_are_judged_like_torch(make: Any, dtype: str, name: str) -> None:
    torch = real_torch()
    size, test = DTYPES[dtype].bits // 8, make(dtype)
    special = st.sampled_from([b"\0", b"\xff", b"\x7f", b"\x7c", b"\xfc", b"\x80", b"\xf0", b"\x7e"])

    @given(st.lists(special | st.binary(min_size=1, max_size=1), min_size=size, max_size=24 * size))
    def agree(parts: list[bytes]) -> None:
        data = b"".join(parts[: len(parts) // size * size])
        values = torch.frombuffer(bytearray(data), dtype=getattr(torch, name))
        assert test(data)[0] == (not bool(torch.isfinite(values.to(torch.float64)).all()))

    agree()


@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("name", ["complex64", "complex128"])
@pytest.mark.parametrize("value", [complex(0, 1), complex(np.nan, 0), complex(0, -np.inf), complex(0, 0)])
def test_complex_values_are_judged_like_torch(tmp_path: Path, big: bool, name: str, value: complex) -> None:
    torch = real_torch()
    values = np.zeros(1000, name)
    values[617] = value
    dtype = {"complex64": "C64", "complex128": "C128"}[name]
    (tmp_path / "x").write_bytes(values.astype(values.dtype.newbyteorder(">" if big else "<")).tobytes())
    with Source(tmp_path / "x") as source:
        tensor = Tensor("t", dtype, (1000,), 0, values.nbytes)
        seen = content_scan.sweep(source, Anatomy("x", tensors=[tensor], big_endian=big))
    assert bool(seen.strange) == (not bool(torch.isfinite(torch.from_numpy(values)).all()))
    assert bool(seen.zero) == (value == 0)


# -------------------------------------------------------------------------------------------------- the exact count


@pytest.mark.parametrize(
    ("shape", "stride", "said"),
    [
        ((1 << 40,), (0,), "1 infinite of 1 values"),  # torch.full((1,), inf).expand(1 << 40)
        ((1 << 20, 300), (0, 1), "2 infinite of 300 values"),
        ((1 << 20, 1 << 9), (1, 1), "2 infinite of 1,049,087 values"),  # overlapping windows
        ((100_000,), (10,), "1 infinite of 100,000 values"),
        ((3, 400_000), (1, 3), "2 infinite of 1,200,000 values"),
    ],
)
def test_counting_a_view_never_exceeds_its_bytes(
    tmp_path: Path, shape: tuple[int, ...], stride: tuple[int, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.ones(1_200_000, "f4")
    values[[0, 77]] = np.inf
    values.tofile(tmp_path / "x")
    extent = 4 * (1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)))
    counted: list[int] = []
    count = nonfinite.NonFinite.count
    monkeypatch.setattr(
        nonfinite.NonFinite, "count", lambda self, bits, kind: (counted.append(bits.size), count(self, bits, kind))
    )
    with Source(tmp_path / "x") as source:
        assert str(nonfinite.count_nonfinite(source, Tensor("t", "F32", shape, 0, extent, stride))) == said
    assert sum(counted) <= extent // 4


# ------------------------------------------------------------------------------------------- several threads, one file


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_crcs_of_two_pieces_are_joined(a: bytes, b: bytes) -> None:
    assert checksums.crc32_joined(zlib.crc32(a), zlib.crc32(b), len(b)) == zlib.crc32(a + b)


def test_crcs_of_huge_pieces_are_joined_in_any_order() -> None:
    """Pieces of a terabyte of zeros, built by doubling, must give one CRC in whatever order they are joined."""
    known = {1: zlib.crc32(b"\0")}
    for n in range(40):
        known[2 << n] = checksums.crc32_joined(known[1 << n], known[1 << n], 1 << n)
    assert known[1 << 20] == zlib.crc32(b"\0" * (1 << 20))
    left = checksums.crc32_joined(checksums.crc32_joined(7, known[1 << 40], 1 << 40), known[1 << 33], 1 << 33)
    right = checksums.crc32_joined(checksums.crc32_joined(7, known[1 << 33], 1 << 33), known[1 << 40], 1 << 40)
    assert left == right


@st.composite
def files(draw: st.DrawFn) -> tuple[bytes, list[Tensor], list[Span]]:
    """Draw bytes, tensors of several types at any offset, some overlapping, and spans, some with a wrong CRC."""
    at, tensors, blocks = draw(st.integers(0, 9)), [], []
    data = bytearray(draw(st.sampled_from([b"\0", b"\x11"])) * 3000)
    for i in range(draw(st.integers(0, 6))):
        dtype = draw(st.sampled_from(["F64", "F32", "BF16", "F8_E5M2", "C64", "I32"]))
        size = DTYPES[dtype].bits // 8
        count = draw(st.integers(0, 600 // size))
        tensors.append(Tensor(f"t{i}", dtype, (count,), at, count * size))
        blocks.append((at, at + count * size))
        at += draw(st.sampled_from([count * size, count * size, count * size + 5, size]))
        at = min(at, 2300)
    for where in draw(st.lists(st.integers(0, 2990), max_size=4)):
        data[where : where + 8] = draw(st.sampled_from([b"\xff" * 8, b"\x7f" * 8, b"\0" * 8, b"\0\0\x80\x7f" * 2]))
    spans = [Span(f"s{a}", a, b, zlib.crc32(data[a:b]) ^ draw(st.integers(0, 1))) for a, b in blocks if a < b]
    return bytes(data), tensors, spans


@pytest.mark.slow
@given(made=files(), segment=st.sampled_from([64, 96, 1000]), chunk=st.sampled_from([40, 64, 257]))
def test_threaded_and_single_pass_results_agree(
    made: tuple[bytes, list[Tensor], list[Span]], segment: int, chunk: int
) -> None:
    data, tensors, spans = made
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(content_scan, "SEGMENT", segment)
        (Path(folder) / "x").write_bytes(data)
        counts: list[int] = []
        with Source(Path(folder) / "x") as source:
            anatomy = Anatomy("x", tensors=tensors, spans=spans)
            whole = content_scan.sweep(source, anatomy, ("sha256", "crc32"))
            assert whole.digests == {"sha256": hashlib.sha256(data).hexdigest(), "crc32": f"{zlib.crc32(data):08x}"}
            patch.setattr(content_scan, "CHUNK", chunk)
            assert content_scan.sweep(source, anatomy, ("sha256", "crc32")) == whole
            assert content_scan.sweep(source, anatomy, ("sha256", "crc32"), counts.append, threads=3) == whole
            assert sum(counts) == len(data)
            patch.setattr(content_scan, "_JOIN", 1)
            del whole.digests["sha256"]
            assert content_scan.sweep(source, anatomy, ("crc32",), threads=2) == whole
            whole.digests.clear()
            assert content_scan.sweep(source, anatomy, threads=3) == whole
    by_hand = [t.name for t in tensors if t.dtype != "I32" and t.numel and not finite(data, t)]
    found = {t.name for t in whole.strange}
    assert set(by_hand) <= found  # tensors that share bytes are reported together; the exact count separates them


def finite(data: bytes, t: Tensor) -> bool:
    bits = data[t.start : t.start + t.extent]
    if t.dtype == "BF16":
        bits = b"".join(b"\0\0" + bits[i : i + 2] for i in range(0, len(bits), 2))
    code = {"F64": "f8", "F32": "f4", "BF16": "f4", "C64": "f4", "F8_E5M2": "u1"}[t.dtype]
    values = np.frombuffer(bits, f"<{code}")
    return bool((values & 0x7F < 0x7C).all() if code == "u1" else np.isfinite(values).all())


def test_an_exception_from_progress_ends_the_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content_scan, "SEGMENT", 1 << 16)
    (tmp_path / "x").write_bytes(b"1" * (1 << 20))

    def enough(count: int) -> None:
        raise Doubtful("enough")

    with Source(tmp_path / "x") as source:
        for threads in (1, 2):
            with pytest.raises(Doubtful, match="enough"):
                content_scan.sweep(source, Anatomy("x"), ("sha256",), enough, threads)
