"""Folders and formats written by the real libraries: no false alarm, and a missing part is noticed."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from gpuwarden.checkpoints.file_model import Limits
from gpuwarden.checkpoints.formats import dcp as our_dcp
from gpuwarden.checkpoints.formats import gguf as our_gguf
from gpuwarden.checkpoints.formats import torch_zip as our_zip
from gpuwarden.checkpoints.plugins import FORMATS
from gpuwarden.checkpoints.safe_file import Source
from gpuwarden.checkpoints.sealing import manifest
from gpuwarden.checkpoints.values.crc32c import crc32c, masked
from gpuwarden.checkpoints.verify import verify
from gpuwarden.core.evidence import Cause
from gpuwarden.core.models import Level, Manifest, Report, Verdict
from real_parts import need
from wording import Wording


def want(*modules: str) -> None:
    for name in modules:
        need(name, importlib.util.find_spec(name) is not None)


def seen(report: Report) -> str:
    found = [*report.problems, *report.doubts]
    for part in (*report.files, *report.checkpoints):
        found += [f"{part.path}: {line}" for line in (*part.problems, *part.doubts)]
    return "\n".join(found)


def change(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


# -------------------------------------------------------------------------------------------------------- adapters


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    arrays = {}
    for layer in range(2):
        for module in ("q_proj", "v_proj"):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            arrays[f"{stem}.lora_A.weight"] = np.ones((4, 32), "f4") * (layer + 1)
            arrays[f"{stem}.lora_B.weight"] = np.ones((16, 4), "f4")
    save_file(arrays, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj", "v_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    return tmp_path


def test_an_intact_adapter_is_proven(adapter: Path, wording: Wording) -> None:
    report = verify(adapter, Level.STRUCTURE)
    assert report.verdict is Verdict.PROVEN, seen(report)
    wording("\n".join(report.proved), 4)


@pytest.mark.parametrize("edit", [{"r": 8}, {"target_modules": ["q_proj", "k_proj"]}])
def test_an_adapter_contradicting_its_config_is_refuted(adapter: Path, edit: dict[str, Any]) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | edit))
    assert verify(adapter, Level.STRUCTURE).verdict is Verdict.REFUTED


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_half_an_adapter_is_refuted(adapter: Path, name: str) -> None:
    (adapter / name).unlink()
    assert verify(adapter, Level.STRUCTURE).verdict is Verdict.REFUTED


# ------------------------------------------------------------------------------------------- distributed checkpoints


@pytest.fixture
def dcp(tmp_path: Path) -> Path:
    want("torch")
    import torch
    import torch.distributed.checkpoint as writer

    state = {"model": {"w": torch.randn(64, 32), "b": torch.randn(32)}, "step": 7, "opt": {"m": torch.randn(64, 32)}}
    writer.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


@pytest.mark.filterwarnings("ignore")
def test_a_distributed_checkpoint_is_proven_until_damaged(dcp: Path) -> None:
    report = verify(dcp, Level.LOAD)
    assert report.verdict is Verdict.PROVEN, seen(report)
    shard = next(dcp.glob("*.distcp"))
    size = shard.stat().st_size
    with Source(shard) as source:
        inside = our_dcp.read(source, Limits()).tensors[0]
    change(shard, inside.start + inside.extent // 2)
    assert verify(dcp, Level.STRUCTURE).verdict is Verdict.PROVEN
    assert verify(dcp, Level.CONTENT).verdict is Verdict.REFUTED
    change(shard, inside.start + inside.extent // 2)
    for damage in (lambda: os.truncate(shard, size - 1), shard.unlink):
        damage()
        assert verify(dcp, Level.STRUCTURE).verdict is Verdict.REFUTED


@pytest.mark.filterwarnings("ignore")
def test_a_distributed_checkpoint_without_metadata_is_reported(dcp: Path, wording: Wording) -> None:
    (dcp / ".metadata").unlink()
    wording(seen(verify(dcp, Level.STRUCTURE)), ".metadata")


# ------------------------------------------------------------------------------------------------------------ onnx


@pytest.fixture
def onnx_file(tmp_path: Path) -> Path:
    want("onnx")
    from onnx import TensorProto, helper, numpy_helper, save

    weight = np.random.default_rng(0).normal(size=(64, 64)).astype("f4")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 64])],
        [numpy_helper.from_array(weight, "w")],
    )
    save(helper.make_model(graph), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def test_a_cut_or_padded_onnx_file_is_refuted(onnx_file: Path, wording: Wording) -> None:
    report = verify(onnx_file, Level.LOAD)
    assert report.verdict is Verdict.PROVEN, seen(report)
    wording(report.files[0].proved[0])
    data = onnx_file.read_bytes()
    for bad in (data[:-1], data[: len(data) // 2], data + b"\0"):
        onnx_file.write_bytes(bad)
        assert verify(onnx_file, Level.STRUCTURE).verdict is Verdict.REFUTED


# ------------------------------------------------------------------------------------------------------------ gguf


def test_the_quantised_type_table_matches_the_library() -> None:
    want("gguf")
    import gguf

    for kind, (name, block, size) in our_gguf.BLOCKS.items():
        theirs = gguf.GGMLQuantizationType(kind)
        assert (theirs.name, *gguf.GGML_QUANT_SIZES[theirs]) == (name, block, size)


def test_gguf_with_more_tokens_than_embeddings_is_reported(tmp_path: Path, wording: Wording) -> None:
    want("gguf")
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(33)])
    writer.add_tensor("token_embd.weight", np.ones((32, 64), "f4"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    wording(seen(verify(tmp_path / "m.gguf", Level.STRUCTURE)), 33, 32)


# -------------------------------------------------------------------------------------------------------- tfevents


def record(body: bytes) -> bytes:
    head = struct.pack("<Q", len(body))
    return head + struct.pack("<I", masked(head)) + body + struct.pack("<I", masked(body))


def test_crc32c_matches_published_values() -> None:
    assert crc32c(b"123456789") == 0xE3069283


def test_event_files_survive_a_cut_but_not_a_changed_byte(tmp_path: Path, wording: Wording) -> None:
    path = tmp_path / "events.out.tfevents.1.host.1.0"
    data = b"".join(record(b"event %d" % i) for i in range(10))
    path.write_bytes(data)
    assert verify(path, Level.LOAD).verdict is Verdict.PROVEN
    path.write_bytes(data[:-3])
    report = verify(path, Level.LOAD)
    assert report.verdict is Verdict.PROVEN
    wording("\n".join(report.files[0].warnings))
    change(path, 40)
    assert verify(path, Level.STRUCTURE).verdict is Verdict.REFUTED


# ----------------------------------------------------------------------------------------- masks, gaps and constants


def test_masks_may_hold_infinity_but_weights_may_not(tmp_path: Path, wording: Wording) -> None:
    mask = np.triu(np.full((64, 64), -np.inf, "f4"), 1)
    weight = np.random.default_rng(0).normal(size=(64, 64)).astype("f4")
    save_file({"mask": mask, "w": weight}, tmp_path / "a.safetensors")
    report = verify(tmp_path / "a.safetensors")
    assert report.verdict is Verdict.PROVEN
    wording("\n".join(report.files[0].warnings), "mask", "2,016", "4,096")
    save_file({"w": np.full((64, 64), np.inf, "f4")}, tmp_path / "b.safetensors")
    wording(seen(verify(tmp_path / "b.safetensors")), "4,096")
    weight[0, 0] = np.inf
    save_file({"mask": mask, "w": weight}, tmp_path / "a.safetensors")
    wording(seen(verify(tmp_path / "a.safetensors")), "(1", "4,096")


@pytest.mark.parametrize("name", ["lm_head.weight", "anything"])
def test_positive_infinity_beside_zeros_is_no_mask(tmp_path: Path, name: str) -> None:
    values = np.zeros((8, 4), "f4")
    values[3, 2] = np.inf
    save_file({name: values}, tmp_path / "a.safetensors")
    assert verify(tmp_path / "a.safetensors").causes == (Cause.NOT_FINITE,)


@pytest.mark.parametrize(("name", "verdict"), [("lm_head.weight", Verdict.REFUTED), ("blocked", Verdict.PROVEN)])
def test_negative_infinity_beside_zeros_is_a_mask_unless_it_is_a_parameter(
    tmp_path: Path, name: str, verdict: Verdict
) -> None:
    values = np.zeros((8, 4), "f4")
    values[3, 2] = -np.inf
    save_file({name: values}, tmp_path / "a.safetensors")
    assert verify(tmp_path / "a.safetensors").verdict is verdict


HOLEY = np.array([1.0, np.nan, 3.0], "f4")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("file", "arrays", "beside", "data"),
    [
        ("targets.npz", {"y": HOLEY}, "", True),
        ("targets.npz", {"y": HOLEY}, "config.json", False),
        ("targets.npz", {"0.weight": HOLEY}, "", False),
        ("targets.npz", {"w1": HOLEY}, "", False),
        ("model-10.npz", {"y": HOLEY}, "", False),
    ],
)
def test_nan_is_a_warning_only_in_data_arrays(
    tmp_path: Path, packed: bool, file: str, arrays: dict[str, Any], beside: str, data: bool
) -> None:
    (np.savez_compressed if packed else np.savez)(tmp_path / file, **arrays)
    if beside:
        (tmp_path / beside).write_text("{}")
    report = verify(tmp_path, Level.CONTENT)
    assert report.causes == (() if data else (Cause.NOT_FINITE,)), seen(report)
    assert len([line for found in report.files for line in found.warnings]) == data


def test_nan_in_a_lone_array_file_is_a_warning(tmp_path: Path) -> None:
    np.save(tmp_path / "scores.npy", HOLEY)
    for path in (tmp_path, tmp_path / "scores.npy"):
        report = verify(path)
        assert report.verdict is Verdict.PROVEN and report.files[0].warnings
    save_file({"w": np.ones(3, "f4")}, tmp_path / "model.safetensors")
    assert verify(tmp_path).causes == (Cause.NOT_FINITE,), "beside a model it may be a part of it"


def test_a_skip_data_file_is_damaged_until_filled(tmp_path: Path, wording: Wording) -> None:
    want("torch")
    import torch

    path = tmp_path / "a.pt"
    with torch.serialization.skip_data():
        torch.save({"w": torch.ones(64, 64), "v": torch.ones(9)}, path)
    report = verify(path)
    assert report.causes == (Cause.DAMAGE,)
    wording("\n".join(report.files[0].problems))
    with Source(path) as source:
        places = our_zip.read(source, Limits()).tensors
    data = bytearray(path.read_bytes())
    for place in places:
        data[place.start : place.start + place.extent] = np.ones(place.numel, "f4").tobytes()
    path.write_bytes(data)
    report = verify(path, Level.LOAD)
    assert report.verdict is Verdict.PROVEN, seen(report)
    assert report.files[0].warnings, "nothing shows that the bytes are those that were written"


def test_garbage_between_view_elements_is_ignored(tmp_path: Path, wording: Wording) -> None:
    want("torch")
    import torch

    base = torch.zeros(64, 64)
    base[:, 1] = float("nan")
    torch.save({"view": base[:, ::2], "tail": base[:, 2:]}, tmp_path / "a.pt")
    assert verify(tmp_path / "a.pt").verdict is Verdict.PROVEN
    torch.save({"view": base[:, 1::2]}, tmp_path / "a.pt")
    wording(seen(verify(tmp_path / "a.pt")), "64 NaN", "2,048")


def test_a_layer_of_zeros_is_a_warning(tmp_path: Path, wording: Wording) -> None:
    save_file({"w": np.zeros((64, 64), "f4")}, tmp_path / "a.safetensors")
    report = verify(tmp_path / "a.safetensors")
    assert report.verdict is Verdict.PROVEN
    wording("\n".join(report.files[0].warnings))


def test_layers_that_are_constant_or_copies_are_warnings(tmp_path: Path, wording: Wording) -> None:
    weight = np.random.default_rng(0).normal(size=(64, 64)).astype("f4")
    arrays = {"a": weight, "b": weight + 1, "c": weight.copy(), "d": np.full((64, 64), 0.5, "f2")}
    save_file(arrays, tmp_path / "a.safetensors")
    warnings = verify(tmp_path / "a.safetensors").files[0].warnings
    wording("\n".join(warnings))


# ----------------------------------------------------------------------------------------------------------- orbax


@pytest.mark.prove
@pytest.mark.filterwarnings("ignore")
def test_damaged_orbax_files_are_refuted_with_a_manifest(tmp_path: Path) -> None:
    want("orbax")
    import orbax.checkpoint as ocp

    state = {"w": np.random.default_rng(0).normal(size=(256, 256)).astype("f4"), "step": 7}
    ocp.PyTreeCheckpointer().save(tmp_path / "out" / "10", state)
    listing = Manifest.model_validate(manifest.take(tmp_path / "out"))
    report = verify(tmp_path / "out", Level.CONTENT, manifest=listing)
    assert (report.verdict, report.step) == (Verdict.PROVEN, 10), seen(report)
    files = sorted(p for p in tmp_path.rglob("*") if p.is_file() and "json" not in p.name and p.stat().st_size > 64)
    for path in files:
        change(path, path.stat().st_size // 2)
        assert verify(tmp_path / "out", Level.CONTENT, manifest=listing).verdict is Verdict.REFUTED, path
        change(path, path.stat().st_size // 2)
    assert verify(tmp_path / "out", Level.CONTENT).verdict is Verdict.UNKNOWN
    for path in [p for p in files if p.suffix == ".ocdbt"]:
        data = path.read_bytes()
        path.write_bytes(data[:-1])
        assert verify(tmp_path / "out", Level.STRUCTURE).verdict is Verdict.REFUTED, path
        path.write_bytes(data)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("database", [False, True])
def test_orbax_without_array_data_is_refuted(tmp_path: Path, database: bool) -> None:
    want("orbax")
    import orbax.checkpoint as ocp

    state = {"w": np.ones((4, 4), "f4"), "inner": [np.ones(2), {"step": 7}], "none": None, "name": "x"}
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=database)).save(tmp_path / "10", state)
    healthy = Verdict.PROVEN if database else Verdict.UNKNOWN  # chunks outside a database can't be read
    assert verify(tmp_path, Level.STRUCTURE).verdict is healthy
    for chunk in [tmp_path / "10/d"] if database else [tmp_path / "10/w/0.0", tmp_path / "10/inner.0"]:
        chunk.rename(tmp_path.parent / "aside")
        assert verify(tmp_path, Level.STRUCTURE).verdict is Verdict.REFUTED, chunk
        (tmp_path.parent / "aside").rename(chunk)
    if database:
        (tmp_path / "10/manifest.ocdbt").unlink()
        assert verify(tmp_path, Level.STRUCTURE).verdict is Verdict.REFUTED


@pytest.mark.parametrize("tree", [None, 5, [1], {}, {"a": 1}, {"a": {"value_metadata": [], "key_metadata": [1]}}])
def test_orbax_metadata_without_an_array_proves_nothing(tmp_path: Path, tree: object) -> None:
    (tmp_path / "10").mkdir()
    (tmp_path / "10/_CHECKPOINT_METADATA").write_text(json.dumps({"commit_timestamp_nsecs": 1}))
    (tmp_path / "10/_METADATA").write_text(json.dumps({"use_ocdbt": False, "tree_metadata": tree}))
    report = verify(tmp_path, Level.STRUCTURE)
    assert report.verdict is (Verdict.UNKNOWN if isinstance(tree, dict) and tree else Verdict.REFUTED)


# ------------------------------------------------------------------------------------------------------- tokenizers


def test_a_sentencepiece_tokenizer_is_proven_until_damaged(tmp_path: Path, wording: Wording) -> None:
    pieces = b"".join(b"\n" + bytes([len(p) + 2]) + b"\n" + bytes([len(p)]) + p for p in (b"<unk>", b"a", b"bc"))
    path = tmp_path / "tokenizer.model"
    path.write_bytes(pieces)
    report = verify(path, Level.LOAD)
    assert report.verdict is Verdict.PROVEN
    wording(report.files[0].proved[0], 3)
    for bad in (pieces[:-1], pieces + b"\n\x09", b"\n\3\n\1\xff"):
        path.write_bytes(bad)
        assert verify(path, Level.STRUCTURE).verdict is Verdict.REFUTED


def test_formats_never_claim_the_same_name() -> None:
    heads = (b"", b"PK\3\4", b"{}", b"\x80\x02", b"GGUF")
    names = ("model.safetensors", "a.pt", "a.bin", "a.json", "a.jsonl", "a.npz", "a.npy", "a.gguf", "a.onnx", "a.txt",
             "tokenizer.model", ".metadata", "__0_0.distcp", "events.out.tfevents.1", "manifest.ocdbt", "process_0",
             "a.model", "a.xyz", "d" * 32)  # fmt: skip
    for name in names:
        for head in heads:
            claiming = [p.NAME for _, p in FORMATS.usable() if p.claims(name, head)]
            assert len(claiming) <= 1, (name, head, claiming)
