"""In formats without checksums, damage to whole pages is a doubt, and intentional zeros are not."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from gpuwarden.checkpoints.sealing import manifest
from gpuwarden.checkpoints.values import content_scan
from gpuwarden.checkpoints.verify import verify
from gpuwarden.core.evidence import Cause
from gpuwarden.core.models import Level, Report, Verdict
from real_parts import need
from wording import Wording

PAGE = 4096


def seen(report: Report) -> str:
    return "\n".join(report.reasons)


def weights(kind: str = "f4", rows: int = 300, columns: int = 331) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    made = {f"layer{i}.weight": rng.normal(size=(rows, columns)).astype(kind) for i in range(4)}
    made["layer3.bias"] = np.zeros(rows, kind)
    return made


def safetensors(path: Path, arrays: dict[str, Any]) -> None:
    save_file(arrays, path)


def gguf(path: Path, arrays: dict[str, Any]) -> None:
    need("gguf", importlib.util.find_spec("gguf") is not None)
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    for name, array in arrays.items():
        if array.ndim == 2 and array.shape[1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def legacy(path: Path, arrays: dict[str, Any]) -> None:
    need("torch", importlib.util.find_spec("torch") is not None)
    import torch

    state = {k: torch.from_numpy(v) for k, v in arrays.items()}
    torch.save(state, path, _use_new_zipfile_serialization=False)


def npy(path: Path, arrays: dict[str, Any]) -> None:
    np.save(path, np.concatenate([a for a in arrays.values() if a.ndim == 2]))


FORMATS: dict[str, tuple[str, Callable[[Path, dict[str, Any]], None], dict[str, Any]]] = {
    "safetensors": ("m.safetensors", safetensors, {}),
    "half": ("m.safetensors", safetensors, {"kind": "f2"}),
    "gguf": ("m.gguf", gguf, {}),
    "gguf q8_0": ("m.gguf", gguf, {"columns": 352}),
    "legacy": ("m.bin", legacy, {}),
    "npy": ("m.npy", npy, {}),
}


@pytest.fixture(params=sorted(FORMATS))
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    name, write, how = FORMATS[request.param]
    write(tmp_path / name, weights(**how))
    return tmp_path / name


def zero_pages(data: bytearray) -> None:
    at = len(data) * 5 // 8 // PAGE * PAGE
    data[at : at + 3 * PAGE] = bytes(3 * PAGE)


def one_page(data: bytearray) -> None:
    at = len(data) * 5 // 8 // PAGE * PAGE
    data[at : at + PAGE] = bytes(PAGE)


def tail(data: bytearray) -> None:
    at = len(data) * 7 // 8 + 77
    data[at:] = bytes(len(data) - at)


def repeated(data: bytearray) -> None:
    at = len(data) * 5 // 8 // PAGE * PAGE
    data[at : at + 2 * PAGE] = data[at - 8 * PAGE : at - 6 * PAGE]


@pytest.mark.parametrize("damage", [zero_pages, one_page, tail, repeated])
def test_damaged_pages_are_not_proven(path: Path, damage: Callable[[bytearray], None]) -> None:
    whole = path.read_bytes()
    assert verify(path, Level.CONTENT).verdict is Verdict.PROVEN, seen(verify(path, Level.CONTENT))
    data = bytearray(whole)
    damage(data)
    path.write_bytes(data)
    report = verify(path, Level.CONTENT)
    # In some formats, the damaged bytes are invalid and refute the file.
    assert report.verdict is Verdict.REFUTED or report.causes == (Cause.UNSEALED,), seen(report)


def test_a_seal_settles_the_doubt(tmp_path: Path) -> None:
    safetensors(tmp_path / "m.safetensors", weights())
    data = bytearray((tmp_path / "m.safetensors").read_bytes())
    zero_pages(data)
    (tmp_path / "m.safetensors").write_bytes(data)
    manifest.write(tmp_path, manifest.take(tmp_path))
    assert verify(tmp_path, Level.CONTENT).verdict is Verdict.PROVEN


def on_purpose() -> dict[str, dict[str, Any]]:
    rng = np.random.default_rng(2)
    dense = rng.normal(size=(600, 512)).astype("f4")
    rows = dense.copy()
    rows[17:40] = 0  # an embedding's padding tokens, or moments of rows without a gradient
    tail = dense.copy()
    tail[-64:] = 0  # a vocabulary padded at its end
    copies = dense.copy()
    copies[100:140] = copies[3]  # added tokens, all initialized to the mean
    pruned = dense * (rng.random(dense.shape) < 0.01)
    heads = rng.normal(size=(8, 64, 256)).astype("f4")
    heads[3] = 0
    experts = np.stack([dense[:64]] * 4)
    some = {i: rng.integers(0, 600, 40) for i in range(3)}
    moments = np.zeros((600, 48), "f4")
    moments[some[0]] = rng.normal(size=(40, 48))
    return {
        "rows": {"a": dense, "embed_tokens.weight": rows, "z": dense},
        "tail": {"a": dense, "lm_head.weight": tail},
        "copies": {"embed_tokens.weight": copies},
        "pruned": {"w": pruned.astype("f4")},
        "heads": {"w": heads},
        "experts": {"w": experts},
        "moments": {"exp_avg": moments, "exp_avg_sq": moments**2},
        "lora": {
            f"{i}.lora_{k}": dense[:16] if k == "A" else np.zeros((512, 16), "f4") for i in range(3) for k in "AB"
        },
        "mask": {"mask": np.tril(np.ones((1024, 1024), "f4"))},
        "eye": {"w": np.eye(1024, dtype="f4")},
        "positions": {"pe": np.sin(np.arange(2048)[:, None] / 10000 ** (np.arange(256) / 256)).astype("f4")},
        "constant": {"norm": np.ones(8192, "f4"), "w": dense},
        "new": {"w": np.zeros((600, 512), "f4"), "v": dense, "b": np.zeros(5000, "f4")},
    }


@pytest.mark.parametrize("name", sorted(on_purpose()))
def test_intended_zeros_and_copies_are_proven(tmp_path: Path, name: str) -> None:
    for write, file in ((safetensors, "m.safetensors"), (legacy, "m.bin"), (gguf, "m.gguf")):
        write(tmp_path / file, {k: np.array(v) for k, v in on_purpose()[name].items()})
        report = verify(tmp_path / file, Level.CONTENT)
        assert report.verdict is Verdict.PROVEN, seen(report)


@pytest.mark.parametrize("threads", [1, 3])
def test_damaged_pages_are_found_with_any_thread_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, wording: Wording
) -> None:
    monkeypatch.setattr(content_scan, "SEGMENT", 1 << 16)
    monkeypatch.setattr(content_scan, "CHUNK", (1 << 14) + 16)
    path = tmp_path / "m.safetensors"
    safetensors(path, weights())
    data = bytearray(path.read_bytes())
    zero_pages(data)
    path.write_bytes(data)
    report = verify(path, Level.CONTENT, threads=threads)
    assert report.causes == (Cause.UNSEALED,)
    wording(seen(report))
