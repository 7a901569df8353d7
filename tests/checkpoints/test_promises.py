"""If one tensor or its values are removed from a file that a real library wrote, the rest is never proven."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from counting import lines_run
from gpuwarden.checkpoints.build import build
from gpuwarden.checkpoints.examine import examine
from gpuwarden.checkpoints.findings import ExamineOptions, Findings
from gpuwarden.checkpoints.layouts import adapter
from gpuwarden.checkpoints.verify import report, verify
from gpuwarden.core.evidence import Cause
from gpuwarden.core.models import Level, Verdict
from real_parts import need

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TARGETS = ["q_proj", "v_proj"]
LORA: dict[str, Any] = {"r": 4, "target_modules": TARGETS}
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", LORA),
    "dora": ("LoraConfig", {**LORA, "use_dora": True}),
    "all_linear": ("LoraConfig", {"r": 4, "target_modules": "all-linear"}),
    "excluded": ("LoraConfig", {"r": 4, "target_modules": "all-linear", "exclude_modules": ["down_proj"]}),
    "pattern": ("LoraConfig", {"r": 4, "target_modules": r".*self_attn\.(q|v)_proj"}),
    "layers": ("LoraConfig", {**LORA, "layers_to_transform": [1, 2]}),
    "ranks": ("LoraConfig", {**LORA, "rank_pattern": {"layers.0.self_attn.q_proj": 8}, "alpha_pattern": {"v_proj": 3}}),
    "rank_patterns": ("LoraConfig", {**LORA, "rank_pattern": {r"^model\.layers\.1\..*v_proj": 2}}),
    "saved": ("LoraConfig", {**LORA, "modules_to_save": ["embed_tokens", "lm_head"]}),
    "tokens": ("LoraConfig", {**LORA, "trainable_token_indices": [1, 2, 3]}),
    "named_tokens": ("LoraConfig", {**LORA, "trainable_token_indices": {"embed_tokens": [1, 2]}}),
    "biases": ("LoraConfig", {**LORA, "bias": "all"}),
    "lora_bias": ("LoraConfig", {**LORA, "lora_bias": True}),
    "parameters": ("LoraConfig", {**LORA, "target_parameters": ["mlp.down_proj.weight"]}),
    "adalora": ("AdaLoraConfig", {"init_r": 6, "target_r": 4, "total_step": 100, "target_modules": TARGETS}),
    "ia3": ("IA3Config", {}),
    "loha": ("LoHaConfig", LORA),
    "lokr": ("LoKrConfig", LORA),
    "oft": ("OFTConfig", {"r": 0, "oft_block_size": 4, "target_modules": TARGETS}),
    "vera": ("VeraConfig", {"r": 4, "target_modules": ["q_proj"]}),
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 4}),
    "prefix": ("PrefixTuningConfig", {"num_virtual_tokens": 4}),
    "only_tokens": ("TrainableTokensConfig", {"token_indices": [1, 2]}),
}
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2": ("Qwen2Config", "AutoModelForCausalLM", {**SIZES, "tie_word_embeddings": False}),
    "tied": ("Qwen2Config", "AutoModelForCausalLM", {**SIZES, "num_hidden_layers": 1, "tie_word_embeddings": True}),
    "mixtral": ("MixtralConfig", "AutoModelForCausalLM", {**SIZES, "num_hidden_layers": 2, "num_local_experts": 2}),
    "bert": ("BertConfig", "AutoModelForSequenceClassification", {**SIZES, "num_hidden_layers": 1}),
    "t5": ("T5Config", "AutoModelForSeq2SeqLM", {"vocab_size": 64, "d_model": 32, "d_ff": 64, "num_layers": 1,
                                                 "num_heads": 4, "d_kv": 8}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def real_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "transformers", "peft"):
        need(name, importlib.util.find_spec(name) is not None)
    # Patch the constant: if the variable were set, a library imported meanwhile would keep it for later tests.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def lessened(arrays: Mapping[str, np.ndarray]) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Yield the arrays with each tensor dropped, and with each emptied."""
    for name, array in arrays.items():
        yield f"{name} dropped", {n: a for n, a in arrays.items() if n != name}
        yield f"{name} emptied", {**arrays, name: array.reshape(-1)[:0]}


def model(kind: str) -> Any:
    import transformers

    config, auto, sizes = MODELS[kind]
    return getattr(transformers, auto).from_config(getattr(transformers, config)(**sizes))


@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_adapter_without_one_of_its_tensors_is_not_proven(tmp_path: Path, kind: str) -> None:
    import peft

    config, settings = ADAPTERS[kind]
    made = peft.get_peft_model(model("qwen2"), getattr(peft, config)(task_type="CAUSAL_LM", **settings))
    made.save_pretrained(tmp_path)
    assert verify(tmp_path, Level.STRUCTURE).verdict is Verdict.PROVEN
    weights = tmp_path / "adapter_model.safetensors"
    verdicts = {}
    for change, arrays in lessened(load_file(weights)):
        save_file(arrays, weights)
        verdicts[change] = verify(tmp_path, Level.STRUCTURE).verdict
    assert Verdict.PROVEN not in verdicts.values(), verdicts
    assert {v for change, v in verdicts.items() if change.endswith("emptied")} == {Verdict.REFUTED}


def test_a_model_without_one_of_its_tensors_is_not_proven(tmp_path: Path) -> None:
    """One process builds the architectures for all variants."""
    found: dict[str, Findings] = {}
    for kind in MODELS:
        model(kind).save_pretrained(tmp_path / kind)
        arrays = load_file(tmp_path / kind / "model.safetensors")
        for number, (change, fewer) in enumerate([("whole", arrays), *lessened(arrays)]):
            folder = tmp_path / f"{kind}{number}"
            shutil.copytree(tmp_path / kind, folder)
            save_file(fewer, folder / "model.safetensors", {"format": "pt"})
            found[f"{kind} {change}"] = examine(folder, ExamineOptions())
    build(list(found.values()))
    proven = [change for change, one in found.items() if report(one, Level.LOAD, "").verdict is Verdict.PROVEN]
    assert proven == [f"{kind} whole" for kind in MODELS]


def test_empty_optimizer_moments_are_a_contradiction(tmp_path: Path) -> None:
    import torch

    layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    optimizer = torch.optim.AdamW(layers.parameters())
    layers(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    torch.save(state, tmp_path / "optimizer.pt")
    assert verify(tmp_path, Level.CONTENT).verdict is Verdict.PROVEN
    for key in ("exp_avg", "exp_avg_sq"):
        kept = state["state"][2][key]
        state["state"][2][key] = torch.empty(0)
        torch.save(state, tmp_path / "optimizer.pt")
        assert Cause.CONTRADICTION in verify(tmp_path, Level.CONTENT).causes
        state["state"][2][key] = kept


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_weights_without_a_tensor_are_refuted(tmp_path: Path, name: str) -> None:
    import torch

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    if name.endswith(".bin"):
        torch.save({}, tmp_path / name)
    else:
        save_file({}, tmp_path / name)
    assert verify(tmp_path, Level.STRUCTURE).verdict is Verdict.REFUTED


def test_a_state_file_without_weights_is_not_proven(tmp_path: Path) -> None:
    import torch

    weight, optimizer = torch.ones(2, 2), {"state": {0: {"exp_avg": torch.ones(2)}}}
    states: dict[str, tuple[Any, Verdict]] = {
        "whole": ({"model": {"a.weight": weight}, "optimizer": optimizer}, Verdict.PROVEN),
        "no model": ({"model": {}, "optimizer": optimizer}, Verdict.REFUTED),
        "a config of that name": ({"model": {}, "state_dict": {"a.weight": weight}}, Verdict.PROVEN),
        "only settings": ({"params": {}, "epoch": 1}, Verdict.UNKNOWN),
        "offloaded": ({"a.weight": weight, "b.weight": torch.empty(2, 2, device="meta")}, Verdict.UNKNOWN),
        "class token": ({"cls_token": torch.empty(0), "a.weight": weight}, Verdict.UNKNOWN),
        "odd names": ({"x": torch.empty(0), "y": torch.empty(0)}, Verdict.UNKNOWN),
        "nothing": ({}, Verdict.UNKNOWN),
    }
    for name, (state, _) in states.items():
        (tmp_path / name).mkdir()
        torch.save(state, tmp_path / name / "model.pt")
    found = {name: verify(tmp_path / name, Level.STRUCTURE).verdict for name in states}
    assert found == {name: verdict for name, (_, verdict) in states.items()}


def test_deepspeed_placeholders_are_no_contradiction(tmp_path: Path) -> None:
    import torch

    states = {"module": {f"layers.{n}.weight": torch.empty(0) for n in range(3)}}
    torch.save(states, tmp_path / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    assert Cause.CONTRADICTION not in verify(tmp_path, Level.STRUCTURE).causes


HEADS = {**SIZES, "num_hidden_layers": 8}
EXPERTS = {"num_experts_per_tok": 1, "moe_intermediate_size": 16}
HYBRIDS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "Lfm2Config": ({**HEADS, "full_attn_idxs": [2, 5]}, ["q_proj", "w1"]),
    "JambaConfig": ({**HEADS, "num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 4,
                     "attn_layer_offset": 2, "mamba_d_state": 4, "mamba_dt_rank": 4},
                    ["q_proj", "in_proj", "gate_proj"]),
    "Qwen3NextConfig": ({**HEADS, **EXPERTS, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
                         "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 2,
                         "shared_expert_intermediate_size": 16}, ["q_proj", "in_proj_qkvz"]),
    "DeepseekV3Config": ({**HEADS, **EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 2, "n_group": 1,
                          "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
                          "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 4},
                         ["q_b_proj", "gate_proj", "up_proj", "down_proj"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", HYBRIDS)
def test_an_adapter_of_a_mixed_layer_model_is_proven(tmp_path: Path, kind: str) -> None:
    """Some layers have no attention, or no experts."""
    import peft
    import transformers

    sizes, targets = HYBRIDS[kind]
    base = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**sizes))
    config = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
    peft.get_peft_model(base, config).save_pretrained(tmp_path)
    assert verify(tmp_path, Level.STRUCTURE).verdict is Verdict.PROVEN


def test_adapter_check_cost_is_linear_in_its_targets(tmp_path: Path) -> None:
    """A mixture of experts has one target for each linear layer of each expert."""
    counts = []
    for many in (250, 1000):
        stems = [f"base_model.model.model.layers.{n % 4}.mlp.experts.{n // 4}.up_proj" for n in range(many)]
        halves = {"lora_A.weight": np.ones((2, 4), "f4"), "lora_B.weight": np.ones((4, 2), "f4")}
        save_file({f"{s}.{h}": a for s in stems for h, a in halves.items()}, tmp_path / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": 2, "target_modules": [s.removeprefix("base_model.model.") for s in stems]}
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        found = examine(tmp_path, ExamineOptions(content=False))
        assert found.tree is not None
        counts.append(lines_run(partial(adapter.judge, found.tree.folders[0], found)))
        assert verify(tmp_path, Level.STRUCTURE).verdict is Verdict.PROVEN
    assert counts[1] < 5 * counts[0]
