"""A run's checkpoints form a sequence: weights, optimizer, scheduler, and log advance from one to the next."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.checkpoints.verify import verify
from gpuwarden.core.models import Level, Report, Verdict
from real_parts import need
from wording import Wording


def torch() -> Any:
    need("torch", importlib.util.find_spec("torch") is not None)
    import torch

    return torch


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints of two shards each, in the Trainer's layout."""
    t = torch()
    from safetensors.torch import save_file

    t.manual_seed(0)
    root = tmp_path_factory.mktemp("run")
    made = t.nn.Sequential(t.nn.Linear(64, 64), t.nn.Linear(64, 64))
    optimizer = t.optim.AdamW(made.parameters(), lr=0.01)
    scheduler = t.optim.lr_scheduler.LinearLR(optimizer)
    for step in range(1, 5):
        made(t.randn(4, 64)).square().sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 2:
            continue
        folder = root / f"checkpoint-{step}"
        folder.mkdir()
        state = made.state_dict()
        index = {}
        for n in (0, 1):
            shard = f"model-{n + 1:05}-of-00002.safetensors"
            part = {name: a for name, a in state.items() if name.startswith(str(n))}
            save_file(part, folder / shard, {"format": "pt"})
            index |= dict.fromkeys(part, shard)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
        t.save(optimizer.state_dict(), folder / "optimizer.pt")
        t.save(scheduler.state_dict(), folder / "scheduler.pt")
        t.save({"cpu": t.get_rng_state()}, folder / "rng_state.pth")
        log = [{"step": s, "loss": 1 / s} for s in range(1, step + 1)]
        state_file = {"global_step": step, "epoch": step / 4, "log_history": log}
        (folder / "trainer_state.json").write_text(json.dumps(state_file))
    return root


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "out"))


def seen(report: Report) -> str:
    return "\n".join(report.reasons)


def test_a_continued_run_is_proven(run: Path) -> None:
    report = verify(run, Level.CONTENT)
    assert report.verdict is Verdict.PROVEN, seen(report)
    assert report.newest == "checkpoint-4"


def from_before(*names: str) -> Callable[[Path], object]:
    return lambda run: [shutil.copy(run / "checkpoint-2" / n, run / "checkpoint-4" / n) for n in names]


def log(*steps: int) -> Callable[[Path], object]:
    def edit(run: Path) -> None:
        path = run / "checkpoint-4/trainer_state.json"
        rows = [{"step": s} for s in steps]
        path.write_text(json.dumps(json.loads(path.read_text()) | {"log_history": rows}))

    return edit


def optimizer(edit: Callable[[dict[str, Any]], object], step: int = 4) -> Callable[[Path], object]:
    def save(run: Path) -> None:
        path = run / f"checkpoint-{step}/optimizer.pt"
        state = torch().load(path, weights_only=True)
        edit(state)
        torch().save(state, path)

    return save


_SHARDS = [f"model-{n:05}-of-00002.safetensors" for n in (1, 2)]


@pytest.mark.parametrize(
    ("edit", "values", "level"),
    [
        (from_before("optimizer.pt"), ["checkpoint-2", 2], Level.STRUCTURE),
        (from_before("scheduler.pt"), ["checkpoint-2", 2], Level.STRUCTURE),
        (from_before(*_SHARDS), ["checkpoint-2"], Level.CONTENT),
        (from_before(_SHARDS[1]), ["checkpoint-2", _SHARDS[1]], Level.CONTENT),
        (log(1, 2, 4, 3), ["trainer_state.json", 4, 3], Level.STRUCTURE),
        (log(1, 9), ["trainer_state.json", 9, 4], Level.STRUCTURE),
        (
            optimizer(lambda made: made["state"][0]["exp_avg_sq"][3, 5:6].fill_(-0.5)),
            ["state.0.exp_avg_sq"],
            Level.CONTENT,
        ),
    ],
    ids=["optimizer", "scheduler", "weights", "a shard", "log backwards", "log ahead", "moments below zero"],
)
def test_a_part_of_another_step_is_refuted(
    run: Path, edit: Callable[[Path], object], values: list[object], level: Level, wording: Wording
) -> None:
    edit(run)
    report = verify(run, level)
    assert report.verdict is Verdict.REFUTED, seen(report)
    assert report.newest == "checkpoint-2"
    wording(seen(report), *values)


def test_frozen_weights_without_an_optimizer_are_unknown(run: Path, wording: Wording) -> None:
    """Without an optimizer, it is unknown whether the weights were meant to change."""
    from_before(_SHARDS[0])(run)
    for step in (2, 4):
        (run / f"checkpoint-{step}/optimizer.pt").unlink()
    report = verify(run, Level.CONTENT)
    assert report.verdict is Verdict.UNKNOWN
    wording(seen(report))


def test_unchanged_weights_with_zero_moments_are_proven(run: Path, wording: Wording) -> None:
    """A GRPO run starts this way if all answers have the same reward: nothing is lost, and a warning reports it."""

    def still(made: Any) -> None:
        for state in made["state"].values():
            state["exp_avg"].zero_()
            state["exp_avg_sq"].zero_()

    from_before(*_SHARDS)(run)
    for step in (2, 4):
        optimizer(still, step)(run)
    report = verify(run, Level.CONTENT)
    assert report.verdict is Verdict.PROVEN, seen(report)
    wording("\n".join(line for found in report.checkpoints for line in found.warnings))


def test_a_restarted_optimizer_is_unknown(run: Path, wording: Wording) -> None:
    optimizer(lambda made: [s.update(step=torch().tensor(1.0)) for s in made["state"].values()])(run)
    report = verify(run, Level.STRUCTURE)
    assert report.verdict is Verdict.UNKNOWN
    wording(seen(report))


def test_negative_zero_is_not_below_zero(run: Path) -> None:
    optimizer(lambda made: made["state"][0]["exp_avg_sq"].fill_(-0.0))(run)
    assert verify(run, Level.CONTENT).verdict is Verdict.PROVEN


def test_an_explicit_comparison_reads_optimizer_and_scheduler_too(run: Path, wording: Wording) -> None:
    now, before = run / "checkpoint-4", run / "checkpoint-2"
    assert verify(now, Level.STRUCTURE, against=before).verdict is Verdict.PROVEN
    from_before("optimizer.pt")(run)
    report = verify(now, Level.STRUCTURE, against=before)
    wording(seen(report), "checkpoint-2", 2)
