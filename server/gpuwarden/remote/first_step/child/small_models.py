"""Shrink Hub models. A small model has the same architecture, but random weights, and fewer and narrower layers.

The real `from_pretrained` then loads these weights, so that the library checks the arguments, dtypes and heads.
"""

from __future__ import annotations

import glob
import json
import os
from typing import Any, Dict, Iterator, List, Optional, Tuple

from gpuwarden.remote.first_step.child.record import Record, Stopped

HEADS, WIDTH, HEAD = 4, 64, 16
_TO: Dict[str, int] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers", "depth", "max_window_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), HEADS),
    **dict.fromkeys(("decoder_attention_heads", "num_local_experts", "num_experts", "n_routed_experts"), HEADS),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim", "out_hidden_size"), WIDTH),
    **dict.fromkeys(("embed_dim", "projection_dim"), WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner"), 128),
    **dict.fromkeys(("hidden_dim", "ffn_hidden_size", "shared_expert_intermediate_size"), 128),
    **dict.fromkeys(("moe_intermediate_size", "global_head_dim"), WIDTH),
    **dict.fromkeys(("d_kv", "head_dim", "kv_channels", "v_head_dim", "qk_nope_head_dim", "linear_key_head_dim"), HEAD),
    **dict.fromkeys(("linear_value_head_dim", "qk_rope_head_dim", "kv_lora_rank", "q_lora_rank"), HEAD),
    **dict.fromkeys(("num_experts_per_tok", "experts_per_token", "num_experts_per_token"), 2),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "hidden_size_per_layer_input"), HEADS),
    "first_k_dense_replace": 1,
    "num_kv_shared_layers": 0,
}


def shrink(config: Dict[str, Any]) -> Dict[str, Any]:
    """Return a config with the same architecture and small sizes. The vocabulary size is kept for the tokenizer."""
    small: Dict[str, Any] = {}
    heads = config.get("num_attention_heads")
    for name, value in config.items():
        if name == "quantization_config":
            continue
        if isinstance(value, dict) and name.endswith("_config"):
            small[name] = shrink(value)
        elif name == "num_key_value_heads" and isinstance(value, int):
            small[name] = HEADS if value == heads else min(value, 2)
        elif name in {"layer_types", "mlp_layer_types", "attention_layers"} and isinstance(value, list):
            small[name] = value[:2]
        elif name in {"rope_scaling", "rope_parameters"} and isinstance(value, dict):
            small[name] = {k: _rope(k, v) for k, v in value.items()}
        elif name in _TO and isinstance(value, int) and not isinstance(value, bool):
            small[name] = min(value, _TO[name])
        else:
            small[name] = value
    return small


def _rope(name: str, value: Any) -> Any:
    if name == "mrope_section" and isinstance(value, list):
        return [2, 3, 3]
    if isinstance(value, list):
        return value[: HEAD // 2]
    return {k: _rope(k, v) for k, v in value.items()} if isinstance(value, dict) else value


def lowered(config: Dict[str, Any], small: Dict[str, Any]) -> Iterator[Tuple[int, int]]:
    """Yield (small value, real value) for each number that differs between a config and its small version."""
    for name, value in config.items():
        if isinstance(value, dict) and isinstance(small.get(name), dict):
            yield from lowered(value, small[name])
        elif isinstance(value, int) and value != small.get(name, value):
            yield small[name], value


def prepare(record: Record, hub: str) -> None:
    """Replace the model configs in the Hub cache with the configs of small models."""
    for name in record.order.get("models", {}):
        for path in glob.glob(os.path.join(folder_of(hub, name), "**", "config.json"), recursive=True):
            with open(path, encoding="utf-8") as file:
                config = json.load(file)
            small = shrink(config)
            record.sizes.update(lowered(config, small))
            with open(path, "w", encoding="utf-8") as file:
                json.dump(small, file)


def folder_of(hub: str, name: str) -> str:
    """Return the folder of a model's only snapshot, which the parent process created."""
    return os.path.join(hub, "models--" + name.replace("/", "--"), "snapshots", "rehearsal")


def give_weights(record: Record, hub: str, name: str, subfolder: str, asked: Any) -> None:
    """Save a small model with random weights. Its class is named in its config; `asked` is the default."""
    import transformers

    folder = os.path.join(folder_of(hub, name), subfolder)
    if any(glob.glob(os.path.join(folder, pattern)) for pattern in ("*.safetensors", "*.bin")):
        return
    record.replaced(f"model {name}", "the same architecture, small, with random weights")
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        named: Optional[List[str]] = getattr(config, "architectures", None)
        made = getattr(transformers, named[0], None) if named else None
        model = (made or asked)(config)
        model.save_pretrained(folder)
    except Exception as error:
        raise Stopped(f"a small copy of {name} can't be built: {type(error).__name__}: {error}") from error
