"""Detect the machine's GPU, and choose the precision and the batch size."""

import os
from dataclasses import dataclass

from gputrain.outcome import Exit, Stop
from gputrain.settings import Settings

# (GPU memory in GB, micro-batch), for the model size that references/hardware.md gives for a GPU with that memory.
MICRO = ((70, 8), (40, 4), (20, 2), (0, 1))
OLDEST = (7, 0)
REHEARSED = "GPUWARDEN_REHEARSAL_INSTANCE"  # set on an emulated machine, which has no real GPU
AMPERE, HOPPER = (8, 0), (9, 0)


@dataclass(frozen=True)
class Plan:
    """The device, the precision and the batch sizes of a run. `capability` is (0, 0) on a CPU."""

    device: str
    memory_gb: float
    capability: tuple[int, int]
    precision: str
    micro: int
    accumulate: int
    world: int

    @property
    def cuda(self) -> bool:
        """Return whether a CUDA or ROCm GPU is used."""
        return self.capability != (0, 0)


def look(settings: Settings) -> Plan:
    """Return the plan for this machine.

    Raises:
        Stop: the machine has no GPU, an unexpected GPU, or a GPU that can't run PyTorch or the precision.

    """
    import torch

    world = int(os.environ.get("WORLD_SIZE", "1"))
    name, memory, capability = "cpu", 0.0, (0, 0)
    if torch.cuda.is_available() and not settings.cpu:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        name, memory = torch.cuda.get_device_name(local), torch.cuda.get_device_properties(local).total_memory / 1e9
        capability = torch.cuda.get_device_capability(local)
        if capability < OLDEST:
            raise Stop(Exit.ENVIRONMENT, f"{name} has compute capability {capability}", "use a T4 or newer")
        try:
            torch.ones(8, 8, device="cuda").matmul(torch.ones(8, 8, device="cuda")).sum().item()
        except RuntimeError as error:
            message = f"PyTorch {torch.__version__} does not run on {name}: {str(error).splitlines()[0]}"
            raise Stop(Exit.ENVIRONMENT, message, "use a PyTorch build for this GPU") from None
    elif not settings.cpu and REHEARSED not in os.environ:
        raise Stop(Exit.ENVIRONMENT, "no GPU is visible", "check nvidia-smi, or pass --cpu to train without a GPU")
    if settings.expect_gpu.lower() not in name.lower():
        raise Stop(
            Exit.ENVIRONMENT, f"the GPU is {name}, not {settings.expect_gpu}", "rent that GPU, or change --expect-gpu"
        )
    precision = arithmetic(settings.precision, capability, name)
    micro, accumulate = split_batch(settings, memory, world)
    return Plan(name, memory, capability, precision, micro, accumulate, world)


def arithmetic(asked: str, capability: tuple[int, int], name: str) -> str:
    """Return the precision to use. For `auto`: bf16 on Ampere or newer, fp16 on older GPUs, fp32 on a CPU."""
    if asked == "auto":
        return "fp32" if capability == (0, 0) else "bf16" if capability >= AMPERE else "fp16"
    if asked == "fp16" and capability == (0, 0):
        raise Stop(Exit.CONFIG, "precision fp16 needs a GPU", "leave --precision at auto")
    if asked == "bf16" and (0, 0) < capability < AMPERE:
        raise Stop(Exit.CONFIG, f"precision bf16 needs Ampere or newer, not {name}", "leave --precision at auto")
    return asked


def split_batch(settings: Settings, memory: float, world: int) -> tuple[int, int]:
    """Return the micro-batch and the accumulation steps. Their product times `world` is the effective batch."""
    if settings.batch_size % world:
        message = f"batch_size {settings.batch_size} is not a multiple of {world} processes"
        raise Stop(Exit.CONFIG, message, "choose a multiple of the number of processes")
    share = settings.batch_size // world
    most = settings.micro_batch or next(rows for least, rows in MICRO if memory >= least)
    micro = max(n for n in range(1, min(most, share) + 1) if share % n == 0)
    return micro, share // micro
