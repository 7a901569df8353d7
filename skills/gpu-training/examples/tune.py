# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "optuna>=4.5,<6",  # chooses the settings to try next
# ]
# ///
"""Tune a trainer's settings with Optuna: every trial is one run, scored by the objective in its result.json.

    uv run tune.py --trials 20 learning_rate=1e-6..1e-3 lora_rank=8,16,32 -- uv run sft.py --model M --dataset D

`low..high` is searched on a logarithmic scale; `a,b,c` are choices. Don't set tuned settings in the command: each trial
gets them as environment variables TRAIN_NAME, which flags would override. The same command resumes an earlier tuning.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

HOPELESS = {4, 5}  # out of memory, diverged: other settings may succeed


def suggested(trial: optuna.Trial, space: list[str]) -> dict[str, Any]:
    """Return the settings that Optuna suggests for a trial."""
    chosen: dict[str, Any] = {}
    for name, _, values in (item.partition("=") for item in space):
        low, between, high = values.partition("..")
        if between:
            chosen[name] = trial.suggest_float(name, float(low), float(high), log=True)
        else:
            chosen[name] = trial.suggest_categorical(name, values.split(","))
    return chosen


def played(trial: optuna.Trial, space: list[str], command: list[str], out: Path) -> float:
    """Run one trial to its end and return its objective.

    Raises:
        TrialPruned: the trial ran out of memory or diverged.
        SystemExit: the trial failed for another reason, so other settings would fail too.

    """
    folder = out / f"trial-{trial.number}"
    chosen = suggested(trial, space)
    print(f"trial {trial.number}: {json.dumps(chosen)}", flush=True)
    variables = {f"TRAIN_{name.upper()}": str(value) for name, value in chosen.items()}
    code = subprocess.run([*command, "--out", str(folder)], env=os.environ | variables, check=False).returncode
    if code in HOPELESS:
        raise optuna.TrialPruned(f"exit code {code}")
    if code:
        sys.exit(f"trial {trial.number} ended with exit code {code}; the error is above")
    return float(json.loads((folder / "result.json").read_text())["objective"]["value"])


def main() -> None:
    """Run the missing trials and print the best one."""
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    ask = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    ask.add_argument("space", nargs="+", help="NAME=LOW..HIGH or NAME=A,B,C")
    ask.add_argument("--trials", type=int, default=20)
    ask.add_argument("--maximize", action="store_true", help="a higher objective is better")
    ask.add_argument("--out", type=Path, default=Path("tuning"))
    ask.add_argument("--seed", type=int, default=0)
    given, command = ask.parse_args(words[:at]), words[at + 1 :]
    if not command:
        ask.error("write the trainer's command after --")
    given.out.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(given.out / "trials.log"))),
        sampler=optuna.samplers.TPESampler(seed=given.seed),
        direction="maximize" if given.maximize else "minimize",
        study_name="tuning",
        load_if_exists=True,
    )
    ended = sum(trial.state.is_finished() for trial in study.trials)
    study.optimize(lambda trial: played(trial, given.space, command, given.out), n_trials=max(0, given.trials - ended))
    best = {"trial": study.best_trial.number, "objective": study.best_value, "settings": study.best_params}
    (given.out / "best.json").write_text(json.dumps(best, indent=1))
    print(json.dumps(best))


if __name__ == "__main__":
    main()
