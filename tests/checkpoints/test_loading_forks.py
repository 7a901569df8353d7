"""A forked loading process gives the same answer as a newly started one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from gpuwarden.checkpoints import build, load
from gpuwarden.static_analysis.estimate import traced
from lifecycle_kit import weights
from real_parts import need

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="forks")]


def task(*paths: Path) -> str:
    files = [{"path": str(path), "name": path.name, "format": "safetensors"} for path in paths]
    return json.dumps({"memory": 8 << 30, "files": files})


@pytest.mark.real("torch")
def test_forked_and_spawned_loads_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("torch", find_spec("torch") is not None)
    (tmp_path / "a.safetensors").write_bytes(weights())
    (tmp_path / "b.safetensors").write_bytes(weights()[:-1])
    both = task(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    forked = load.run_child(both, 120, load.CHILD)
    monkeypatch.setattr(load, "subprocess", subprocess)
    assert forked == load.run_child(both, 120, load.CHILD)
    assert [sorted(answer) for answer in forked[0]] == [["by", "elements", "tensors"], ["error"]]


@pytest.mark.parametrize(("child", "name"), [(build.CHILD, "models"), (traced.CHILD, "tasks")])
def test_other_forked_and_spawned_programs_agree(
    child: tuple[str, ...], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = json.dumps({"memory": 8 << 30, name: []})
    forked = load.run_child(nothing, 120, child)
    monkeypatch.setattr(load, "subprocess", subprocess)
    assert forked == load.run_child(nothing, 120, child)
    assert forked[1].endswith("code 0")


@pytest.mark.real("torch")
def test_a_hanging_forked_load_is_killed(tmp_path: Path) -> None:
    need("torch", find_spec("torch") is not None)
    os.mkfifo(tmp_path / "a.safetensors")  # it has no writer, so reading blocks
    assert load.run_child(task(tmp_path / "a.safetensors"), 1, load.CHILD) == ([], "it took longer than 1 s")
