"""Verifying on the machine: load, report gaps for a resume, compare. No file is transferred or counts as a copy."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from gpuwarden.checkpoints import archive
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import BadRequest
from gpuwarden.core.models import Level, Report, Verdict
from gpuwarden.lifecycle.artifacts.local_copies import last_pull
from gpuwarden.lifecycle.artifacts.verify import verify
from gpuwarden.lifecycle.artifacts.verify_remote import CLAIM
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.teardown.gate import request
from lifecycle_kit import launch, open_house, rent_cloud, training, until
from resume_kit import saved
from wording import Wording

pytestmark = pytest.mark.anyio


@pytest.fixture
def house(tmp_path: Path) -> Context:
    warden = open_house(tmp_path / "home", SystemClock())
    rent_cloud(warden)
    return warden


def said(report: Report) -> str:
    return "\n".join(report.reasons)


def steps(root: Path, *seeds: int) -> Path:
    """Create a run's folder: a checkpoint at 10, 20 ... with weights from each seed, and a log."""
    for number, seed in enumerate(seeds, 1):
        folder = root / f"checkpoint-{number * 10}"
        folder.mkdir(parents=True)
        dice = np.random.default_rng(seed)
        (folder / "model.safetensors").write_bytes(save({"w": dice.normal(size=(64, 32)).astype("f4")}))
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": number * 10}))
    (root / "train.log").write_text("done\n")
    return root


async def job_with(ctx: Context, tmp_path: Path, made: Path, **changes: object) -> str:
    """Launch a job whose outputs are a copy of `made`, links included, in the folder `out`."""
    text = f"import shutil; shutil.copytree({str(made)!r}, 'out', symlinks=True)"
    job = await launch(ctx, training(tmp_path / "said", command=(sys.executable, "-c", text), **changes))
    await until(ctx, job)
    return job


@pytest.mark.prove
async def test_loading_on_the_machine_proves_weights_but_is_no_copy(
    house: Context, tmp_path: Path, wording: Wording
) -> None:
    job = await job_with(house, tmp_path, steps(tmp_path / "made", 1, 2))
    report = await verify(house, job, Level.LOAD)
    assert (report.verdict, report.level, report.not_checked[0]) == (Verdict.PROVEN, Level.LOAD, CLAIM), said(report)
    weights = [f for f in report.files if f.path.endswith(".safetensors")]
    assert weights and all(any("2,048" in line for line in file.proved) for file in weights)
    assert last_pull(house, job) is None
    rules = {f.rule for f in (await request(house, job, "terminate")).findings}
    assert "TD-COPY-001" in rules
    report = await verify(house, job, Level.RESUME, where="instance")
    assert report.verdict is Verdict.REFUTED
    wording(said(report), "optimizer.pt", "scheduler.pt")


@pytest.mark.prove
async def test_the_machine_proves_a_resume_of_a_real_optimizer(house: Context, tmp_path: Path) -> None:
    made = saved(tmp_path / "made")
    job = await job_with(house, tmp_path, made.parent)
    report = await verify(house, job, Level.RESUME, where="instance")
    assert report.verdict is Verdict.PROVEN, said(report)
    assert report.step == 3
    assert any("torch" in line for file in report.files for line in file.proved)


@pytest.mark.prove
async def test_the_machine_compares_the_newest_checkpoint_with_an_earlier_one(house: Context, tmp_path: Path) -> None:
    job = await job_with(house, tmp_path, steps(tmp_path / "made", 1, 2), outputs=("out", "out/train.log"))
    report = await verify(house, job, against="out/checkpoint-10")
    assert report.verdict is Verdict.PROVEN, said(report)
    assert {"compared: the step went from 10 to 20", "compared: 1 of 1 tensors have changed"} <= {*report.proved}
    for other, words in (
        ("out/checkpoint-20", "all 1 tensors are the same"),
        ("out/none", "does not exist on the machine"),
    ):
        report = await verify(house, job, against=other, where="instance")
        assert report.verdict is not Verdict.PROVEN and words in said(report)


@pytest.mark.prove
async def test_the_machine_refutes_a_run_that_learned_nothing(house: Context, tmp_path: Path, wording: Wording) -> None:
    job = await job_with(house, tmp_path, steps(tmp_path / "made", 1, 1))
    report = await verify(house, job, Level.STRUCTURE, against="out/checkpoint-10")
    assert report.verdict is Verdict.REFUTED
    wording(said(report))


@pytest.mark.slow
async def test_a_comparison_link_out_of_the_folder_is_refused(house: Context, tmp_path: Path, wording: Wording) -> None:
    made = steps(tmp_path / "made", 1)
    (made / "elsewhere").symlink_to(steps(tmp_path / "private", 2))
    job = await job_with(house, tmp_path, made)
    with pytest.raises(BadRequest) as refused:
        await verify(house, job, against="out/elsewhere", where="instance")
    wording(refused, "out/elsewhere")


# ----------------------------------------------------------------------------------- the program sent to the machine


@pytest.fixture
def pyz(tmp_path: Path) -> Path:
    place = tmp_path / archive.name(archive.build())
    place.write_bytes(archive.build())
    return place


def shipped(pyz: Path, *args: object, python: str = sys.executable) -> dict[str, Any]:
    argv = [python, "-I", "-S", str(pyz), "examine", *map(str, args)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    (answer,) = (json.loads(line) for line in done.stdout.splitlines())
    return dict(answer)


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a Python without packages, the only one on the PATH."""
    place = tmp_path / "bare/bin"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place.parent], check=True, timeout=300)
    monkeypatch.setenv("PATH", str(place))
    return str(place / "python")


@pytest.mark.prove
def test_the_bundled_reader_loads_without_torch_and_numpy(tmp_path: Path, pyz: Path, bare: str) -> None:
    made = steps(tmp_path / "made", 1)
    (made / "checkpoint-10/x.npy").write_bytes(npy())
    found = shipped(pyz, made, "--load", python=bare)
    by = {f["path"]: f["proved"] for f in found["files"]}
    for name, count in (("checkpoint-10/model.safetensors", "2,048"), ("checkpoint-10/x.npy", "6")):
        line = f"loads with gpuwarden's own reader into memory, without numpy: 1 tensors, {count} elements"
        assert line in by[name], by[name]
    assert {f["verdict"] for f in found["files"]} == {"proven"}


def npy() -> bytes:
    import io

    out = io.BytesIO()
    np.save(out, np.arange(6, dtype="f4"))
    return out.getvalue()


@pytest.mark.slow
def test_a_loader_that_dies_leaves_a_doubt(
    tmp_path: Path, pyz: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    """A Python on the machine that claims to have torch and then exits proves nothing and refutes nothing."""
    fake = tmp_path / "bin/python3"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\ncase "$3" in *find_spec*) exit 0;; esac\nexit 9\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:/usr/bin:/bin")
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True, timeout=300)
    found = shipped(pyz, steps(tmp_path / "made", 1), "--load", python=str(bare / "bin/python"))
    bad = next(f for f in found["files"] if f["path"].endswith("model.safetensors"))
    assert bad["verdict"] == "unknown"
    wording(bad["doubts"][0], "9")


@pytest.mark.prove
def test_a_module_beside_a_checkpoint_is_never_imported(tmp_path: Path, pyz: Path, bare: str) -> None:
    made = steps(tmp_path / "made", 1)
    for name in ("json.py", "torch.py", "numpy.py", "gpuwarden.py", "sitecustomize.py"):
        (made / name).write_text(f"open({str(tmp_path / 'canary')!r}, 'w')")
        shutil.copy(made / name, made / "checkpoint-10" / name)
    found = shipped(pyz, made, "--load", "--against", made / "checkpoint-10", python=bare)
    assert any("loads" in line for file in found["files"] for line in file["proved"])
    assert not (tmp_path / "canary").exists()


def test_a_spent_budget_ends_a_comparison_with_a_doubt(tmp_path: Path, pyz: Path) -> None:
    made = steps(tmp_path / "made", 1, 2)
    found = shipped(pyz, made, "--structure", "--seconds", "0", "--against", made / "checkpoint-10")
    assert found["doubts"] and not found.get("compared", {}).get("proved")
