"""Estimate a training run's memory from a trace of its model, if torch and transformers are installed.

A child process traces a step without weights and without a GPU, and `replay` runs the trace through a simulated
allocator. The interval contains the published peaks from the `home` sources. Only settings for which traces were
compared with published peaks are traced; all others use the formula, and `NotTraced` gives the reason.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from gpuwarden.checkpoints.load import run_child
from gpuwarden.static_analysis.estimate.memory import GB
from gpuwarden.static_analysis.estimate.replay import DEPTH, Peak, Trace, replay
from gpuwarden.static_analysis.estimate.setup import ADAPTED_MODULES, Interval, Run

CHILD: Final = (sys.executable, "-P", "-m", "gpuwarden.static_analysis.estimate.trace_child")
LIMIT_S: Final = 120.0
MEMORY: Final = 16 << 30
"""The child process's address space in bytes. Fake tensors need no memory, but the libraries map several gigabytes."""
_LAYERS: Final = 200
"""Maximum number of layers in a traced model, because replaying more layers takes too long."""
_LEAST, _MOST = 0.985, 1.06
"""Lowest and highest ratio of published to replayed bytes in runs from the `home` sources."""
_HOLES: Final = 0.5
"""Lowest share of the replayed fragmentation that also occurs in a real run. Fragmentation depends on the allocation
order, which differs between library versions.
"""
_CONTEXT_GB: Final = (0.35, 1.3)
_CONTEXT_USUAL_GB: Final = 0.5
_BYTES: Final = 1.062
"""Ratio of a GPU's actual bytes to its nominal bytes: a GPU with nominally 80 GB has 79.15 GiB."""


class NotTraced(Exception):
    """The run can't be traced, for the reason in the message; the formula is used instead."""


@dataclass(frozen=True)
class Traced:
    """A run with the traces of its possible variants."""

    run: Run
    traces: tuple[Trace, ...]

    def peaks(self, limit: float = float("inf")) -> list[Peak]:
        """Return each variant's peak on a GPU with `limit` bytes."""
        steps = (True, False) if self.run.fused is None else (not self.run.fused,)
        return [replay(t, self.run.form.layers, limit, foreach=step) for t in self.traces for step in steps]

    def interval(self, card_gb: float | None = None) -> Interval:
        """Return the minimum and maximum memory used on one GPU with `card_gb` gigabytes."""
        limit = float("inf") if card_gb is None else (card_gb * _BYTES - _CONTEXT_USUAL_GB) * GB
        peaks = self.peaks(limit)
        low, high = ends(peaks)
        how = f"traced with {self.traces[0].by}: at least {min(p.allocated for p in peaks) / GB:.3g} GB of tensors, "
        how += (
            f"at most {max(p.reserved for p in peaks) / GB:.3g} GB with the allocator's blocks, and the GPU's context"
        )
        return Interval(
            low=low / GB + _CONTEXT_GB[0], high=high / GB + _CONTEXT_GB[1], unit="GB", how=how, level="traced"
        )


def ends(peaks: Sequence[Peak]) -> tuple[float, float]:
    """Return the minimum and maximum bytes that PyTorch reserves. On a full GPU, PyTorch frees its unused blocks."""
    low = min(p.allocated if p.full else p.allocated + _HOLES * (p.reserved - p.allocated) for p in peaks)
    return _LEAST * low, _MOST * max(p.reserved for p in peaks)


def unproven(run: Run) -> str:
    """Return the reason why a run's settings require the formula; empty if the run can be traced."""
    shape = run.shape
    named = {
        "this architecture": shape is None or shape.kind != "decoder" or shape.experts > 0 or shape.layers > _LAYERS,
        "this task": run.task != "sft" or run.unsure or run.trained_share < 1,
        "rows of different lengths": run.padded,
        "quantized weights": run.method == "qlora" or run.quantized is not None,
        "trained embeddings that are tied to the output layer": run.trains_embeddings
        and shape is not None
        and shape.tied,
        "this optimizer": run.optimizer != "adamw" or run.layerwise or run.master_weights,
        "several GPUs or offloading": run.zero > 0 or run.gpus > 1 or bool(run.offload),
        "a compiled model": run.compiled,
        "eager attention": run.attention == "eager",
        "an unknown batch or length": run.batch is None or run.length is None,
        "a run that is not known to use checkpointing": run.checkpointing is not True,
        "this type of weights": run.weights != "half",
        "a loss that the script defines": run.own_loss,
    }
    setting = next((name for name, missing in named.items() if missing), "")
    return setting and f"traces were not compared with published peaks for {setting}"


def tasks_of(run: Run, config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the tasks for the child process: one for each adapter type and each point at which logits may be freed,
    because both depend on the libraries' versions.
    """
    layers = run.form.layers
    adapters = run.method == "lora"
    common = {
        "config": dict(config),
        "layers": layers,
        "depth": min(DEPTH, layers),
        "batch": run.batch,
        "length": run.length,
        "checkpointing": run.checkpointing,
        "accumulates": run.accumulate > 1,
        "modules": sorted(m for part in run.targets for m in ADAPTED_MODULES[part]) if adapters else [],
        "rank": run.rank,
        "trains_embeddings": run.trains_embeddings,
        "fused_loss": run.loss != "plain",
    }
    for wide in (True, False) if adapters else (False,):
        yield {**common, "autocast": wide, "keeps_logits": False}
    if run.loss == "plain":
        yield {**common, "autocast": adapters, "keeps_logits": True}


def trace(run: Run, config: Mapping[str, Any], child: Sequence[str] = CHILD, seconds: float = LIMIT_S) -> Traced:
    """Trace a run. Raises NotTraced if the run can't be traced."""
    if setting := unproven(run):
        raise NotTraced(setting)
    if not (importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")):
        raise NotTraced("torch and transformers are not installed here")
    tasks = list(tasks_of(run, config))
    answers, why = run_child(json.dumps({"memory": MEMORY, "tasks": tasks}), seconds, child)
    if len(answers) < len(tasks):
        raise NotTraced(f"the trace did not finish: {why}")
    if unable := next((str(a["unable"]) for a in answers if "unable" in a), ""):
        raise NotTraced(f"the architecture can't be traced: {unable}")
    try:
        traces = tuple(Trace.model_validate(answer) for answer in answers)
    except ValidationError as why_not:
        raise NotTraced("the trace is not valid") from why_not
    if not all(found.repeats or found.depth == run.form.layers for found in traces):
        raise NotTraced("the layers differ from each other")
    return Traced(run, traces)
