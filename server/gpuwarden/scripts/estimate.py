"""Estimate the memory, time and money of a training run as intervals, each with its derivation.

Memory: bytes per parameter by method (half-precision weights, gradients, optimizer states), activations by tokens in
flight. Time: 6 operations per parameter and token (arXiv:2001.08361), fewer for adapters, over the GPU's published
speed at 12 to 45 % of it, the range from small fine-tunes to tuned runs (46 % in arXiv:2204.02311). A missing setting
takes the trainer's default, and widens the interval.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from gpuwarden.core.hardware import Gpu
from gpuwarden.core.models import Frozen
from gpuwarden.scripts.script_usage import Uses

Method: TypeAlias = Literal["full", "lora", "qlora"]

GB = 1e9
VOCABULARY = 152_000
UTILISATION = (0.12, 0.45)
START_S = (60.0, 420.0)  # image, packages and weights, before the first step

# Bytes per parameter of the base model: lowest and highest usual set-up.
_BYTES: dict[Method, tuple[float, float]] = {"full": (8.0, 18.0), "lora": (2.2, 4.6), "qlora": (0.65, 1.2)}
_SEES = frozenset({"detection", "classification", "segmentation"})
_TALKS = frozenset({"sft", "dpo", "orpo", "cpo", "kto", "grpo", "rloo"})


class Interval(Frozen):
    """A lowest and a highest plausible value, its unit, and the derivation of both."""

    low: float
    high: float
    unit: str
    how: str

    def __str__(self) -> str:
        return f"{self.low:.3g} to {self.high:.3g} {self.unit}"


class Run(Frozen):
    """The inputs of the estimates. None means unknown, so a default or a wider interval is used."""

    params: int
    method: Method = "full"
    task: str = "sft"
    batch: int | None = None
    accumulate: int = 1
    length: int | None = None
    checkpointing: bool | None = None
    eight_bit_optimizer: bool = False
    half_weights: bool = False
    rows: int | None = None
    epochs: float | None = None
    max_steps: int | None = None
    gpus: int = 1

    @property
    def sequences(self) -> int:
        """Return the sequences in one sample: methods of preference train on pairs."""
        return 2 if self.task in {"dpo", "orpo", "cpo", "reward"} else 1


def run_of(uses: Uses, params: int, rows: int | None, gpus: int) -> Run:
    """Read a run from a script's settings."""
    causal = any("ForCausalLM" in name for name, _ in uses.imports)
    task = min(uses.methods, default="sft" if causal else "other")
    optimizer = uses.setting("optim")
    steps = _whole(uses.setting("max_steps"))
    epochs = uses.setting("num_train_epochs", 3)
    recomputes = uses.setting("gradient_checkpointing", True if uses.methods else None)
    loads = [c for c in uses.calls if c.last in {"from_pretrained", "SFTConfig", "DPOConfig"}]
    dtypes = [c.kwargs[name] for c in loads for name in ("dtype", "torch_dtype") if name in c.kwargs]
    # What the configuration says, else the longest that the tokenizer is asked for.
    length = _whole(uses.setting("max_length", uses.setting("max_seq_length")))
    asked = [_whole(c.kwargs.get(name)) for c in uses.calls for name in ("max_length", "max_seq_length")]
    return Run(
        params=params,
        method=method_of(uses),
        task=task,
        batch=_whole(uses.setting("per_device_train_batch_size", 8)),
        accumulate=_whole(uses.setting("gradient_accumulation_steps", 1)) or 1,
        length=length or max(filter(None, asked), default=1024),
        checkpointing=recomputes if isinstance(recomputes, bool) else None,
        eight_bit_optimizer=isinstance(optimizer, str) and "8bit" in optimizer,
        half_weights=any(d not in (None, "float32", "auto") for d in dtypes),
        rows=rows,
        epochs=float(epochs) if isinstance(epochs, int | float) and not isinstance(epochs, bool) else None,
        max_steps=steps if steps and steps > 0 else None,
        gpus=gpus,
    )


def method_of(uses: Uses) -> Method:
    """Return the method: full training, LoRA, or LoRA over a 4-bit base."""
    four = any(c.kwargs.get("load_in_4bit") is True for c in uses.calls)
    adapter = uses.called("LoraConfig", "get_peft_model") or any(t.kwargs.get("peft_config") for t in uses.trainers)
    if adapter or uses.setting("use_peft") is True:
        return "qlora" if four or uses.setting("load_in_4bit") is True else "lora"
    return "full"


def vram(run: Run) -> Interval:
    """Return gigabytes per GPU, weights not sharded."""
    low, high = _BYTES[run.method]
    if run.method == "full":
        low, high = (8.0, 10.0) if run.half_weights else (15.0, 18.0)
        if run.eight_bit_optimizer:
            low, high = low - (3.0 if run.half_weights else 6.0), high - 3.0
    if run.task == "dpo" and run.method == "full":
        low, high = low + 2.0, high + 4.0  # the reference model
    if run.task in {"grpo", "rloo"}:
        high += 2.5  # a copy for generation
    tokens_high = 1.0 * (run.batch or 4) * (run.length or 1024) * run.sequences
    tokens_low = 0.25 * tokens_high
    act_low, act_high = _activations(run, tokens_low)[0], _activations(run, tokens_high)[1]
    low_gb = run.params * low / GB + act_low + 0.6
    high_gb = (run.params * high / GB + act_high + 1.5) * 1.08
    how = (
        f"{run.params / 1e9:.3g}B parameters x {low:.3g} to {high:.3g} bytes ({run.method}), activations of "
        f"{tokens_low:,.0f} to {tokens_high:,.0f} tokens, 0.6 to 1.5 GB of context; may be 30 % wrong either way"
    )
    return Interval(low=low_gb, high=high_gb, unit="GB", how=how)


def _activations(run: Run, tokens: float) -> tuple[float, float]:
    """Return gigabytes: about 34 bytes per token, layer and width (arXiv:2205.05198), 2 with recomputation."""
    width = 35_000 * (run.params / 1e9) ** 0.7  # layers x hidden size, fitted to Qwen 2.5 and Llama 3
    per_token = {True: (2.0, 6.0), False: (20.0, 34.0), None: (2.0, 34.0)}[run.checkpointing]
    logits = VOCABULARY * 6.0 if run.task in _TALKS else 0.0
    return tokens * width * per_token[0] / GB, tokens * (width * per_token[1] + logits) / GB


def duration(run: Run, gpu: Gpu) -> Interval | None:
    """Return seconds of the whole run; None where the number of tokens is unknown, as for images."""
    if run.task in _SEES:
        return None
    if run.max_steps:
        samples = float(run.max_steps * (run.batch or 8) * run.accumulate * run.gpus)
    elif run.rows and run.epochs:
        samples = run.rows * run.epochs
    else:
        return None
    most = samples * (run.length or 1024) * run.sequences
    least = most * 0.1
    per_token = run.params * (6.0 if run.method == "full" else 4.0)
    dear = 1.34 if run.checkpointing is not False else 1.0
    generation = 8.0 if run.task in {"grpo", "rloo"} else 1.0
    speed = gpu.tflops * 1e12 * run.gpus
    low = least * per_token / (speed * UTILISATION[1]) + START_S[0]
    high = most * per_token * dear * generation / (speed * UTILISATION[0]) + START_S[1]
    how = (
        f"{least:,.0f} to {most:,.0f} tokens at 12 to 45 % of {gpu.tflops:g} TFLOPS x {run.gpus} "
        f"({gpu.name}), and 1 to 7 minutes of start; the interval is honest, its middle is not a forecast"
    )
    return Interval(low=low, high=high, unit="s", how=how)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
