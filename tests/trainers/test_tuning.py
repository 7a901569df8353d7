"""Tuning: trials are trainer runs with different variables, and resume where they stopped."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpuwarden.data import data_dir
from real_parts import need
from trainer_kit import SCRIPTS

TUNE = data_dir("skills") / "gpu-training" / "examples" / "tune.py"
# Stands in for a trainer: reads the variables, then writes the objective or exits with a code.
TRAINER = """
import json, os, pathlib, sys
rate, rank = float(os.environ["TRAIN_LEARNING_RATE"]), os.environ["TRAIN_LORA_RANK"]
if rank == "64":
    sys.exit(4)
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
out.mkdir()
loss = abs(rate - 1e-4) + (rank == "8")
(out / "result.json").write_text(json.dumps({"objective": {"name": "eval_loss", "value": loss}}))
"""
pytestmark = pytest.mark.slow


def tune(folder: Path, trials: int, *command: str) -> subprocess.CompletedProcess[str]:
    need("optuna", importlib.util.find_spec("optuna") is not None)
    space = ("learning_rate=1e-6..1e-2", "lora_rank=8,16,64")
    words = [sys.executable, TUNE, "--trials", str(trials), *space, "--", sys.executable, *command]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True)


def test_tuning_finds_the_best_settings_and_continues_trials(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text(TRAINER)
    assert tune(tmp_path, 4, "trainer.py").returncode == 0
    done = tune(tmp_path, 9, "trainer.py")
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines() if line.startswith("trial")] == [
        f"trial {n}" for n in range(4, 9)
    ]
    best = json.loads((tmp_path / "tuning" / "best.json").read_text())
    values = [
        json.loads(file.read_text())["objective"]["value"] for file in tmp_path.glob("tuning/trial-*/result.json")
    ]
    assert best["objective"] == min(values) and best["settings"]["lora_rank"] == "16"


def test_a_wrong_command_ends_the_tuning_at_once(tmp_path: Path) -> None:
    done = tune(tmp_path, 5, str(SCRIPTS / "sft.py"), "--no-such-flag")
    assert done.returncode == 1 and "no_such_flag" in done.stderr
    assert not list(tmp_path.glob("tuning/trial-1*")), "the first trial was the last one"


@pytest.mark.prove
def test_a_real_trainer_is_tuned(tmp_path: Path) -> None:
    need("trl", importlib.util.find_spec("trl") is not None)
    done = tune(tmp_path, 1, str(SCRIPTS / "sft.py"), "--smoke")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "tuning" / "trial-0" / "result.json").read_text())
    best = json.loads((tmp_path / "tuning" / "best.json").read_text())
    assert best["settings"]["learning_rate"] == result["settings"]["learning_rate"]
    assert best["objective"] == result["objective"]["value"] == result["metrics"]["eval_loss"]
