"""The demo, run as a user and as CI: its output is compared with the ledger and the files that it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

ENV = {k: v for k, v in os.environ.items() if not k.startswith("GPUWARDEN_")}


def demo(tmp_path: Path, *flags: str, columns: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpuwarden", "demo", *flags]
    # UTC has no daylight saving time, so it is always 15 hours from 18:00 to 9:00.
    env = (
        ENV | {"HOME": str(tmp_path), "TMPDIR": str(tmp_path), "TZ": "UTC"} | ({"COLUMNS": columns} if columns else {})
    )
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.prove
def test_the_whole_story_ends_in_one_json_object(tmp_path: Path) -> None:
    done = demo(tmp_path, "--yes", "--json", "--keep", str(tmp_path / "kept"))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["ok"] is True
    job = told["job"]
    assert (job["state"], job["preemptions"], job["final_step"]) == ("succeeded", 1, 240)
    assert 0 < job["resumed_from_step"] <= 120 and job["resumed_from_step"] % 30 == 0
    assert {"PF-SEC-001", "PF-OUT-001", "PF-TIME-001"} <= set(told["refused_submit_rules"])
    assert "TD-COPY-001" in told["teardown_refused_rules"]
    assert told["corruption_caught"] is True and told["checkpoint"]["verified"] is True
    assert told["lease"] == {"state": "stopped"} and told["cost_usd"] > 0
    assert told["approval"] == {"channel": "rehearsal"}
    _files_agree(tmp_path / "kept", told)


def _files_agree(kept: Path, told: dict[str, object]) -> None:
    """Assert that the copies exist, the machine's disk is gone, and the ledger has the reported number of events."""
    copies = list((kept / "artifacts").rglob("model.safetensors"))
    assert {p.parent.name for p in copies} == {"checkpoint-180", "checkpoint-210", "checkpoint-240"}
    assert not list((kept / "providers").rglob("model.safetensors"))
    events = history(kept)
    assert len(events) == told["events"]
    assert [e["kind"] for e in events if e["kind"] == "approval.used"] == ["approval.used"]


def history(kept: Path) -> list[dict[str, Any]]:
    """Return the events in the ledger of a demo run with `--keep`."""
    done = subprocess.run(
        [sys.executable, "-m", "gpuwarden", "history", "--json"],
        env=ENV | {"GPUWARDEN_HOME": str(kept)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return list(json.loads(done.stdout)["events"])


@pytest.mark.prove
def test_demo_without_a_terminal_answers_itself_and_reports_it(tmp_path: Path) -> None:
    done = demo(tmp_path, "--keep", str(tmp_path / "kept"))
    assert done.returncode == 0, done.stderr
    told = " ".join(done.stdout.split())
    assert "rehearsal" in told and "$1.80" in told, told
    events = history(tmp_path / "kept")
    (granted,) = [e["body"] for e in events if e["kind"] == "approval.granted"]
    assert granted["channel"] == "rehearsal" and "--yes" not in granted["by"]
    assert [e["kind"] for e in events].count("lease.stopped") == 1


@pytest.mark.long
@pytest.mark.prove
def test_overnight_demo_compares_automatic_and_approved_teardown(tmp_path: Path) -> None:
    done = demo(tmp_path, "--overnight", "--json", "--keep", str(tmp_path / "kept"))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["ok"] is True and told["approvals"] == ["automatic_teardown", "rehearsal"]
    ordered, asked = told["ordered"], told["asked"]
    for bill in (ordered, asked):
        assert (bill["job"], bill["proven"], bill["lease"]) == ("succeeded", True, "stopped")
    assert (ordered["copied_from"], asked["copied_from"]) == ("hf://you/night-run", "machine")
    assert told["starts"] == 0, "a store with the last word needs no machine"
    assert 0.2 < ordered["idle_hours"] < 1 and "08:00" < ordered["gone_at"] < "08:30"
    assert asked["gone_at"] == "09:00" and asked["idle_hours"] > 8
    assert asked["cost_usd"] == pytest.approx(15 * 2.80, rel=0.02), "from 18:00 to 9:00, at the price of the quote"
    hours = 5.5 + ordered["idle_hours"]  # the job, and the time until the machine stopped itself
    assert ordered["cost_usd"] == pytest.approx(hours * 2.80, rel=0.03), "and its disk"
    assert told["saved_usd"] == pytest.approx(asked["cost_usd"] - ordered["cost_usd"], abs=1e-5)
    events = history(tmp_path / "kept")
    _proven_before_the_end(events)
    times = sorted(e["at"] for e in events)
    assert max(b - a for a, b in pairwise(times)) > 13.5 * 3600, "nothing of gpuwarden ran in the night"


@pytest.mark.prove
def test_overnight_demo_fits_80_columns_and_is_marked_as_rehearsal(tmp_path: Path) -> None:
    done = demo(tmp_path, "--overnight", "--keep", str(tmp_path / "kept"), columns="80")
    assert done.returncode == 0, done.stderr
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    assert max(map(len, lines)) <= 80
    told = " ".join(done.stdout.split())
    assert lines[0].split()[1].startswith("rehearsal/"), "what is pretended comes first"
    for text in ("hf://you/night-run", "channel rehearsal", "$2.80/h", "18:00", "23:45", "08:12", "09:00"):
        assert text in told, text
    jobs = {e["body"]["spec"]["name"] for e in history(tmp_path / "kept") if e["kind"] == "job.accepted"}
    assert jobs == {"ordered", "asked"} <= set(told.split())
    assert len([line for line in lines if "$" in line[:30] and "23:30" in line]) == len(jobs), "a bill for each"


def _proven_before_the_end(events: list[dict[str, Any]]) -> None:
    """Assert that the end was ordered with the job, then proven, announced, and, after the grace period, approved."""
    (ordered,) = [e for e in events if e["kind"] == "ending.ordered"]
    mine = [e for e in events if e["subject"] == ordered["subject"]]
    (said,) = [e for e in mine if e["kind"] == "ending.announced"]
    proven = [e for e in mine if e["kind"] == "artifacts.verified" and e["body"]["verdict"] == "proven"]
    (granted,) = [e for e in events if e["kind"] == "approval.granted" and e["body"]["channel"] == "automatic_teardown"]
    assert ordered["seq"] < proven[0]["seq"] < said["seq"] < granted["seq"]
    assert granted["at"] >= said["at"] + ordered["body"]["grace_s"]
