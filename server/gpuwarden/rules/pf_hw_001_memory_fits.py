from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts
from gpuwarden.scripts.estimate import run_of, vram


@rule(
    "PF-HW-001",
    gate="submit",
    severity=Severity.ERROR,
    fix="Take a larger GPU, LoRA or QLoRA, or a smaller model.",
)
def memory_fits(facts: SubmitFacts) -> Iterator[Found]:
    """The model and its training state fit into the GPU's memory.

    Why: out of memory is certain where even the lowest estimate does not fit, and likely where only the lowest
    does. The estimate says how it was made; sharding over several GPUs is taken into account generously.

    Example:
        submit_job(gpu="t4-small", script=full_fine_tuning_of_an_8b_model)

    Instead:
        submit_job(gpu="a100-large", script=qlora_of_an_8b_model)

    """
    model, gpu = facts.hub.model if facts.hub else None, facts.gpu
    if model is None or not model.repo.params or gpu is None or not facts.uses.trainers:
        return
    need = vram(run_of(facts.uses, model.repo.params, None, gpu[1]))
    room = gpu[0].gb * gpu[1]  # as if everything could be sharded
    if need.low > room:
        yield Found(f"{model.use.id} needs {need} to train; {gpu[1]} x {gpu[0].name} has {room} GB ({need.how})")
    elif need.low > gpu[0].gb:
        yield Found(
            f"{model.use.id} needs {need} to train, more than one {gpu[0].name} has ({gpu[0].gb} GB)",
            severity=Severity.WARNING,
            fix="Shard it with FSDP or DeepSpeed ZeRO-3, or take a larger GPU.",
        )
    elif need.high > gpu[0].gb:
        yield Found(
            f"{model.use.id} needs {need} to train; {gpu[0].name} has {gpu[0].gb} GB ({need.how})",
            severity=Severity.WARNING,
            fix="Try a few steps first; batch size, length and checkpointing decide.",
        )
