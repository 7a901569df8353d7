"""Emulate a rented machine for a job's process: its installed modules, disk, memory and end.

Reads one JSON object per line and runs each job in a forked child, as `trainer_zygote` does. A job's `conditions`:
`steps`: the number of steps, including earlier attempts, after which the timeout ends the process; `kill`,
`terminate`, `nan`, `always_nan`, `full_disk`: the step of that event; `kill_in_save`: the step whose save is
interrupted; `oom_above`: the largest micro-batch that fits; `free_gb`: the reported free space; `missing`: the modules
that can't be imported. If a file is given, runs the job in it without a fork, in a process without imported modules.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

AGAIN = 200
Conditions = dict[str, Any]


class Missing(PathFinder):
    """Import hook that hides the modules that are not installed on the emulated machine."""

    names: frozenset[str] = frozenset()

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Return None for missing modules and their submodules."""
        return None if fullname.partition(".")[0] in cls.names else PathFinder.find_spec(fullname, path, target)


def take_away(names: list[str]) -> None:
    """Make modules impossible to import."""
    Missing.names = frozenset(names)
    sys.meta_path[:] = [Missing if finder is PathFinder else finder for finder in sys.meta_path]
    for name in [n for n in sys.modules if n.partition(".")[0] in Missing.names]:
        del sys.modules[name]


def watch(conditions: Conditions, steps: Path) -> None:
    """Add the machine's events to every trainer that this process builds."""
    import torch
    import transformers

    class Events(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
        """The machine's events at each step."""

        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            self.nan(state.global_step + 1, model)
            if conditions.get("kill_in_save") == state.global_step + 1 and once(steps, "kill_in_save"):
                torch.save = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
            if conditions.get("full_disk") == state.global_step + 1:
                torch.save = full

        def nan(self, step: int, model: Any) -> None:
            now = conditions.get("nan") == step and once(steps, "nan")
            if now or conditions.get("always_nan") == step:
                weight = next(p for p in model.parameters() if p.requires_grad)
                weight.register_hook(lambda gradient: gradient * float("nan"))

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            with steps.open("a") as file:
                file.write(f"{state.global_step}\n")
            if len(steps.read_text().split()) >= conditions.get("steps", 1_000_000):
                os.kill(os.getpid(), signal.SIGKILL)
            if conditions.get("kill") == state.global_step and once(steps, "kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            if conditions.get("terminate") == state.global_step and once(steps, "terminate"):
                os.kill(os.getpid(), signal.SIGTERM)

    build, step = transformers.Trainer.__init__, transformers.Trainer.training_step

    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        # Before the trainer's callbacks, so that they notice a signal in the same step.
        self.callback_handler.callbacks.insert(0, Events())

    def stepped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.args.per_device_train_batch_size > conditions.get("oom_above", 1_000_000):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return step(self, *args, **kwargs)

    transformers.Trainer.__init__, transformers.Trainer.training_step = built, stepped


def full(*args: Any, **kwargs: Any) -> None:
    """Fail as a write to a full disk does."""
    raise OSError(errno.ENOSPC, "No space left on device")


def once(steps: Path, name: str) -> bool:
    """Return whether this is the first event of this name on the machine."""
    mark = steps.with_suffix(f".{name}")
    first = not mark.exists()
    mark.touch()
    return first


def furnish(conditions: Conditions, again: Path) -> None:
    """Set up the emulated machine for a process before any library is loaded."""
    take_away(conditions.get("missing", []))
    if "free_gb" in conditions:
        usage = shutil.disk_usage("/")
        free = int(conditions["free_gb"] * 1e9)
        shutil.disk_usage = lambda path: usage._replace(free=free)  # type: ignore[assignment, unused-ignore]

    def execute(path: str, argv: list[str]) -> None:
        again.write_text(json.dumps({"argv": argv[1:], "env": {k: v for k, v in os.environ.items() if "TRAIN_" in k}}))
        sys.stdout.flush()
        os._exit(AGAIN)

    os.execv = execute  # type: ignore[assignment, unused-ignore]


def run(job: dict[str, Any]) -> int:
    """Run one job in this process; return its exit code."""
    from trainer_zygote import run as run_script

    os.chdir(job["cwd"])
    os.environ.update(job["env"])
    for name in job.get("unset", ()):
        os.environ.pop(name, None)
    conditions, steps = job["conditions"], Path(job["steps"])
    furnish(conditions, Path(job["again"]))
    watch(conditions, steps)
    return run_script(job)


def main() -> None:
    """Serve jobs until the input ends."""
    from forked import preload, serve

    preload(
        "albumentations datasets peft torch",
        transformers="AutoModelForCausalLM AutoModelForImageClassification ViTForImageClassification "
        "ViTImageProcessorPil Qwen2ForCausalLM",
        trl="SFTTrainer DPOTrainer GRPOTrainer",
    )
    serve(run)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(run(json.loads(Path(sys.argv[1]).read_text())))
    main()
