"""Smoke runs: test the script and the machine with a tiny random model and made-up rows, without downloads."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gputrain.folder import put_in_place
from gputrain.outcome import Exit, Stop, say
from gputrain.settings import convert, values_given

ROWS = 48
NOUNS = ("cat", "dog", "tree", "sun", "one", "two", "three", "four", "five", "six")
WORDS = ("how", "much", "is", "plus", "times", "red", "green", "blue", "the", "of", "a", "and", "what", *NOUNS)
# A run with two checkpoints, which takes seconds on a CPU.
SHORT = ("--steps", "8", "--save-steps", "4", "--batch-size", "4", "--micro-batch", "2", "--logging-steps", "1")
MODEL, DATA = "model", "data.jsonl"
# Settings for other inputs and for the push. A smoke run overrides them, because it downloads and uploads nothing.
LEFT_OUT = {
    "dataset_config": "", "split": "train", "eval_dataset": "", "eval_split": "", "columns": "",
    "chat_template_from": "", "hub_model_id": "",
}  # fmt: skip


@dataclass(frozen=True)
class Smoke:
    """Inputs for `--smoke`. `make` writes them into a folder; in `flags`, `{}` stands for that folder."""

    make: Callable[[Path], None]
    flags: tuple[str, ...]
    trains: bool = True


def sentences() -> list[str]:
    """Return short, distinct texts."""
    size = len(WORDS)
    return [" ".join(WORDS[(i * 7 + j * (i % 5 + 1)) % size] for j in range(3 + i % 4)) for i in range(ROWS)]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def with_inputs(kind: type, words: list[str], smoke: Smoke) -> list[str]:
    """Return a smoke run's command line, and write its inputs; return any other command line unchanged.

    The smoke run's inputs come last, so that `--smoke` after a complete command tests that command with them.
    """
    values = values_given(kind, words)
    if not convert("smoke", bool, values.get("smoke", False)):
        return words
    out = str(values.get("out", "smoke"))
    inputs = Path(out) / "inputs"
    try:
        write_inputs(inputs, smoke)
    except OSError as error:
        message = f"the smoke run's inputs can't be written to {inputs}: {error.strerror}"
        raise Stop(Exit.ENVIRONMENT, message, "choose another --out, or move that folder away") from None
    made = {f: v.format(inputs) for f, v in zip(smoke.flags, smoke.flags[1:], strict=False) if "{}" in v}
    fixed = made | {f"--{n.replace('_', '-')}": v for n, v in LEFT_OUT.items() if n in kind.__dataclass_fields__}
    unused = [n for n, v in values.items() if f"--{n.replace('_', '-')}" in fixed and v != LEFT_OUT.get(n)]
    say(f"smoke run on made-up inputs in {inputs}" + (f"; not used: {', '.join(sorted(unused))}" if unused else ""))
    last = [word for pair in fixed.items() for word in pair]
    return ["--out", out, *(["--cpu"] if smoke.trains and not has_gpu() else []), *smoke.flags, *words, *last]


def has_gpu() -> bool:
    """Return whether PyTorch finds a GPU."""
    import torch

    return torch.cuda.is_available()


def write_inputs(inputs: Path, smoke: Smoke) -> None:
    """Write a smoke run's inputs into a folder, unless an earlier run has written them."""
    if inputs.exists():
        return
    making = inputs.with_name(f".{inputs.name}")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    smoke.make(making)
    put_in_place(making, inputs)
