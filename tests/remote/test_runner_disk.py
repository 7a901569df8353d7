"""A full disk, and output that isn't text."""

from __future__ import annotations

import base64
import os
import sys
from pathlib import Path

import pytest

from gpuwarden.remote.runner import status
from gpuwarden.remote.runner.log import Log
from gpuwarden.remote.runner.status import read_status, write_status
from runner_kit import call, ended, order


def test_a_full_disk_does_not_lose_the_status(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert write_status(str(folder), {"state": "running", "metrics": {}})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(status, "write_atomic", full)
    assert write_status(str(folder), {"state": "failed"})
    assert read_status(str(folder)) == {"state": "failed"}
    assert not write_status(str(folder), {"state": "x" * 100_000})  # would need a new block
    assert read_status(str(folder)) == {"state": "failed"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_an_unwritable_log_counts_dropped_bytes(folder: Path) -> None:
    log_ = Log(str(folder), 4096)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, log_.fd)
    log_.write(b"x" * 10_000)
    assert log_.dropped == 10_000
    os.close(full)
    os.close(log_.fd)


@pytest.mark.slow
def test_binary_output_does_not_break_the_reply(folder: Path) -> None:
    blob = base64.b64encode(bytes(range(256))).decode()
    call("start", folder, order([sys.executable, "-c", f"import os,base64; os.write(1, base64.b64decode('{blob}'))"]))
    ended(folder)
    seen = call("logs", folder, {"cursor": 0})
    assert seen["next"] == seen["size"] == 256
