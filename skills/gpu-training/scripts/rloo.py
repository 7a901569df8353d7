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
"""Improve a language model by reinforcement learning from a reward model or function (RLOO).

Rows: `prompt`, and the columns that the rewards read. Use this method for RLHF: TRL 1.16 removed PPO, and REINFORCE
with a leave-one-out baseline is its replacement. Train the reward model with reward.py.

    uv run rloo.py --model Qwen/Qwen3-0.6B --dataset questions.jsonl --reward answer --steps 200

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
from gputrain.rewards import OnlineSettings, check_prompts, load_rewards, rollout
from gputrain.rows import ALL, Data, load
from gputrain.settings import option
from gputrain.smoke import smoke_text, turn
from gputrain.text import load_model, load_tokenizer, lora
from gputrain.training import arguments, run

# Sets of columns that the method can read, and columns that it uses if they exist.
WANTED = (("prompt",),)
ALSO = (ALL, "answer")


@dataclass
class RlooSettings(OnlineSettings):
    """REINFORCE leave-one-out."""

    generations: int = option(4, "number of answers to generate and compare for each prompt", least=2)
    beta: float = option(0.05, "weight of the penalty for the distance to the reference model", least=0)


def read(settings: RlooSettings) -> Data:
    """Read the rows. For another format, pass `convert` to `load`: it returns one row with the columns of WANTED."""
    return load(settings, WANTED, ALSO)


def build(settings: RlooSettings, plan: Plan, data: Data) -> Any:
    """Return the trainer."""
    rewards = load_rewards(settings, data)
    tokenizer = load_tokenizer(settings, data)
    check_prompts(settings, tokenizer, data)
    from transformers import AutoModelForCausalLM
    from trl import RLOOConfig, RLOOTrainer

    return RLOOTrainer(
        model=load_model(settings, plan, AutoModelForCausalLM),
        reward_funcs=rewards,
        args=RLOOConfig(**arguments(settings, plan, data), **rollout(settings, plan)),
        train_dataset=data.train,
        eval_dataset=data.held_out,
        processing_class=tokenizer,
        peft_config=lora(settings),
    )


def example(index: int, text: str) -> dict[str, Any]:
    """Return a row for a smoke run, in the format that `read` expects."""
    return {"prompt": turn("user", text), "answer": text[0]}


if __name__ == "__main__":
    sys.exit(
        run(
            RlooSettings,
            "rloo",
            read,
            build,
            smoke_text(example, "--reward", "letters", "--generations", "2", "--max-completion-length", "8"),
        )
    )
