"""Write the outputs of transformers' Trainer and TRL's trainers after a few steps of a tiny model."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from healthy import configuration, family
from healthy.hub_models import build, tokenizer
from healthy.torch_files import torch

_COMMON: dict[str, Any] = {
    "max_steps": 4,
    "save_steps": 2,
    "per_device_train_batch_size": 2,
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "bf16": False,
    "logging_steps": 1,
}
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "SGD": {"optim": "sgd"},
    "Adafactor": {"optim": "adafactor"},
    "RMSprop": {"optim": "rmsprop"},
    "cosine": {"lr_scheduler_type": "cosine", "warmup_steps": 1},
    "accumulation": {"gradient_accumulation_steps": 2},
    "torch files": {"save_only_model": False, "optim": "adamw_torch_fused"},
    "only the model": {"save_only_model": True},
    "last two": {"save_total_limit": 2, "save_steps": 1},
    "best": {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True},
    "reduce on plateau": {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "neftune": {"neftune_noise_alpha": 5.0},
    "weight decay, groups": {"weight_decay": 0.1, "max_grad_norm": 0.5},
    "epochs": {"max_steps": -1, "num_train_epochs": 1, "save_strategy": "epoch"},
}


def rows(count: int = 8) -> Any:
    from datasets import Dataset

    ids = [[1, 5, 9, 7, 2, 3, 4, 6]] * count
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def trained(at: Path, name: str = "Llama", peft: Any = None, **more: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    torch().set_num_threads(1)
    made = build(name)
    if peft is not None:
        from peft import get_peft_model

        made = get_peft_model(made, peft)
    args = TrainingArguments(output_dir=str(at), **(_COMMON | more))
    trainer = Trainer(model=made, args=args, train_dataset=rows(), eval_dataset=rows(2), processing_class=tokenizer())
    trainer.train()
    return trainer


@family(
    "Trainer", {n: n for n in RUNS if n != "only the model"}, "torch", "transformers", "datasets", "accelerate", step=4
)
def run(at: Path, name: str) -> None:
    trained(at, **RUNS[name])


@configuration("Trainer: only the model", "torch", "transformers", "datasets", "accelerate")
def only_model(at: Path) -> None:
    trained(at, **RUNS["only the model"])


@configuration(
    "Trainer: save_model and save_state in the root", "torch", "transformers", "datasets", "accelerate", step=4
)
def root_state(at: Path) -> None:
    trainer = trained(at)
    trainer.save_model(str(at))
    trainer.save_state()


@configuration("Trainer: model card, metrics and tokenizer", "torch", "transformers", "datasets", "accelerate", step=4)
def root_files(at: Path) -> None:
    trainer = trained(at, "Qwen2 tied")
    trainer.save_model()
    trainer.save_metrics("train", {"loss": 1.5})
    trainer.create_model_card(model_name="tiny")


@family(
    "Trainer with",
    ("GPT-2", "T5", "Gemma2", "Mixtral", "Mamba"),
    "torch",
    "transformers",
    "datasets",
    "accelerate",
    step=4,
)
def run_of(at: Path, name: str) -> None:
    trained(at, name)


@configuration("Trainer with LoRA", "torch", "transformers", "datasets", "accelerate", "peft", step=4)
def run_lora(at: Path) -> None:
    from peft import LoraConfig

    trained(at, peft=LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])).save_model()


@configuration("Trainer with bitsandbytes", "torch", "transformers", "datasets", "accelerate", "bitsandbytes", step=4)
def run_8bit(at: Path) -> None:
    trained(at, optim="adamw_bnb_8bit")


# --------------------------------------------------------------------------------------------------------------- TRL

PAIRS = [{"prompt": "the cat", "chosen": " sat on", "rejected": " the mat"}] * 8
TRL: dict[str, tuple[str, str, list[dict[str, Any]], dict[str, Any]]] = {
    "sft": ("trl", "SFT", [{"text": "the cat sat on the mat"}] * 8, {"max_length": 32}),
    "sft packed": ("trl", "SFT", [{"text": "the cat sat on the mat"}] * 40, {"max_length": 32, "packing": True}),
    "dpo": ("trl", "DPO", PAIRS, {"max_length": 32}),
    "kto": (
        "trl",
        "KTO",
        [{"prompt": "the cat", "completion": " sat on", "label": b} for b in (True, False)] * 4,
        {"max_length": 32},
    ),
    "reward": ("trl", "Reward", PAIRS, {"max_length": 32}),
    "grpo": ("trl", "GRPO", [{"prompt": "the cat"}] * 8, {"max_completion_length": 8, "num_generations": 2}),
    "rloo": ("trl", "RLOO", [{"prompt": "the cat"}] * 8, {"max_completion_length": 8, "num_generations": 2}),
    "orpo": ("trl.experimental.orpo", "ORPO", PAIRS, {"max_length": 32}),
    "cpo": ("trl.experimental.cpo", "CPO", PAIRS, {"max_length": 32}),
}


def _trl(at: Path, name: str, lora: bool) -> None:
    import importlib

    from datasets import Dataset
    from peft import LoraConfig

    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    torch().set_num_threads(1)
    module, kind, data, more = TRL[name]
    home = importlib.import_module(module)
    args = getattr(home, f"{kind}Config")(output_dir=str(at), **(_COMMON | more))
    extra: dict[str, Any] = {}
    if name in ("grpo", "rloo"):
        extra["reward_funcs"] = lambda completions, **_: [float(len(c)) for c in completions]
    task = "SEQ_CLS" if name == "reward" else "CAUSAL_LM"
    if lora:
        extra["peft_config"] = LoraConfig(task_type=task, r=4, target_modules=["q_proj", "v_proj"])
    made = build("Llama classifier", num_labels=1) if name == "reward" else build("Qwen2")
    with tempfile.TemporaryDirectory() as base:
        # Trainers load the reference model from the path that is stored as the model's name.
        made.save_pretrained(base)
        made.config._name_or_path = base
        getattr(home, f"{kind}Trainer")(
            model=made, args=args, train_dataset=Dataset.from_list(data), processing_class=tokenizer(), **extra
        ).train()


_NEEDS = ("torch", "transformers", "datasets", "accelerate", "peft", "trl")


@family("TRL", {n: n for n in TRL}, *_NEEDS, step=4)
def trl_run(at: Path, name: str) -> None:
    _trl(at, name, lora=False)


@family("TRL with LoRA", ("sft", "dpo", "grpo", "reward"), *_NEEDS, step=4)
def trl_lora(at: Path, name: str) -> None:
    _trl(at, name, lora=True)
