"""Count the operations in a training step, and convert them to seconds based on a GPU's speed and utilization.

A pass needs 2 operations per weight and token (arXiv:2001.08361), in addition to the operations for attention. A step
consists of a forward pass and a backward pass, which counts as one or two passes; recomputation adds one pass. The
share of the GPU's published speed that training reaches, and the launch time of each layer, which limits small batches,
were fitted to the `home` sources in `tests/corpus/published-runs.json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gpuwarden.core.hardware import Gpu
from gpuwarden.static_analysis.estimate.memory import compared
from gpuwarden.static_analysis.estimate.setup import PICTURE_TASKS, Interval, Run, run_measured
from gpuwarden.static_analysis.measured import Measured, measured_runs

USED: Final = (0.15, 0.75)
"""Share of a GPU's published 16-bit speed that training reaches, from small fine-tuning runs to optimized runs."""
FULL_WIDTH_SHARE: Final = (0.06, 0.15)
"""Share of the published 16-bit speed that 32-bit training reaches."""
LAUNCH_S: Final = (0.0003, 0.0028)
"""Seconds of Python code and kernel launches per layer and pass, which limit the speed if the GPU has to wait for them.
"""


def operations(run: Run) -> float:
    """Return the number of operations per token in a training step."""
    shape = run.form
    passes = 3.0 if run.method == "full" else 2.0
    passes += 0.0 if run.checkpointing is False else 1.0
    attention = 2.0 * shape.blocks * shape.heads * shape.head_width * (run.length or 1024)
    return passes * (2.0 * shape.active + attention)


def step_seconds(run: Run, gpu: Gpu) -> tuple[float, float]:
    """Return the minimum and maximum number of seconds for one forward and backward pass on one GPU's batch."""
    low, high = USED if run.compute == "half" else FULL_WIDTH_SHARE
    counted = run.tokens * operations(run) / (gpu.tflops * 1e12)
    if run.quantized:
        low *= 0.7  # weights are unpacked in each pass
    if run.attention == "eager":
        low *= 0.7
    passes = 3.0 + (0.0 if run.checkpointing is False else 1.0)
    launches = run.form.blocks * passes
    update = 6.0 * run.trained * 4.0 / (gpu.gbps * 1e9) / max(1, run.accumulate)
    least = max(counted / high, launches * LAUNCH_S[0]) + 0.5 * update
    most = counted / low + launches * LAUNCH_S[1] + 2.0 * update
    if run.zero or run.gpus > 1:
        most *= 1.6
    return least, most


def tokens_per_second(run: Run, gpu: Gpu) -> tuple[float, float]:
    """Return the minimum and maximum number of tokens per second on one GPU."""
    least, most = step_seconds(run, gpu)
    return run.tokens / most, run.tokens / least


START_S: Final = (30.0, 420.0)
"""Seconds before the first step, to load the image, packages and weights."""


_SURE: Final = 0.5
"""Share of the lowest estimate that every run needs at least; the fastest published run needed 0.86 of its estimate.
"""
_GENERATING: Final = frozenset({"grpo", "rloo", "async_grpo"})
_PASS_S: Final = {"other": 0.003, **dict.fromkeys(_GENERATING, 0.25)}
"""Minimum number of seconds for one pass with a model of any size, by task; 0.01 for unlisted tasks. Trainers that
generate text produce tens of tokens before each pass.
"""


def passes_of(run: Run) -> float | None:
    """Return the number of forward and backward passes on one GPU; None if the number of rows is unknown."""
    if run.max_steps:
        return float(run.max_steps * run.accumulate)
    return run.rows * run.epochs / ((run.batch or 8) * run.gpus) if run.rows and run.epochs else None


def shortest(run: Run, gpu: Gpu, *, sized: bool) -> float | None:
    """Return a run's minimum duration in seconds, including its start; None if the number of passes is unknown.

    `sized` is true if the model's size is known.
    """
    passes = passes_of(run)
    if passes is None:
        return None
    estimate = duration(run, gpu, ()) if sized else None
    training = _SURE * (estimate.low - START_S[0]) if estimate is not None else 0.0
    return START_S[0] + max(training, passes * _PASS_S.get(run.task, 0.01))


def duration(run: Run, gpu: Gpu, measured: Sequence[Measured] | None = None) -> Interval | None:
    """Return the duration of the complete run in seconds; None if the number of tokens is unknown, as for images.

    Measured runs of this method on this GPU widen the interval.
    """
    passes = passes_of(run)
    if run.task in PICTURE_TASKS or passes is None:
        return None
    full = run.model_copy(update={"batch": run.batch or 8})
    short = full.model_copy(update={"length": max(1, round((run.length or 1024) * 0.1))}) if run.padded else full
    quickest = short.model_copy(update={"checkpointing": run.checkpointing or False})
    method = "full" if run.unsure else run.method
    slowest = full.model_copy(update={"checkpointing": run.checkpointing is not False, "method": method})
    least, most = step_seconds(quickest, gpu)[0], step_seconds(slowest, gpu)[1]
    known = measured_runs() if measured is None else measured
    alike = [m for m in known if m.gpu == gpu.name and m.method == run.method and m.tokens_per_second]
    for m in alike:
        slow, fast = tokens_per_second(run_measured(m), gpu)
        least, most = (
            least * min(1.0, fast / (m.tokens_per_second or fast)),
            most * max(1.0, slow / (m.tokens_per_second or slow)),
        )
    if run.task in _GENERATING:
        most *= 8.0
    how = (
        f"{passes:,.0f} passes of {short.tokens:,} to {full.tokens:,} tokens at {USED[0]:.0%} to {USED[1]:.0%} of "
        f"{gpu.tflops:g} TFLOPS ({gpu.name}), and up to 7 minutes to start; the job's first minutes narrow the range"
    )
    low, high = passes * least + START_S[0], passes * most + START_S[1]
    return Interval(low=low, high=high, unit="s", how=how + compared(alike))
