"""Callbacks that break a run at the step in FAULT_STEP, given to a trainer as `--callback trainer_faults.py:Class`."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from transformers import TrainerCallback

STEP = int(os.environ.get("FAULT_STEP", "0"))


class Killed(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Kill the process, as the loss of its machine does."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == STEP:
            os.kill(os.getpid(), signal.SIGKILL)


class Held(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Block in the first attempt, so that the machine is preempted at a known step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        while state.global_step == STEP and os.environ.get("GPUWARDEN_ATTEMPT") == "1":
            time.sleep(60)


class KilledInSave(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Kill the process in the middle of a save, after the weights and before the optimizer are written."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == STEP - 1:
            torch.save = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)


class Terminated(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Send the signal in FAULT_SIGNAL."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == STEP - 1:
            os.kill(os.getpid(), getattr(signal, os.environ["FAULT_SIGNAL"]))


class LauncherTold(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Send the signal in FAULT_SIGNAL to the process that started the training processes."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == STEP - 1 and os.environ["RANK"] == "0":
            os.kill(int(os.environ["TRAIN_LAUNCHER"]), getattr(signal, os.environ["FAULT_SIGNAL"]))


class NotFinite(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Make one gradient NaN."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == STEP - 1:
            weight = next(p for p in model.parameters() if p.requires_grad)
            weight.register_hook(lambda gradient: gradient * float("nan"))


class OutOfMemory(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Raise PyTorch's out-of-memory error, until the run is restarted."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == STEP - 1 and (not os.environ.get("TRAIN_RESTARTED") or os.environ.get("FAULT_ALWAYS")):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Filled(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Fill the disk that contains the file in FAULT_FILLS."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == STEP - 1:
            with open(os.environ["FAULT_FILLS"], "wb", buffering=0) as file:
                for size in (1 << 20, 1 << 12, 1):
                    try:
                        while file.write(bytes(size)) == size:
                            pass
                    except OSError:
                        continue
