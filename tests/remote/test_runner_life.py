"""A job's lifecycle: the ways in which it ends, and the reported state."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpuwarden.remote.launch import MARKER, content_name
from gpuwarden.remote.runner import inventory, process
from gpuwarden.remote.runner.observe import orphans
from gpuwarden.remote.runner.process import boot_id, group_members, is_alive, start_mark
from runner_kit import call, ended, linux, log, look, sh, until
from waiting import eventually

RUNNER = content_name("runner", b"any release of the runner")


@pytest.mark.slow
@linux
def test_a_killed_supervisor_is_dead_and_a_stopped_supervisor_alive(folder: Path) -> None:
    call("start", folder, sh("sleep 30"))
    seen = look(folder)
    os.kill(seen["pid"], signal.SIGSTOP)
    assert look(folder)["alive"] is True
    os.kill(seen["pid"], signal.SIGKILL)
    dead = until(folder, lambda s: s["alive"] is False)
    assert (dead["state"], dead["child_alive"]) == ("running", True)
    assert call("start", folder, sh("true", attempt=2))["code"] == "conflict"
    assert call("stop", folder, {"grace_s": 1}) == {"ok": True, "result": "stopped"}
    after = look(folder)
    assert (after["state"], after["child_alive"]) == ("canceled", False)


@linux
def test_stop_ends_processes_that_outlived_supervisor_and_leader(folder: Path) -> None:
    call("start", folder, sh("sleep 31 & echo $! > ../orphan; wait"))
    seen = until(folder, lambda _: (folder / "orphan").exists() and (folder / "orphan").read_text().strip())
    orphan = int((folder / "orphan").read_text())
    os.kill(seen["pid"], signal.SIGKILL)
    os.kill(seen["child_pid"], signal.SIGKILL)
    dead = until(folder, lambda s: s["child_alive"] is False and s["alive"] is False)
    assert orphans(str(folder), dead) == [orphan]
    assert call("stop", folder, {"grace_s": 1})["result"] == "stopped"
    assert group_members(dead["pgid"]) == []


@pytest.mark.slow
@linux
def test_a_reused_pid_is_never_signaled(folder: Path) -> None:
    with subprocess.Popen(["sleep", "30"], start_new_session=True) as stranger:
        identity = {"pid": stranger.pid, "child_pid": stranger.pid, "pgid": stranger.pid, "boot_id": boot_id()}
        status = {"token": "t", "attempt": 1, "state": "running", "start_ticks": "1", "child_ticks": "1", **identity}
        (folder / "status.json").write_text(json.dumps(status))
        assert look(folder)["alive"] is False
        assert call("stop", folder, {"grace_s": 0})["result"] == "gone"
        ticks = start_mark(stranger.pid)
        status.update(start_ticks=ticks, child_ticks=ticks, boot_id="another boot")
        (folder / "status.json").write_text(json.dumps(status))
        assert look(folder)["alive"] is False
        assert call("stop", folder, {"grace_s": 0})["result"] == "gone"
        assert stranger.poll() is None
        stranger.kill()


@linux
@pytest.mark.parametrize(
    ("words", "listed"),
    [
        ((f"/runs/{RUNNER}", "list"), False),
        (("/lib/gpuwarden/remote/runner", "serve"), False),
        ((f"/runs/{RUNNER}", "supervise-me"), True),
        (("/home/me/runner.py", "serve", "--port", "8000"), True),
        (("--role", "runner", "start"), True),
    ],
)
def test_gpuwarden_requests_are_not_listed_as_processes(folder: Path, words: tuple[str, ...], listed: bool) -> None:
    """Otherwise, the facts would change if the watch polls between a teardown ticket and its approval."""
    command = [sys.executable, "-c", "import sys; sys.stdin.read()", *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env={MARKER: str(folder)}) as other:
        found = inventory.processes(f"{MARKER}={folder}")
        assert [text.split(":")[0] for text in found] == ([f"pid {other.pid}"] if listed else [])


def test_ps_identifies_processes_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "PROC", "/nonexistent")
    mark = start_mark(os.getpid())
    if not mark:
        pytest.skip("no ps here")
    assert is_alive(os.getpid(), mark, "") is True
    assert is_alive(os.getpid(), "another time", "") is False
    assert is_alive(os.getpid(), "", "") is None
    with subprocess.Popen(["true"]) as done:
        done.wait()
    assert is_alive(done.pid, mark, "") is False


def test_an_external_signal_is_a_preemption(folder: Path) -> None:
    call("start", folder, sh("trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.05; done"))
    seen = until(folder, lambda s: s["log_bytes"] > 0)
    os.kill(seen["pid"], signal.SIGTERM)
    after = ended(folder)
    assert (after["state"], after["exit_code"]) == ("preempted", 0)
    assert log(folder).splitlines()[-1] == "saved"


@pytest.mark.slow
def test_the_timeout_warns_and_ends_the_job(folder: Path) -> None:
    call("start", folder, sh("sleep 30", timeout_s=1, warn_before_s=0.6, grace_s=1))
    seen = ended(folder)
    assert (seen["state"], seen["signal"], seen["alerts"]) == ("timeout", signal.SIGTERM, 1)
    assert [alert["kind"] for alert in seen["last_alerts"]] == ["timeout"] and "[gpuwarden] " in log(folder)


def test_a_job_that_requests_restarts_is_restarted(folder: Path) -> None:
    text = "echo $GPUWARDEN_RESTARTS; test $GPUWARDEN_RESTARTS = 2 || exit 75"
    call("start", folder, sh(text, max_restarts=3, restart_delay_s=0.01))
    seen = ended(folder)
    assert (seen["state"], seen["restarts"], log(folder)) == ("succeeded", 2, "0\n1\n2\n")


def test_a_job_fails_after_its_last_restart(folder: Path) -> None:
    call("start", folder, sh("kill -TERM $$", max_restarts=1, restart_delay_s=0.01))
    seen = ended(folder)
    assert (seen["state"], seen["restarts"], seen["signal"]) == ("failed", 1, signal.SIGTERM)
    assert seen["reason"] == "restarts_used"


def test_a_plain_failure_is_not_restarted(folder: Path) -> None:
    call("start", folder, sh("exit 1", max_restarts=3))
    assert (ended(folder)["restarts"], look(folder)["state"]) == (0, "failed")


@linux
def test_background_processes_of_a_command_are_ended(folder: Path) -> None:
    call("start", folder, sh("sleep 32 & exit 0"))
    seen = ended(folder)
    assert seen["state"] == "succeeded"
    assert group_members(seen["pgid"]) == []


@pytest.mark.slow
@linux
def test_a_job_ends_if_its_run_folder_disappears(folder: Path) -> None:
    call("start", folder, sh("sleep 900"))
    seen = look(folder)
    folder.rename(folder.with_name("moved"))
    eventually(
        lambda: not group_members(seen["pgid"]) and not is_alive(seen["pid"], seen["start_ticks"], seen["boot_id"])
    )
