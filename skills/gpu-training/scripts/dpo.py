# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#   "torch>=2.13,<2.16",  # tensors, GPU support
#   "transformers>=5.23,<6",  # model, tokenizer and Trainer
#   "trl>=1.16,<1.20",  # training method
#   "datasets>=5.2,<6",  # reads jsonl, csv, parquet and Hub datasets
#   "accelerate>=1.15,<2",  # required by the Trainer; multi-GPU training
#   "peft>=0.21,<1",  # LoRA adapters
#   "safetensors>=0.5,<1",  # the format of the weights
#   "huggingface_hub>=2.4,<3",  # upload to the Hub
#   "PyYAML>=6.0.2,<7",  # reads settings from a file
#   "sentencepiece>=0.2,<1",  # tokenizers of Llama 2, Gemma and T5; transformers imports it when needed
#   "protobuf>=5,<8",  # needed by the same tokenizers
#   "tensorboard>=2.20,<3",  # writes training curves to a folder
#   "trackio>=0.20,<1",  # shows training curves in a browser
#   "bitsandbytes>=0.48,<1; sys_platform == 'linux'",  # 4-bit weights
# ]
# ///
"""Align a language model with pairs of a preferred and a rejected answer (DPO).

Rows: `chosen` + `rejected`, with or without `prompt`.

    uv run dpo.py --model Qwen/Qwen3-0.6B --dataset pairs.jsonl --steps 500

The folder `gputrain` next to this script has the code that all trainers share.

Exit codes: 0 done, 2 invalid settings, 3 invalid data, 4 out of memory, 5 diverged, 6 machine or access problem, 7 push
failed, 75 interrupted (the same command resumes the run). `--help` lists the settings. Each setting is also a key of
`--config FILE` and an environment variable TRAIN_NAME. In this file, `option` defines a setting's default, help text
and allowed values.
"""

import sys
from dataclasses import dataclass
from typing import Any

from gputrain.hardware import Plan
from gputrain.rows import Data, load
from gputrain.settings import option
from gputrain.smoke import smoke_text, turn
from gputrain.text import TextSettings, check_lengths, load_model, load_tokenizer, lora
from gputrain.training import arguments, run

# Sets of columns that the method can read, and columns that it uses if they exist.
WANTED = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))
ALSO = ()


@dataclass
class DpoSettings(TextSettings):
    """Direct preference optimization."""

    learning_rate: float = option(5e-6, "peak learning rate", least=0, most=1)
    beta: float = option(0.1, "higher values keep the model closer to the reference model", least=0)


def read(settings: DpoSettings) -> Data:
    """Read the rows. For another format, pass `convert` to `load`: it returns one row with the columns of WANTED."""
    return load(settings, WANTED, ALSO)


def build(settings: DpoSettings, plan: Plan, data: Data) -> Any:
    """Return the trainer."""
    tokenizer = load_tokenizer(settings, data)
    check_lengths(settings, tokenizer, data)
    from transformers import AutoModelForCausalLM
    from trl import DPOConfig, DPOTrainer

    args = DPOConfig(
        **arguments(settings, plan, data),
        loss_type=["sigmoid"],
        beta=settings.beta,
        max_length=settings.max_length,
    )
    return DPOTrainer(
        model=load_model(settings, plan, AutoModelForCausalLM),
        args=args,
        train_dataset=data.train,
        eval_dataset=data.held_out,
        processing_class=tokenizer,
        peft_config=lora(settings),
    )


def example(index: int, text: str) -> dict[str, Any]:
    """Return a row for a smoke run, in the format that `read` expects."""
    return {"prompt": turn("user", text), "chosen": turn("assistant", text[::-1]), "rejected": turn("assistant", "a")}


if __name__ == "__main__":
    sys.exit(run(DpoSettings, "dpo", read, build, smoke_text(example)))
