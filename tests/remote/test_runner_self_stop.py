"""A machine that stops itself: the runner requests the stop only after its job has ended and no requests arrive."""

from __future__ import annotations

import fcntl
import http.server
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuwarden.remote.runner import self_stop
from gpuwarden.remote.runner.self_stop import SelfStopper, ask
from gpuwarden.remote.runner.store_report import GOES_ON
from runner_kit import call, ended, linux, look, order, sh, until
from wording import Wording

pytestmark = linux


def says(folder: Path, *, code: int = 0) -> list[str]:
    """Return a command that records its call instead of stopping the machine."""
    text = f"import sys; open({str(folder)!r} + '/asked', 'a').write('x'); sys.exit({code} and 'refused: quota')"
    return [sys.executable, "-I", "-S", "-c", text]


def with_self_stop(folder: Path, argv: list[str], after_s: float = 0.4, **more: Any) -> dict[str, Any]:
    code = more.pop("code", 0)
    how = {"after_s": after_s, "command": says(folder, code=code), "down_s": 0.05, "retry_s": 0.1, **more}
    return order(argv, self_stop=how, heartbeat_s=0.2)


def asked(folder: Path) -> int:
    path = folder / "asked"
    return len(path.read_text()) if path.exists() else 0


def wait_for(folder: Path, times: int = 1) -> None:
    until(folder, lambda _: asked(folder) >= times)


@pytest.mark.slow
def test_the_machine_stops_after_the_end_and_the_idle_time(folder: Path) -> None:
    call("start", folder, with_self_stop(folder, ["true"]))
    ended(folder)
    wait_for(folder)
    note = json.loads((folder / "self_stopped.json").read_text())
    assert note["tries"] >= 1 and look(folder)["state"] == "succeeded"
    (folder / "self_stop.hold").touch()


@pytest.mark.slow
def test_a_rehearsals_clock_can_be_advanced(folder: Path) -> None:
    clock = folder.parent / "clock"

    def set_forward(seconds: float) -> None:
        fresh = clock.with_suffix(".new")
        fresh.write_text(str(seconds + (float(clock.read_text()) if clock.exists() else 0.0)))
        fresh.replace(clock)

    def passes(_: object) -> bool:
        set_forward(1800)
        return asked(folder) > 0

    call("start", folder, with_self_stop(folder, ["true"], after_s=3600.0, clock=str(clock), down_s=1.0))
    ended(folder)
    self_stopper = SelfStopper(str(folder), {"self_stop": {"after_s": 3600.0, "clock": str(clock)}, "attempt": 1})
    before = self_stopper.now()
    set_forward(7200)
    assert 7200 <= self_stopper.now() - before < 9000
    until(folder, passes)
    (folder / "self_stop.hold").touch()


@pytest.mark.slow
def test_a_failed_self_stop_is_retried_and_reported_in_the_status(folder: Path) -> None:
    call("start", folder, with_self_stop(folder, ["true"], code=1))
    wait_for(folder, 3)
    assert not (folder / "keep.look").exists(), "there is no artifact store to ask"
    seen = until(folder, lambda s: any(a["kind"] == "self_stop_failed" for a in s["last_alerts"]))
    alert = next(a for a in seen["last_alerts"] if a["kind"] == "self_stop_failed")
    assert "refused: quota" in alert["text"] and seen["state"] == "succeeded"
    assert len([a for a in seen["last_alerts"] if a["kind"] == "self_stop_failed"]) == 1, "one alert, the newest"
    (folder / "self_stop.hold").touch()


@pytest.mark.slow
def test_a_hold_keeps_the_machine_on(folder: Path) -> None:
    call("start", folder, with_self_stop(folder, ["true"], after_s=0.6))
    assert call("hold", folder)["ok"] is True
    until(folder, lambda _: unlocked(folder / "self_stop.lock"))
    assert not asked(folder)


def unlocked(path: Path) -> bool:
    if not path.exists():
        return False
    with path.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


@pytest.mark.slow
def test_the_self_stop_process_is_not_disclosed(folder: Path) -> None:
    call("start", folder, with_self_stop(folder, ["true"], after_s=60))
    ended(folder)
    until(folder, lambda _: (folder / "self_stop.lock").exists())
    assert not [text for text in call("disclose", folder)["processes"] if str(folder) in text]
    (folder / "self_stop.hold").touch()


def test_a_launch_without_an_order_starts_no_self_stop_process(folder: Path) -> None:
    call("start", folder, sh("true"))
    ended(folder)
    assert not (folder / "self_stop.lock").exists()


# ------------------------------------------------------------------------------- the decision, with a test clock


class Hand(SelfStopper):
    """The same decision on a clock that the test moves. The machine's wall clock may jump."""

    def __init__(self, folder: Path, after_s: float = 100.0, deadline_s: float | None = None) -> None:
        self.at = 1000.0
        spec = {"after_s": after_s, "deadline_s": deadline_s, "command": ["true"]}
        super().__init__(str(folder), {"self_stop": spec, "attempt": 1})

    def now(self) -> float:
        return self.at

    def sees(self, state: str) -> None:
        self.look({"state": state, "pid": os.getpid(), "start_ticks": self_stop_mark(), "boot_id": ""})

    def comes(self) -> None:
        os.close(self_stop.record_request(self.folder))


def self_stop_mark() -> str:
    from gpuwarden.remote.runner.process import start_mark

    return start_mark(os.getpid())


@pytest.fixture
def hand(tmp_path: Path) -> Hand:
    return Hand(tmp_path)


@pytest.mark.parametrize("way", ["answers", "silent", "comes", "failed"])
def test_a_stop_waits_for_the_artifact_stores_last_check(
    hand: Hand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A store that doesn't answer doesn't keep the machine running, but a request that arrives meanwhile does."""
    report = tmp_path / "keep.json"
    report.write_text(json.dumps({"state": "failed" if way == "failed" else "done"}))
    asked: list[str] = []

    def sleep(seconds: float) -> None:
        hand.at += 10.0
        asked.append((tmp_path / "keep.look").read_text())
        if way == "comes" and len(asked) == 2:
            hand.comes()
        if way == "answers" and len(asked) == 3:
            report.write_text(json.dumps({"state": "done", "look": asked[-1]}))

    monkeypatch.setattr(self_stop.time, "sleep", sleep)
    assert hand.last_word() is (way != "comes")
    assert len(asked) == {"answers": 3, "silent": 12, "comes": 2, "failed": 0}[way] and len(set(asked)) <= 1


def test_a_refused_stop_revokes_the_last_check(hand: Hand, tmp_path: Path) -> None:
    (tmp_path / "keep.look").write_text("1")
    hand.spec = {**hand.spec, "command": ["false"]}
    hand.stop_machine()
    assert (tmp_path / "keep.look").read_text().startswith(GOES_ON) and hand.tries == 1


@pytest.mark.parametrize("way", ["refused", "answered", "taken back", "silent"])
def test_after_a_refused_stop_the_store_must_answer_a_newer_check(
    hand: Hand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, wording: Wording
) -> None:
    """The store may claim that nothing was written since the first try, and the machine would be terminated for it."""
    report, look, stops = tmp_path / "keep.json", tmp_path / "keep.look", []
    report.write_text(json.dumps({"state": "done"}))
    answering = True

    def sleep(seconds: float) -> None:
        hand.at += 10.0
        asked = look.read_text()
        if answering:
            report.write_text(json.dumps({"state": "done", "look": asked}))
        elif way == "refused":
            report.write_text(json.dumps({"state": "failed", "look": asked}))

    def refused(spec: object) -> str:
        stops.append(look.read_text())
        return "quota"

    monkeypatch.setattr(self_stop.time, "sleep", sleep)
    monkeypatch.setattr(self_stop, "ask", refused)
    hand.stop_machine()
    assert len(stops) == 1 and not stops[0].startswith(GOES_ON)
    answering = way == "answered"
    if way == "taken back":
        report.write_text(json.dumps({"state": "done", "look": look.read_text()}))
    hand.stop_machine()
    assert len(stops) == (2 if way in {"answered", "taken back"} else 1) and hand.tries == 2
    assert look.read_text().startswith(GOES_ON) and hand.not_before > hand.at
    alert = json.loads((tmp_path / "alerts.jsonl").read_text().splitlines()[-1])
    wording(alert["text"])


def test_a_request_during_the_stop_revokes_the_last_check(
    hand: Hand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, look = tmp_path / "keep.json", tmp_path / "keep.look"
    report.write_text(json.dumps({"state": "done"}))

    def sleep(seconds: float) -> None:
        hand.at += 10.0
        report.write_text(json.dumps({"state": "done", "look": look.read_text()}))

    monkeypatch.setattr(self_stop.time, "sleep", sleep)
    reader = self_stop.record_request(str(tmp_path))
    hand.heard_at, hand.mark = 0.0, hand.stamp(self_stop.HEARD)
    hand.stop_machine()
    os.close(reader)
    assert hand.tries == 0 and look.read_text().startswith(GOES_ON)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("time"), st.floats(0.1, 90.0)),
        st.tuples(st.just("comes"), st.just(0.0)),
        st.tuples(st.just("ends"), st.just(0.0)),
        st.tuples(st.just("clock"), st.floats(-1e9, 1e9)),
    ),
    max_size=40,
)


@pytest.mark.slow
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS, st.one_of(st.none(), st.floats(50.0, 600.0)))
def test_a_machine_stops_only_after_its_idle_time(
    tmp_path: Path, steps: list[tuple[str, float]], late: float | None
) -> None:
    """It stops only after `after_s` without a request after the end or the deadline, whatever the wall clock shows."""
    hand = Hand(tmp_path, deadline_s=late)
    over_at: float | None = None
    last = begun = hand.at
    state, wall = "running", 1e9
    for what, value in steps:
        if what == "time":
            hand.at += value
        elif what == "comes":
            hand.comes()
            last = hand.at
        elif what == "ends":
            state, over_at = "succeeded", over_at if over_at is not None else hand.at
        else:
            wall += value
        with patch("time.time", lambda wall=wall: wall):
            hand.sees(state)
            due = hand.due()
        ended = over_at is not None and hand.at - max(over_at, last) >= 100.0
        overdue = late is not None and hand.at - begun >= late and hand.at - max(last, over_at or 0.0) >= 100.0
        assert due == (ended or overdue), (what, value)


def test_a_long_pull_keeps_the_machine_on(hand: Hand) -> None:
    hand.sees("succeeded")
    reading = self_stop.record_request(hand.folder)
    hand.sees("succeeded")
    hand.at += 5000
    hand.sees("succeeded")
    assert hand.due()
    hand.stop_machine()
    assert hand.tries == 0 and not hand.due(), "somebody reads at this moment"
    os.close(reading)
    hand.at += 100
    hand.sees("succeeded")
    assert hand.due()


def test_another_job_on_the_machine_keeps_it_on(tmp_path: Path) -> None:
    mine, other = tmp_path / "gw-a", tmp_path / "gw-b"
    mine.mkdir()
    other.mkdir()
    hand = Hand(mine)
    hand.sees("succeeded")
    hand.at += 101
    assert hand.due()
    lock = self_stop.take_lock(str(other))
    assert not hand.due()
    os.close(lock)
    assert hand.due()


def test_a_progressing_upload_keeps_the_machine_on(hand: Hand) -> None:
    hand.sees("succeeded")
    lock = self_stop.take_lock(hand.folder, "keep.lock")
    for _ in range(5):
        os.utime(hand.folder + "/keep.lock")
        hand.sees("succeeded")
        hand.at += 99
        hand.sees("succeeded")
        assert not hand.due()
    os.close(lock)
    assert hand.due()


def test_a_failing_upload_does_not_keep_the_machine_on(hand: Hand) -> None:
    """The uploader holds its lock during a day of retries, but the idle time begins at the last uploaded byte."""
    lock = self_stop.take_lock(hand.folder, "keep.lock")
    hand.sees("succeeded")
    hand.at += 99
    hand.sees("succeeded")
    assert not hand.due()
    hand.at += 2
    hand.sees("succeeded")
    assert hand.due()
    os.close(lock)


def test_only_a_dead_supervisor_counts_as_an_end(hand: Hand) -> None:
    hand.sees("running")
    hand.at += 1000
    assert not hand.due(), "no deadline, and the job runs"
    hand.look({"state": "running", "pid": 2**22 + 1, "start_ticks": "1", "boot_id": "", "child_pid": 2**22 + 2})
    hand.at += 101
    assert hand.due()


def test_a_later_attempt_or_a_hold_ends_self_stop(tmp_path: Path) -> None:
    hand = Hand(tmp_path)
    (tmp_path / "status.json").write_text(json.dumps({"state": "running", "attempt": 1}))
    assert hand.wanted()
    (tmp_path / "status.json").write_text(json.dumps({"state": "running", "attempt": 2}))
    assert not hand.wanted()
    (tmp_path / "status.json").write_text(json.dumps({"state": "running", "attempt": 1}))
    (tmp_path / "self_stop.hold").touch()
    assert not hand.wanted()


# -------------------------------------------------------------------------------------- outputs that a stop loses


@pytest.fixture
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A mount table with a disk, an in-memory folder on it, and a disk inside that folder."""
    at = os.path.realpath(tmp_path)
    table = tmp_path / "mounts"
    table.write_text(
        f"tmpfs / tmpfs rw 0 0\n/dev/vda / ext4 rw 0 0\nx {at}/in\\040memory tmpfs rw 0 0\n"
        f"/dev/vdb {at}/in\\040memory/disk ext4 rw 0 0\nx {at}/ram ramfs rw 0 0\n"
    )
    monkeypatch.setattr(self_stop, "MOUNTS", str(table))
    return table


@pytest.mark.parametrize(
    ("output", "lost"),
    [("in memory/x", True), ("in memory", True), ("ram", True), ("link", True), ("", True), ("in memory/disk/x", False),
     ("in memoryless", False), ("out", False), ("ram2/x", False)],
)  # fmt: skip
def test_an_output_in_memory_is_detected_by_its_real_path(
    tmp_path: Path, mounts: Path, output: str, lost: bool
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "ram" / "deep")
    said = self_stop.lost_by_stop(str(tmp_path), ["work/x", f"{tmp_path}/{output}"])
    assert lost == bool(said) and (f"{tmp_path}/{output}" in said) == lost


def test_a_working_folder_linked_into_memory_is_detected(tmp_path: Path, mounts: Path) -> None:
    (tmp_path / "work").mkdir()
    assert not self_stop.lost_by_stop(str(tmp_path), ["out"])
    (tmp_path / "work" / "out").symlink_to(tmp_path / "ram")
    assert self_stop.lost_by_stop(str(tmp_path), ["out"])


def test_unreadable_mounts_count_outputs_as_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    monkeypatch.setattr(self_stop, "MOUNTS", str(tmp_path / "none"))
    wording(self_stop.lost_by_stop(str(tmp_path), ["out"]))
    assert not self_stop.lost_by_stop(str(tmp_path), [])


@pytest.mark.slow
@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="needs memory that is mounted")
def test_an_output_in_memory_keeps_the_machine_on_with_an_alert(folder: Path) -> None:
    call("start", folder, with_self_stop(folder, ["true"], outputs=["out", "/dev/shm/gpuwarden-none"]))
    seen = until(folder, lambda s: any(a["kind"] == "self_stop_failed" for a in s["last_alerts"]))
    alert = next(a for a in seen["last_alerts"] if a["kind"] == "self_stop_failed")
    assert "/dev/shm/gpuwarden-none" in alert["text"]
    assert not asked(folder) and not (folder / "self_stopped.json").exists()
    (folder / "self_stop.hold").touch()


# ------------------------------------------------------------------------------------- the platform's own request


class Platform(http.server.BaseHTTPRequestHandler):
    """A platform that records the request and answers with the test's status."""

    answer, seen = 200, list[tuple[str, str, str, bytes]]()

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        Platform.seen.append(("PUT", self.path, self.headers["Authorization"], body))
        self.send_response(self.answer)
        if self.answer == 302:
            self.send_header("Location", "http://127.0.0.1:9/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    server = http.server.HTTPServer(("127.0.0.1", 0), Platform)
    Platform.seen, Platform.answer = [], 200
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/api/v0/instances/7/"
    server.shutdown()
    server.server_close()


def request(url: str) -> dict[str, Any]:
    return {"request": {"method": "PUT", "url": url, "body": {"state": "stopped"}, "key": "CONTAINER_API_KEY"}}


@pytest.mark.slow
def test_the_stop_request_uses_the_machines_own_key(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTAINER_API_KEY", "of-this-machine")
    assert ask(request(url)) == ""
    method, path, key, body = Platform.seen[0]
    assert (method, path, key) == ("PUT", "/api/v0/instances/7/", "Bearer of-this-machine")
    assert json.loads(body) == {"state": "stopped"}


@pytest.mark.parametrize("answer", [302, 401, 403, 500])
def test_a_refusal_is_reported_without_the_key(url: str, monkeypatch: pytest.MonkeyPatch, answer: int) -> None:
    monkeypatch.setenv("CONTAINER_API_KEY", "of-this-machine")
    Platform.answer = answer
    problem = ask(request(url))
    assert str(answer) in problem and "of-this-machine" not in problem
    assert len(Platform.seen) == 1, "a key follows no redirect"


@pytest.mark.slow
def test_a_trailing_newline_is_stripped_from_the_key(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTAINER_API_KEY", " of-this-machine\r\n")
    assert ask(request(url)) == "" and Platform.seen[0][2] == "Bearer of-this-machine"


@pytest.mark.slow
@pytest.mark.parametrize(
    "key", ["of-this\nmachine", "of-this\x00machine", "of-this-mach\u00efne", "of-this\u2028machine"]
)
def test_a_key_invalid_in_a_header_is_not_quoted(url: str, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.delenv("CONTAINER_API_KEY", raising=False)
    monkeypatch.setattr(self_stop, "environ_of", lambda _: {"CONTAINER_API_KEY": key})
    problem = ask(request(url))
    assert "CONTAINER_API_KEY" in problem and "of-this" not in problem and not Platform.seen


def test_a_key_in_an_error_is_removed_before_truncation(monkeypatch: pytest.MonkeyPatch) -> None:
    key = "of-this-machine-" * 8
    monkeypatch.setenv("CONTAINER_API_KEY", key)
    for pad in range(120, 200, 7):  # an address that quotes the key, at different positions in the text
        problem = ask(request(f"gopher{'r' * pad}-{key}:x"))
        assert problem and "of-this" not in problem and len(problem) <= 200


@pytest.mark.slow
def test_a_missing_key_is_reported(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONTAINER_API_KEY", raising=False)
    monkeypatch.setattr(self_stop, "environ_of", lambda _: {})
    assert "CONTAINER_API_KEY" in ask(request(url)) and not Platform.seen


@pytest.mark.slow
def test_the_key_is_found_in_the_containers_first_process(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONTAINER_API_KEY", raising=False)
    monkeypatch.setattr(self_stop, "environ_of", lambda pid: {"CONTAINER_API_KEY": "first"} if pid == 1 else {})
    assert ask(request(url)) == "" and Platform.seen[0][2] == "Bearer first"
