"""A job in an engine's allocation, of which only the log can be read."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuwarden.remote.launch import runner_source
from gpuwarden.remote.runner.command import CHANGED_FILE, Reason

LINES = "import sys; print('one'); sys.stderr.write('two\\n'); print('s3cret-value'); sys.exit(3)"


@pytest.mark.parametrize("echo", [True, False])
def test_the_output_is_echoed_on_request(tmp_path: Path, echo: bool) -> None:
    order = {"spec": {"argv": [sys.executable, "-u", "-c", LINES], "env": {}}, "token": "t-1", "attempt": 1}
    (tmp_path / "runner.py").write_bytes(runner_source())
    (tmp_path / "order.1.json").write_text(json.dumps(order))
    request = json.dumps({"attempt": 1, "id": "RUN", "echo": echo, "outlast": True})
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(tmp_path / "runner.py"), "allot", str(tmp_path)],
        input=request.encode(), capture_output=True, check=False,
        env={"RUN": "1", "GPUWARDEN_ORDER": json.dumps({"TOKEN": "s3cret-value"})},
    )  # fmt: skip
    written = (tmp_path / "out.log").read_bytes()
    assert (done.returncode, written) == (3, b"one\ntwo\n***\n")
    assert done.stdout == (written if echo else b"")


@pytest.mark.parametrize("swap", ["content", "link", "pipe", "nothing there"])
@pytest.mark.attack("files", "changes the checked script on the shared disk before the engine starts the job again")
def test_a_changed_script_is_not_started(tmp_path: Path, swap: str) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('checked')")
    files = {"script.py": hashlib.sha256(script.read_bytes()).hexdigest()}
    spec = {"argv": [sys.executable, str(script)], "env": {}, "files": files}
    (tmp_path / "runner.py").write_bytes(runner_source())
    (tmp_path / "order.1.json").write_text(json.dumps({"spec": spec, "token": "t-1", "attempt": 1}))
    assert _allot(tmp_path, 0) == 0
    script.unlink()
    if swap == "pipe":
        os.mkfifo(script)
    elif swap == "link":
        (tmp_path / "other.py").write_text("print('checked')")
        script.symlink_to("other.py")
    elif swap == "content":
        script.write_text("print('swapped')")
    (tmp_path / "status.json").unlink()
    assert _allot(tmp_path, 1) == CHANGED_FILE
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["reason"]) == ("failed", Reason.NOT_STARTED)
    assert (tmp_path / "out.log").read_bytes() == b"checked\n"


def _allot(folder: Path, restart: int) -> int:
    """Start the runner as the engine does, after `restart` earlier starts. Return its exit code."""
    request = json.dumps({"attempt": 1, "id": "RUN", "restarts": "RESTARTS"})
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(folder / "runner.py"), "allot", str(folder)],
        input=request.encode(), check=False, env={"RUN": "1", "RESTARTS": str(restart)},
    )  # fmt: skip
    return done.returncode
