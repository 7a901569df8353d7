"""The save helper for training scripts: after any kill, a checkpoint is either complete or absent."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from gpuwarden.checkpoints.sealing import save_helper
from gpuwarden.checkpoints.verify import verify
from gpuwarden.core.models import Level, Verdict
from warm import TORCH, warm
from wording import Wording

SAVER = """
import importlib.util, os, sys
import numpy as np
from safetensors.numpy import save_file
spec = importlib.util.spec_from_file_location("savelib", %r); savelib = importlib.util.module_from_spec(spec)
sys.modules["savelib"] = savelib; spec.loader.exec_module(savelib)
print(os.getpid(), flush=True)
for step in range(1, 100000):
    with savelib.saving(sys.argv[1], step, keep=3, parts=("model", "optimizer")) as folder:
        save_file({"w": np.full((256, 1024), step, "f4")}, folder / "model.safetensors")
    print(step, flush=True)
"""


def write(root: Path, step: int, text: str = "{}") -> None:
    with save_helper.saving(root, step, keep=2, parts=("model", "optimizer")) as folder:
        save_file({"w": np.ones(4, "f4")}, folder / "weights.safetensors")
        (folder / "extra.json").write_text(text)


@pytest.mark.slow
def test_the_newest_save_loads_and_old_saves_are_removed(tmp_path: Path) -> None:
    for step in (5, 10, 20):
        write(tmp_path, step)
    latest = save_helper.load_latest(tmp_path)
    assert latest is not None
    assert (latest.step, latest.path.name, latest.state) == (20, "checkpoint-20", None)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-20"]
    report = verify(tmp_path, Level.RESUME)
    assert (report.verdict, report.step) == (Verdict.PROVEN, 20), report
    assert all(f.sealed for f in report.files if "manifest" not in f.path)


def test_load_latest_and_verify_skip_a_damaged_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wording: Wording
) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2)
    (tmp_path / "checkpoint-2/extra.json").write_text("[]")
    latest = save_helper.load_latest(tmp_path)
    assert latest is not None
    assert latest.step == 1
    wording(capsys.readouterr().out, "checkpoint-2", "extra.json")
    assert verify(tmp_path, Level.CONTENT).step == 1


def test_saves_never_overwrite_and_failed_saves_leave_nothing(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with pytest.raises(FileExistsError):
        write(tmp_path, 1)
    with pytest.raises(RuntimeError), save_helper.saving(tmp_path, 2):
        raise RuntimeError
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]
    assert save_helper.load_latest(tmp_path / "nowhere") is None


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


def test_a_damaged_checkpoint_displaces_no_intact_one(tmp_path: Path) -> None:
    write(tmp_path, 1000)
    write(tmp_path, 2000)
    (tmp_path / "checkpoint-2000/extra.json").write_text("[]")
    write(tmp_path, 1100)
    assert names(tmp_path) == ["checkpoint-1000", "checkpoint-1100", "checkpoint-2000"]
    latest = save_helper.load_latest(tmp_path)
    assert latest is not None
    assert latest.step == 1100
    write(tmp_path, 1200)
    assert names(tmp_path) == ["checkpoint-1100", "checkpoint-1200"]


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    write(tmp_path, 1000)
    for damaged in ("extra.json", save_helper.MANIFEST):
        write(tmp_path, 2000)
        (tmp_path / "checkpoint-2000" / damaged).write_text("[")
        write(tmp_path, 2000)
        assert names(tmp_path) == ["checkpoint-1000", "checkpoint-2000"]
        assert save_helper.damage(tmp_path / "checkpoint-2000") == ""
        save_helper.shutil.rmtree(tmp_path / "checkpoint-2000")


def test_a_damaged_checkpoint_stays_if_the_new_save_fails(tmp_path: Path) -> None:
    write(tmp_path, 5)
    (tmp_path / "checkpoint-5/extra.json").write_text("[")
    with pytest.raises(RuntimeError), save_helper.saving(tmp_path, 5):
        raise RuntimeError
    assert names(tmp_path) == ["checkpoint-5"]


def test_a_new_run_in_a_used_folder_keeps_its_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1000)
    write(tmp_path, 2000)
    monkeypatch.setattr(save_helper.time, "time", lambda: 5.0)  # the clock was set back
    write(tmp_path, 100)
    assert names(tmp_path) == ["checkpoint-100", "checkpoint-2000"]
    write(tmp_path, 200)
    assert names(tmp_path) == ["checkpoint-100", "checkpoint-200"]
    latest = save_helper.load_latest(tmp_path)
    assert latest is not None
    assert latest.step == 200


def test_a_checkpoint_of_another_program_is_neither_deleted_nor_replaced(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3/trainer_state.json").write_text("{}")
    for step in (10, 20, 30):
        write(tmp_path, step)
    assert names(tmp_path) == ["checkpoint-20", "checkpoint-3", "checkpoint-30"]
    with pytest.raises(FileExistsError):
        write(tmp_path, 3)


def killed_run(root: Path, moments: random.Random, kills: int) -> None:
    """Kill the saver repeatedly; after each kill, the newest complete checkpoint is at least the last announced one."""
    argv = [*warm(TORCH), "-c", SAVER % save_helper.__file__, str(root / "out")]
    for _ in range(kills):
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout
            pid, first = int(child.stdout.readline()), child.stdout.readline()
            time.sleep(moments.uniform(0, 0.1))  # the kill has to come at a random moment
            os.kill(pid, signal.SIGKILL)
            out, _ = child.communicate()
        assert child.returncode == -signal.SIGKILL
        announced = [int(line) for line in [first, *out.splitlines()]]
        report = verify(root / "out", Level.CONTENT)
        assert not any(c.verdict is Verdict.REFUTED for c in report.checkpoints), report
        assert report.step is not None
        assert report.step >= max(announced)
        latest = save_helper.load_latest(root / "out")
        assert latest is not None
        assert latest.step == report.step
        for folder in (root / "out").iterdir():
            if folder.name.startswith("checkpoint-"):
                save_helper.shutil.rmtree(folder)


@pytest.mark.slow
def test_a_kill_during_a_save_costs_at_most_that_save(tmp_path: Path) -> None:
    killed_run(tmp_path, random.Random(1), 4)


@pytest.mark.prove
def test_a_hundred_kills_during_a_save(tmp_path: Path) -> None:
    killed_run(tmp_path, random.Random(2), 100)
