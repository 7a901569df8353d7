"""Compare a model's config with its tensors, using a small table of architecture families. Standard library only.

The table lists the tensor names and shapes that transformers uses for the most commonly fine-tuned families.
`build_child.py` uses transformers itself, so it supports every architecture in the installed version.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Dict, Tuple  # noqa: UP035  (Python 3.8)

from gpuwarden.checkpoints.file_model import Tensor, role, short, some

_Shapes = Dict[str, str]  # noqa: UP006

# Maps each shape symbol to the config keys that may contain its value.
_NUMBERS: dict[str, tuple[str, ...]] = {
    "V": ("vocab_size",),
    "H": ("hidden_size", "n_embd", "dim"),
    "I": ("intermediate_size", "n_inner", "hidden_dim"),
    "L": ("num_hidden_layers", "n_layer", "n_layers"),
    "N": ("num_attention_heads", "n_head", "n_heads"),
    "G": ("num_key_value_heads",),
    "D": ("head_dim",),
    "P": ("max_position_embeddings", "n_positions"),
    "E": ("num_local_experts", "num_experts", "n_routed_experts"),
    "M": ("moe_intermediate_size",),
}
_FLOATS = ("F64", "F32", "F16", "BF16")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "shared.weight", "embed_in.weight")
_QUANTIZED = ("quantization_config", "quantization", "compression_config")
_MOST_LAYERS = 10_000


@dataclass(frozen=True)
class _Family:
    """An architecture's tensor names, mapped to symbolic shapes.

    `once` lists the tensors that occur once, `each` the tensors in every layer, `may` a layer's optional tensors, and
    `head` the output layer's tensors.
    """

    prefixes: Tuple[str, ...]  # noqa: UP006
    layers: str
    once: _Shapes
    each: _Shapes
    may: _Shapes = field(default_factory=dict)
    head: _Shapes = field(default_factory=dict)
    # True if the model class defines a default head size. The head size is then unknown if the config omits it.
    own_head: bool = False


def _affine(shapes: _Shapes) -> _Shapes:
    """Return the weight and bias shapes by tensor name, given each layer's weight shape."""
    made = {f"{name}.weight": shape for name, shape in shapes.items()}
    made.update({f"{name}.bias": shape.split()[0] for name, shape in shapes.items()})
    return made


_ATTENTION = {
    "self_attn.q_proj.weight": "Q H", "self_attn.k_proj.weight": "K H", "self_attn.v_proj.weight": "K H",
    "self_attn.o_proj.weight": "H Q",
}  # fmt: skip
_ATTENTION_BIAS = {
    "self_attn.q_proj.bias": "Q", "self_attn.k_proj.bias": "K", "self_attn.v_proj.bias": "K",
    "self_attn.o_proj.bias": "H",
}  # fmt: skip
_MLP = {"mlp.gate_proj.weight": "I H", "mlp.up_proj.weight": "I H", "mlp.down_proj.weight": "H I"}
_NORMS = {"input_layernorm.weight": "H", "post_attention_layernorm.weight": "H"}
_HEAD_NORMS = {"self_attn.q_norm.weight": "D", "self_attn.k_norm.weight": "D"}
_GEMMA_NORMS = {"pre_feedforward_layernorm.weight": "H", "post_feedforward_layernorm.weight": "H"}
_ENDS = {"embed_tokens.weight": "V H", "norm.weight": "H"}


def _decoder(each: _Shapes, may: _Shapes = _ATTENTION_BIAS, own_head: bool = False) -> _Family:
    return _Family(("model.", ""), "layers.", _ENDS, each, may, {"lm_head.weight": "V H"}, own_head)


_LLAMA = _decoder({**_ATTENTION, **_MLP, **_NORMS})
_BERT_LAYER = {
    "attention.self.query": "H H", "attention.self.key": "H H", "attention.self.value": "H H",
    "attention.output.dense": "H H", "intermediate.dense": "I H", "output.dense": "H I",
}  # fmt: skip
# Optional, because old files name the LayerNorm parameters gamma and beta.
_BERT_NORMS = _affine({"attention.output.LayerNorm": "H", "output.LayerNorm": "H"})
_BERT_ENDS = {"embeddings.word_embeddings.weight": "V H", "embeddings.position_embeddings.weight": "P H"}


def _encoder(prefix: str) -> _Family:
    return _Family((f"{prefix}.", ""), "encoder.layer.", _BERT_ENDS, _affine(_BERT_LAYER), _BERT_NORMS)


_FAMILIES: dict[str, _Family] = {
    "llama": _LLAMA, "mistral": _LLAMA, "smollm3": _LLAMA,
    "qwen2": _decoder({**_ATTENTION, **_MLP, **_NORMS, **{n: _ATTENTION_BIAS[n] for n in list(_ATTENTION_BIAS)[:3]}}),
    "qwen3": _decoder({**_ATTENTION, **_MLP, **_NORMS, **_HEAD_NORMS}, own_head=True),
    "gemma": _decoder({**_ATTENTION, **_MLP, **_NORMS}, own_head=True),
    "gemma2": _decoder({**_ATTENTION, **_MLP, **_NORMS, **_GEMMA_NORMS}, own_head=True),
    "gemma3_text": _decoder({**_ATTENTION, **_MLP, **_NORMS, **_GEMMA_NORMS, **_HEAD_NORMS}, own_head=True),
    "phi3": _decoder({
        "self_attn.qkv_proj.weight": "F H", "self_attn.o_proj.weight": "H Q", "mlp.gate_up_proj.weight": "2*I H",
        "mlp.down_proj.weight": "H I", **_NORMS,
    }),
    "mixtral": _decoder({**_ATTENTION, **_NORMS, "block_sparse_moe.gate.weight": "E H"}),
    "qwen3_moe": _decoder({**_ATTENTION, **_NORMS, **_HEAD_NORMS}, own_head=True),
    "gpt2": _Family(
        ("transformer.", ""), "h.",
        {"wte.weight": "V H", "wpe.weight": "P H", "ln_f.weight": "H", "ln_f.bias": "H"},
        {"attn.c_attn.weight": "H 3*H", "attn.c_attn.bias": "3*H", "attn.c_proj.weight": "H H",
         "attn.c_proj.bias": "H", "mlp.c_fc.weight": "H I", "mlp.c_fc.bias": "I", "mlp.c_proj.weight": "I H",
         "mlp.c_proj.bias": "H", "ln_1.weight": "H", "ln_1.bias": "H", "ln_2.weight": "H", "ln_2.bias": "H"},
        {}, {"lm_head.weight": "V H"},
    ),
    "gpt_neox": _Family(
        ("gpt_neox.", ""), "layers.",
        {"embed_in.weight": "V H", "final_layer_norm.weight": "H", "final_layer_norm.bias": "H"},
        {**_affine({"input_layernorm": "H", "post_attention_layernorm": "H", "mlp.dense_h_to_4h": "I H",
                    "mlp.dense_4h_to_h": "H I"}),
         "attention.query_key_value.weight": "3*H H", "attention.dense.weight": "H H"},
        {"attention.query_key_value.bias": "3*H", "attention.dense.bias": "H"}, {"embed_out.weight": "V H"},
    ),
    "bert": _encoder("bert"), "roberta": _encoder("roberta"), "xlm-roberta": _encoder("roberta"),
    "distilbert": _Family(
        ("distilbert.", ""), "transformer.layer.", _BERT_ENDS,
        _affine({"attention.q_lin": "H H", "attention.k_lin": "H H", "attention.v_lin": "H H",
                 "attention.out_lin": "H H", "ffn.lin1": "I H", "ffn.lin2": "H I", "sa_layer_norm": "H",
                 "output_layer_norm": "H"}),
    ),
}  # fmt: skip


@dataclass
class Agreement:
    """The result of comparing a config with tensors. `unproved` lists the checks that could not be made."""

    proved: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    unproved: list[str] = field(default_factory=list)


def agree(config: dict[str, Any], tensors: dict[str, Tensor]) -> Agreement:
    """Compare the tensors' names and shapes with the config, and check that the data types are consistent."""
    agreement = Agreement()
    kind = config.get("model_type")
    family = _FAMILIES.get(kind) if isinstance(kind, str) else None
    if quantized(config):
        agreement.unproved.append("whether the tensor shapes match the config, because the weights are quantized")
        return agreement
    _types(tensors, agreement)
    if family is None:
        what = f"the architecture {short(kind, 40)}" if isinstance(kind, str) else "their architecture"
        agreement.unproved.append(f"whether the tensors match {what}; use level load to check this with transformers")
        return agreement
    prefix = next((p for p in family.prefixes if any(n.startswith(p + family.layers) for n in tensors)), None)
    numbers = _numbers(config, family)
    if prefix is None:
        agreement.doubts.append(f"none of its {len(tensors):,} tensor names matches a {kind} layer")
        return agreement
    wanted, may = _expected(config, family, numbers, agreement)
    lost = [name for name in wanted if prefix + name not in tensors and name not in tensors]
    if lost:
        agreement.problems.append(f"tensors that the {kind} model in config.json requires are missing: {some(lost)}")
    _layers(tensors, prefix + family.layers, numbers["L"], config, agreement)
    odd = []
    for name, shape in {**may, **wanted}.items():
        held = tensors.get(prefix + name) or tensors.get(name)
        sizes = _sizes(shape, numbers)
        if held is not None and sizes is not None and held.shape != sizes:
            odd.append(f"{name} {list(held.shape)}, not {list(sizes)}")
    if odd:
        agreement.problems.append(f"the shapes of {len(odd):,} tensors differ from config.json: {some(odd)}")
    if not agreement.problems and not agreement.doubts:
        agreement.proved.append(
            f"the {len(wanted):,} tensors that config.json describes exist and have the expected shapes"
        )
    return agreement


def quantized(config: dict[str, Any]) -> bool:
    """Return true if the config describes quantized weights, whose names and shapes depend on the quantizer."""
    return any(config.get(key) for key in _QUANTIZED)


def experts(config: Any) -> int:
    """Return the number of experts per layer that a config specifies; 0 if it specifies none."""
    given = [config.get(key) for key in _NUMBERS["E"]] if isinstance(config, dict) else []
    return next((n for n in given if type(n) is int), 0)


def _numbers(config: dict[str, Any], family: _Family) -> dict[str, int | None]:
    """Map each symbol to its value; None if the config does not determine the value."""
    made: dict[str, int | None] = {}
    for symbol, keys in _NUMBERS.items():
        given = (config.get(key) for key in keys)
        made[symbol] = next((v for v in given if type(v) is int and 0 < v < 1 << 40), None)
    hidden, heads = made["H"], made["N"]
    if made["I"] is None and hidden and config.get("model_type") == "gpt2":
        made["I"] = 4 * hidden
    made["G"] = made["G"] or heads
    if made["D"] is None and not family.own_head and hidden and heads:
        made["D"] = hidden // heads
    size, groups = made["D"], made["G"]
    made["Q"] = heads * size if heads and size else None
    made["K"] = groups * size if groups and size else None
    made["F"] = made["Q"] + 2 * made["K"] if made["Q"] and made["K"] else None
    return made


def _sizes(shape: str, numbers: dict[str, int | None]) -> tuple[int, ...] | None:
    """Return the dimensions of a shape such as "2*I H"; None if one of them is unknown."""
    made = []
    for part in shape.split():
        times, symbol = part.split("*") if "*" in part else ("1", part)
        number = numbers[symbol]
        if number is None:
            return None
        made.append(int(times) * number)
    return tuple(made)


def _expected(
    config: dict[str, Any], family: _Family, numbers: dict[str, int | None], agreement: Agreement
) -> tuple[_Shapes, _Shapes]:
    """Return the shapes of the required and the optional tensors, each by tensor name."""
    layers = numbers["L"]
    if layers is None or layers > _MOST_LAYERS:
        agreement.unproved.append("the number of layers, because config.json does not specify a valid one")
        layers = 0
    classes = config.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes and isinstance(classes[0], str) else ""
    wanted: _Shapes = dict(family.once)
    may: _Shapes = {}
    # Tied weights are stored once. If `tie_word_embeddings` is missing, the class default applies, which is unknown.
    untied = config.get("tie_word_embeddings") is False and name.endswith(("ForCausalLM", "LMHeadModel"))
    (wanted if untied else may).update(family.head)
    for i in range(layers):
        wanted.update({f"{family.layers}{i}.{n}": shape for n, shape in family.each.items()})
        may.update({f"{family.layers}{i}.{n}": shape for n, shape in family.may.items()})
    return wanted, may


def _layers(
    tensors: dict[str, Tensor], stem: str, layers: int | None, config: dict[str, Any], agreement: Agreement
) -> None:
    """Report layer numbers that exceed the number of layers in the config."""
    numbered = re.compile(re.escape(stem) + r"(\d{1,6})\.")
    found = {int(m.group(1)) for m in map(numbered.match, tensors) if m}
    more = config.get("num_nextn_predict_layers")
    beyond = [n for n in found if layers and n >= layers + (more if type(more) is int else 0)]
    if beyond:
        agreement.problems.append(f"has layers up to number {max(beyond)}, but config.json specifies {layers} layers")


def _types(tensors: dict[str, Tensor], agreement: Agreement) -> None:
    """Report tensors that have the same role in different layers but different data types."""
    roles: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, t in tensors.items():
        if t.dtype in _FLOATS:
            roles[role(name)][t.dtype].append(name)
    for types in roles.values():
        if len(types) > 1:
            rare = min(types, key=lambda dtype: len(types[dtype]))
            agreement.doubts.append(
                f"the type of {some(types[rare])} is {rare}, but in other layers it is "
                f"{some(d for d in types if d != rare)}: the tensors may come from two saves or a manual conversion"
            )
            return


def tokens(tokenizer: Any) -> int | None:
    """Return the highest token id in a parsed tokenizer.json, plus one; None if the file has no tokens."""
    if not isinstance(tokenizer, dict):
        return None
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    # A Unigram model's vocabulary is a list of tokens with their scores.
    found = [len(vocab) - 1] if isinstance(vocab, list) else list(vocab.values()) if isinstance(vocab, dict) else []
    found += [t.get("id") for t in added if isinstance(t, dict)] if isinstance(added, list) else []
    return max((n for n in found if type(n) is int), default=-1) + 1 or None


def embedded(tensors: dict[str, Tensor]) -> int | None:
    """Return the number of tokens that have an embedding in the model; None if unknown."""
    rows = [t.shape[0] for n, t in tensors.items() if n.endswith(_EMBEDDINGS) and len(t.shape) == 2]
    return max(rows, default=None)
