"""Launching: once, in the background, or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runner_kit import call, ended, look, order, sh, until


@pytest.mark.slow
def test_ten_concurrent_starts_launch_once(folder: Path) -> None:
    job = sh("echo run >> ../count; sleep 30")
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda _: call("start", folder, job), range(10)))
    assert [a["ok"] for a in answers] == [True] * 10
    assert sorted(a["adopted"] for a in answers) == [False] + [True] * 9
    assert len({a["pid"] for a in answers}) == 1
    until(folder, lambda _: (folder / "count").exists())
    assert (folder / "count").read_text() == "run\n"


@pytest.mark.slow
def test_a_start_returns_while_the_job_runs_in_its_own_session(folder: Path) -> None:
    assert call("start", folder, sh("sleep 1200"))["ok"]
    seen = look(folder)
    assert (seen["state"], seen["alive"], seen["child_alive"]) == ("running", True, True)
    assert os.getsid(seen["pid"]) == seen["pid"] != os.getsid(0)


@pytest.mark.slow
def test_an_attempt_beside_an_earlier_attempt_is_a_conflict(folder: Path) -> None:
    call("start", folder, sh("sleep 1200"))
    answer = call("start", folder, sh("sleep 30", attempt=2))
    assert (answer["ok"], answer["code"]) == (False, "conflict")


def test_a_claim_whose_owner_died_before_its_status_is_retaken(folder: Path) -> None:
    script = f"import fcntl, os; fcntl.flock(os.open({str(folder / 'lock')!r}, os.O_RDWR | os.O_CREAT), 2); os._exit(9)"
    subprocess.run([sys.executable, "-c", script], check=False)
    answer = call("start", folder, sh("exit 0"))
    assert (answer["ok"], answer["adopted"], answer["state"], answer["attempt"]) == (True, False, "running", 1)
    assert answer["pid"] > 1 and answer["start_ticks"] and answer["machine"].startswith(answer["boot_id"])


@pytest.mark.slow
def test_a_malformed_status_launches_nothing(folder: Path) -> None:
    (folder / "status.json").write_text("{torn")
    assert call("start", folder, sh("touch ../ran"))["code"] == "bad_reply"
    assert look(folder)["state"] == "unreadable"
    (folder / "status.json").unlink()
    os.mkfifo(folder / "status.json")
    assert call("start", folder, sh("touch ../ran"))["code"] == "bad_reply"
    assert not (folder / "ran").exists()


def test_a_command_that_does_not_exist_is_a_failed_job(folder: Path) -> None:
    assert call("start", folder, order(["/no/such/program"]))["ok"]
    seen = ended(folder)
    assert (seen["state"], seen["reason"], seen["exit_code"]) == ("failed", "not_started", 127)
