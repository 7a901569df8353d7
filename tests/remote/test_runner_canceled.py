"""A task that was canceled permanently: its command never runs, no matter how often the engine starts the task."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.remote.launch import runner_source

ORDER = {"spec": {"argv": ["touch", "ran"], "env": {}, "max_restarts": 0}, "token": "t-1", "attempt": 1}


def allot(folder: Path, **request: Any) -> int:
    runner = folder / "runner.py"
    runner.write_bytes(runner_source())
    (folder / "order.1.json").write_text(json.dumps(ORDER))
    given = json.dumps({"attempt": 1, "id": "POD", **request}).encode()
    argv = [sys.executable, "-I", "-S", str(runner), "allot", str(folder)]
    return subprocess.run(argv, input=given, capture_output=True, check=False, env={"POD": "p-1"}).returncode


@pytest.mark.parametrize("state", ["", "running", "preempted"])
def test_a_canceled_attempt_is_recorded_and_ends(tmp_path: Path, state: str) -> None:
    if state:
        (tmp_path / "status.json").write_text(json.dumps({"token": "t-1", "attempt": 1, "state": state}))
    (tmp_path / "canceled.1").touch()
    assert allot(tmp_path, codes={"canceled": 130}) == 130
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["token"], status["attempt"]) == ("canceled", "t-1", 1)
    assert not (tmp_path / "work/ran").exists()


def test_an_end_recorded_earlier_is_kept(tmp_path: Path) -> None:
    before = {"token": "t-1", "attempt": 1, "state": "succeeded"}
    (tmp_path / "status.json").write_text(json.dumps(before))
    (tmp_path / "canceled.1").touch()
    assert allot(tmp_path) == 143, "the code of an engine that names none of its own"
    assert json.loads((tmp_path / "status.json").read_text()) == before
