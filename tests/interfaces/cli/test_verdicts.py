"""`gpuwarden verify` as a person sees it: a table, worst first, and an exit code."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from gpuwarden.interfaces.cli.main import run


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUWARDEN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "160")
    for step in (10, 20):
        folder = tmp_path / f"out/checkpoint-{step}"
        folder.mkdir(parents=True)
        save_file({"w": np.random.default_rng(step).normal(size=(8, 8))}, folder / "model.safetensors")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return tmp_path / "out"


def test_a_table_with_what_is_wrong_first(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(outputs), "--level", "structure"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "proven at level structure" in shown and "newest whole checkpoint checkpoint-20 (step 20)" in shown
    assert "not checked: the bytes inside the tensors" in shown
    (outputs / "checkpoint-20/model.safetensors").write_bytes(b"")
    (outputs / "a\x1b[31m.json").write_text("{")
    assert run(["verify", str(outputs), "--level", "structure"]) == 1
    shown = capsys.readouterr().out
    words = [line.split()[0] for line in shown.splitlines() if line.startswith(("refuted ", "proven "))]
    assert words == sorted(words, reverse=True) and {"refuted", "proven"} == {*words}
    assert "is empty" in shown and "\x1b[31m.json" not in shown


def test_exit_codes_and_a_comparison(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new, old = str(outputs / "checkpoint-20"), str(outputs / "checkpoint-10")
    assert run(["verify", new, "--level", "structure", "--against", old, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert "\u27e6compared: the step went from 10 to 20\u27e7" in body["proved"]
    assert run(["verify", old, "--level", "structure", "--against", new]) == 1
    assert run(["verify", new, "--level", "structure", "--against", str(outputs / "none")]) == 2
    (outputs / "checkpoint-20/what.xyz").write_bytes(b"\1")
    assert run(["verify", new, "--level", "structure"]) == 2
