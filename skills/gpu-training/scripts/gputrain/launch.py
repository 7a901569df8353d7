"""Start several processes, forward signals, restart the run with a smaller micro-batch, and return one exit code.

torchrun and `accelerate launch` always exit with 1 if a process fails, and a signal ends them before their processes
have saved a checkpoint. For this reason, the first process supervises the launcher and reads the notes that the
training processes write to a folder.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gputrain.folder import write_json
from gputrain.hardware import Plan
from gputrain.outcome import Exit, Stop, rank, say
from gputrain.settings import Settings

NOTES = "TRAIN_NOTES"
RESTARTED = "TRAIN_RESTARTED"
LAUNCHER = "TRAIN_LAUNCHER"
SHARDING = {"fsdp2": "ACCELERATE_USE_FSDP", "deepspeed": "ACCELERATE_USE_DEEPSPEED"}


def start_processes(settings: Settings) -> None:
    """Start one process for each GPU if the run uses several, and exit with their exit code.

    Return if the processes are already running, or if one process is enough.
    """
    if "WORLD_SIZE" in os.environ:
        variable = SHARDING.get(settings.sharding)
        if variable and os.environ.get(variable) != "true":
            message = f"sharding {settings.sharding} is set, but the processes were started without it"
            raise Stop(Exit.CONFIG, message, "start the script directly; it starts its own processes")
        return
    import torch

    number = settings.processes or (1 if settings.cpu else torch.cuda.device_count())
    if number <= 1:
        if settings.sharding != "none":
            say(f"with one process, sharding {settings.sharding} is not used")
        return
    if os.environ.get(NOTES):
        message = f"{number} processes were started, but WORLD_SIZE is not set in this one"
        raise Stop(Exit.ENVIRONMENT, message, "start the script with torchrun")
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(number)]
    if settings.sharding != "none":
        path = Path(settings.out) / "accelerate.json"
        config = launch_config(number, settings.sharding, cpu=settings.cpu)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, config)
        launch = ["accelerate.commands.launch", "--config_file", str(path)]
    say(f"starting {number} processes: {' '.join(launch)}")
    notes = Path(tempfile.mkdtemp(prefix="train-"))
    try:
        code = supervised([sys.executable, "-m", *launch], notes, sys.argv)
        half = next((note["rows"] for note in read_notes(notes) if "rows" in note), 0)
        if half and not os.environ.get(RESTARTED):
            os.environ[RESTARTED] = "memory"
            code = supervised([sys.executable, "-m", *launch], notes, with_rows(half))
    finally:
        shutil.rmtree(notes, ignore_errors=True)
    say(f"the processes ended with exit code {code}; their output is above")
    raise SystemExit(code)


def supervised(launch: list[str], notes: Path, words: list[str]) -> int:
    """Run the processes until they end; return the most specific exit code."""
    for old in notes.iterdir():
        old.unlink()

    def forward(number: int, frame: Any) -> None:
        (notes / "signal").write_text(str(number))

    for name in ("SIGTERM", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), forward)
    env = os.environ | {NOTES: str(notes), LAUNCHER: str(os.getpid())}
    code = subprocess.Popen([*launch, *words], env=env).wait()
    return ending(code, [note["code"] for note in read_notes(notes) if "code" in note])


def ending(code: int, codes: list[int]) -> int:
    """Return one exit code for the launcher and its processes: that of the original failure, if it is known."""
    causes = [c for c in codes if c not in {Exit.OK, 1, Exit.INTERRUPTED}]
    return 0 if code == 0 else min(causes) if causes else 75 if codes and {*codes} == {75} else 1


def leave_note(name: str, value: int) -> None:
    """Record a number for the supervising process, if there is one."""
    if folder := os.environ.get(NOTES, ""):
        file = Path(folder) / f"{rank()}.json"
        known = json.loads(file.read_text()) if file.exists() else {}
        write_json(file, known | {name: value})


def read_notes(notes: Path) -> list[dict[str, int]]:
    """Return the notes of the processes."""
    return [json.loads(file.read_text()) for file in sorted(notes.glob("[0-9]*.json"))]


def signal_asked() -> int:
    """Return the number of the signal that the supervising process has received, or 0."""
    folder = os.environ.get(NOTES, "")
    try:
        return int((Path(folder) / "signal").read_text()) if folder else 0
    except (OSError, ValueError):
        return 0


def launch_config(number: int, sharding: str, *, cpu: bool) -> dict[str, Any]:
    """Return a configuration for `accelerate launch` on one machine. The Trainer's arguments set the precision."""
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "mixed_precision": "no",
        "num_machines": 1,
        "num_processes": number,
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": cpu,
    }
    if cpu:
        raise Stop(Exit.CONFIG, f"sharding {sharding} needs GPUs", "leave --sharding at none")
    if sharding == "deepspeed" and find_spec("deepspeed") is None:
        fix = "add deepspeed to the dependencies in the script's header, or use fsdp2"
        raise Stop(Exit.ENVIRONMENT, "sharding deepspeed is set, but deepspeed is not installed", fix)
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
    """Raise Stop unless all processes train together. Separate runs would write to the same folder."""
    if actual != plan.world:
        message = f"{plan.world} processes were started, but {actual} train together"
        raise Stop(Exit.ENVIRONMENT, message, "start with torchrun or accelerate launch, with a matching use_cpu")


def free_memory_retry(settings: Settings, plan: Plan) -> None:
    """Restart this command once, with a smaller micro-batch and the same effective batch.

    Raises:
        Stop: the command was already restarted, or the micro-batch is 1.

    """
    fix = "lower --max-length, train with LoRA or --quantize 4bit, or rent a larger GPU"
    if plan.micro == 1 or os.environ.get(RESTARTED):
        raise Stop(Exit.MEMORY, f"out of memory with {plan.micro} rows at a time", fix)
    half = max(n for n in range(1, plan.micro // 2 + 1) if plan.micro % n == 0)
    again = f"{half} rows and accumulation {plan.accumulate * plan.micro // half}"
    print(f"OUT OF MEMORY with {plan.micro} rows at a time: starting again from the last checkpoint with {again}; "
          f"the effective batch stays {settings.batch_size}", flush=True)  # fmt: skip
    if plan.world > 1:
        leave_note("rows", half)
        raise SystemExit(int(Exit.MEMORY))
    os.environ[RESTARTED] = "memory"
    os.execv(sys.executable, [sys.executable, *with_rows(half)])  # noqa: S606


def with_rows(micro: int) -> list[str]:
    """Return this command line with another micro-batch."""
    return [*without_flag(sys.argv, "--micro-batch"), "--micro-batch", str(micro)]


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
