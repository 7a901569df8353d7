"""Estimates: intervals that contain what is known to be so, and say how they were made."""

from __future__ import annotations

import pytest

from gpuwarden.core.hardware import GPUS
from gpuwarden.scripts.estimate import Method, Run, duration, run_of, vram
from gpuwarden.scripts.script import read_script

# Parameters in billions, method, gigabytes of a GPU, whether it is known to fit with batch 1 and checkpointing. The
# sizing table of the training facts: what people run, and what fails.
FITS: list[tuple[float, Method, int, bool]] = [
    (0.5, "full", 16, True),
    (1.0, "full", 24, True),
    (3.0, "qlora", 16, True),
    (8.0, "qlora", 24, True),
    (4.0, "full", 80, True),
    (70.0, "qlora", 80, True),
    (14.0, "lora", 80, True),
    (7.0, "full", 24, False),
    (13.0, "full", 80, False),
    (70.0, "lora", 80, False),
    (3.0, "full", 24, False),
]


@pytest.mark.parametrize(("billions", "method", "gb", "fits"), FITS)
def test_memory_agrees_with_what_is_known_to_fit(billions: float, method: Method, gb: int, fits: bool) -> None:
    need = vram(Run(params=int(billions * 1e9), method=method, batch=1, length=1024, checkpointing=True))
    assert need.low < need.high
    if fits:
        assert need.low <= gb
    else:
        assert need.high > gb
    assert "30 % wrong" in need.how


def test_memory_grows_with_what_makes_it_grow() -> None:
    base = Run(params=1_000_000_000, batch=2, length=1024, checkpointing=True)

    def high(**change: object) -> float:
        return vram(base.model_copy(update=change)).high

    assert high(batch=8) > high()
    assert high(length=4096) > high()
    assert high(checkpointing=False) > high()
    assert high(method="lora") < high()
    assert high(method="qlora") < high(method="lora")
    assert high(half_weights=True) < high()
    assert high(task="dpo") > high()
    assert high(eight_bit_optimizer=True) < high()


def test_time_and_money() -> None:
    run = Run(params=500_000_000, batch=2, accumulate=8, length=1024, max_steps=1000)
    time = duration(run, GPUS["a10g"])
    assert time is not None
    assert 60 < time.low < time.high
    fast = duration(run, GPUS["h100"])
    assert fast is not None
    assert fast.high < time.high
    assert duration(run.model_copy(update={"task": "detection"}), GPUS["a10g"]) is None
    assert duration(run.model_copy(update={"max_steps": None}), GPUS["a10g"]) is None


def test_a_run_is_read_from_a_script() -> None:
    script = """
from peft import LoraConfig
from transformers import BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer
BitsAndBytesConfig(load_in_4bit=True)
SFTTrainer(model="a/b", peft_config=LoraConfig(), args=SFTConfig(
    per_device_train_batch_size=3, gradient_accumulation_steps=5, max_length=700, max_steps=11, optim="adamw_8bit"))
"""
    run = run_of(read_script(script).uses, 10, 100, 2)
    assert (run.method, run.task, run.batch, run.accumulate, run.length) == ("qlora", "sft", 3, 5, 700)
    assert (run.max_steps, run.gpus, run.eight_bit_optimizer, run.checkpointing) == (11, 2, True, True)


def test_hidden_settings_don_t_break_it() -> None:
    script = "from trl import SFTConfig, SFTTrainer\nSFTTrainer(model=m, args=SFTConfig(**cfg, max_steps=n, optim=o, max_length=l))"  # noqa: E501
    run = run_of(read_script(script).uses, 1_000_000, None, 1)
    assert vram(run).high > 0
    assert duration(run, GPUS["t4"]) is None
