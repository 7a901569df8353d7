from collections.abc import Iterator

from gpuwarden.core.rules import Found, Severity, rule
from gpuwarden.rules.facts import SubmitFacts

_LAUNCHERS = (
    "torchrun",
    "accelerate",
    "deepspeed",
    "torch.distributed",
    "--accelerate_config",
    "mp.spawn",
    "notebook_launcher",
)


@rule(
    "PF-HW-004",
    gate="submit",
    severity=Severity.WARNING,
    fix="Start the script with accelerate launch or torchrun, or rent one GPU.",
)
def processes_for_gpus(facts: SubmitFacts) -> Iterator[Found]:
    """A job with several GPUs starts several processes.

    Why: on a machine with four GPUs, plain `python train.py` uses only one GPU, or fails in trl with an error about
    DataParallel, but all four GPUs are billed.

    Example:
        submit_job(gpu="a10g", gpu_count=4, command=["python", "train.py"])

    Instead:
        submit_job(gpu="a10g", gpu_count=4, command=["accelerate", "launch", "train.py"])

    """
    gpu, spec = facts.gpu, facts.spec
    if gpu is None or gpu[1] < 2:
        return
    words = " ".join((*spec.command, *spec.args, *(w for s in facts.uses.shells for w in s.words)))
    starts = any(name in words for name in _LAUNCHERS)
    itself = facts.uses.called("spawn", "notebook_launcher", "init_process_group", "LLM", "Accelerator")
    if not starts and not itself and not any("device_map" in c.kwargs for c in facts.uses.calls):
        yield Found(f"{gpu[1]} GPUs are requested, but the job starts only one process")
