"""Resuming from one file with model, optimizer, and step, and from a run whose root contains the export."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.checkpoints.verify import verify
from gpuwarden.core.models import Level, Report, Verdict
from real_parts import need
from resume_kit import saved
from wording import Wording

State = dict[str, Any]


def torch() -> Any:
    need("torch", importlib.util.find_spec("torch") is not None)
    import torch

    return torch


def state(step: int = 3) -> State:
    t = torch()
    t.manual_seed(0)
    made = t.nn.Sequential(t.nn.Linear(8, 4), t.nn.Linear(4, 4))
    optimizer = t.optim.AdamW(made.parameters())
    scheduler = t.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(step):
        made(t.randn(2, 8)).sum().backward()
        optimizer.step()
        scheduler.step()
    return {"step": step, "model": made.state_dict(), "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict()}  # fmt: skip


def renamed(**names: str) -> Callable[[State], object]:
    return lambda made: [made.__setitem__(new, made.pop(old)) for old, new in names.items()]


def nothing(made: State) -> None:
    assert made["step"] == 3


def in_a_list(made: State) -> None:
    """Store the optimizer and scheduler in lists, as Lightning does."""
    made |= {"optimizer_states": [made.pop("optimizer")], "lr_schedulers": [made.pop("scheduler")]}
    made |= {"state_dict": made.pop("model"), "global_step": made.pop("step"), "epoch": 0}


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("state.pt", nothing),
        ("ckpt.pt", renamed(step="iter_num")),
        ("epoch=0-step=3.ckpt", in_a_list),
        ("last.pth", renamed(model="model_state_dict", optimizer="optimizer_state_dict", step="global_step")),
        ("step_3.pt", lambda made: made.pop("step")),
        ("ckpt.pth", lambda made: made.update(optimizer={"a": made["optimizer"]})),
    ],
)
def test_common_part_names_are_recognized(tmp_path: Path, name: str, edit: Callable[[State], object]) -> None:
    made = state()
    edit(made)
    torch().save(made, tmp_path / name)
    for path, newest in ((tmp_path, name), (tmp_path / name, name)):
        report = verify(path, Level.STRUCTURE)
        assert (report.verdict, report.step, report.newest) == (Verdict.PROVEN, 3, newest), report
        assert report.checkpoints[0].resume == ()
        assert any(" 4 " in line for line in report.checkpoints[0].proved), "the moments of the optimizer"


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda made: made.pop("optimizer"), id="no optimizer"),
        pytest.param(lambda made: made["optimizer"]["state"].clear(), id="no state"),
        pytest.param(lambda made: made["optimizer"]["state"][0].pop("exp_avg_sq"), id="a moment is gone"),
        pytest.param(lambda made: made["model"].update({"0.weight": torch().ones(9, 9)}), id="another shape"),
    ],
)
def test_incomplete_resume_state_is_reported(tmp_path: Path, edit: Callable[[State], object], wording: Wording) -> None:
    made = state()
    edit(made)
    torch().save(made, tmp_path / "state.pt")
    report = verify(tmp_path, Level.STRUCTURE)
    assert report.verdict is Verdict.PROVEN
    wording("\n".join(report.checkpoints[0].resume))


def test_the_whole_file_with_the_highest_step_is_newest(tmp_path: Path) -> None:
    for step in (1, 3, 2):
        torch().save(state(step), tmp_path / f"ckpt_{step}.pt")
    assert verify(tmp_path, Level.STRUCTURE).newest == "ckpt_3.pt"
    data = (tmp_path / "ckpt_3.pt").read_bytes()
    (tmp_path / "ckpt_3.pt").write_bytes(data[: len(data) // 2])
    report = verify(tmp_path, Level.STRUCTURE)
    assert (report.verdict, report.newest) == (Verdict.REFUTED, "ckpt_2.pt")


@pytest.mark.parametrize(("whole", "bare"), [("a.pt", "b.pt"), ("b.pt", "a.pt")])
def test_at_equal_steps_the_file_with_an_optimizer_is_newest(tmp_path: Path, whole: str, bare: str) -> None:
    made = state()
    torch().save(made, tmp_path / whole)
    del made["optimizer"], made["scheduler"]
    torch().save(made, tmp_path / bare)
    report = verify(tmp_path, Level.RESUME)
    assert (report.verdict, report.newest) == (Verdict.PROVEN, whole)


@pytest.mark.parametrize(("whole", "broken"), [("a", "b"), ("b", "a")])
def test_at_equal_steps_the_whole_folder_is_compared(tmp_path: Path, whole: str, broken: str) -> None:
    before, now = tmp_path / "before", tmp_path / "now"
    for folder, value in ((now / whole, 2), (now / broken, 2), (before, 1)):
        made = state(3 * value)
        (folder / f"step_{3 * value}").mkdir(parents=True)
        torch().save(made, folder / f"step_{3 * value}" / "state.pt")
    file = now / broken / "step_6/state.pt"
    file.write_bytes(file.read_bytes()[:-100])
    report = verify(now, Level.STRUCTURE, against=before)
    assert report.newest == f"{whole}/step_6" and not [d for d in report.doubts if "compared" in d], report.doubts
    assert [line for line in report.proved if line.startswith("compared")]


# ------------------------------------------------------------------------------------ accelerate, and several processes


def accelerated(folder: Path, optimizer: State | None, last_epoch: int = 12) -> None:
    """Write the files of accelerate's `save_state`."""
    t = torch()
    folder.mkdir(parents=True)
    t.save({"0.weight": t.ones(4, 8)}, folder / "pytorch_model.bin")
    if optimizer is not None:
        t.save(optimizer, folder / "optimizer.bin")
    t.save({"last_epoch": last_epoch, "_step_count": last_epoch + 1}, folder / "scheduler.bin")
    t.save({"step": 0, "torch_manual_seed": t.get_rng_state()}, folder / "random_states_0.pkl")


@pytest.mark.parametrize(
    ("name", "step"), [("state", 3), ("checkpoints/checkpoint_0", 3), ("epoch_1", 3), ("step_7", 7)]
)
def test_the_optimizer_gives_save_state_its_step(tmp_path: Path, name: str, step: int) -> None:
    accelerated(tmp_path / name, state()["optimizer"])
    report = verify(tmp_path, Level.STRUCTURE)
    assert (report.newest, report.step) == (name, step), report
    assert report.checkpoints[0].resume == () and bool(report.checkpoints[0].warnings) is (step == 7)


def test_save_state_falls_back_to_the_schedulers_step(tmp_path: Path) -> None:
    accelerated(tmp_path / "state", {"state": {}, "param_groups": [{"params": [0], "momentum": 0}]})
    accelerated(tmp_path / "bare", None, last_epoch=5)
    found = {c.path: c for c in verify(tmp_path, Level.STRUCTURE).checkpoints}
    assert (found["state"].step, found["bare"].step) == (12, 5)
    assert not found["state"].resume and found["bare"].resume


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("saved_step", "step"), [({"step": 41}, 41), ({"train_state": {"step": 41}}, 41), ({}, 3)])
@pytest.mark.parametrize("folder", ["dcp", "step-8"])
def test_a_distributed_checkpoints_step_is_found(
    tmp_path: Path, saved_step: dict[str, Any], step: int, folder: str
) -> None:
    t = torch()
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = t.nn.Linear(8, 4)
    optimizer = t.optim.AdamW(model.parameters())
    for _ in range(3):
        model(t.randn(2, 8)).sum().backward()
        optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": moments, **saved_step}, checkpoint_id=tmp_path / folder)
    report = verify(tmp_path, Level.CONTENT)
    assert (report.verdict, report.newest, report.step) == (Verdict.PROVEN, folder, 8 if folder == "step-8" else step)
    assert report.checkpoints[0].resume == ()


def test_a_step_differing_from_the_folder_name_is_a_warning(tmp_path: Path, wording: Wording) -> None:
    (tmp_path / "checkpoint-5").mkdir()
    torch().save(state(), tmp_path / "checkpoint-5/state.pt")
    checkpoint = verify(tmp_path, Level.STRUCTURE).checkpoints[0]
    wording("\n".join(checkpoint.warnings), "checkpoint-5/state.pt", "checkpoint-5", 3)


def test_weights_alone_are_not_a_checkpoint(tmp_path: Path) -> None:
    t = torch()
    t.save({"model": {"w": t.ones(3)}}, tmp_path / "model.pt")
    t.save({"w": t.ones(3)}, tmp_path / "weights.pt")
    assert verify(tmp_path, Level.STRUCTURE).checkpoints == ()


# --------------------------------------------------------------------------------- train(); save_model(); save_state()


def exported(root: Path) -> Path:
    """Make a run's folder as it is after save_model and save_state: the root has a state but no optimizer."""
    folder = saved(root)
    for name in ("model.safetensors", "config.json", "trainer_state.json"):
        (root / name).write_bytes((folder / name).read_bytes())
    return root


def test_an_export_is_not_the_newest_checkpoint(tmp_path: Path) -> None:
    report: Report = verify(exported(tmp_path), Level.STRUCTURE)
    assert (report.verdict, report.newest, report.step) == (Verdict.PROVEN, "checkpoint-3", 3), report
    assert [c.path for c in report.checkpoints] == ["checkpoint-3"]


def test_an_export_alone_is_a_checkpoint_without_resume_state(tmp_path: Path, wording: Wording) -> None:
    """Without a checkpoint folder below the root, only the export is left."""
    root = exported(tmp_path)
    for file in (root / "checkpoint-3").iterdir():
        file.unlink()
    (root / "checkpoint-3").rmdir()
    checkpoint = verify(root, Level.STRUCTURE).checkpoints[0]
    assert (checkpoint.path, checkpoint.step) == (".", 3)
    wording(checkpoint.resume[0], "optimizer.pt, scheduler.pt")


def test_a_missing_step_in_an_export_is_a_problem(tmp_path: Path, wording: Wording) -> None:
    root = exported(tmp_path)
    (root / "trainer_state.json").write_text(json.dumps({"epoch": 1.0}))
    wording("\n".join(verify(root, Level.STRUCTURE).problems), "trainer_state.json", "global_step")
