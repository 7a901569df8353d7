"""The terminal output of `gpuwarden verify`: a table with the worst verdict first, and an exit code."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import save_file

from gpuwarden.interfaces.cli import console
from gpuwarden.interfaces.cli.main import run
from wording import Wording


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUWARDEN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(console, "out", Console(width=160, highlight=False))
    monkeypatch.chdir(tmp_path)
    for step in (10, 20):
        folder = tmp_path / f"out/checkpoint-{step}"
        folder.mkdir(parents=True)
        save_file({"w": np.random.default_rng(step).normal(size=(8, 8))}, folder / "model.safetensors")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return tmp_path / "out"


def test_table_lists_refuted_files_first(outputs: Path, capsys: pytest.CaptureFixture[str], wording: Wording) -> None:
    assert run(["verify", "out", "--level", "structure"]) == 0
    shown = capsys.readouterr().out
    assert "20" in shown.splitlines()[0], "the newest whole checkpoint comes first"
    wording(shown)
    (outputs / "checkpoint-20/model.safetensors").write_bytes(b"")
    (outputs / "a\x1b[31m.json").write_text("{")
    assert run(["verify", str(outputs), "--level", "structure"]) == 1
    shown = capsys.readouterr().out
    words = [line.split()[0] for line in shown.splitlines() if line.startswith(("refuted ", "proven "))]
    assert words == sorted(words, reverse=True) and {"refuted", "proven"} == {*words}
    assert "\x1b[31m.json" not in shown
    assert run(["verify", str(outputs), "--level", "structure", "--json"]) == 1
    refuted = [e["path"] for e in json.loads(capsys.readouterr().out)["evidence"] if e["verdict"] == "refuted"]
    assert "checkpoint-20/model.safetensors" in refuted


def test_exit_code_follows_the_verdict(outputs: Path, capsys: pytest.CaptureFixture[str], wording: Wording) -> None:
    new, old = str(outputs / "checkpoint-20"), str(outputs / "checkpoint-10")
    assert run(["verify", new, "--level", "structure", "--against", old, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    wording("\n".join(body["proved"]), "10", "20")
    assert run(["verify", old, "--level", "structure", "--against", new]) == 1
    assert run(["verify", new, "--level", "structure", "--against", str(outputs / "none")]) == 2
    (outputs / "checkpoint-20/what.xyz").write_bytes(b"\1")
    assert run(["verify", new, "--level", "structure"]) == 2
