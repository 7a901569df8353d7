"""Count a training step's bytes part by part, from the model's shape and the settings.

Weights, gradients and optimizer states depend only on the number of parameters. Activations are counted per token and
layer as autograd keeps them (arXiv:2205.05198; for flash attention, arXiv:2205.14135).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gpuwarden.static_analysis.estimate.setup import PICTURE_TASKS, Run

STATES: Final = {
    "adamw": 2.0,
    "adamw_8bit": 0.52,
    "paged_adamw": 2.0,
    "paged_adamw_8bit": 0.52,
    "adafactor": 0.02,
    "lion": 1.0,
    "lion_8bit": 0.26,
    "muon": 1.0,
    "sgd": 0.0,
    "lomo": 0.0,
    "galore": 0.6,
    "apollo": 0.1,
}
"""The number of values that an optimizer keeps per trained parameter, in the weights' type. For 8-bit optimizers, it is
the number of 32-bit values."""


@dataclass(frozen=True)
class Parts:
    """The bytes of each part of a training step's memory, with activations and logits at their usual size."""

    weights: float
    gradients: float
    states: float
    activations: float
    layer: float
    """One layer's activations and their gradients, if activations are recomputed."""
    logits: float
    step: float
    """Temporary tensors in the optimizer's step."""
    casts: float
    """16-bit copies of 32-bit weights, which autocast keeps for the backward pass."""
    accumulated: bool

    @property
    def kept(self) -> float:
        """Return the bytes that remain allocated between steps, including gradients."""
        return self.weights + self.gradients + self.states

    def moving(self, activations: float, layer: float, logits: float, step: float = 1.0) -> float:
        """Return the bytes that the peak adds to `kept`, with each part multiplied by its factor.

        The peak is at the beginning of the backward pass, at its end, or in the optimizer's step.
        """
        passing = activations * self.activations + max(logits * self.logits, layer * self.layer) + self.casts
        return max(passing - (0 if self.accumulated else self.gradients), step * self.step, 0.1 * passing)


def parts_of(run: Run) -> Parts:
    """Return the bytes of each part of a training step's memory on one GPU."""
    shape, shares = run.form, run.gpus if run.zero else 1
    trained = run.trained
    stored, kind = _weight_bytes(run), 4.0 if run.weights == "float32" else 2.0
    if run.method != "full":
        kind = 4.0 if run.weights == "float32" else 3.0  # peft 0.12 and later keep adapters in 32 bits; others use 16
    states = STATES.get(run.optimizer, 2.0) * trained * (4.0 if "8bit" in run.optimizer or run.master_weights else kind)
    states += trained * 4.0 if run.master_weights else 0.0
    head = shape.vocabulary * shape.width
    gradients = trained * kind
    if run.layerwise:  # the token table's gradient is the largest; a tied table keeps it during both uses
        gradients = min(gradients, (head + shape.layer_weights) * kind)
    if run.optimizer.startswith("paged") or "optimizer" in run.offload:
        states = 0.0
    sharded = shares if run.zero >= 1 else 1
    weights = 0.0 if "weights" in run.offload else stored / (shares if run.zero == 3 else 1)
    gathered = (2 * shape.layer_weights + head) * 2.0 if run.zero == 3 else 0.0
    # A sharded layer's gradient and the buffer for its sum are unsharded until the gradient is summed over the GPUs.
    whole = (6.0 if run.weights == "float32" else 4.0) if run.zero == 3 and run.method == "full" else 0.0
    kept, recomputed = _activations(run)
    casts = run.weights == "float32" and run.compute == "half" and run.quantized is None and run.zero < 3
    return Parts(
        weights=weights + gathered,
        gradients=gradients / (shares if run.zero >= 2 else 1),
        states=states / sharded,
        activations=kept,
        layer=recomputed + whole * shape.layer_weights,
        logits=_logits(run) + whole * head,
        step=_step(run, kind) / sharded,
        casts=2.0 * shape.linear_weights if casts else 0.0,
        accumulated=run.accumulate > 1,
    )


def _step(run: Run, kind: float) -> float:
    """Return the bytes of an optimizer's temporary tensors.

    If AdamW works on lists of tensors, it creates temporary tensors for all square roots (`_multi_tensor_adam` in
    torch/optim/adam.py). Its fused kernel needs none. The temporary tensors of an optimizer that updates one tensor at
    a time are as large as the largest tensor, the token table.
    """
    if run.optimizer in {"adamw", "paged_adamw"} and not run.fused and not run.layerwise:
        return run.trained * kind
    return 0.0 if run.fused else min(0.25 * run.trained, 2.0 * run.form.vocabulary * run.form.width) * kind


def _weight_bytes(run: Run) -> float:
    """Return the bytes of all weights. Quantization does not change the token tables or the norms."""
    shape, wide = run.form, 4.0 if run.weights == "float32" else 2.0
    bits = run.quantized
    base = run.params * wide
    if bits is not None:
        tables = shape.embeddings
        base = (run.params - tables) * (bits / 8 + 0.06) + tables * 2.0  # including each block's scales
    if run.task == "dpo" and run.method == "full":
        base *= 2  # the reference model
    extra = run.adapter_weights * (4.0 if run.weights == "float32" else 3.0) if run.method != "full" else 0.0
    if run.trains_embeddings and run.method != "full":
        extra += shape.embeddings * 2.0  # a trained copy in addition to the frozen one
    return base + extra


def _activations(run: Run) -> tuple[float, float]:
    """Return the bytes of the activations kept for the backward pass, and of those that one layer recomputes."""
    shape, layer = run.form, _layer_bytes(run)
    blocks = shape.blocks * (1.25 if shape.kind == "pair" else 1.0)
    if run.checkpointing is False:
        return run.tokens * blocks * layer, 0.0
    # Full sharding also casts a layer's inputs; autocast leaves the residual stream in 32 bits.
    stream = 4.0 if run.weights == "float32" and (run.zero < 3 or run.compute == "float32") else 2.0
    boundary = 0.0 if "activations" in run.offload else blocks * shape.width * stream
    return run.tokens * boundary, run.tokens * 1.5 * layer


def _layer_bytes(run: Run) -> float:
    """Return the bytes that autograd keeps per token in one layer."""
    s, c = run.form, 2.0 if run.compute == "half" else 4.0
    queries, values = s.heads * s.head_width, s.kv_heads * s.head_width
    norms = (1 if s.parallel else 2) * s.width * ((4.0 + c) if s.gated else 2 * c)
    if run.weights == "float32" and run.compute == "half" and run.zero < 3:
        norms = (1 if s.parallel else 2) * s.width * 10.0  # autocast computes norms in 32 bits and casts the result
    attention = c * (2 * queries + 2 * values)
    if run.attention == "eager":
        attention += s.heads * (run.length or 1024) * (2 * c + 1)
    inner = s.feed_forward
    if s.experts:
        inner = s.expert_width * (s.active_experts + s.shared_experts)
    feed_forward = c * (4 if s.gated else 2.5) * inner
    if run.method != "full" and "mlp" not in run.targets:
        feed_forward -= c * inner * (1 if s.gated else 0.5)
    if run.quantized:
        feed_forward += 0.5 * c * (2 * s.width + inner)  # in some versions, kernels keep their inputs
    adapters = 0.0
    if run.method != "full":  # the adapters' inputs; with dropout, also a copy and a mask
        inputs = sum(s.width for t in run.targets if t != "mlp") + ("mlp" in run.targets) * (2 * s.width + inner)
        adapters = 0.5 * (c + 1) * inputs
    dropout = 2 * s.width * (c + 1) if s.kind != "decoder" else 0.0
    total = norms + attention + feed_forward + adapters + dropout
    return total * (0.8 if run.compiled else 1.0)


def _logits(run: Run) -> float:
    """Return the bytes of the last layer's output and its loss.

    A fused loss computes the logits for a chunk of tokens and the output layer's gradient, like Liger's kernel, whose
    chunks need about as much memory as the last layer's input (liger_kernel/ops/fused_linear_cross_entropy.py).
    """
    shape = run.form
    if shape.kind == "encoder" or run.task in PICTURE_TASKS:
        return 0.0
    if run.loss == "fused":
        trained = shape.vocabulary * shape.width if run.method == "full" or run.trains_embeddings else 0
        return 8.0 * run.tokens * shape.width + 4.0 * trained
    element = {"plain": 14.0, "chunked": 3.0}[run.loss] + (2.0 if run.compute == "float32" else 0.0)
    return run.tokens * shape.vocabulary * element
