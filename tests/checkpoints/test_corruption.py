"""The corruption table: damage inside a tensor is caught at the level that promises it, in every format."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuwarden.checkpoints.examine import reader
from gpuwarden.checkpoints.file_model import Limits, Tensor
from gpuwarden.checkpoints.safe_file import Source
from gpuwarden.checkpoints.sealing import manifest
from gpuwarden.checkpoints.verify import verify
from gpuwarden.core.evidence import Cause
from gpuwarden.core.models import Level, Manifest, Report, Verdict
from real_parts import need
from wording import Wording

SHAPE = (128, 256)


def weights(bad: bool = False) -> dict[str, Any]:
    rng = np.random.default_rng(7)
    made = {f"layer{i}.weight": rng.normal(size=SHAPE).astype("f4") for i in range(3)}
    if bad:
        made["layer1.weight"][3, 5] = np.nan
    return made


def _torch(legacy: bool) -> Callable[[Path, dict[str, Any]], None]:
    def write(path: Path, arrays: dict[str, Any]) -> None:
        need("torch", importlib.util.find_spec("torch") is not None)
        import torch

        state = {k: torch.from_numpy(v) for k, v in arrays.items()}
        torch.save({"model": state, "step": 3}, path, _use_new_zipfile_serialization=not legacy)

    return write


def _safetensors(path: Path, arrays: dict[str, Any]) -> None:
    from safetensors.numpy import save_file

    save_file(arrays, path, metadata={"format": "pt"})


def _npz(path: Path, arrays: dict[str, Any]) -> None:
    np.savez(path, **arrays)


def _packed(path: Path, arrays: dict[str, Any]) -> None:
    np.savez_compressed(path, **arrays)


def _npy(path: Path, arrays: dict[str, Any]) -> None:
    np.save(path, arrays["layer1.weight"])


def _gguf(path: Path, arrays: dict[str, Any]) -> None:
    need("gguf", importlib.util.find_spec("gguf") is not None)
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(5000)])
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _dcp(path: Path, arrays: dict[str, Any]) -> None:
    need("torch", importlib.util.find_spec("torch") is not None)
    import warnings

    import torch
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({k: torch.from_numpy(v) for k, v in arrays.items()}, checkpoint_id=path.parent, no_dist=True)


WRITERS: dict[str, tuple[str, Callable[[Path, dict[str, Any]], None]]] = {
    "safetensors": ("model.safetensors", _safetensors),
    "torch zip": ("model.pt", _torch(False)),
    "torch legacy": ("model.bin", _torch(True)),
    "npz": ("model.npz", _npz),
    "npz compressed": ("model.npz", _packed),
    "npy": ("model.npy", _npy),
    "gguf": ("model.gguf", _gguf),
    "dcp": ("__0_0.distcp", _dcp),
}
OWN_CRC = {"dcp", "torch zip", "npz", "npz compressed"}


@pytest.fixture(params=sorted(WRITERS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def intact(kind: str, tmp_path: Path) -> Path:
    name, write = WRITERS[kind]
    (tmp_path / "ckpt").mkdir()
    write(tmp_path / "ckpt" / name, weights())
    return tmp_path / "ckpt" / name


def tensor(path: Path) -> Tensor:
    """Locate the middle tensor with gpuwarden's own reader."""
    with Source(path) as source:
        plugin = reader(path.name, source.head())
        assert plugin is not None
        found = plugin.read(source, Limits())
    return next((t for t in found.tensors if "layer1" in t.name), found.tensors[0])


def inside(path: Path) -> tuple[int, int]:
    """Return the offset and length of a tensor's data; if it is compressed, use a range in the middle of the file."""
    t = tensor(path)
    return (t.start, t.extent) if t.start >= 0 else (path.stat().st_size // 2, 4096)


def change(path: Path, edit: Callable[[bytearray], object]) -> None:
    data = bytearray(path.read_bytes())
    edit(data)
    path.write_bytes(data)


def flip(path: Path, bit: int) -> None:
    start, length = inside(path)
    at = start + length // 2 // 4 * 4 + bit // 8
    change(path, lambda d: d.__setitem__(at, d[at] ^ (1 << bit % 8)))


def zero(path: Path) -> None:
    start, length = inside(path)
    at = start + length // 4
    size = min(4096, length // 2)
    assert any(path.read_bytes()[at : at + size])
    change(path, lambda d: d.__setitem__(slice(at, at + size), bytes(size)))


def seen(report: Report) -> str:
    return "\n".join([line for f in report.files for line in (*f.problems, *f.doubts)] + [*report.problems])


@pytest.mark.parametrize("level", list(Level)[:2])
def test_an_intact_file_is_proven_without_warnings(intact: Path, kind: str, level: Level) -> None:
    report = verify(intact, level)
    assert report.verdict is Verdict.PROVEN, seen(report)
    assert not report.files[0].warnings


@pytest.mark.parametrize("bit", [0, 22, 30])
def test_a_flipped_bit_is_refuted_with_a_manifest(intact: Path, kind: str, bit: int) -> None:
    listing = Manifest.model_validate(manifest.take(intact.parent))
    flip(intact, bit)
    assert kind == "npz compressed" or verify(intact, Level.STRUCTURE).verdict is Verdict.PROVEN
    assert kind not in OWN_CRC or verify(intact, Level.CONTENT).verdict is Verdict.REFUTED
    assert verify(intact.parent, Level.CONTENT, manifest=listing).verdict is Verdict.REFUTED


def test_a_zeroed_page_is_refuted_with_a_manifest(intact: Path, kind: str) -> None:
    listing = Manifest.model_validate(manifest.take(intact.parent))
    zero(intact)
    assert kind not in OWN_CRC or verify(intact, Level.CONTENT).verdict is Verdict.REFUTED
    assert verify(intact.parent, Level.CONTENT, manifest=listing).verdict is Verdict.REFUTED


@pytest.mark.parametrize("cut", ["half", "last byte"])
def test_a_truncated_file_is_refuted(intact: Path, kind: str, cut: str) -> None:
    size = intact.stat().st_size
    os.truncate(intact, size // 2 if cut == "half" else size - 1)
    assert verify(intact, Level.STRUCTURE).verdict is Verdict.REFUTED


@pytest.mark.parametrize("count", [1, 4096])
def test_appended_zeros_are_refuted(intact: Path, kind: str, count: int) -> None:
    with intact.open("ab") as out:
        out.write(b"\0" * count)
    assert verify(intact, Level.STRUCTURE).verdict is Verdict.REFUTED


def test_saved_nan_values_are_refuted(tmp_path: Path, kind: str, wording: Wording) -> None:
    name, write = WRITERS[kind]
    write(tmp_path / name, weights(bad=True))
    assert verify(tmp_path / name, Level.STRUCTURE).verdict is Verdict.PROVEN
    report = verify(tmp_path / name, Level.CONTENT)
    assert report.verdict is Verdict.REFUTED
    assert report.causes == (Cause.NOT_FINITE,)
    wording(seen(report), *(["32,768"] if kind != "npz compressed" else []))


def test_empty_files_and_lfs_pointers_are_refuted(intact: Path, kind: str) -> None:
    intact.write_bytes(b"")
    assert verify(intact, Level.STRUCTURE).verdict is Verdict.REFUTED
    intact.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 5\n")
    assert verify(intact, Level.STRUCTURE).verdict is Verdict.REFUTED


@pytest.mark.skipif(not hasattr(os, "SEEK_HOLE"), reason="this system can't tell holes")
def test_a_hole_is_a_warning(intact: Path, kind: str, wording: Wording) -> None:
    if kind == "npz compressed":
        pytest.skip("too small for a hole")
    start, length = inside(intact)
    data = intact.read_bytes()
    low, high = -(-start // 4096) * 4096, (start + length) // 4096 * 4096
    intact.unlink()
    with intact.open("wb") as out:
        out.write(data[:low])
        out.seek(high)
        out.write(data[high:])
    report = verify(intact, Level.STRUCTURE)
    if intact.stat().st_blocks * 512 < len(data):  # only if the file system supports sparse files
        wording("\n".join(report.files[0].warnings))


@pytest.mark.slow
def test_safetensors_and_npz_files_load_in_a_subprocess(tmp_path: Path, wording: Wording) -> None:
    for kind in ("safetensors", "npz", "npz compressed"):
        name, write = WRITERS[kind]
        write(tmp_path / f"{kind.replace(' ', '-')}-{name}", weights())
    report = verify(tmp_path, Level.LOAD)
    assert report.verdict is Verdict.PROVEN, seen(report)
    for file in report.files:
        wording(file.proved[-1], "98,304")


# ------------------------------------------------------------------------------------------------------ in shards


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    arrays, table = weights(), {}
    for i, (name, array) in enumerate(sorted(arrays.items())):
        file = f"model-{i + 1:05}-of-00003.safetensors"
        _safetensors(tmp_path / file, {name: array})
        table[name] = file
    total = sum(a.nbytes for a in arrays.values())
    index = {"metadata": {"total_size": total}, "weight_map": table}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


BREAKS: dict[str, Callable[[Path], object]] = {
    "missing shard": lambda p: (p / "model-00002-of-00003.safetensors").unlink(),
    "empty shard": lambda p: (p / "model-00002-of-00003.safetensors").write_bytes(b""),
    "cut shard": lambda p: os.truncate(p / "model-00002-of-00003.safetensors", 5000),
    "index gone": lambda p: (p / "model.safetensors.index.json").unlink(),
    "unknown tensor": lambda p: edit(
        p, lambda i: i["weight_map"].update({"ghost": "model-00001-of-00003.safetensors"})
    ),
    "tensor left out": lambda p: edit(p, lambda i: i["weight_map"].pop("layer1.weight")),
    "wrong shard": lambda p: edit(
        p, lambda i: i["weight_map"].update({"layer1.weight": "model-00001-of-00003.safetensors"})
    ),
    "wrong total": lambda p: edit(p, lambda i: i["metadata"].update({"total_size": 7})),
    "temporary file": lambda p: (p / "model.safetensors.tmp").write_bytes(b"x"),
    "path outside": lambda p: edit(p, lambda i: i["weight_map"].update({"layer1.weight": "../../etc/passwd"})),
}


def test_intact_shards_are_proven(shards: Path, wording: Wording) -> None:
    report = verify(shards, Level.CONTENT)
    assert report.verdict is Verdict.PROVEN, seen(report)
    wording("\n".join(report.proved))


@pytest.mark.parametrize("name", sorted(BREAKS))
def test_mismatched_shards_are_not_proven(shards: Path, name: str, wording: Wording) -> None:
    BREAKS[name](shards)
    report = verify(shards, Level.STRUCTURE)
    assert report.verdict is (Verdict.UNKNOWN if name == "temporary file" else Verdict.REFUTED)
    wording(seen(report))
