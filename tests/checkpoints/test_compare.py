"""Comparison with an earlier checkpoint, an adapter's base model, or a GGUF file's source."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from gpuwarden.checkpoints.verify import verify
from gpuwarden.core.models import Level, Verdict
from real_parts import need
from wording import Wording


def checkpoint(root: Path, step: int, **tensors: Any) -> Path:
    folder = root / f"checkpoint-{step}"
    folder.mkdir()
    made = {"w": np.full((8, 8), step, "f4"), "frozen": np.ones(8, "f4"), **tensors}
    save_file({k: v for k, v in made.items() if v is not None}, folder / "model.safetensors")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return folder


def test_changed_weights_of_a_later_step_are_proven(tmp_path: Path, wording: Wording) -> None:
    old, new = checkpoint(tmp_path, 10), checkpoint(tmp_path, 20)
    report = verify(new, Level.STRUCTURE, against=old)
    assert report.verdict is Verdict.PROVEN, report
    wording("\n".join((*report.proved, *report.warnings)), 10, 20, "frozen")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"w": np.full((8, 8), 10, "f4")}, id="the same"),
        pytest.param({"w": np.ones((8, 4), "f4")}, id="another shape"),
        pytest.param({"w": np.ones((8, 8), "f2")}, id="another type"),
        pytest.param({"w": None}, id="gone"),
        pytest.param({"new": np.ones(3, "f4")}, id="new"),
    ],
)
def test_weights_that_cannot_be_a_later_step_are_refuted(
    tmp_path: Path, change: dict[str, Any], wording: Wording
) -> None:
    report = verify(checkpoint(tmp_path, 20, **change), Level.STRUCTURE, against=checkpoint(tmp_path, 10))
    assert report.verdict is Verdict.REFUTED
    wording("\n".join(report.problems))


def test_a_step_before_the_compared_step_is_a_problem(tmp_path: Path, wording: Wording) -> None:
    old, new = checkpoint(tmp_path, 10), checkpoint(tmp_path, 20)
    wording("\n".join(verify(old, against=new).problems), 10, 20)


@pytest.mark.parametrize(("rows", "verdict"), [(16, Verdict.PROVEN), (12, Verdict.REFUTED)])
def test_an_adapter_must_fit_its_base(tmp_path: Path, rows: int, verdict: Verdict) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    adapter.mkdir()
    save_file({"model.layers.0.q_proj.weight": np.ones((rows, 32), "f4")}, base / "model.safetensors")
    stem = "base_model.model.model.layers.0.q_proj"
    pair = {f"{stem}.lora_A.weight": np.ones((4, 32), "f4"), f"{stem}.lora_B.weight": np.ones((16, 4), "f4")}
    save_file(pair, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    assert verify(adapter, Level.STRUCTURE, against=base).verdict is verdict


@pytest.mark.parametrize("part", ["A", "B"])
def test_an_adapter_with_a_scalar_matrix_is_refuted(tmp_path: Path, part: str, wording: Wording) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    adapter.mkdir()
    save_file({"model.layers.0.q_proj.weight": np.ones((16, 32), "f4")}, base / "model.safetensors")
    stem = "base_model.model.model.layers.0.q_proj"
    pair = {f"{stem}.lora_A.weight": np.ones((4, 32), "f4"), f"{stem}.lora_B.weight": np.ones((16, 4), "f4")}
    pair[f"{stem}.lora_{part}.weight"] = np.array(1, "f4")
    save_file(pair, adapter / "adapter_model.safetensors")
    report = verify(adapter, Level.STRUCTURE, against=base)
    assert report.verdict is Verdict.REFUTED and not report.doubts
    wording("\n".join(line for line in report.problems if "base" in line), "base")


@pytest.mark.parametrize(("layers", "verdict"), [(1, Verdict.PROVEN), (2, Verdict.REFUTED)])
def test_a_conversion_must_match_its_source_config(tmp_path: Path, layers: int, verdict: Verdict) -> None:
    need("gguf", importlib.util.find_spec("gguf") is not None)
    import gguf

    source = tmp_path / "source"
    source.mkdir()
    save_file({"embed": np.ones((32, 64), "f4"), "norm": np.ones(64, "f4")}, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"num_hidden_layers": layers, "hidden_size": 64, "vocab_size": 32}))
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(64)
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(32)])
    writer.add_tensor("token_embd.weight", np.ones((32, 64), "f4"))
    writer.add_tensor("output_norm.weight", np.ones(64, "f4"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    report = verify(tmp_path / "m.gguf", Level.STRUCTURE, against=source)
    assert report.verdict is verdict, report
