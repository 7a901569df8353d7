"""Train with a shipped trainer on this machine's GPU, and record its peak memory and speed.

    python tools/measure_gpu.py TRAINER --model ID --dataset ID [--steps N] [--here] [--at FILE] [-- more flags]
    python tools/measure_gpu.py --table [--write references/hardware.md]

The trainer runs with `uv run`, as in a job, or, with `--here`, in this interpreter with its libraries. The result is
appended as a line to `references/measured-gpus.jsonl`, which corrects the submit gate's estimates; `--at` names another
file. Use a run on a CPU (`--here --at FILE -- --cpu`) to test the command; it can't be recorded in the default file.
`--table` prints the measured runs next to gpuwarden's estimates, and "not measured" for trainers without a run.

Exit code: 0 if the run was recorded; 1, with the reason, if it can't be recorded; otherwise the trainer's exit code.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from gpuwarden.core.hardware import gpu_of
from gpuwarden.static_analysis.estimate.memory import vram
from gpuwarden.static_analysis.estimate.setup import run_measured
from gpuwarden.static_analysis.measured import CPU, Measured, measured_file, read_measured
from gpuwarden.static_analysis.shipped_trainers import trainer_file, trainer_names

MARKS = ("<!-- generated:measured-gpus -->", "<!-- /generated -->")
LEAST = 10
TASKS = {"cpt": "sft", "distill": "sft", "image_classification": "classification", "object_detection": "detection"}
NEVER = "not measured"
COLUMNS = ("trainer", "model", "run", "card", "date", "peak memory", "estimate", "tokens/s", "rows/s")


def main(words: Sequence[str] | None = None) -> int:
    """Measure one run, or print the table."""
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("trainer", nargs="?", choices=trained())
    ask.add_argument("--model")
    ask.add_argument("--dataset")
    ask.add_argument("--steps", type=int, default=30, help=f"optimizer steps, at least {LEAST} (default: 30)")
    ask.add_argument("--here", action="store_true", help="use this interpreter's libraries instead of uv")
    ask.add_argument("--at", type=Path, default=measured_file(), help="the file to append the line to")
    ask.add_argument("--table", action="store_true", help="print the table")
    ask.add_argument("--write", type=Path, default=None, help="page whose marked block is replaced by the table")
    given = list(sys.argv[1:] if words is None else words)
    cut = given.index("--") if "--" in given else len(given)
    asked = ask.parse_args(given[:cut])
    if asked.table:
        return show(table(read_measured(asked.at)), asked.write)
    if not (asked.trainer and asked.model and asked.dataset) or asked.steps < LEAST:
        ask.error(f"a run needs a trainer, --model, --dataset and at least {LEAST} steps")
    with tempfile.TemporaryDirectory() as out:
        flags = ["--model", asked.model, "--dataset", asked.dataset, "--steps", str(asked.steps), "--out", out,
                 "--save-steps", str(asked.steps), "--logging-steps", "1", "--eval-fraction", "0",
                 *given[cut + 1 :]]  # fmt: skip
        runner = [sys.executable] if asked.here else ["uv", "run"]
        code = subprocess.run([*runner, str(trainer_file(asked.trainer)), *flags], check=False).returncode
        if code:
            print(f"the run ended with exit code {code} and was not recorded", file=sys.stderr)
            return code
        result = json.loads((Path(out) / "result.json").read_text())
    try:
        made = measured_of(asked.trainer, asked.model, result, datetime.now(UTC).date())
    except (KeyError, ValueError) as error:
        print(f"the run can't be recorded: {error}", file=sys.stderr)
        return 1
    if made.gpu == CPU and asked.at == measured_file():
        print("a run on a CPU can't calibrate estimates; specify another file with --at", file=sys.stderr)
        return 1
    with asked.at.open("a", encoding="utf-8") as file:
        file.write(made.model_dump_json() + "\n")
    return show(table([made]), None)


def trained() -> tuple[str, ...]:
    """Return the names of the shipped trainers, except the one that only converts a model."""
    return tuple(name for name in trainer_names() if name != "merge_and_gguf")


def measured_of(trainer: str, model: str, result: dict[str, Any], day: date) -> Measured:
    """Return a trainer's run as data. Raises ValueError or KeyError if the result lacks information."""
    plan, settings, figures = result["plan"], result["settings"], result["figures"]
    if plan["world"] != 1 or result["resumed_from"]:
        raise ValueError("a run can be measured only if it starts at the first step and uses one process")
    card = plan["device"]
    known = gpu_of(card)
    if card != CPU and known is None:
        raise ValueError(f"{card} is not in the card table, core/hardware.py")
    lora = settings.get("lora_rank", 0)
    resident = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / (1e9 if sys.platform == "darwin" else 1e6)
    tokens = figures["tokens"]
    return Measured(
        date=day, card=card, gpu=CPU if known is None else known[0].name, card_gb=plan["memory_gb"], trainer=trainer,
        model=model, parameters=figures["parameters"],
        method="full" if not lora else "qlora" if settings.get("quantize") == "4bit" else "lora",
        task=TASKS.get(trainer, trainer), micro_batch=plan["micro"], max_length=settings.get("max_length"),
        recomputes=figures["recomputes"], precision=plan["precision"], fast=settings["fast"], steps=result["step"],
        peak_gb=result["peak_memory_gb"] or resident, tokens_per_second=tokens / figures["seconds"] if tokens else None,
        rows_per_second=figures["rows_per_second"], versions=result["versions"],
    )  # fmt: skip


def table(runs: Sequence[Measured]) -> str:
    """Return the measured runs of every trainer next to the estimates, in Markdown."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    for name in trained():
        mine = sorted((r for r in runs if r.trainer == name), key=lambda r: (r.parameters, r.card, r.date))
        cells = [cells_of(run) for run in mine] or [[NEVER] * (len(COLUMNS) - 1)]
        lines += [f"| {name} | {' | '.join(row)} |" for row in cells]
    return "\n".join(lines) + "\n"


def cells_of(run: Measured) -> list[str]:
    """Return a run's cells. The estimate is computed without this run's correction."""
    shape = f"{run.method}, {run.micro_batch} x {run.max_length or 'whole'}, {run.precision}{', fast' * run.fast}"
    tokens = f"{run.tokens_per_second:,.0f}" if run.tokens_per_second else "none read"
    need = vram(run_measured(run), ())
    return [run.model, shape, run.card, str(run.date), f"{run.peak_gb:.1f} GB", str(need), tokens,
            f"{run.rows_per_second:.1f}"]  # fmt: skip


def show(text: str, page: Path | None) -> int:
    """Print a table, and insert it into the marked block of a page."""
    print(text)
    if page:
        before, rest = page.read_text(encoding="utf-8").split(MARKS[0], 1)
        page.write_text(f"{before}{MARKS[0]}\n{text}{MARKS[1]}{rest.split(MARKS[1], 1)[1]}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
