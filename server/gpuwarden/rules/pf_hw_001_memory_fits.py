from collections.abc import Iterator
from typing import Final

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts
from gpuwarden.static_analysis.estimate.memory import vram
from gpuwarden.static_analysis.estimate.setup import run_of

WIDEST: Final = 3.0
"""Maximum ratio of the interval's upper end to its lower end for a warning. A wider interval is too uncertain."""
REACHED: Final = 0.9
"""Position in the estimate's interval, from 0 to 1 on a logarithmic scale. One in sixteen published peaks is above it
(`tests/corpus/published-runs.json`).
"""
ROUNDED: Final = 0.5
"""Tolerance for rounding in a GPU's nominal memory size, in GB."""


@rule(
    "PF-HW-001",
    gate="submit",
    severity=Severity.ERROR,
    fix="Use a larger GPU, LoRA or QLoRA, or a smaller model.",
)
def memory_fits(facts: SubmitFacts) -> Iterator[Found]:
    """The model and its training state fit in the GPU's memory.

    Why: the job definitely runs out of memory if even the lowest estimate does not fit, and probably does if only the
    lowest estimate fits. The estimate is computed from the model's config.json, and the finding contains the formula.
    For several GPUs, the estimate assumes ideal sharding. No warning is given if the upper end of the estimate is more
    than three times the lower end, or if only the highest tenth of the interval is too large.

    Example:
        submit_job(gpu="t4-small", script=full_fine_tuning_of_an_8b_model)

    Instead:
        submit_job(gpu="a100-large", script=qlora_of_an_8b_model)

    """
    model, gpu = facts.hub.model if facts.hub else None, facts.gpu
    if model is None or not model.parameters or gpu is None or not facts.uses.trainers:
        return
    need = vram(run_of(facts.uses, model.parameters, None, gpu[1], model.shape))
    room = gpu[0].gb * gpu[1]  # assumes that everything can be sharded
    if need.low > room:
        yield Found(f"{model.use.id} needs {need} to train; {gpu[1]} x {gpu[0].name} has {room} GB ({need.how})")
    elif need.low > gpu[0].gb:
        yield Found(
            f"{model.use.id} needs {need} to train, but one {gpu[0].name} has {gpu[0].gb} GB",
            severity=Severity.WARNING,
            fix="Shard the model with FSDP or DeepSpeed ZeRO-3, or use a larger GPU.",
        )
    elif need.within(REACHED) > gpu[0].gb + ROUNDED and need.width <= WIDEST and facts.uses.typed is None:
        # Bundled trainers, which have typed settings, halve the rows per step if they run out of memory.
        yield Found(
            f"{model.use.id} may need more memory than {gpu[0].name} has: {need} of {gpu[0].gb} GB ({need.how})",
            severity=Severity.WARNING,
            fix="Try a few steps first; memory use depends on batch size, length and checkpointing.",
        )
