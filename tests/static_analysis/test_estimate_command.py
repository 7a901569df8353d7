"""`gpuwarden estimate`, and the remaining time of a running job."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpuwarden.core.models import JobSpec, Observation
from gpuwarden.core.states import Job
from gpuwarden.interfaces.cli.main import run
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.monitoring import time_left as module
from gpuwarden.lifecycle.monitoring.time_left import time_left
from gpuwarden.lifecycle.records import JobRecord
from wording import Wording

CONFIG = {
    "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32,
    "num_key_value_heads": 4, "intermediate_size": 5632, "vocab_size": 32000,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "model"


def test_a_model_is_estimated_for_named_cards(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["estimate", str(folder), "--gpu", "t4", "--gpu", "h100x2", "--method", "lora", "--steps", "100", "--json"]
    assert run(asked) == 0
    reply = json.loads(capsys.readouterr().out)
    assert reply["parameters"] == pytest.approx(1.1e9, rel=0.01) and 2 < reply["low_gb"] < reply["high_gb"]
    assert [(c["gpu"], c["count"]) for c in reply["cards"]] == [("t4", 1), ("h100", 2)]
    assert all(c["seconds"][0] < c["seconds"][1] for c in reply["cards"])
    assert reply["parts_gb"]["weights"] > reply["parts_gb"]["optimizer"]


def test_a_run_that_fits_nowhere_exits_with_code_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["estimate", str(folder), "--gpu", "t4", "--batch-size", "64", "--max-length", "8192", "--no-checkpointing"]
    assert run([*words, "--json"]) == 1
    reply = json.loads(capsys.readouterr().out)
    assert reply["cards"][0]["fit"] == "will_not_fit"
    assert max(reply["parts_gb"], key=reply["parts_gb"].get) == "activations"
    assert run(words) == 1
    assert "t4" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["MODEL", "--gpu", "voodoo2"], ["no/such.py", "--gpu", "t4"]])
def test_an_impossible_estimate_fails_with_a_hint(
    words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["estimate", *(str(folder) if w == "MODEL" else w for w in words), "--json"]) != 0
    reply = json.loads(capsys.readouterr().out)
    assert reply["ok"] is False and reply["hint"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model_index.json", "{}"),
        (
            "config.json",
            json.dumps({"model_type": "vit", "hidden_size": 768, "num_hidden_layers": 12, "image_size": 224}),
        ),
        ("train.py", "from diffusers import UNet2DConditionModel\nUNet2DConditionModel.from_pretrained('a/b')\n"),
    ],
    ids=["diffusers", "vit", "script"],
)
def test_image_models_are_not_estimated(
    name: str,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    wording: Wording,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / name
    file.write_text(text)
    assert run(["estimate", "--json", str(file if name.endswith(".py") else tmp_path)]) != 0
    reply = json.loads(capsys.readouterr().out)
    assert reply["ok"] is False
    wording(reply["message"])


def running(**more: Any) -> Observation:
    return Observation(state=Job.RUNNING, at=1_400.0, started_at=1_000.0, **more)


def record(job_id: str, **spec: Any) -> JobRecord:
    found = JobSpec(name="t", platform="local", script="print(1)", outputs=("out",), **spec)
    return cast("JobRecord", SimpleNamespace(id=job_id, subject=f"job/{job_id}", spec=found))


def ledger_of(*ended: tuple[JobRecord, dict[str, Any]]) -> Context:
    events = {job.subject: SimpleNamespace(data=SimpleNamespace(observation=seen)) for job, seen in ended}
    ledger = SimpleNamespace(jobs_of_script=lambda *_: list(events), last=lambda subject, _: events.get(subject))
    return cast("Context", SimpleNamespace(ledger=ledger))


def test_a_running_jobs_pace_narrows_the_estimate() -> None:
    seen = running(step=100, total_steps=1_000, eta_at=1_400.0 + 900 * 2)
    left = time_left(ledger_of(), record("j1"), seen)
    assert left is not None and left.low < 1_800 < left.high < 3_000
    assert time_left(ledger_of(), record("j1"), seen.model_copy(update={"state": Job.SUCCEEDED})) is None
    assert time_left(ledger_of(), record("j1"), running()) is None, "nobody knows how many steps there are"


def test_a_job_without_steps_is_estimated_from_earlier_runs(monkeypatch: pytest.MonkeyPatch, wording: Wording) -> None:
    before, other = record("j0", gpu="t4"), record("j9", gpu="h100")
    known = {job.id: job for job in (before, other)}
    monkeypatch.setattr(module, "read_job", lambda _, job_id: known[job_id])
    whole = {"step": 500, "started_at": 10.0, "ended_at": 1_010.0}
    ctx = ledger_of((before, whole), (other, {**whole, "ended_at": 20.0}))
    left = time_left(ctx, record("j1", gpu="t4"), running())
    assert left is not None and left.low < 1_000 < left.high
    wording(left.basis)
    odd = ledger_of((before, {"step": "many", "started_at": None, "ended_at": True}))
    assert time_left(odd, record("j1", gpu="t4"), running()) is None
