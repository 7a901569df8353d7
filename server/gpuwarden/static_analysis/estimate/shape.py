"""Read a model's shape from its config.json. Memory and operations are computed from the shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from gpuwarden.core.models import Frozen

_NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"),
    "width": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"),
    "vocabulary": ("vocab_size",),
    "feed_forward": ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size", "encoder_ffn_dim"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "head_width": ("head_dim", "d_kv"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "active_experts": ("num_experts_per_tok", "moe_top_k"),
    "expert_width": ("moe_intermediate_size",),
    "shared_experts": ("n_shared_experts",),
    "dense_layers": ("first_k_dense_replace",),
}
_PLAIN = frozenset({
    "bert", "roberta", "distilbert", "electra", "deberta", "deberta-v2", "albert", "camembert", "xlm-roberta", "mpnet",
    "gpt2", "gpt_neo", "gptj", "gpt_neox", "gpt_bigcode", "opt", "bloom", "falcon", "mpt", "phi", "starcoder2",
    "codegen", "t5", "bart", "vit", "wav2vec2", "whisper", "apertus", "arcee", "nemotron",
})  # fmt: skip
"""Families whose feed-forward layers have two matrices. In other families, there is a third matrix, the gate."""
_ENCODERS = frozenset({
    "bert", "roberta", "distilbert", "electra", "deberta", "deberta-v2", "albert", "camembert", "xlm-roberta", "mpnet",
    "modernbert", "vit",
})  # fmt: skip
_SINGLE_NORM = frozenset({"falcon", "phi", "gpt_neox", "gptj"})
"""Families that compute attention and the feed-forward layer in parallel, from the same normalized input."""

_CLOSE = 0.01
"""Largest relative difference between a shape's parameter count and that of the model's files, which also contain
biases and small norms."""


class Shape(Frozen):
    """A model's layers, widths and vocabulary. `kind` is decoder, encoder, or pair (an encoder-decoder model)."""

    family: str
    kind: Literal["decoder", "encoder", "pair"]
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    feed_forward: int
    vocabulary: int
    gated: bool = True
    tied: bool = False
    parallel: bool = False
    experts: int = 0
    active_experts: int = 0
    expert_width: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    bits: int | None = None
    """Bits per weight if the weights are stored in quantized form."""

    @property
    def attention_weights(self) -> int:
        """Return the number of attention weights in one layer."""
        queries = self.heads * self.head_width
        return self.width * (2 * queries + 2 * self.kv_heads * self.head_width)

    def _matrices(self, inner: int) -> int:
        return (3 if self.gated else 2) * self.width * inner

    @property
    def layer_weights(self) -> float:
        """Return the number of weights in one layer, including all experts."""
        return self.attention_weights + self._feed_forward_weights(self.experts) + 2 * self.width

    @property
    def active_layer_weights(self) -> float:
        """Return the number of weights in one layer that are used for one token."""
        return self.attention_weights + self._feed_forward_weights(self.active_experts)

    def _feed_forward_weights(self, experts: int) -> float:
        if not self.experts:
            return self._matrices(self.feed_forward)
        sparse = self._matrices(self.expert_width) * (experts + self.shared_experts) + self.width * self.experts
        dense = self.dense_layers / self.layers
        return dense * self._matrices(self.feed_forward) + (1 - dense) * sparse

    @property
    def blocks(self) -> int:
        """Return the number of layers in the model. For an encoder-decoder model, this includes the decoder."""
        return self.layers * (2 if self.kind == "pair" else 1)

    @property
    def embeddings(self) -> int:
        """Return the number of weights in the token tables."""
        head = 0 if self.tied or self.kind == "encoder" else 1
        return self.vocabulary * self.width * (1 + head)

    @property
    def linear_weights(self) -> float:
        """Return the number of weights in all layers, without the token tables. In an encoder-decoder model, each
        decoder layer has a second attention block.
        """
        crossed = self.layers * self.attention_weights if self.kind == "pair" else 0
        return self.blocks * self.layer_weights + crossed

    @property
    def parameters(self) -> float:
        """Return the model's number of parameters."""
        return self.linear_weights + self.embeddings + self.width

    def held(self, counted: int) -> int:
        """Return the number of parameters in memory during training if the model's files contain `counted` of them.

        Some files, such as those of Qwen3 0.6B, also store the output layer although it is identical to the token
        table. In memory, it exists only once.
        """
        head = self.vocabulary * self.width
        twice = self.tied and abs(counted - head - self.parameters) < _CLOSE * self.parameters
        return counted - head if twice else counted

    @property
    def active(self) -> float:
        """Return the number of weights that are used in multiplications for one token, including the output layer."""
        crossed = self.layers * self.attention_weights if self.kind == "pair" else 0
        head = 0 if self.kind == "encoder" else self.vocabulary * self.width
        return self.blocks * self.active_layer_weights + crossed + head


def shape_of(config: Mapping[str, Any]) -> Shape | None:
    """Return the shape that a config.json describes; None if layers, width or vocabulary are missing."""
    inner = config.get("text_config") or config.get("llm_config")
    text = {**config, **inner} if isinstance(inner, Mapping) else config
    counts = {k: v for k, v in text.items() if isinstance(v, int) and not isinstance(v, bool) and v > 0}
    found = {name: next((counts[n] for n in names if n in counts), None) for name, names in _NAMES.items()}
    layers, width, heads, vocabulary = (found[n] for n in ("layers", "width", "heads", "vocabulary"))
    if not (layers and width and vocabulary):
        return None
    family = str(text.get("model_type") or "")
    heads = heads or max(1, width // 64)
    expert_width = found["expert_width"] or found["feed_forward"] or 4 * width
    gate = text.get("feed_forward_proj")
    gated = family not in _PLAIN if gate is None else str(gate).startswith("gated")
    pair = bool(text.get("is_encoder_decoder")) or family in {"t5", "mt5", "bart", "umt5", "mbart", "whisper"}
    encoder = family in _ENCODERS and not any("CausalLM" in str(a) for a in config.get("architectures") or ())
    return Shape(
        family=family,
        kind="pair" if pair else "encoder" if encoder else "decoder",
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=found["kv_heads"] or (1 if text.get("multi_query") else heads),
        head_width=found["head_width"] or max(1, width // heads),
        feed_forward=found["feed_forward"] or 4 * width,
        vocabulary=vocabulary,
        gated=gated,
        tied=text.get("tie_word_embeddings", config.get("tie_word_embeddings", family in {"gpt2", "gemma", "mpt"}))
        is True,
        parallel=family in _SINGLE_NORM,
        experts=found["experts"] or 0,
        active_experts=found["active_experts"] or (2 if found["experts"] else 0),
        expert_width=expert_width,
        shared_experts=found["shared_experts"] or 0,
        dense_layers=found["dense_layers"] or 0,
        bits=_bits(config.get("quantization_config")),
    )


def _bits(quantized: Any) -> int | None:
    if not isinstance(quantized, Mapping):
        return None
    if quantized.get("load_in_4bit") or quantized.get("quant_method") == "mxfp4":
        return 4
    bits = quantized.get("bits")
    return bits if isinstance(bits, int) and not isinstance(bits, bool) and bits in (2, 3, 4, 8) else 8


def shape_like(parameters: int) -> Shape:
    """Return the usual shape for a language model of this size, for use if its config.json is unknown.

    Layers x width is 35,000 x (billions of parameters)^0.7, fitted to Qwen 2.5 and Llama 3. The width is about 128
    times the number of layers.
    """
    product = 35_000 * (parameters / 1e9) ** 0.7
    width = max(64, round((product * 128) ** 0.5 / 64) * 64)
    layers = max(1, round(product / width))
    vocabulary = max(1_000, min(152_000, round(0.3 * parameters / width)))
    inner = max(width, round(((parameters - 2 * vocabulary * width) / layers - 2.5 * width * width) / (3 * width)))
    return Shape(
        family="",
        kind="decoder",
        layers=layers,
        width=width,
        heads=max(1, width // 128),
        kv_heads=max(1, width // 512),
        head_width=128,
        feed_forward=inner,
        vocabulary=vocabulary,
    )
