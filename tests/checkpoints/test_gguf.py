"""GGUF files written by the `gguf` library: split models, scales of quantized blocks, and damage in both."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuwarden.checkpoints.file_model import BLOCK_SCALES
from gpuwarden.checkpoints.values import checksums
from gpuwarden.checkpoints.verify import verify
from gpuwarden.core.evidence import Cause
from gpuwarden.core.models import Level, Report, Verdict
from real_parts import need
from wording import Wording


@pytest.fixture(scope="module")
def gguf() -> Any:
    need("gguf", importlib.util.find_spec("gguf") is not None)
    import gguf

    return gguf


def seen(report: Report) -> str:
    return "\n".join(report.reasons)


def write(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def parts(gguf: Any, tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    (tmp_path / "model").mkdir()
    writer = gguf.GGUFWriter(tmp_path / "model" / "tiny.gguf", "llama", split_max_tensors=2)
    for i in range(5):
        writer.add_tensor(f"blk.{i}.ffn_up.weight", rng.normal(size=(64, 64)).astype("f4"))
    write(writer)
    return tmp_path / "model"


@pytest.mark.parametrize("level", list(Level)[:3])
def test_a_split_model_is_proven_as_one_model(parts: Path, level: Level, wording: Wording) -> None:
    assert len(list(parts.iterdir())) == 3
    report = verify(parts, level)
    assert report.verdict is Verdict.PROVEN, seen(report)
    wording("\n".join(report.proved), 3, "tiny", 5)


@pytest.mark.slow
def test_each_part_alone_is_proven(parts: Path) -> None:
    for part in parts.iterdir():
        assert verify(part, Level.LOAD).verdict is Verdict.PROVEN


def test_a_split_model_with_one_part_is_complete(gguf: Any, tmp_path: Path) -> None:
    reports = []
    for name, count in (("whole.gguf", None), ("only.gguf", 1)):
        writer = gguf.GGUFWriter(tmp_path / name, "llama")
        if count is not None:
            writer.add_uint16("split.no", 0)
            writer.add_uint16("split.count", count)
        writer.add_tensor("blk.0.ffn_up.weight", np.random.default_rng(0).normal(size=(64, 64)).astype("f4"))
        write(writer)
        reports.append(verify(tmp_path / name, Level.LOAD))
    whole, only = reports
    assert only.verdict is Verdict.PROVEN, seen(only)
    assert [len(file.unproved) for file in only.files] == [len(file.unproved) for file in whole.files]


def test_a_missing_part_refutes_the_set(parts: Path, wording: Wording) -> None:
    (parts / "tiny-00002-of-00003.gguf").unlink()
    wording(seen(verify(parts, Level.STRUCTURE)), "tiny", "00002")


def test_a_part_under_another_parts_name_is_refuted(parts: Path, wording: Wording) -> None:
    shutil.copy(parts / "tiny-00003-of-00003.gguf", parts / "tiny-00002-of-00003.gguf")
    report = verify(parts, Level.STRUCTURE)
    assert report.verdict is Verdict.REFUTED
    wording(seen(report), "tiny")


def quantised(gguf: Any, path: Path, label: str) -> tuple[bytes, int]:
    """Write one tensor of a type with random bytes from 1 to 99; return its data and the data's offset in the file."""
    kind = gguf.GGMLQuantizationType[label]
    block, each = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(1)
    raw = rng.integers(1, 100, size=(16, 256 // block * each), dtype=np.uint8)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.ffn_up.weight", raw, raw_shape=(16, 256 // block * each), raw_dtype=kind)
    write(writer)
    data = raw.tobytes()
    return data, path.read_bytes().index(data)


NOT_FINITE = {"F16": b"\x00\x7c", "F32": b"\x00\x00\x80\xff", "F8_E8M0": b"\xff", "F8_E4M3": b"\x7f"}


@pytest.mark.parametrize("numpy", [True, False])
@pytest.mark.parametrize("label", sorted(BLOCK_SCALES))
def test_a_non_finite_block_scale_is_reported(
    gguf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, label: str, numpy: bool
) -> None:
    if not numpy:
        monkeypatch.setattr(checksums, "numpy_or_none", lambda: None)
    path = tmp_path / "model.gguf"
    data, start = quantised(gguf, path, label)
    report = verify(path, Level.CONTENT)
    assert report.verdict is Verdict.PROVEN, seen(report)
    each, kind, offsets = BLOCK_SCALES[label]
    raw = bytearray(path.read_bytes())
    at = start + len(data) // each // 2 * each + offsets[-1]
    raw[at : at + len(NOT_FINITE[kind])] = NOT_FINITE[kind]
    path.write_bytes(raw)
    report = verify(path, Level.CONTENT)
    assert report.causes == (Cause.NOT_FINITE,) and "blk.0.ffn_up.weight" in seen(report)


def test_the_block_table_matches_the_library(gguf: Any) -> None:
    from gpuwarden.checkpoints.formats.gguf import BLOCKS

    theirs = {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {kind: (block, each) for kind, (_, block, each) in BLOCKS.items()} == theirs
    for name, _, each in BLOCKS.values():
        assert name not in BLOCK_SCALES or BLOCK_SCALES[name][0] == each
