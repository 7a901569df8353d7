"""A hanging test is ended by its time limit, in each of its attempts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paths import KITS

HANGS = "import time\n\ndef test_it():\n    time.sleep(3600)\n"
FAILS_THEN_HANGS = """
import time
runs = []

def test_it():
    runs.append(1)
    assert len(runs) > 1
    time.sleep(3600)
"""
TEARDOWN_HANGS = """
import time, pytest

@pytest.fixture
def slow_to_go():
    yield
    time.sleep(3600)

def test_it(slow_to_go):
    assert False
"""


@pytest.mark.slow
@pytest.mark.parametrize("body", [HANGS, FAILS_THEN_HANGS, TEARDOWN_HANGS])
@pytest.mark.parametrize("method", ["signal", "thread"])
def test_a_hanging_test_fails_by_timeout(tmp_path: Path, body: str, method: str) -> None:
    (tmp_path / "test_one.py").write_text(body)
    options = ["--timeout", "1", "--timeout-method", method, "--reruns", "1"]
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "timed_again", "-p", "no:cacheprovider", *options]
    kits = {"PYTHONPATH": f"{KITS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "PYTEST_ADDOPTS": ""}
    ran = subprocess.run(argv, cwd=tmp_path, env=os.environ | kits, capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "Timeout" in ran.stdout + ran.stderr
    if method == "signal":  # the thread method ends the whole process
        assert " rerun in " in ran.stdout, ran.stdout
