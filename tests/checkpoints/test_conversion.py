"""A GGUF file compared with its source model: values within the types' precision, and every tensor in its place."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gpuwarden.checkpoints.verify import verify
from gpuwarden.core.evidence import Cause
from gpuwarden.core.models import Level, Report, Verdict
from real_parts import need
from wording import Wording

LAYERS, WIDTH, HEADS, GROUPS, VOCAB = 2, 256, 8, 2, 300
CONFIG = {
    "model_type": "llama", "num_hidden_layers": LAYERS, "hidden_size": WIDTH, "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS, "vocab_size": VOCAB, "tie_word_embeddings": False,
}  # fmt: skip
Arrays = dict[str, Any]


@pytest.fixture(scope="module")
def gguf() -> Any:
    need("gguf", importlib.util.find_spec("gguf") is not None)
    import gguf

    return gguf


def seen(report: Report) -> str:
    return "\n".join(report.reasons)


def weights(seed: int = 0) -> Arrays:
    """Return a Llama model's tensors under their transformers names."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> Any:
        return (rng.normal(size=shape) * 0.05).astype("f4")

    made = {"model.embed_tokens.weight": draw(VOCAB, WIDTH), "lm_head.weight": draw(VOCAB, WIDTH)}
    made["model.norm.weight"] = np.ones(WIDTH, "f4") + draw(WIDTH)
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        small = WIDTH * GROUPS // HEADS
        sizes = {"q": (WIDTH, WIDTH), "k": (small, WIDTH), "v": (small, WIDTH), "o": (WIDTH, WIDTH)}
        made |= {f"{at}self_attn.{k}_proj.weight": draw(*size) for k, size in sizes.items()}
        made |= {f"{at}mlp.{k}_proj.weight": draw(512, WIDTH) for k in ("gate", "up")}
        made[f"{at}mlp.down_proj.weight"] = draw(WIDTH, 512)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            made[f"{at}{norm}.weight"] = np.ones(WIDTH, "f4") + draw(WIDTH)
    return made


def turned(name: str, array: Any) -> Any:
    """Reorder the rows of query and key weights, as llama.cpp's converter does for Llama models."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return array
    heads = HEADS if name.endswith("q_proj.weight") else GROUPS
    rows, columns = array.shape
    return array.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def source(folder: Path, arrays: Arrays, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(arrays, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    vocab = {f"t{i}": i for i in range(VOCAB - 1)}
    added = [{"id": VOCAB - 1, "content": "<end>"}]
    text = {"version": "1.0", "model": {"type": "BPE", "vocab": vocab, "merges": ["t 1"]}, "added_tokens": added}
    (folder / "tokenizer.json").write_text(json.dumps(text))
    return folder


def convert(
    gguf: Any,
    path: Path,
    arrays: Arrays,
    kind: str = "F16",
    *,
    arch: str = "llama",
    turn: Callable[[str, Any], Any] = turned,
    tokens: list[str] | None = None,
    swap: dict[str, str] | None = None,
) -> Path:
    """Write a GGUF file with the `gguf` library's names and quantization."""
    table = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), LAYERS)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(WIDTH)
    writer.add_array("tokenizer.ggml.tokens", tokens or [*(f"t{i}" for i in range(VOCAB - 1)), "<end>"])
    writer.add_array("tokenizer.ggml.merges", ["t 1"])
    for name, array in arrays.items():
        to = table.get_name((swap or {}).get(name, name), try_suffixes=(".weight", ".bias"))
        kept = gguf.GGMLQuantizationType[kind if array.ndim > 1 else "F32"]
        writer.add_tensor(to, gguf.quants.quantize(turn(name, array), kept), raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


KINDS = ["F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "TQ1_0", "TQ2_0", "MXFP4"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversion_has_the_values_of_its_source(gguf: Any, tmp_path: Path, kind: str, wording: Wording) -> None:
    made = convert(gguf, tmp_path / "m.gguf", weights(), kind)
    report = verify(made, Level.CONTENT, against=source(tmp_path / "base", weights()))
    assert report.verdict is Verdict.PROVEN, seen(report)
    wording("\n".join(report.proved), 21, 300, "llama", kind)


@pytest.mark.parametrize("kind", KINDS)
def test_the_wrong_source_is_refuted(gguf: Any, tmp_path: Path, kind: str) -> None:
    made = convert(gguf, tmp_path / "m.gguf", weights(), kind)
    report = verify(made, Level.CONTENT, against=source(tmp_path / "base", weights(1)))
    assert report.verdict is Verdict.REFUTED and report.causes == (Cause.CONTRADICTION,)
    assert "lm_head.weight" in seen(report) and kind in seen(report), "what its type allows"


@pytest.mark.parametrize(
    ("kind", "moved"), [("F32", 1e-4), ("F16", 1e-3), ("BF16", 5e-3), ("Q8_0", 0.01), ("Q4_0", 0.2)]
)
def test_a_different_step_of_the_same_run_is_refuted(gguf: Any, tmp_path: Path, kind: str, moved: float) -> None:
    """`moved` is how far training went, relative to the weights; less than the type's own error can't be detected."""
    rng = np.random.default_rng(5)
    later = {n: (a + moved * a.std() * rng.normal(size=a.shape)).astype("f4") for n, a in weights().items()}
    report = verify(convert(gguf, tmp_path / "m.gguf", weights(), kind), against=source(tmp_path / "base", later))
    assert report.verdict is Verdict.REFUTED, seen(report)


def test_swapped_tensors_are_reported(gguf: Any, tmp_path: Path, wording: Wording) -> None:
    at = "model.layers.0.mlp."
    swap = {f"{at}gate_proj.weight": f"{at}up_proj.weight", f"{at}up_proj.weight": f"{at}gate_proj.weight"}
    made = convert(gguf, tmp_path / "m.gguf", weights(), "Q8_0", swap=swap)
    report = verify(made, against=source(tmp_path / "base", weights()))
    wording(seen(report), "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight")


def test_llama_attention_rows_must_be_reordered(gguf: Any, tmp_path: Path, wording: Wording) -> None:
    made = convert(gguf, tmp_path / "m.gguf", weights(), "Q8_0", turn=lambda name, array: array)
    report = verify(made, against=source(tmp_path / "base", weights()))
    wording(seen(report), "llama")
    made = convert(gguf, tmp_path / "n.gguf", weights(), "Q8_0", arch="qwen2", turn=lambda name, array: array)
    report = verify(made, against=source(tmp_path / "qwen", weights(), model_type="qwen2"))
    assert report.verdict is Verdict.PROVEN, seen(report)


def test_a_lost_tensor_and_foreign_tokens_are_reported(gguf: Any, tmp_path: Path, wording: Wording) -> None:
    base = source(tmp_path / "base", weights())
    less = {n: a for n, a in weights().items() if n != "model.layers.1.mlp.up_proj.weight"}
    report = verify(convert(gguf, tmp_path / "m.gguf", less), against=base)
    wording(seen(report), "model.layers.1.mlp.up_proj.weight")
    made = convert(gguf, tmp_path / "n.gguf", weights(), tokens=[f"x{i}" for i in range(VOCAB)])
    wording(seen(verify(made, against=base)), 300)


def test_a_conversion_may_omit_a_tied_output_layer(gguf: Any, tmp_path: Path) -> None:
    arrays = {n: a for n, a in weights().items() if n != "lm_head.weight"}
    made = convert(gguf, tmp_path / "m.gguf", arrays, "Q8_0")
    base = source(
        tmp_path / "base", arrays | {"lm_head.weight": arrays["model.embed_tokens.weight"]}, tie_word_embeddings=True
    )
    report = verify(made, against=base)
    assert report.verdict is Verdict.PROVEN, seen(report)


def test_a_source_of_another_architecture_is_reported(gguf: Any, tmp_path: Path, wording: Wording) -> None:
    made = convert(gguf, tmp_path / "m.gguf", weights())
    report = verify(made, against=source(tmp_path / "base", weights(), model_type="qwen2"))
    wording(seen(report), "llama", "qwen2", "config.json")


@pytest.mark.prove
@pytest.mark.filterwarnings("ignore")
def test_a_converted_transformers_model_is_proven(gguf: Any, tmp_path: Path) -> None:
    need("transformers", importlib.util.find_spec("transformers") is not None)
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {k: v for k, v in CONFIG.items() if k != "model_type"} | {"intermediate_size": 512}
    base = tmp_path / "base"
    LlamaForCausalLM(LlamaConfig(**size)).to("cpu").save_pretrained(base)
    made = convert(gguf, tmp_path / "m.gguf", load_file(base / "model.safetensors"), "Q5_0")
    report = verify(made, Level.LOAD, against=base)
    assert report.verdict is Verdict.PROVEN, seen(report)
