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
"""Distill a large language model (the teacher) into a small one (the student), using the student's answers.

Rows: `prompt`. The teacher scores each token of the student's answers; both need the same tokenizer.

    uv run distill.py --model Qwen/Qwen3-0.6B --teacher Qwen/Qwen3-4B --dataset questions.jsonl --steps 200

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
from gputrain.outcome import Exit, Stop, why_not_loaded
from gputrain.rewards import GeneratingSettings, check_prompts
from gputrain.rows import Data, load
from gputrain.settings import option
from gputrain.smoke import smoke_text, turn
from gputrain.text import dtype_of, load_model, load_tokenizer, lora
from gputrain.training import arguments, run

# Sets of columns that the method can read, and columns that it uses if they exist.
WANTED = (("prompt",),)
ALSO = ()


@dataclass
class DistillSettings(GeneratingSettings):
    """On-policy distillation."""

    teacher: str = option("", "model to learn from: Hub id or folder")
    learning_rate: float = option(1e-5, "peak learning rate", least=0, most=1)
    beta: float = option(1.0, "0: forward KL, 1: reverse KL, in between: a mixture", least=0, most=1)

    def check(self) -> None:
        """Raise Stop if a required setting is missing or settings contradict each other."""
        super().check()
        if not self.teacher:
            raise Stop(Exit.CONFIG, "teacher is not set", "pass --teacher ID_OR_FOLDER")


def need_same_tokens(settings: DistillSettings, tokenizer: Any) -> None:
    """Raise Stop if the teacher's vocabulary differs from the student's."""
    from transformers import AutoTokenizer

    try:
        theirs = AutoTokenizer.from_pretrained(settings.teacher)
    except Exception as error:
        raise why_not_loaded(settings.teacher, error) from error
    if theirs.get_vocab() != tokenizer.get_vocab():
        message = f"{settings.teacher} and {settings.model} have different vocabularies"
        raise Stop(Exit.CONFIG, message, "use a teacher of the same family")


def read(settings: DistillSettings) -> Data:
    """Read the rows. For another format, pass `convert` to `load`: it returns one row with the columns of WANTED."""
    return load(settings, WANTED, ALSO)


def build(settings: DistillSettings, plan: Plan, data: Data) -> Any:
    """Return the trainer."""
    tokenizer = load_tokenizer(settings, data)
    need_same_tokens(settings, tokenizer)
    check_prompts(settings, tokenizer, data)
    from transformers import AutoModelForCausalLM
    from trl import DistillationConfig, DistillationTrainer

    args = DistillationConfig(
        **arguments(settings, plan, data),
        max_completion_length=settings.max_completion_length,
        temperature=settings.temperature,
        beta=settings.beta,
    )
    try:
        teacher = AutoModelForCausalLM.from_pretrained(settings.teacher, dtype=dtype_of(plan, trained=False))
    except Exception as error:
        raise why_not_loaded(settings.teacher, error) from error
    return DistillationTrainer(
        model=load_model(settings, plan, AutoModelForCausalLM),
        teacher_model=teacher,
        args=args,
        train_dataset=data.train,
        eval_dataset=data.held_out,
        processing_class=tokenizer,
        peft_config=lora(settings),
    )


def example(index: int, text: str) -> dict[str, Any]:
    """Return a row for a smoke run, in the format that `read` expects."""
    return {"prompt": turn("user", text)}


if __name__ == "__main__":
    sys.exit(
        run(
            DistillSettings,
            "distill",
            read,
            build,
            smoke_text(example, "--teacher", "{}/teacher", "--max-completion-length", "8"),
        )
    )
