"""Estimate a training step's memory by formula, part by part, from the model's shape and the settings.

`parts` counts the bytes of each part. Weights, gradients and optimizer states are nearly exact. The other parts depend
on versions and kernels, so the interval was chosen to contain the published peaks in
`tests/corpus/published-runs.json`; the `unseen` runs were not used for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Literal, TypeAlias

from gpuwarden.static_analysis.estimate.parts import Parts, parts_of
from gpuwarden.static_analysis.estimate.setup import PICTURE_TASKS, Interval, Run, run_measured
from gpuwarden.static_analysis.measured import Measured, measured_runs

GB: Final = 1e9
Counted: TypeAlias = Literal["allocated", "reserved", "occupied"]
"""The memory that a peak includes: PyTorch's tensors, its allocator's blocks, or all memory used on the GPU."""
CONTEXT_GB: Final = (0.35, 1.2)
"""Memory for CUDA's context and libraries, which PyTorch does not count."""
_NCCL_GB: Final = 0.8
"""Memory for NCCL's buffers, which PyTorch does not count; used only if there are several GPUs."""
_KEPT: Final = (0.8, 1.4)
"""Lowest and highest ratio of measured to counted activations in runs without recomputation (the `home` runs in
`tests/corpus/published-runs.json`).
"""
_INPUTS: Final = (0.95, 1.1)
"""Lowest and highest ratio for the layers' inputs, which are the only activations that recomputation keeps."""
_LAYER: Final = (0.75, 1.4)
"""Lowest and highest ratio for one layer's activations and gradients, and for temporaries."""
_LOGITS: Final = {"plain": (0.65, 1.4), "chunked": (0.7, 1.4), "fused": (0.1, 1.4)}
"""Lowest and highest ratio for the logits. The shifted logits may be a copy, and each of the two has a gradient, which
makes 20 bytes per logit.
"""
_LOGITS_HALF: Final = 0.55
"""The lowest ratio for 16-bit logits: a script's own loss may keep the logits in 16 bits (torch's `cross_entropy`
computes in that type), while transformers converts them to 32 bits (`ForCausalLMLoss`).
"""
_WIDENED: Final = 1.7
"""The highest ratio with a quantized base: peft converts tables and norms to 32 bits, so that all activations between
the layers have 32 bits (`prepare_model_for_kbit_training`)."""
_CHUNK: Final = 1024
"""Tokens per chunk of a fused loss, if the number is fixed."""
_CHANGING = 2.5
"""Highest factor by which the allocator's blocks grow if batches of different lengths cause fragmentation."""


_HOLES: Final = 0.35
"""The largest share by which the allocator's blocks exceed temporary tensors. The optimizer's step can't reuse all
blocks from the backward pass, and full sharding may free tensors late (`record_stream` in torch/distributed/fsdp)."""
_STASHED: Final = 5
"""The number of layers whose inputs are still on the GPU while activations are offloaded (`max_fwd_stash_size` in
torchtune and TRL)."""


def memory(run: Run, counted: Counted = "occupied") -> tuple[float, float]:
    """Return the minimum and maximum memory on one GPU in bytes, over all variants of the run."""
    ends = [_bounds(variant, counted) for variant in _variants(run)]
    return min(low for low, _ in ends), max(high for _, high in ends)


def _variants(run: Run) -> list[Run]:
    """Return one run for each combination of possible values for a run's unknown settings."""
    found = [run, run.model_copy(update={"method": "full"})] if run.unsure else [run]
    either = (("checkpointing", (True, False)), ("weights", ("half", "float32")), ("batch", (1, 4)))
    for name, values in (*either, ("fused", (True, False))):
        if getattr(run, name) is None:
            found = [r.model_copy(update={name: value}) for r in found for value in values]
    return found


def _bounds(run: Run, counted: Counted) -> tuple[float, float]:
    parts = parts_of(run)
    shorter = parts_of(run.model_copy(update={"length": max(1, round((run.length or 1024) * 0.85))}))
    least = shorter if run.padded else parts
    if run.checkpointing is not False:
        least = replace(least, casts=0.0)  # the casts are freed after the forward pass
    fewest, most = _KEPT if run.checkpointing is False else _INPUTS
    if run.checkpointing is False and (run.quantized or run.attention == "eager"):
        most = 2.1  # some kernels keep their inputs, or attention scores in 32 bits
    if run.form.kind == "pair":
        fewest *= 0.4  # the decoder's input may have only a few tokens, so only the encoder's layers are counted
    thin, thick = _LOGITS[run.loss]
    thick = max(thick, _WIDENED) if run.quantized else thick
    if run.loss == "plain" and run.weights == "half":
        thin = _LOGITS_HALF
    changing, slack = 1.0, 0.0
    if counted != "allocated":
        passing = parts.activations + max(parts.logits, parts.layer)
        slack = 0.5 * GB + _HOLES * (passing + parts.step)
        changing = _CHANGING if run.padded else 1.0
    low = (0.97 if run.method == "full" else 0.96) * parts.kept
    # An engine's own AdamW does not use lists of tensors, and older versions of peft keep adapters in 16 bits.
    low += least.moving(fewest, _LAYER[0], thin, 0.0 if run.master_weights else 1.0 if run.method == "full" else 0.6)
    high = (1.12 if run.zero == 3 else 1.03) * parts.kept + slack
    # The size of the copied weights does not depend on the length.
    high += changing * replace(parts, casts=parts.casts / changing).moving(most, _LAYER[1], thick)
    high += _extras(run, parts)
    if run.quantized and run.method != "full":  # the same run with a base in 32 bits needs at least as much
        whole = run.model_copy(update={"method": "lora", "bits": None, "weights": "float32"})
        high = min(high, _bounds(whole, "reserved" if counted == "occupied" else counted)[1])
    if counted == "occupied":
        low, high = low + CONTEXT_GB[0] * GB, high + (CONTEXT_GB[1] + (_NCCL_GB if run.gpus > 1 else 0.0)) * GB
    return low, high


def _extras(run: Run, parts: Parts) -> float:
    """Return the extra bytes that only some versions of trainers and engines need."""
    shape, extra = run.form, 0.0
    head = shape.vocabulary * shape.width
    if run.zero == 3:  # most trainers gather both token tables and their gradients at once
        extra += (6.0 if run.method == "full" else 2.0) * max(0, shape.embeddings - head)
    if run.master_weights:
        extra += 0.2 * parts.states  # the engine's flat buffers
    if run.quantized:  # scales, zero points, an unpacked matrix, and the token tables, which peft converts to 32 bits
        extra += 0.06 * shape.linear_weights + 4.0 * shape.width * shape.feed_forward
        extra += 2.0 * shape.embeddings
    if "activations" in run.offload:
        extra += _STASHED * 2.0 * run.tokens * shape.width
    if run.trains_embeddings and shape.tied and run.method != "full":
        extra += 14.0 * head  # peft's `ModulesToSaveWrapper` copies each module, and a tied table twice
    if run.loss == "fused":
        extra += 12.0 * min(run.tokens, _CHUNK) * shape.vocabulary
    if run.gpus > 1 and not run.zero:  # the buckets in which gradients are summed over the GPUs
        extra += parts.gradients
    return extra


def vram(run: Run, measured: Sequence[Measured] | None = None) -> Interval:
    """Return the memory used on one GPU in gigabytes, as an interval that similar measured runs may widen."""
    low, high = memory(run)
    known = measured_runs() if measured is None else measured
    alike = [m for m in known if m.method == run.method and (m.task in PICTURE_TASKS) is (run.task in PICTURE_TASKS)]
    for m in alike:
        least, most = memory(run_measured(m))
        low = min(low, low * (m.peak_gb + CONTEXT_GB[0]) * GB / least)
        high = max(high, high * (m.peak_gb + CONTEXT_GB[1]) * GB / most)
    parts = parts_of(_variants(run)[-1])
    counts = {
        "weights": parts.weights,
        "gradients": parts.gradients,
        "optimizer": parts.states,
        "activations": parts.activations + parts.layer,
        "logits and loss": parts.logits,
    }
    listed = ", ".join(f"{name} {count / GB:.3g}" for name, count in counts.items() if count > 0.005 * GB)
    shape = f"{run.form.layers} layers of width {run.form.width}" if run.shape else "the usual shape for its size"
    how = f"by formula from {shape}, {run.method}, {run.tokens:,} tokens at once: {listed} GB, and the GPU's context"
    return Interval(low=low / GB, high=high / GB, unit="GB", how=how + compared(alike))


def compared(runs: Sequence[Measured]) -> str:
    """Return the last part of a derivation: the number of measured runs that the estimate was compared with."""
    return f"; compared with {len(runs)} measured runs up to {max(m.date for m in runs)}" if runs else ""
