"""The runner as it is sent to machines: a separate process, a real run folder, and real signals."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.remote.launch import runner_source
from gpuwarden.remote.runner.log import segments
from gpuwarden.remote.runner.observe import observe
from gpuwarden.remote.runner.status import FINAL
from waiting import eventually

linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


@cache
def runner_file() -> str:
    """Return the path of the single file that contains the runner."""
    folder = tempfile.TemporaryDirectory(prefix="gpuwarden-runner-")
    atexit.register(folder.cleanup)
    path = Path(folder.name) / "runner.py"
    path.write_bytes(runner_source())
    return str(path)


def call(verb: str, folder: Path | None = None, request: object = None) -> dict[str, Any]:
    """Run one of the runner's verbs; return its last line, parsed from JSON."""
    argv = [sys.executable, "-I", "-S", runner_file(), verb, *([str(folder)] if folder else [])]
    done = subprocess.run(argv, input=json.dumps(request or {}).encode(), capture_output=True, timeout=300)
    assert not done.stderr, done.stderr.decode()
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def order(argv: list[str], *, attempt: int = 1, secrets: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    return {"spec": {"argv": argv, "env": {}, **spec}, "secrets": secrets or {}, "token": "t", "attempt": attempt}


def sh(text: str, **more: Any) -> dict[str, Any]:
    return order(["sh", "-c", text], **more)


def look(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = call("poll", request={"dirs": [str(folder)]})["jobs"][str(folder)]
    return found


def until(folder: Path, good: Callable[[dict[str, Any]], Any], within: float = 30.0) -> dict[str, Any]:
    """Poll a run folder until its status is good; return the last status."""

    def good_one() -> dict[str, Any]:
        seen = observe(str(folder))
        return seen if good(seen) else {}

    return eventually(good_one, within)


def ended(folder: Path, within: float = 30.0) -> dict[str, Any]:
    return until(folder, lambda s: s["state"] in FINAL and s["alive"] is False, within)


def log(folder: Path) -> str:
    return "".join(Path(path).read_text() for _, path in segments(str(folder)))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    path = Path(os.path.realpath(tmp_path)) / "job"
    path.mkdir()
    yield path
    if path.exists():
        call("stop", path, {"grace_s": 0})
