# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#   "torch>=2.13,<2.16",  # arrays, GPU
#   "transformers>=5.23,<6",  # model, tokenizer, Trainer
#   "trl>=1.16,<1.20",  # the method
#   "datasets>=5.2,<6",  # jsonl, csv, parquet, Hub
#   "accelerate>=1.15,<2",  # the Trainer runs on it; several GPUs
#   "peft>=0.21,<1",  # adapters (LoRA)
#   "safetensors>=0.5,<1",  # the form of the weights
#   "huggingface_hub>=2.4,<3",  # the push
#   "PyYAML>=6.0.2,<7",  # settings from a file
#   "sentencepiece>=0.2,<1",  # tokenizers of Llama 2, Gemma, T5, loaded without a visible import
#   "protobuf>=5,<8",  # the same tokenizers
#   "tensorboard>=2.20,<3",  # curves in a folder
#   "trackio>=0.20,<1",  # curves in a browser
#   "bitsandbytes>=0.48,<1; sys_platform == 'linux'",  # weights in 4 bits
# ]
# ///
"""Align a language model with pairs of a preferred and a rejected answer (DPO).

Rows: `chosen` + `rejected`, with or without `prompt`.

    uv run dpo.py --model Qwen/Qwen3-0.6B --dataset pairs.jsonl --steps 500

Exit codes: 0 done, 2 settings, 3 data, 4 memory, 5 diverged, 6 machine or access, 7 push, 75 interrupted (the same
command resumes). `--help` lists the settings; each is also a key of `--config FILE` and a variable TRAIN_NAME.
"""

import sys
from dataclasses import dataclass
from typing import Any

from trainers.common.hardware import Plan
from trainers.common.rows import Data, load
from trainers.common.settings import option
from trainers.common.smoke_text import smoke_text, turn
from trainers.common.text import TextSettings, check_lengths, load_model, load_tokenizer, lora
from trainers.common.training import arguments, run

WANTED = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))
ALSO = ()


@dataclass
class DpoSettings(TextSettings):
    """Direct preference optimization."""

    learning_rate: float = option(5e-6, "peak learning rate", least=0, most=1)
    beta: float = option(0.1, "how closely to stay with the reference model", least=0)


def build(settings: DpoSettings, plan: Plan, data: Data) -> Any:
    """Return the trainer."""
    tokenizer = load_tokenizer(settings, data)
    check_lengths(settings, tokenizer, data)
    from transformers import AutoModelForCausalLM
    from trl import DPOConfig, DPOTrainer

    args = DPOConfig(**arguments(settings, plan, data), max_length=settings.max_length, beta=settings.beta)
    return DPOTrainer(
        model=load_model(settings, plan, AutoModelForCausalLM),
        args=args,
        train_dataset=data.train,
        eval_dataset=data.held_out,
        processing_class=tokenizer,
        peft_config=lora(settings),
    )


def example(index: int, text: str) -> dict[str, Any]:
    """Return a row of a smoke run."""
    return {"prompt": turn("user", text), "chosen": turn("assistant", text[::-1]), "rejected": turn("assistant", "a")}


if __name__ == "__main__":
    sys.exit(run(DpoSettings, "dpo", lambda settings: load(settings, WANTED, ALSO), build, smoke_text(example)))
