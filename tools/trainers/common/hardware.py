"""The machine: its GPU, arithmetic and batch, and the start of several processes."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainers.common.folder import write_json
from trainers.common.outcome import Exit, Stop, say
from trainers.common.settings import Settings

# Rows at a time by memory in GB: what fits with a model of the size that references/hardware.md names for the card.
MICRO = ((70, 8), (40, 4), (20, 2), (0, 1))
OLDEST = (7, 0)
AMPERE, HOPPER = (8, 0), (9, 0)


@dataclass(frozen=True)
class Plan:
    """Plan of training on this machine. `capability` is (0, 0) on a CPU."""

    device: str
    memory_gb: float
    capability: tuple[int, int]
    precision: str
    micro: int
    accumulate: int
    world: int

    @property
    def cuda(self) -> bool:
        """Return whether a GPU of CUDA or ROCm trains."""
        return self.capability != (0, 0)


def look(settings: Settings) -> Plan:
    """Return the plan for this machine.

    Raises:
        Stop: it has no GPU, another than expected, or one that PyTorch or the precision doesn't support.

    """
    import torch

    world = int(os.environ.get("WORLD_SIZE", "1"))
    name, memory, capability = "cpu", 0.0, (0, 0)
    if torch.cuda.is_available() and not settings.cpu:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        name, memory = torch.cuda.get_device_name(local), torch.cuda.get_device_properties(local).total_memory / 1e9
        capability = torch.cuda.get_device_capability(local)
        if capability < OLDEST:
            raise Stop(Exit.ENVIRONMENT, f"{name} has compute capability {capability}", "take a T4 or newer")
        try:
            torch.ones(8, 8, device="cuda").matmul(torch.ones(8, 8, device="cuda")).sum().item()
        except RuntimeError as error:
            message = f"PyTorch {torch.__version__} does not run on {name}: {str(error).splitlines()[0]}"
            raise Stop(Exit.ENVIRONMENT, message, "take a PyTorch build for this GPU") from None
    elif not settings.cpu:
        raise Stop(Exit.ENVIRONMENT, "no GPU is visible", "check nvidia-smi, or pass --cpu to train without one")
    if settings.expect_gpu.lower() not in name.lower():
        raise Stop(Exit.ENVIRONMENT, f"the GPU is {name}, not {settings.expect_gpu}", "rent what --expect-gpu names")
    precision = arithmetic(settings.precision, capability, name)
    micro, accumulate = split_batch(settings, memory, world)
    return Plan(name, memory, capability, precision, micro, accumulate, world)


def arithmetic(asked: str, capability: tuple[int, int], name: str) -> str:
    """Return the precision: bf16 from Ampere on, fp16 before it, fp32 on a CPU."""
    if asked == "auto":
        return "fp32" if capability == (0, 0) else "bf16" if capability >= AMPERE else "fp16"
    if asked == "fp16" and capability == (0, 0):
        raise Stop(Exit.CONFIG, "precision fp16 needs a GPU", "leave it at auto")
    if asked == "bf16" and (0, 0) < capability < AMPERE:
        raise Stop(Exit.CONFIG, f"precision bf16 needs Ampere or newer, not {name}", "leave it at auto")
    return asked


def split_batch(settings: Settings, memory: float, world: int) -> tuple[int, int]:
    """Return rows at a time and accumulation whose product over all processes is the effective batch."""
    if settings.batch_size % world:
        message = f"batch_size {settings.batch_size} is not a multiple of {world} processes"
        raise Stop(Exit.CONFIG, message, "choose a multiple")
    share = settings.batch_size // world
    most = settings.micro_batch or next(rows for least, rows in MICRO if memory >= least)
    micro = max(n for n in range(1, min(most, share) + 1) if share % n == 0)
    return micro, share // micro


def start_processes(settings: Settings) -> None:
    """Replace this process by one for each GPU where several are to be used and none was started."""
    if "WORLD_SIZE" in os.environ:
        return
    import torch

    number = settings.processes or (1 if settings.cpu else torch.cuda.device_count())
    if number <= 1:
        return
    if os.environ.get("TRAIN_STARTED"):
        message = f"{number} processes were started, and this one does not know of the others"
        raise Stop(Exit.ENVIRONMENT, message, "start the script with torchrun")
    os.environ["TRAIN_STARTED"] = str(number)
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(number)]
    if settings.sharding != "none":
        path = Path(settings.out) / "accelerate.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        bf16 = not settings.cpu and torch.cuda.get_device_capability(0) >= AMPERE
        write_json(path, launch_config(number, settings.sharding, cpu=settings.cpu, bf16=bf16))
        launch = ["accelerate.commands.launch", "--config_file", str(path)]
    say(f"starting {number} processes: {' '.join(launch)}")
    os.execv(sys.executable, [sys.executable, "-m", *launch, *sys.argv])  # noqa: S606


def launch_config(number: int, sharding: str, *, cpu: bool, bf16: bool) -> dict[str, Any]:
    """Return a configuration of `accelerate launch` for one machine."""
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "mixed_precision": "bf16" if bf16 else "no",
        "num_machines": 1,
        "num_processes": number,
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": cpu,
    }
    if cpu:
        raise Stop(Exit.CONFIG, f"sharding {sharding} needs GPUs", "leave it at none")
    if sharding == "fsdp2":
        return config | {
            "distributed_type": "FSDP",
            "fsdp_config": {
                "fsdp_version": 2,
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_reshard_after_forward": True,
                "fsdp_cpu_ram_efficient_loading": True,
                "fsdp_state_dict_type": "FULL_STATE_DICT",
                "fsdp_offload_params": False,
            },
        }
    return config | {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"zero_stage": 3, "zero3_init_flag": True, "zero3_save_16bit_model": True,
                             "offload_optimizer_device": "none", "offload_param_device": "none"},
    }  # fmt: skip


def need_world(plan: Plan, actual: int) -> None:
    """Raise Stop where the processes don't train together, each writing the same folder."""
    if actual != plan.world:
        message = f"{plan.world} processes were started, and {actual} train together"
        raise Stop(Exit.ENVIRONMENT, message, "start with torchrun or accelerate launch, with a matching use_cpu")


def free_memory_retry(settings: Settings, plan: Plan) -> None:
    """Start this command again, once, with half the rows at a time and twice the accumulation; else raise Stop."""
    fix = "lower --max-length, train with LoRA or --quantize 4bit, or rent a larger GPU"
    if plan.micro == 1 or plan.world > 1 or os.environ.get("TRAIN_RESTARTED"):
        raise Stop(Exit.MEMORY, f"out of memory with {plan.micro} rows at a time", fix)
    half = max(n for n in range(1, plan.micro // 2 + 1) if plan.micro % n == 0)
    again = f"{half} rows and accumulation {plan.accumulate * plan.micro // half}"
    say(f"OUT OF MEMORY with {plan.micro} rows at a time: starting again from the last checkpoint with {again}; "
        f"the effective batch stays {settings.batch_size}")  # fmt: skip
    words = without_flag(sys.argv, "--micro-batch")
    os.environ["TRAIN_RESTARTED"] = "memory"
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *words, "--micro-batch", str(half)])  # noqa: S606


def without_flag(words: list[str], flag: str) -> list[str]:
    """Return a command line without one flag and its value."""
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word == flag:
            skip = True
        elif not word.startswith(f"{flag}="):
            kept.append(word)
    return kept
