"""Collect the inputs for the memory and time estimates: the model's shape and the trainer's settings."""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

from pydantic import Field

from gpuwarden.core.models import Frozen
from gpuwarden.static_analysis.estimate.shape import Shape, shape_like
from gpuwarden.static_analysis.measured import Measured
from gpuwarden.static_analysis.script_usage import Uses
from gpuwarden.static_analysis.static_eval import UNKNOWN

Method: TypeAlias = Literal["full", "lora", "qlora"]
Attention: TypeAlias = Literal["eager", "sdpa", "flash"]
Loss: TypeAlias = Literal["plain", "chunked", "fused"]
"""How logits are kept in memory: all in 32 bits (`plain`), all in 16 bits and one chunk in 32 bits (`chunked`), or only
one chunk of tokens at a time (`fused`).
"""

PICTURE_TASKS: Final = frozenset({"detection", "classification", "segmentation"})
PAIRED_TASKS: Final = frozenset({"dpo", "orpo", "cpo", "reward"})
"""Preference methods. Each sample consists of two sequences."""
_SMALL_BATCH: Final = 32
"""Rows in the default mini-batch for sentence-transformers losses that cache gradients."""
ADAPTED_MODULES: Final = {
    "q": ("q_proj", "query", "q"),
    "k": ("k_proj", "key", "k"),
    "v": ("v_proj", "value", "v"),
    "qkv": ("c_attn", "query_key_value", "qkv_proj", "Wqkv", "W_pack"),
    "o": ("o_proj", "dense", "out_proj", "c_proj", "attn.c_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "fc1", "fc2", "dense_h_to_4h", "dense_4h_to_h"),
}


class Interval(Frozen):
    """An interval of plausible values, with its unit and its derivation."""

    low: float
    high: float
    unit: str
    how: str
    level: Literal["formula", "traced"] = "formula"

    @property
    def width(self) -> float:
        """Return the highest value divided by the lowest value."""
        return self.high / self.low if self.low > 0 else float("inf")

    def within(self, part: float) -> float:
        """Return the value at this fraction of the interval, on a logarithmic scale."""
        return self.low * float(self.width**part)

    def __str__(self) -> str:
        return f"{self.low:.3g} to {self.high:.3g} {self.unit}"


class Run(Frozen):
    """The inputs for the estimates. If a value is None (unknown), the trainer's default is used, or the interval is
    wider.
    """

    params: int
    shape: Shape | None = None
    method: Method = "full"
    unsure: bool = False
    """The run uses either `method` or full training, depending on an unknown condition."""
    task: str = "sft"
    batch: int | None = None
    accumulate: int = 1
    length: int | None = None
    padded: bool = True
    """Rows may be shorter than `length`. False if all rows have that length, as with packing."""
    checkpointing: bool | None = None
    optimizer: str = "adamw"
    fused: bool | None = None
    """AdamW updates all weights in one kernel. If false, it works on lists of tensors, which requires a copy of the
    gradients."""
    layerwise: bool = False
    """Each gradient is applied and freed during the backward pass."""
    weights: Literal["float32", "half"] | None = None
    """The data type in which trained or frozen weights are loaded. For quantized weights, see `bits`."""
    compute: Literal["float32", "half"] = "half"
    bits: int | None = None
    rank: int = 16
    targets: frozenset[str] = frozenset({"q", "k", "v", "o", "mlp"})
    trains_embeddings: bool = False
    trained_share: float = Field(default=1.0, ge=0, le=1)
    attention: Attention | None = None
    loss: Loss = "plain"
    own_loss: bool = False
    """The script, not a trainer, computes the loss, so the logits may stay in 16 bits."""
    compiled: bool = False
    zero: int = Field(default=0, ge=0, le=3)
    """The ZeRO stage. FSDP's full sharding counts as stage 3."""
    master_weights: bool = False
    """The training engine keeps a 32-bit copy of half-precision weights, as DeepSpeed does."""
    offload: frozenset[Literal["optimizer", "weights", "activations"]] = frozenset()
    rows: int | None = None
    epochs: float | None = None
    max_steps: int | None = None
    gpus: int = Field(default=1, ge=1)

    @property
    def sequences(self) -> int:
        """Return the number of sequences in one sample."""
        return 2 if self.task in PAIRED_TASKS else 1

    @property
    def form(self) -> Shape:
        """Return the model's shape, or the usual shape for a model of its size."""
        return self.shape or shape_like(self.params)

    @property
    def quantized(self) -> int | None:
        """Return the number of bits per weight in the frozen base model; None if it is not quantized."""
        return self.bits or (4 if self.method == "qlora" else None)

    @property
    def tokens(self) -> int:
        """Return the number of tokens in one forward pass, with each row counted at its full length."""
        return (self.batch or 4) * (self.length or 1024) * self.sequences

    @property
    def adapter_weights(self) -> float:
        """Return the number of adapter parameters."""
        s = self.form
        queries, values = s.heads * s.head_width, s.kv_heads * s.head_width
        sides = {
            "q": s.width + queries,
            "k": s.width + values,
            "v": s.width + values,
            "qkv": s.width + queries + 2 * values,
            "o": s.width + queries,
            "mlp": (3 if s.gated else 2) * (s.width + (s.feed_forward if not s.experts else s.expert_width)),
        }
        return self.rank * s.blocks * sum(sides[name] for name in self.targets)

    @property
    def trained(self) -> float:
        """Return the number of parameters that receive gradients."""
        if self.method == "full":
            return self.params * self.trained_share
        return self.adapter_weights + (self.form.embeddings if self.trains_embeddings else 0)


def run_of(uses: Uses, params: int, rows: int | None, gpus: int, shape: Shape | None = None) -> Run:
    """Read the inputs for the estimates from a script's settings."""
    causal = any("ForCausalLM" in name for name, _ in uses.imports)
    most = _whole(uses.typed.given.get("max_rows")) if uses.typed is not None else None
    rows = min(rows, most) if rows and most else rows
    task = min(uses.methods, default="sft" if causal else "other")
    steps, epochs = _whole(uses.setting("max_steps")), uses.setting("num_train_epochs", 3)
    recomputes = uses.setting("gradient_checkpointing", True if uses.methods else None)
    # The length in the configuration, or else the largest length in a call, such as a call to the tokenizer.
    length = _whole(uses.setting("max_length", uses.setting("max_seq_length")))
    asked = [_whole(c.kwargs.get(name)) for c in uses.calls for name in ("max_length", "max_seq_length")]
    optimizer, layerwise = optimizer_of(uses.setting("optim"))
    weights, mixed = _weights(uses), [uses.setting("bf16"), uses.setting("fp16")]
    of_trl = any(c.name.startswith("trl.") and c.last.endswith("Config") for c in uses.calls)
    by_trl = of_trl and mixed[0] is not False  # trl's configurations enable bf16
    named = (c.kwargs.get("attn_implementation") for c in uses.calls)
    kernel = str(next(filter(None, named), None) or uses.setting("attn_implementation"))
    packed = {b for b in (4, 8) for c in uses.calls if c.kwargs.get(f"load_in_{b}bit") is True}
    bits = min(packed | {b for b in (4, 8) if uses.setting(f"load_in_{b}bit") is True}, default=None)
    method = method_of(uses)
    # A loss that caches gradients processes the rows in small batches.
    rows_at_once = [_positive(uses.setting("per_device_train_batch_size", 8))]
    losses = [c for c in uses.calls if c.last.startswith("Cached") and c.last.endswith("Loss")]
    rows_at_once += [_positive(c.get("mini_batch_size", default=_SMALL_BATCH)) for c in losses]
    return Run(
        params=params,
        shape=shape,
        method=method or adapters_of(uses),
        unsure=method is None,
        task=task,
        batch=min(filter(None, rows_at_once)) if all(rows_at_once) else None,
        accumulate=_whole(uses.setting("gradient_accumulation_steps", 1)) or 1,
        length=length or max(filter(None, asked), default=1024),
        padded=uses.setting("packing") is not True,
        checkpointing=recomputes if isinstance(recomputes, bool) else None,
        optimizer=optimizer,
        fused=fused_of(uses.setting("optim")),
        layerwise=layerwise,
        weights=weights,
        compute="half" if True in mixed or UNKNOWN in mixed or by_trl or weights != "float32" else "float32",
        bits=bits or (shape.bits if shape else None),
        **_adapters(uses),
        attention="flash" if "flash" in kernel else "eager" if kernel == "eager" else None,
        loss="fused" if uses.setting("use_liger_kernel") is True else "plain",
        own_loss=not uses.trainers,
        zero=_zero(uses) if gpus > 1 else 0,
        rows=rows,
        epochs=float(epochs) if isinstance(epochs, int | float) and not isinstance(epochs, bool) else None,
        max_steps=steps if steps and steps > 0 else None,
        gpus=gpus,
    )


def run_measured(m: Measured) -> Run:
    """Return the estimate inputs for a measured run."""
    return Run(
        params=m.parameters,
        method=m.method,
        task=m.task,
        batch=m.micro_batch,
        length=m.max_length,
        checkpointing=m.recomputes,
        weights="half" if m.method != "full" and m.precision != "fp32" else "float32",
        compute="float32" if m.precision == "fp32" else "half",
    )


def method_of(uses: Uses) -> Method | None:
    """Return the method: full training, LoRA, or LoRA on a 4-bit base; None if unknown."""
    made = [not c.maybe for c in uses.calls if c.last in {"LoraConfig", "get_peft_model"}]
    named = [t.kwargs.get("peft_config") for t in uses.trainers]
    asked = uses.setting("use_peft")
    if any(made) or asked is True or any(v is not None and v is not UNKNOWN for v in named):
        return adapters_of(uses)
    return None if made or UNKNOWN in (asked, *named) else "full"


def adapters_of(uses: Uses) -> Method:
    """Return the method for a script that trains adapters: `qlora` if the base is loaded in 4 bits, else `lora`."""
    four_bit = any(c.kwargs.get("load_in_4bit") is True for c in uses.calls) or uses.setting("load_in_4bit") is True
    return "qlora" if four_bit else "lora"


def optimizer_of(name: Any) -> tuple[str, bool]:
    """Return an optimizer's family, given its name, and whether the optimizer works layer by layer."""
    text = name.lower() if isinstance(name, str) else "adamw"
    family = next((f for f in ("galore", "apollo", "adafactor", "lomo", "sgd", "lion", "muon") if f in text), "adamw")
    eight = family in {"adamw", "lion"} and ("8bit" in text or "bnb_8" in text)
    paged = "paged_" if "paged" in text and family == "adamw" else ""
    return paged + family + ("_8bit" if eight else ""), "layerwise" in text or family == "lomo"


def fused_of(name: Any) -> bool | None:
    """Return whether an optimizer's name selects one fused kernel; None if the trainer's version decides."""
    return {"adamw_torch_fused": True, "adamw_torch": False}.get(name) if isinstance(name, str) else None


def _weights(uses: Uses) -> Literal["float32", "half"] | None:
    """Return the data type in which weights are loaded.

    transformers 5 uses the checkpoint's own type ("auto"), which is a 16-bit type for most models. If trl is given a
    model name, it loads the model in 32 bits unless `model_init_kwargs` sets another type.
    """
    loads = [c for c in uses.calls if c.last == "from_pretrained" or c.last.endswith("Config")]
    given = [c.kwargs[name] for c in loads for name in ("dtype", "torch_dtype") if name in c.kwargs]
    given += [uses.setting(name) for name in ("dtype", "torch_dtype") if name in uses.settings]
    kwargs = uses.setting("model_init_kwargs")
    if isinstance(kwargs, dict):
        given += [kwargs[name] for name in ("dtype", "torch_dtype") if name in kwargs]
    words = [str(d).rpartition(".")[2] for d in given if d not in (None, UNKNOWN)]
    if not words:
        by_name = any(isinstance(t.get("model", 0), str) for t in uses.trainers)
        return "float32" if by_name and uses.methods and kwargs is None else None
    return "float32" if words[-1] in {"float32", "float"} else "half"


def _adapters(uses: Uses) -> dict[str, Any]:
    """Return the adapters' rank and target modules; all modules if the script names none, as in TRL's commands."""
    call = uses.called("LoraConfig", "get_peft_model")
    given = call.kwargs.get("r") if call else uses.setting("lora_r")
    found: dict[str, Any] = {"rank": _whole(given) or (8 if call else 16)}
    modules = call.kwargs.get("target_modules") if call else uses.setting("lora_target_modules")
    saved = call.kwargs.get("modules_to_save") if call else None
    if isinstance(saved, list | tuple):
        found["trains_embeddings"] = any("embed" in str(name) or "head" in str(name) for name in saved)
    if call is not None and modules is None and call.last == "LoraConfig":
        return found | {"targets": frozenset({"q", "v"})}  # peft's default for most families
    if not isinstance(modules, list | tuple | set | frozenset):
        return found
    names = {str(name).rpartition(".")[2] for name in modules}
    parts = frozenset(part for part, words in ADAPTED_MODULES.items() if names & set(words)) or frozenset({"q", "v"})
    return found | {"targets": parts - {"q", "k", "v"} if "qkv" in parts else parts}


def _zero(uses: Uses) -> int:
    """Return the sharding stage that a script's own settings select; 3 for FSDP's full sharding."""
    engine = uses.setting("deepspeed")
    if isinstance(engine, dict) and isinstance(stage := (engine.get("zero_optimization") or {}), dict):
        return min(3, _whole(stage.get("stage")) or 0)
    text = f"{engine} {uses.setting('fsdp')}".lower()
    return 3 if "zero3" in text or "full_shard" in text else 2 if "zero2" in text or "shard_grad" in text else 0


def _positive(value: Any) -> int | None:
    """Return a number of rows; None for 0 (the trainer chooses) and for an invalid value."""
    whole = _whole(value)
    return whole if whole and whole > 0 else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
