"""Trace a model's training steps without weights. The program reads tasks as JSON from stdin and prints one JSON result
per task.

The installed version of transformers builds the architecture with a few layers under torch's FakeTensorMode, so no
memory is allocated and no kernel runs. The result lists each tensor that a step allocates and frees, in order and by
layer; `replay` derives the complete model's step from the list. The child process does not run code from a repository,
use the network or start other programs.
"""

from __future__ import annotations

import gc
import sys
import warnings
import weakref
from typing import Any

from gpuwarden.checkpoints.build_child import answer_each, forbid, use_no_cache


def main() -> None:
    """Trace every task. If an architecture can't be traced, the result contains the reason."""
    answer_each("tasks", traced)


def traced(task: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of parameters by layer, and the steps as segments of allocated and freed tensors."""
    use_no_cache()
    import torch
    import transformers
    from torch._subclasses.fake_tensor import FakeTensorMode

    from gpuwarden.static_analysis.estimate.trace_model import model_of, register_kernels

    register_kernels()
    sys.addaudithook(forbid)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(50)  # critical
    recorder = Recorder()
    gc.disable()  # the order of events must not depend on the garbage collector
    with FakeTensorMode(allow_non_fake_inputs=True), _recording(recorder):
        model, layers = model_of(task, int(task["depth"]))
        weights, trained = _sizes(model, layers, False), _sizes(model, layers, True)
        for at, layer in enumerate(layers):
            _mark(layer, at, at == len(layers) - 1, recorder)
        steps = [_step(task, model, recorder, number) for number in range(2 if task["accumulates"] else 1)]
    gc.enable()
    by = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return {"by": by, "weights": weights, "trained": trained, "steps": steps}


class Recorder:
    """A record of allocated and freed tensors, divided into segments. Each belongs to one layer or to no layer.

    A tensor's name consists of its segment, its layer, and its number in the segment.
    """

    def __init__(self) -> None:
        self.backward = False
        self.start(-1)

    def start(self, step: int) -> None:
        """Start recording another step."""
        self.step = step
        self.segments: list[dict[str, Any]] = []
        self.backward = False
        self.begin("batch", -1)

    def begin(self, part: str, layer: int) -> None:
        """Begin a segment for `part` of the step in a layer, or outside all layers if the layer is -1."""
        self._key, self._number = (f"{part} {self.step}", layer), 0
        self.events: list[list[Any]] = []
        self.segments.append({"part": part, "layer": layer, "events": self.events})

    def take(self, storage: Any, alive: dict[int, Any]) -> None:
        """Record a new tensor's memory, and its release when the last reference is dropped."""
        key, size = _identity(storage), storage.nbytes()
        name = [*self._key, self._number]
        self._number += 1

        def gone(_: Any) -> None:
            del alive[key]
            if size:
                self.events.append([*name, 0])

        alive[key] = weakref.ref(storage, gone)
        if size:
            self.events.append([*name, size])


def _identity(storage: Any) -> int:
    """Return the address of the storage object, because a fake storage's data has no address."""
    found: int = storage._cdata  # noqa: SLF001
    return found


def _recording(recorder: Recorder) -> Any:
    """Return a dispatch mode that records the memory of each operation's results."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    alive: dict[int, Any] = {}

    class Recording(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and _identity(leaf.untyped_storage()) not in alive:
                    recorder.take(leaf.untyped_storage(), alive)
            return result

    made: Any = Recording
    return made()


def _sizes(model: Any, layers: Any, trained: bool) -> dict[str, Any]:
    """Return the size in bytes of each parameter and buffer, outside the layers and in each layer."""

    def of(module: Any, apart: set[int]) -> list[int]:
        found = [*module.parameters(), *([] if trained else module.buffers())]
        return [t.nbytes for t in found if id(t) not in apart and (t.requires_grad or not trained)]

    inside = {id(t) for layer in layers for t in (*layer.parameters(), *layer.buffers())}
    return {"outside": of(model, inside), "layers": [of(layer, set()) for layer in layers]}


def _mark(layer: Any, at: int, last: bool, recorder: Recorder) -> None:
    """Begin segments at the start and end of a layer's forward pass, and at the start of its backward pass."""

    def before(*_: Any) -> None:
        if not recorder.backward:  # a checkpointed layer runs again in the backward pass
            recorder.begin("forward", at)

    def after(_layer: Any, _inputs: Any, output: Any) -> None:
        if recorder.backward:
            return
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(lambda _: recorder.begin("backward", at))
        recorder.begin("between", -1 if last else at)

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after)


def _step(task: dict[str, Any], model: Any, recorder: Recorder, number: int) -> list[dict[str, Any]]:
    """Train on one batch and return its segments. The gradients are kept."""
    import torch

    from gpuwarden.static_analysis.estimate.trace_model import FusedLoss

    recorder.start(number)
    fused: Any = FusedLoss
    rows = torch.ones(task["batch"], task["length"], dtype=torch.long)
    out = None
    with torch.autocast("cpu", torch.bfloat16, enabled=bool(task["autocast"])):
        if task["fused_loss"]:
            hidden = model.base_model(input_ids=rows, use_cache=False).last_hidden_state
            loss = fused.apply(hidden, model.get_output_embeddings().weight)
            del hidden
        else:
            out = model(input_ids=rows, labels=rows, use_cache=False)
            loss = out.loss
            if not task["keeps_logits"]:
                out = None
    recorder.begin("head", -1)
    recorder.backward = True
    loss.backward()
    del loss, rows, out
    return recorder.segments


if __name__ == "__main__":
    main()
