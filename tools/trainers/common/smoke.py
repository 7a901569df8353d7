"""Smoke runs: a tiny random model and made-up rows try the script and the machine without a download."""

import argparse
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainers.common.folder import put_in_place
from trainers.common.outcome import say

ROWS = 48
NOUNS = ("cat", "dog", "tree", "sun", "one", "two", "three", "four", "five", "six")
WORDS = ("how", "much", "is", "plus", "times", "red", "green", "blue", "the", "of", "a", "and", "what", *NOUNS)
# Two checkpoints, in seconds on a CPU.
SHORT = ("--steps", "8", "--save-steps", "4", "--batch-size", "4", "--micro-batch", "2", "--logging-steps", "1")
MODEL, DATA = "model", "data.jsonl"


@dataclass(frozen=True)
class Smoke:
    """Inputs of `--smoke`. `make` writes them into a folder; `flags` are the run's, with `{}` for that folder."""

    make: Callable[[Path], None]
    flags: tuple[str, ...]
    trains: bool = True


def sentences() -> list[str]:
    """Return short texts that differ from each other."""
    size = len(WORDS)
    return [" ".join(WORDS[(i * 7 + j * (i % 5 + 1)) % size] for j in range(3 + i % 4)) for i in range(ROWS)]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def with_inputs(words: list[str], smoke: Smoke) -> list[str]:
    """Return a command line that begins with a smoke run's flags, and write its inputs; others stay as they are."""
    ask = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    ask.add_argument("--smoke", action="store_true")
    ask.add_argument("--out", default="smoke")
    known, _ = ask.parse_known_args(words)
    if not known.smoke:
        return words
    import torch

    inputs = Path(known.out) / "inputs"
    if not inputs.exists():
        making = inputs.with_name(f".{inputs.name}")
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
        smoke.make(making)
        put_in_place(making, inputs)
    say(f"smoke run on made-up inputs in {inputs}")
    device = ("--cpu",) if smoke.trains and not torch.cuda.is_available() else ()
    return ["--out", known.out, *device, *(flag.format(inputs) for flag in smoke.flags), *words]
