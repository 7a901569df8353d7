"""A job in an allocation of an engine whose log is all that can be read of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpuwarden.remote.launch import runner_source

LINES = "import sys; print('one'); sys.stderr.write('two\\n'); print('s3cret-value'); sys.exit(3)"


@pytest.mark.parametrize("echo", [True, False])
def test_the_output_is_repeated_where_that_is_asked_for(tmp_path: Path, echo: bool) -> None:
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
