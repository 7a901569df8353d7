"""Build the model for a traced step in the child process, with a few layers, adapters and replaced kernels.

torch's fake tensors are on the CPU, where attention, autocast and fused losses need different amounts of memory than on
a GPU. Each of these operations is replaced by a function that needs as much memory as the GPU's kernel.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import transformers

from gpuwarden.checkpoints.build_child import harmless

_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_KEPT = "gpuwarden_kept"


def model_of(task: dict[str, Any], depth: int) -> tuple[Any, Any]:
    """Return a task's model with `depth` layers, and the model's list of layers."""
    config = transformers.AutoConfig.for_model(**_shortened(task["config"], int(task["layers"]), depth))
    config.use_cache = False
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.bfloat16, attn_implementation=_KEPT)
    model.train()
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == depth)
    if task["checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    if task["modules"]:
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        if task["trains_embeddings"]:
            # As with `modules_to_save`, copies are trained and the originals are kept.
            for name in ("input", "output"):
                module = getattr(model, f"get_{name}_embeddings")()
                model.register_buffer(f"frozen_{name}", torch.empty_like(module.weight))
                module.weight.requires_grad_(True)
        model.enable_input_require_grads()
        targets = [
            (layer, name)
            for layer in layers
            for name, module in layer.named_modules()
            if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in task["modules"]
        ]
        for layer, name in targets:
            adapter = _Adapter(layer.get_submodule(name), int(task["rank"]), bool(task["autocast"]))
            layer.set_submodule(name, adapter)
    return model, layers


def _shortened(given: dict[str, Any], layers: int, depth: int) -> dict[str, Any]:
    """Return a config with a different depth, changing every layer count and every list with one item per layer."""
    found: dict[str, Any] = harmless(given)
    for name, value in found.items():
        if name in _DEPTHS and value == layers:
            found[name] = depth
        elif isinstance(value, list) and len(value) == layers:
            found[name] = value[:depth]
    return found


class _Adapter(torch.nn.Module):
    """LoRA for a frozen weight matrix, computed as in peft."""

    def __init__(self, base: Any, rank: int, wide: bool) -> None:
        super().__init__()
        kind = torch.float32 if wide else torch.bfloat16
        self.base = base
        self.a = torch.nn.Linear(base.in_features, rank, bias=False, dtype=kind)
        self.b = torch.nn.Linear(rank, base.out_features, bias=False, dtype=kind)

    def forward(self, x: Any) -> Any:
        plain = self.base(x)
        return plain + self.b(self.a(x.to(self.a.weight.dtype))).to(plain.dtype) * 2.0


class FusedLoss(torch.autograd.Function):
    """A loss that never keeps all logits, because its gradients are computed in chunks during the forward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any) -> Any:
        """Allocate the memory for the chunks one after another, and keep both gradients."""
        rows = hidden.shape[0] * hidden.shape[1]
        chunk = max(1, rows * hidden.shape[-1] // weight.shape[0])
        down = torch.empty_like(hidden)
        across = torch.empty_like(weight) if weight.requires_grad else weight.new_empty(0)
        logits = hidden.new_empty(chunk, weight.shape[0])
        wide = logits.float()
        passing = torch.empty_like(across)  # a chunk's share of the gradient, before the shares are added
        del logits, wide, passing
        ctx.save_for_backward(down, across)
        return hidden.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Return the gradients that the forward pass computed."""
        down, across = ctx.saved_tensors
        return down, across if across.numel() else None


class _Attention(torch.autograd.Function):
    """Attention that keeps the same tensors as flash attention: query, key, value, output and the row sums."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any) -> Any:
        batch, heads, length, _ = query.shape
        out = query.new_empty(batch, length, heads, value.shape[-1])
        sums = query.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        query, key, value, _, _ = ctx.saved_tensors
        summed = torch.empty_like(query, dtype=torch.float32)  # the kernel's buffer for the query's gradient
        spread = [query.new_empty(query.shape) for _ in range(2)] if query.shape[1] != key.shape[1] else []
        found = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        del summed, spread
        return found


@lru_cache(maxsize=1)
def register_kernels() -> None:
    """Make transformers use `_Attention`, and compute norms and softmax in 32 bits under autocast, as on CUDA."""
    attention: Any = _Attention

    def attend(_module: Any, query: Any, key: Any, value: Any, _mask: Any = None, *_: Any, **__: Any) -> Any:
        return attention.apply(query, key, value.to(query.dtype)), None

    def widened(function: Any) -> Any:
        def wide(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_autocast_enabled("cpu"):
                return function(*args, **kwargs)
            return function(*(a.float() if isinstance(a, torch.Tensor) else a for a in args), **kwargs)

        return wide

    transformers.AttentionInterface.register(_KEPT, attend)
    transformers.AttentionMaskInterface.register(_KEPT, lambda *_, **__: None)
    for name in ("layer_norm", "softmax", "rms_norm"):
        setattr(torch.nn.functional, name, widened(getattr(torch.nn.functional, name)))
