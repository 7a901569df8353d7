"""A folder is refuted if a model's config, tensors, tokenizer, and shards don't describe one architecture."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gpuwarden.checkpoints.architectures import tokens
from gpuwarden.checkpoints.verify import verify
from gpuwarden.core.models import Level, Report, Verdict
from healthy.hub_models import MODELS, build, tokenizer
from real_parts import need
from wording import Wording

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50,
    "tie_word_embeddings": False,
}  # fmt: skip
_EACH = {
    "self_attn.q_proj": (16, 16), "self_attn.k_proj": (8, 16), "self_attn.v_proj": (8, 16),
    "self_attn.o_proj": (16, 16),
    "mlp.gate_proj": (24, 16), "mlp.up_proj": (24, 16), "mlp.down_proj": (16, 24), "input_layernorm": (16,),
    "post_attention_layernorm": (16,),
}  # fmt: skip
Arrays = dict[str, Any]


def arrays() -> Arrays:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (50, 16), "model.norm.weight": (16,), "lm_head.weight": (50, 16)
    }  # fmt: skip
    shapes |= {f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in _EACH.items()}
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype("f4") for name, shape in shapes.items()}


def llama(at: Path, config: dict[str, Any] | None = None, edit: Callable[[Arrays], object] = lambda _: None) -> Path:
    made = arrays()
    edit(made)
    at.mkdir(parents=True, exist_ok=True)
    save_file(made, at / "model.safetensors")
    (at / "config.json").write_text(json.dumps(LLAMA | (config or {})))
    return at


def words(count: int, added: int = 0) -> str:
    vocab = {f"t{i}": i for i in range(count)}
    return json.dumps({"model": {"type": "BPE", "vocab": vocab, "merges": []},
                       "added_tokens": [{"id": count + i, "content": f"<{i}>"} for i in range(added)]})  # fmt: skip


def seen(report: Report) -> str:
    return "\n".join(report.reasons)


def test_a_model_matching_its_config_is_proven(tmp_path: Path, wording: Wording) -> None:
    root = llama(tmp_path)
    (root / "tokenizer.json").write_text(words(48, 2))
    report = verify(root, Level.STRUCTURE)
    assert report.verdict is Verdict.PROVEN, seen(report)
    wording("\n".join(report.proved), 21, "config.json", 50)


@pytest.mark.parametrize(
    ("config", "values"),
    [
        ({"hidden_size": 32}, ["config.json"]),
        ({"num_hidden_layers": 3}, ["layers.2."]),
        ({"num_hidden_layers": 1}, ["config.json"]),
        ({"num_key_value_heads": 4}, ["k_proj.weight [8, 16]", "[16, 16]"]),
        ({"intermediate_size": 25}, ["gate_proj.weight [24, 16]", "[25, 16]"]),
        ({"vocab_size": 51}, ["embed_tokens.weight [50, 16]", "[51, 16]"]),
        ({"model_type": "qwen2"}, ["layers.0.self_attn.q_proj.bias"]),
        ({"model_type": "gpt2"}, ["gpt2", 21]),
    ],
    ids=["hidden_size", "more layers", "fewer layers", "heads", "intermediate_size", "vocab_size", "qwen2", "gpt2"],
)
def test_a_config_of_another_model_is_a_contradiction(
    tmp_path: Path, config: dict[str, Any], values: list[object], wording: Wording
) -> None:
    report = verify(llama(tmp_path, config), Level.STRUCTURE)
    assert report.verdict is (Verdict.UNKNOWN if config.get("model_type") == "gpt2" else Verdict.REFUTED)
    wording(seen(report), *values)


def drop(*names: str) -> Callable[[Arrays], object]:
    return lambda made: [made.pop(n) for n in list(made) if any(part in n for part in names)]


@pytest.mark.parametrize(
    ("edit", "verdict", "values"),
    [
        pytest.param(drop("layers.1."), Verdict.REFUTED, ["layers.1.self_attn.q_proj.weight"], id="a layer"),
        pytest.param(drop("layers.0.mlp.up_proj"), Verdict.REFUTED, ["layers.0.mlp.up_proj.weight"], id="a matrix"),
        pytest.param(drop("lm_head"), Verdict.REFUTED, ["lm_head.weight"], id="the head"),
        pytest.param(drop("model.norm"), Verdict.REFUTED, ["norm.weight"], id="the norm"),
        pytest.param(
            lambda made: made.update({"model.layers.1.self_attn.q_proj.weight": np.ones((16, 8), "f4")}),
            Verdict.REFUTED,
            ["layers.1.self_attn.q_proj.weight [16, 8]", "[16, 16]"],
            id="another shape",
        ),
        pytest.param(
            lambda made: made.update({n: a.astype("f2") for n, a in made.items() if "layers.1" in n}),
            Verdict.UNKNOWN,
            [],
            id="two types",
        ),
    ],
)
def test_tensors_that_contradict_the_config_are_not_proven(
    tmp_path: Path, edit: Callable[[Arrays], object], verdict: Verdict, values: list[object], wording: Wording
) -> None:
    report = verify(llama(tmp_path, edit=edit), Level.STRUCTURE)
    assert report.verdict is verdict
    wording(seen(report), *values)


def test_tied_weights_may_be_stored_once_or_twice(tmp_path: Path) -> None:
    for name, edit in (("once", drop("lm_head")), ("twice", drop())):
        report = verify(llama(tmp_path / name, {"tie_word_embeddings": True}, edit), Level.STRUCTURE)
        assert report.verdict is Verdict.PROVEN, seen(report)


def test_a_tokenizer_larger_than_the_embedding_is_reported(tmp_path: Path, wording: Wording) -> None:
    root = llama(tmp_path)
    for text in (words(51), words(50, 1)):
        (root / "tokenizer.json").write_text(text)
        wording(seen(verify(root, Level.STRUCTURE)), 51, 50)
    assert tokens({"model": {"vocab": [["a", 0.0], ["b", -1.0]]}}) == 2, "Unigram"
    assert tokens({"model": {"vocab": {"a": "x"}}}) is None and tokens([]) is None


def test_a_missing_config_is_reported_if_one_is_expected(tmp_path: Path, wording: Wording) -> None:
    for step in (1, 2):
        llama(tmp_path / f"run/part-{step}")
    (tmp_path / "run/part-2/config.json").unlink()
    report = verify(tmp_path / "run", Level.STRUCTURE)
    wording("\n".join(report.problems), "part-2", "part-1", "config.json")
    root = tmp_path / "run/part-2"
    assert verify(root, Level.STRUCTURE).verdict is Verdict.PROVEN, "a model of plain torch has none either"
    (root / "generation_config.json").write_text("{}")
    wording(seen(verify(root, Level.STRUCTURE)), "generation_config.json", "config.json")


def test_an_unknown_architecture_is_reported_as_not_checked(tmp_path: Path, wording: Wording) -> None:
    report = verify(llama(tmp_path, {"model_type": "own"}), Level.STRUCTURE)
    assert report.verdict is Verdict.PROVEN
    wording(report.not_checked[0], "own")
    packed = verify(llama(tmp_path, {"quantization_config": {"bits": 4}}), Level.STRUCTURE)
    wording(packed.not_checked[0])


@pytest.mark.parametrize("config", [{"num_hidden_layers": 10**9}, {"hidden_size": "x"}, {"head_dim": -1},
    {"architectures": 5}, {"architectures": [5]}, {"model_type": ["llama"]},
])  # fmt: skip
def test_a_hostile_config_costs_nothing_and_raises_nothing(tmp_path: Path, config: dict[str, Any]) -> None:
    verify(llama(tmp_path, config), Level.STRUCTURE)


# --------------------------------------------------------------------------------- models that transformers builds


def want_transformers() -> None:
    for name in ("torch", "transformers"):
        need(name, importlib.util.find_spec(name) is not None)


@pytest.mark.slow
def test_transformers_checks_architectures_missing_from_the_table(tmp_path: Path, wording: Wording) -> None:
    want_transformers()
    build("ViT").save_pretrained(tmp_path / "good")
    config = json.loads((tmp_path / "good/config.json").read_text())
    tensors = load_file(tmp_path / "good/model.safetensors")

    def variant(name: str, lost: str = "-", **changed: Any) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config | changed))
        save_file({n: a for n, a in tensors.items() if lost not in n}, tmp_path / name / "model.safetensors")

    variant("wide", intermediate_size=32)
    variant("short", num_hidden_layers=1)
    variant("long", num_hidden_layers=3)
    variant("lost", lost="layer.1.attention.attention.query.weight")
    # Code in a repository is never used, so an unknown class leaves the line unchecked.
    variant("own", architectures=["OwnModel"], auto_map={"AutoModel": "modeling_own.OwnModel"})
    variant("kernel", _attn_implementation="someone/kernel", attn_implementation="someone/kernel")
    report = verify(tmp_path, Level.LOAD)
    reported = {p.partition(":")[0]: p for p in report.problems}
    assert reported.keys() == {"wide", "short", "long", "lost"}, reported
    for name in sorted(reported):
        wording(": ".join(reported[name].split(": ")[:2]))  # tensor names depend on the version of transformers
    assert {p.partition(":")[0] for p in report.proved} == {"good", "kernel"}
    (own,) = (line for line in report.not_checked if line.startswith("own:") and "OwnModel" in line)
    wording(own, "OwnModel")


@pytest.mark.prove
def test_every_family_is_proven_whole_and_refuted_without_a_tensor(tmp_path: Path) -> None:
    """Files saved by transformers match the models that it builds; with a tensor missing or doubled, they don't."""
    want_transformers()
    import torch
    from safetensors.torch import load_file as load
    from safetensors.torch import save_file as save

    for name in sorted(MODELS):
        good = tmp_path / name.replace(" ", "_") / "good"
        build(name).save_pretrained(good)
        state = load(good / "model.safetensors")
        floats = (n for n, t in state.items() if t.is_floating_point() and t.ndim > 1)
        lost = max(floats, key=lambda n: state[n].numel())
        for bad, made in (
            ("lost", {n: t for n, t in state.items() if n != lost}),
            ("doubled", state | {lost: torch.cat([state[lost]] * 2)}),
        ):
            (good.parent / bad).mkdir()
            save(made, good.parent / bad / "model.safetensors", {"format": "pt"})
            (good.parent / bad / "config.json").write_bytes((good / "config.json").read_bytes())
    report = verify(tmp_path, Level.LOAD)
    judged = {p.partition(":")[0] for p in report.problems}
    wanted = {f"{name.replace(' ', '_')}/{bad}" for name in MODELS for bad in ("lost", "doubled")}
    assert judged == wanted, judged ^ wanted


@pytest.mark.slow
def test_a_resized_embedding_and_its_tokenizer_agree(tmp_path: Path, wording: Wording) -> None:
    want_transformers()
    made, made_words = build("Qwen2 tied"), tokenizer()
    made_words.add_tokens([f"<{i}>" for i in range(300)])
    made.save_pretrained(tmp_path)
    made_words.save_pretrained(tmp_path)
    wording(seen(verify(tmp_path, Level.STRUCTURE)), 256)
    made.resize_token_embeddings(len(made_words))
    made.save_pretrained(tmp_path)
    assert verify(tmp_path, Level.STRUCTURE).verdict is Verdict.PROVEN
