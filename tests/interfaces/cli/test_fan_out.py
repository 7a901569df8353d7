"""`gpuwarden fan-out` at a terminal: a receipt, a launch, the spread as a table and a picture, and bad input."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich.console import Console

from doors import PLATFORM, answer, in_process, quick_warden
from gpuwarden.interfaces.cli import console
from gpuwarden.remote.sandbox.words import Kind, Sandbox
from wording import Wording

SCRIPT = """
import json, os, sys
os.makedirs("out")
values = dict(word[2:].split("=") for word in sys.argv[1:])
with open("out/result.json", "w") as file:
    json.dump({"objective": {"name": "loss", "value": float(values["lr"]) + int(values["seed"])}}, file)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gpuwarden.backends.local.detect", lambda: Sandbox(Kind.NONE))
    monkeypatch.setattr(console, "out", Console(width=100, highlight=False))
    Path("train.py").write_text(SCRIPT)
    return "train.py"


@pytest.mark.slow
def test_a_grid_is_checked_launched_followed_and_drawn(script: str, tmp_path: Path, wording: Wording) -> None:
    home = tmp_path / "home"
    quick_warden(home)
    call = ["fan-out", "--on", PLATFORM, "--grid", "lr=1,2", "--seeds", "2", "--output", "out"]
    call += ["--timeout", "60", "--max-cost", "20", "--max-machines", "2"]
    checked = in_process(home, *call, script)
    assert checked.returncode == 0 and re.search(r"\b4 .*\$\d", checked.stdout)
    asked = answer(in_process(home, *call, "--json", script))
    seen = answer(in_process(home, *call, "--receipt", asked["receipt"], "--json", script))
    assert seen["fan_out"]["states"] == {"running": 4}
    name = seen["job_id"]
    while seen["state"] == "running":
        seen = answer(in_process(home, "fan-out", name, "--json"))
    assert seen["code"] == "complete"
    shown = in_process(home, "fan-out", name, "--plot", "spread.svg")
    assert shown.returncode == 0 and shown.stdout.count("2/2") == 2
    wording(shown.stdout.partition("`")[0].rpartition("\n")[0], name)
    assert Path("spread.svg").read_text().count("<circle") == 4
    again = answer(in_process(home, "fan-out", name, "--resume", "--cells", "0", "--json"))
    assert again["code"] == "bad_request"
    wording(again["message"])


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("--grid", "lr=1,1"), id="a value twice"),
        pytest.param(("--grid", "lr=1", "--grid", "lr=2"), id="a key twice"),
        pytest.param(("--grid", "lr=1", "--random", "lr=1..2"), id="two ways"),
        pytest.param(("--random", "lr=5..2"), id="no range"),
        pytest.param(("--random", "opt=a,b", "--trials", "3"), id="few settings"),
        pytest.param(("--tune", "opt=a,b", "--trials", "3"), id="few settings to tune"),
        pytest.param(("--grid", "lr=1", "--weigh", "lr2"), id="no such key to weigh"),
        pytest.param(("--grid", "lr=1", "--resume"), id="nothing to resume"),
        pytest.param(("--grid", "lr=1", "--cells", "3"), id="cells of a new one"),
        pytest.param((), id="nothing"),
    ],
)
def test_invalid_manifest_is_refused(script: str, tmp_path: Path, words: tuple[str, ...], wording: Wording) -> None:
    done = in_process(tmp_path / "home", "fan-out", "--on", PLATFORM, "--output", "out", *words, "--json", script)
    assert done.returncode != 0 and answer(done)["code"] == "bad_request", done.stdout
    wording(answer(done)["message"])


@pytest.mark.slow
def test_fan_out_limits_are_raised_with_a_receipt(script: str, tmp_path: Path, wording: Wording) -> None:
    home = tmp_path / "home"
    quick_warden(home)
    call = ["fan-out", "--on", PLATFORM, "--grid", "lr=1,2", "--output", "out", "--timeout", "60"]
    call += ["--max-cost", "0.0001", "--json"]
    receipt = answer(in_process(home, *call, script))["receipt"]
    seen = answer(in_process(home, *call, "--receipt", receipt, script))
    name = seen["job_id"]
    assert "fan-out --resume --max-cost" in seen["hint"]
    wording(seen["fan_out"]["held"])
    for words in (["--max-cost", "20"], ["--receipt", receipt], ["--max-machines", "2"], ["--dry-run"]):
        assert answer(in_process(home, "fan-out", name, *words, "--json"))["code"] == "bad_request"
    more = ["fan-out", name, "--resume", "--max-cost", "0.9", "--json"]
    rise = answer(in_process(home, *more))
    assert rise["code"] == "checked" and not rise["fan_out"]["jobs"]
    wording(rise["message"], name)
    wrong = answer(in_process(home, *more, "--receipt", receipt))
    assert wrong["code"] == "conflict"
    done = answer(in_process(home, *more, "--receipt", rise["receipt"]))
    assert not done["fan_out"]["held"], done
    assert "waiting" not in done["fan_out"]["states"]  # a job that has already ended isn't one of its live jobs
