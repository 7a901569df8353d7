"""Limit transformers and Lightning trainers to one step, save and resume, on the CPU, without experiment trackers."""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any, Dict, List

from gpuwarden.remote.first_step.child.record import Record

TOKENS, ROWS, EVALUATED = 128, 2, 8
_NEW_TOKENS = 8
_OFF: Dict[str, Any] = {
    "deepspeed": None, "fsdp": None, "fsdp_config": None, "use_vllm": False, "torch_compile": False, "tf32": None,
    "use_liger_kernel": False, "dataloader_num_workers": 0, "dataloader_prefetch_factor": None,
    "dataloader_persistent_workers": False, "dataset_num_proc": None, "ddp_backend": None,
}  # fmt: skip


def patch_arguments(record: Record, module: ModuleType) -> None:
    """Patch `transformers.training_args`: disable trainer settings that need a GPU or a network."""
    kind = module.TrainingArguments
    original = kind.__post_init__

    def post_init(self: Any) -> None:
        for name, off in _OFF.items():
            if getattr(self, name, off) not in (off, None, False, 0, ""):
                record.replaced(f"setting {name}", "off")
            if hasattr(self, name):
                setattr(self, name, off)
        if hasattr(self, "use_cpu"):
            self.use_cpu = True
        if getattr(self, "fp16", False):
            self.fp16 = False
            record.replaced("setting fp16", "off")
        if str(getattr(self, "report_to", "")) not in ("none", "None", "[]"):
            record.replaced("setting report_to", "none")
        self.report_to = "none"
        original(self)
        record.at("arguments")
        if "8bit" in str(self.optim) or "4bit" in str(self.optim) or "paged" in str(self.optim):
            record.replaced(f"optimizer {getattr(self.optim, 'value', self.optim)}", "adamw_torch")
            self.optim = module.OptimizerNames.ADAMW_TORCH

    kind.__post_init__ = post_init


def patch_trainer(record: Record, module: ModuleType) -> None:
    """Patch `transformers.trainer`: train one step, resume from the checkpoint, and evaluate only a few rows."""
    kind = module.Trainer
    train, evaluate = kind.train, kind.evaluate

    def lowered(original: Any) -> Any:
        @functools.wraps(original)
        def new_init(self: Any, *args: Any, **given: Any) -> None:
            settings = given.get("args") or next((a for a in args if hasattr(a, "per_device_train_batch_size")), None)
            if settings is not None:
                lower(settings)
            original(self, *args, **given)
            record.at("trainer")

        return new_init

    def subclass(cls: Any, /, **given: Any) -> None:
        if "__init__" in vars(cls):  # trl's trainers copy settings before they call the base class
            cls.__init__ = lowered(cls.__init__)

    def new_train(self: Any, *args: Any, **given: Any) -> Any:
        settings = self.args
        strategy = str(getattr(settings.save_strategy, "value", settings.save_strategy))
        record.unsaved = f"save_strategy={strategy!r}" if strategy == "no" else None
        record.frozen = not any(p.requires_grad for p in self.model.parameters())
        for name in ("num_train_epochs", "max_steps", "save_steps", "eval_steps", "logging_steps"):
            value = getattr(settings, name, None)  # fail as the library would, because the values are replaced below
            assert value is None or value < 1 or value >= 1, f"{name} is {value}"
        lower(settings)
        settings.max_steps, settings.logging_steps = 1, 1
        if strategy == "steps":
            settings.save_steps = 1
        if str(getattr(settings.eval_strategy, "value", settings.eval_strategy)) == "steps":
            settings.eval_steps = 1
        done = train(self, *args, **given)
        record.at("step")
        saved = checkpoints(settings.output_dir)
        if saved:
            record.at("save")
            settings.max_steps, record.resumed = 2, False
            record.at("resume")
            train(self, resume_from_checkpoint=saved[-1])
            record.resumed = True
        return done

    def new_evaluate(self: Any, eval_dataset: Any = None, *args: Any, **given: Any) -> Any:
        whole = self.eval_dataset
        self.eval_dataset = few(whole, self.args)  # restored afterwards, because scripts use its length
        try:
            return evaluate(self, eval_dataset, *args, **given)
        finally:
            self.eval_dataset = whole

    kind.__init__, kind.train, kind.evaluate = lowered(kind.__init__), new_train, new_evaluate
    kind.__init_subclass__ = classmethod(subclass)


def lower(settings: Any) -> None:
    """Reduce the sizes in a trainer's settings, after the library has checked the script's values."""
    if not hasattr(settings, "num_generations"):
        settings.per_device_train_batch_size = min(settings.per_device_train_batch_size, ROWS)
        settings.gradient_accumulation_steps = min(settings.gradient_accumulation_steps, 2)
    group = max(getattr(settings, name, None) or 1 for name in ("num_generations", "num_generations_eval"))
    settings.per_device_eval_batch_size = min(settings.per_device_eval_batch_size, max(ROWS, group))
    for name, most in (("max_length", TOKENS), ("max_prompt_length", TOKENS), ("max_completion_length", _NEW_TOKENS),
                       ("generation_max_length", TOKENS), ("max_new_tokens", _NEW_TOKENS)):  # fmt: skip
        value = getattr(settings, name, None)
        if isinstance(value, int):
            setattr(settings, name, min(value, most))


def few(rows: Any, settings: Any) -> Any:
    """Return the first rows of an evaluation dataset, or of each dataset in a dict."""
    if isinstance(rows, dict):
        return {name: few(some, settings) for name, some in rows.items()}
    group = max(getattr(settings, name, None) or 1 for name in ("num_generations", "num_generations_eval"))
    most = max(EVALUATED, group)
    return rows.select(range(most)) if hasattr(rows, "select") and len(rows) > most else rows


def checkpoints(folder: str) -> List[str]:
    """Return the checkpoints in a folder, oldest first."""
    names = [n for n in os.listdir(folder) if n.startswith("checkpoint-")] if os.path.isdir(folder) else []
    return [os.path.join(folder, n) for n in sorted(names, key=lambda n: (len(n), n))]


def patch_lightning(record: Record, module: ModuleType) -> None:
    """Patch Lightning's `Trainer`: run one batch on the CPU."""
    kind = module.Trainer
    init = kind.__init__

    def new_init(self: Any, *args: Any, **given: Any) -> None:
        init(self, *args, **{**given, "accelerator": "cpu", "devices": 1, "strategy": "auto", "precision": "32-true",
                             "num_nodes": 1, "max_epochs": 1, "limit_train_batches": 1, "limit_val_batches": 1,
                             "limit_test_batches": 1, "logger": False, "max_steps": -1})  # fmt: skip
        record.at("trainer")
        record.replaced("GPU", "the CPU")

    new_init.__wrapped__ = init  # type: ignore[attr-defined]
    kind.__init__ = new_init
