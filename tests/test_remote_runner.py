"""The runner as it is shipped: its own process, a real run folder, real signals."""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden.remote import runner
from gpuwarden.remote.launch import RUNNER_FILE

DEADLINE_S = 20.0
linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


def call(verb: str, folder: Path | None = None, request: object = None) -> dict[str, Any]:
    """Run one verb; its last line."""
    argv = [sys.executable, "-I", "-S", str(RUNNER_FILE), verb, *([str(folder)] if folder else [])]
    done = subprocess.run(argv, input=json.dumps(request or {}).encode(), capture_output=True, timeout=60)
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


def until(folder: Path, good: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Look until it is good, for a bounded time."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        seen = runner.observe(str(folder))
        if good(seen):
            return seen
        time.sleep(0.02)
    pytest.fail(f"not within {DEADLINE_S} s: {seen}")


def ended(folder: Path) -> dict[str, Any]:
    return until(folder, lambda s: s["state"] in runner.FINAL and s["alive"] is False)


def log(folder: Path) -> str:
    return "".join(Path(path).read_text() for _, path in runner.segments(str(folder)))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    path = Path(os.path.realpath(tmp_path)) / "job"
    path.mkdir()
    yield path
    if path.exists():
        call("stop", path, {"grace_s": 0})


# ------------------------------------------------------------------------------------------------------- one file


def test_it_is_python_3_8_and_standard_library_only() -> None:
    tree = ast.parse(RUNNER_FILE.read_text(), feature_version=(3, 8))
    assert isinstance(tree.body[1], ast.ImportFrom) and tree.body[1].module == "__future__"
    names = {a.name.partition(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {str(n.module).partition(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert names <= sys.stdlib_module_names


def test_nothing_of_it_needs_a_later_python_when_it_runs() -> None:
    """Annotations are not evaluated; everything else must not subscript builtins or join types with `|`."""
    text = RUNNER_FILE.read_text()
    assert not re.search(
        r"\.(removeprefix|removesuffix|is_relative_to)\(|functools\.cache\b|\bmatch \w+:$", text, re.MULTILINE
    )
    tree = ast.parse(text)
    for node in tree.body:
        if isinstance(node, ast.Assign):
            inner = [n for n in ast.walk(node.value) if isinstance(n, ast.Subscript) and isinstance(n.value, ast.Name)]
            assert not [n for n in inner if n.value.id in {"list", "dict", "tuple", "set"}]  # type: ignore[attr-defined]


def test_it_starts_fast() -> None:
    heavy = "import sys; sys.argv=['x','poll']; import runpy; runpy.run_path(%r, run_name='other'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", heavy % str(RUNNER_FILE)], capture_output=True, text=True)
    assert not {"subprocess", "urllib.request", "hashlib", "typing_extensions", "asyncio"} & set(done.stdout.split())


@pytest.mark.parametrize(
    ("verb", "request_"),
    [("start", {}), ("start", {"spec": {"argv": []}, "token": "t", "attempt": 1}), ("start", []), ("nonsense", {})],
)
def test_a_senseless_order_is_refused(folder: Path, verb: str, request_: object) -> None:
    answer = call(verb, folder, request_)
    assert (answer["ok"], answer["code"]) == (False, "bad_request")
    assert not (folder / "status.json").exists()


# --------------------------------------------------------------------------------------------------------- launching


def test_ten_starts_at_once_launch_once(folder: Path) -> None:
    job = sh("echo run >> ../count; sleep 30")
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda _: call("start", folder, job), range(10)))
    assert [a["ok"] for a in answers] == [True] * 10
    assert sorted(a["adopted"] for a in answers) == [False] + [True] * 9
    assert len({a["pid"] for a in answers}) == 1
    until(folder, lambda _: (folder / "count").exists())
    assert (folder / "count").read_text() == "run\n"


def test_a_start_returns_while_the_job_runs_and_outlives_its_caller(folder: Path) -> None:
    began = time.monotonic()
    assert call("start", folder, sh("sleep 30"))["ok"]
    assert time.monotonic() - began < 10
    seen = look(folder)
    assert (seen["state"], seen["alive"], seen["child_alive"]) == ("running", True, True)
    assert os.getsid(seen["pid"]) == seen["pid"] != os.getsid(0)


def test_an_attempt_is_not_launched_beside_an_earlier_one(folder: Path) -> None:
    call("start", folder, sh("sleep 30"))
    answer = call("start", folder, sh("sleep 30", attempt=2))
    assert (answer["ok"], answer["code"]) == (False, "conflict")


def test_a_claim_whose_owner_died_before_its_status_is_retaken(folder: Path) -> None:
    script = f"import fcntl, os; fcntl.flock(os.open({str(folder / 'lock')!r}, os.O_RDWR | os.O_CREAT), 2); os._exit(9)"
    subprocess.run([sys.executable, "-c", script], check=False)
    assert call("start", folder, sh("exit 0")) | {"pid": 0} == {
        "ok": True, "adopted": False, "pid": 0, "state": "running", "attempt": 1,
    }  # fmt: skip


def test_a_status_that_makes_no_sense_launches_nothing(folder: Path) -> None:
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
    assert (seen["state"], seen["exit_code"]) == ("failed", 127)
    assert "could not be started" in seen["why"]


# ----------------------------------------------------------------------------------------------------- life and death


@linux
def test_death_is_told_from_silence(folder: Path) -> None:
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
def test_stop_finds_what_outlived_supervisor_and_leader(folder: Path) -> None:
    call("start", folder, sh("sleep 31 & echo $! > ../orphan; wait"))
    seen = until(folder, lambda _: (folder / "orphan").exists() and (folder / "orphan").read_text().strip())
    orphan = int((folder / "orphan").read_text())
    os.kill(seen["pid"], signal.SIGKILL)
    os.kill(seen["child_pid"], signal.SIGKILL)
    dead = until(folder, lambda s: s["child_alive"] is False and s["alive"] is False)
    assert runner.orphans(str(folder), dead) == [orphan]
    assert call("stop", folder, {"grace_s": 1})["result"] == "stopped"
    assert runner.group_members(dead["pgid"]) == []


@linux
def test_a_reused_pid_is_never_signaled(folder: Path) -> None:
    with subprocess.Popen(["sleep", "30"], start_new_session=True) as stranger:
        identity = {"pid": stranger.pid, "child_pid": stranger.pid, "pgid": stranger.pid, "boot_id": runner.boot_id()}
        status = {"token": "t", "attempt": 1, "state": "running", "start_ticks": "1", "child_ticks": "1", **identity}
        (folder / "status.json").write_text(json.dumps(status))
        assert look(folder)["alive"] is False
        assert call("stop", folder, {"grace_s": 0})["result"] == "gone"
        ticks = runner.start_mark(stranger.pid)
        status.update(start_ticks=ticks, child_ticks=ticks, boot_id="another boot")
        (folder / "status.json").write_text(json.dumps(status))
        assert look(folder)["alive"] is False
        assert call("stop", folder, {"grace_s": 0})["result"] == "gone"
        assert stranger.poll() is None
        stranger.kill()


def test_without_proc_ps_tells_processes_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "PROC", "/nonexistent")
    mark = runner.start_mark(os.getpid())
    if not mark:
        pytest.skip("no ps here")
    assert runner.is_alive(os.getpid(), mark, "") is True
    assert runner.is_alive(os.getpid(), "another time", "") is False
    assert runner.is_alive(os.getpid(), "", "") is None
    with subprocess.Popen(["true"]) as done:
        done.wait()
    assert runner.is_alive(done.pid, mark, "") is False


def test_a_signal_from_outside_is_a_preemption(folder: Path) -> None:
    call("start", folder, sh("trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.05; done"))
    seen = until(folder, lambda s: s["log_bytes"] > 0)
    os.kill(seen["pid"], signal.SIGTERM)
    after = ended(folder)
    assert (after["state"], after["exit_code"]) == ("preempted", 0)
    assert log(folder).splitlines()[-1] == "saved"


def test_the_timeout_warns_and_ends(folder: Path) -> None:
    call("start", folder, sh("sleep 30", timeout_s=1, warn_before_s=0.6, grace_s=1))
    seen = ended(folder)
    assert (seen["state"], seen["signal"], seen["alerts"]) == ("timeout", signal.SIGTERM, 1)
    assert "the time limit comes" in log(folder)


def test_a_job_that_asks_for_it_is_restarted_to_the_limit(folder: Path) -> None:
    text = "echo $GPUWARDEN_RESTARTS; test $GPUWARDEN_RESTARTS = 2 || exit 75"
    call("start", folder, sh(text, max_restarts=3, restart_delay_s=0.01))
    seen = ended(folder)
    assert (seen["state"], seen["restarts"], log(folder)) == ("succeeded", 2, "0\n1\n2\n")


def test_restarts_run_out(folder: Path) -> None:
    call("start", folder, sh("kill -TERM $$", max_restarts=1, restart_delay_s=0.01))
    seen = ended(folder)
    assert (seen["state"], seen["restarts"], seen["signal"]) == ("failed", 1, signal.SIGTERM)
    assert "all 1 were used" in seen["why"]


def test_a_plain_failure_is_not_restarted(folder: Path) -> None:
    call("start", folder, sh("exit 1", max_restarts=3))
    assert (ended(folder)["restarts"], look(folder)["state"]) == (0, "failed")


@linux
def test_what_a_command_leaves_behind_is_ended(folder: Path) -> None:
    call("start", folder, sh("sleep 32 & exit 0"))
    seen = ended(folder)
    assert seen["state"] == "succeeded"
    assert runner.group_members(seen["pgid"]) == []


@linux
def test_a_run_folder_that_disappears_takes_its_job_along(folder: Path) -> None:
    call("start", folder, sh("sleep 30"))
    seen = look(folder)
    folder.rename(folder.with_name("moved"))
    end = time.monotonic() + DEADLINE_S
    while runner.group_members(seen["pgid"]) or runner.is_alive(seen["pid"], seen["start_ticks"], seen["boot_id"]):
        assert time.monotonic() < end
        time.sleep(0.02)


# ------------------------------------------------------------------------------------------------------------ secrets

SECRET = "hf_Zx9-very secret/value"


def test_a_secret_is_nowhere_but_in_the_environment(folder: Path) -> None:
    text = 'test -n "$KEY" && echo "$KEY" | tee /dev/stderr; printf "%s" "${KEY%alue}"; sleep 0.1; echo alue; sleep 30'
    call("start", folder, sh(text, secrets={"KEY": SECRET}, env={"PLAIN": "1"}))
    seen = until(folder, lambda s: s["log_bytes"] >= len("***\n***\n***\n"))
    assert log(folder) == "***\n***\n***\n"
    assert seen["state"] == "running"
    held = [p for p in folder.rglob("*") if p.is_file() and SECRET.encode() in p.read_bytes()]
    assert held == []
    for pid in (seen["pid"], seen["child_pid"]):
        assert SECRET.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert SECRET.encode() not in Path(f"/proc/{seen['pid']}/environ").read_bytes()


texts = st.text(alphabet="abc\n", max_size=60)


@given(
    secrets=st.lists(st.text(alphabet="abc", min_size=4, max_size=8), max_size=4),
    text=texts,
    cuts=st.lists(st.integers(0, 60), max_size=8),
    spliced=st.lists(st.integers(0, 3), max_size=3),
)
@settings(max_examples=300, deadline=None)
def test_masking_does_not_depend_on_how_the_stream_is_cut(
    secrets: list[str], text: str, cuts: list[int], spliced: list[int]
) -> None:
    for n in spliced:
        text += secrets[n % len(secrets)] if secrets else ""
    data = text.encode()
    whole = runner.Redactor(secrets)
    expected = whole.feed(data) + whole.finish()
    edges = sorted({0, len(data), *(min(c, len(data)) for c in cuts)})
    cut = runner.Redactor(secrets)
    pieces = [cut.feed(data[a:b]) for a, b in pairwise(edges)]
    assert b"".join(pieces) + cut.finish() == expected
    assert not [s for s in secrets if s.encode() in expected]


# ---------------------------------------------------------------------------------------------------------------- log


@given(
    pieces=st.lists(st.text(max_size=600), max_size=12),
    limit=st.integers(1, 4000),
    max_bytes=st.integers(1000, 9000),
)
@settings(max_examples=60, deadline=None)
def test_following_a_log_reads_every_kept_byte_once(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[str], limit: int, max_bytes: int
) -> None:
    folder = str(tmp_path_factory.mktemp("log"))
    writer = runner.Log(folder, max_bytes)
    for piece in pieces:
        writer.write(piece.encode("utf-8", "surrogatepass"))
    os.close(writer.fd)
    whole = "".join(pieces).encode("utf-8", "surrogatepass")
    first = runner.segments(folder)[0][0]
    cursor, texts, size = first, [], runner.log_size(folder)
    assert size == len(whole)
    while cursor < size:
        chunk = runner.read_log(folder, cursor, limit)
        assert chunk["next"] > cursor and not chunk["truncated"]
        cursor = chunk["next"]
        texts.append(chunk["text"])
    kept = whole[first:]
    assert "".join(texts).encode() == kept.decode("utf-8", "replace").encode()
    assert runner.read_log(folder, 0, limit)["truncated"] is (first > 0)


def test_a_rotated_log_keeps_its_cursors(folder: Path) -> None:
    call(
        "start",
        folder,
        sh("for i in 1 2 3 4 5 6 7 8 9; do head -c 1000 /dev/zero | tr '\\0' $i; done", log_max_bytes=4096),
    )
    ended(folder)
    seen = call("logs", folder, {"cursor": 0, "limit": 1 << 20})
    assert seen["truncated"] and seen["size"] == 9000
    assert seen["text"] == "".join(str(i) * 1000 for i in range(1, 10))[9000 - len(seen["text"]) :]
    assert call("logs", folder, {"cursor": 8500})["text"] == "9" * 500
    assert call("logs", folder, {"cursor": -10})["text"] == "9" * 10
    assert call("logs", folder, {"cursor": 99_999})["truncated"]
    assert os.readlink(folder / "out.log") == Path(runner.segments(str(folder))[-1][1]).name


def test_a_line_of_a_megabyte_passes_whole(folder: Path) -> None:
    call("start", folder, sh("head -c 1048576 /dev/zero | tr '\\0' x; echo"))
    ended(folder)
    assert log(folder) == "x" * 1048576 + "\n"


# ------------------------------------------------------------------------------------------------------------ metrics


def test_metrics_alerts_and_rubbish(folder: Path) -> None:
    lines = [
        '{"step": 1, "loss": 2.0}', "no json", "[1]", '{"step": 2, "loss": NaN}', '{"step": 3, "loss": Infinity}',
        '{"step": 4, "loss": 1.0, "big": 1' + "0" * 400 + "}", "[" * 5000, "x" * 200_000, '{"step": true, "name": "a"}',
        '{"step": 5, "acc": "nan", "lr": 0.1}',
    ]  # fmt: skip
    (folder / "lines").write_text("\n".join(lines) + "\n")
    call("start", folder, sh('cat ../lines >> "$GPUWARDEN_METRICS"; sleep 0.4'))
    seen = ended(folder)
    assert (seen["state"], seen["step"], seen["metrics"]) == ("succeeded", 5, {"loss": 1.0, "lr": 0.1})
    alerts = [json.loads(line) for line in (folder / "alerts.jsonl").read_text().splitlines()]
    assert [(a["kind"], a["text"].split()[0]) for a in alerts] == [("nonfinite", n) for n in ("loss", "big", "acc")]
    assert seen["alerts"] == 3


def test_a_stall_is_said_once(folder: Path) -> None:
    call("start", folder, sh('echo \'{"step": 7}\' >> "$GPUWARDEN_METRICS"; sleep 1.5', stall_s=0.4))
    seen = ended(folder)
    assert [a.partition(":")[0] for a in seen["last_alerts"]] == ["stall"]


def test_events_are_posted_in_spite_of_failures(folder: Path) -> None:
    received: list[dict[str, Any]] = []

    class Receiver(BaseHTTPRequestHandler):
        failures = 1

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if Receiver.failures:
                Receiver.failures -= 1
                self.send_error(503)
                return
            assert self.headers["Authorization"] == "Bearer post-token"
            received.extend(json.loads(body)["events"])
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Receiver) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            text = (
                'test -z "$GPUWARDEN_POST_TOKEN" && echo \'{"step": 1, "loss": NaN}\' >> $GPUWARDEN_METRICS; sleep 0.4'
            )
            url = f"http://127.0.0.1:{server.server_port}/in"
            call("start", folder, sh(text, secrets={"GPUWARDEN_POST_TOKEN": "post-token"}, post_url=url))
            assert ended(folder)["state"] == "succeeded"
        finally:
            server.shutdown()
            thread.join()
    assert [e["event"] for e in received] == ["alert", "metrics", "state"]


# ------------------------------------------------------------------------------------------------------------- roster


def roster(
    folder: Path, *paths: str, verb: str = "manifest", root: str = ""
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    argv = [sys.executable, "-I", "-S", str(RUNNER_FILE), verb, str(folder)]
    request = json.dumps({"paths": paths, "root": root}).encode()
    done = subprocess.run(argv, input=request, capture_output=True, timeout=60, check=True)
    *rows, last = (json.loads(line) for line in done.stdout.splitlines())
    return rows, last


def test_the_roster_follows_no_link_out(folder: Path) -> None:
    out = folder / "work" / "out"
    (out / "sub").mkdir(parents=True)
    (out / "sub" / "model").write_bytes(b"weights")
    (out / "latest").symlink_to("sub")
    (out / "best").symlink_to("sub/model")
    (out / "passwd").symlink_to("/etc/passwd")
    (out / "up").symlink_to("../..")
    (out / "dangling").symlink_to("nowhere")
    (folder / "work" / "away").symlink_to("/etc")
    rows, last = roster(folder, "out", "away", "../status.json", "gone")
    sha = hashlib.sha256(b"weights").hexdigest()
    assert {r["path"]: r["sha256"] for r in rows} == {"out/best": sha, "out/sub/model": sha}
    assert last["missing"] == ["../status.json", "gone"]
    assert {s["path"] for s in last["skipped"]} == {"out/latest", "out/passwd", "out/up", "out/dangling", "away"}


def test_a_work_folder_swapped_for_a_link_opens_nothing(folder: Path) -> None:
    (folder / "work").symlink_to("/etc")
    rows, last = roster(folder, "passwd")
    assert rows == [] and last["skipped"][0]["path"] == "passwd"


def test_absolute_outputs_lie_under_the_root(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "inst" / "workspace" / "ckpt").mkdir(parents=True)
    (tmp_path / "inst" / "workspace" / "ckpt" / "a").write_text("x")
    (tmp_path / "inst" / "workspace" / "etc").symlink_to("/etc")
    rows, last = roster(folder, "/workspace/ckpt", "/workspace/etc", root=str(tmp_path / "inst"))
    assert [r["path"] for r in rows] == ["/workspace/ckpt/a"]
    assert [s["path"] for s in last["skipped"]] == ["/workspace/etc"]


@linux
def test_strange_names_are_said_not_crashed_on(folder: Path) -> None:
    work = os.fsencode(folder / "work")
    os.mkdir(work)
    for name in (b"bad\xff", b"new\nline", "ü".encode()):
        Path(os.fsdecode(work + b"/" + name)).write_bytes(b"x")
    os.mkdir(work + b"/dir\xfe")
    Path(os.fsdecode(work + b"/dir\xfe/in")).write_bytes(b"x")
    os.mkfifo(work + b"/pipe")
    rows, last = roster(folder, ".")
    assert sorted(r["path"] for r in rows) == ["./new\nline", "./ü"]
    assert {s["path"] for s in last["skipped"]} == {"./bad\\xff", "./dir\\xfe/in", "./pipe"}


def test_a_file_that_keeps_growing_gets_no_digest(folder: Path) -> None:
    (folder / "work").mkdir()
    grown = folder / "work" / "grown"
    grown.write_bytes(b"\0" * (32 << 20))
    done = threading.Event()

    def grow() -> None:
        with grown.open("ab", buffering=0) as file:
            while not done.is_set():
                file.write(b"x")
                time.sleep(0.0005)

    writer = threading.Thread(target=grow)
    writer.start()
    try:
        rows, last = roster(folder, "grown")
    finally:
        done.set()
        writer.join()
    assert rows[0]["sha256"] is None
    assert last["skipped"][0]["path"] == "grown"
    rows, last = roster(folder, "grown")
    assert rows[0]["sha256"] == hashlib.sha256(grown.read_bytes()).hexdigest() and not last["skipped"]


# ---------------------------------------------------------------------------------------------------------- full disk


def test_a_full_disk_does_not_cost_the_status(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runner.write_status(str(folder), {"state": "running", "metrics": {}})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runner, "write_atomic", full)
    assert runner.write_status(str(folder), {"state": "failed"})
    assert runner.read_status(str(folder)) == {"state": "failed"}
    assert not runner.write_status(str(folder), {"state": "x" * 100_000})  # would need a new block
    assert runner.read_status(str(folder)) == {"state": "failed"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_log_that_cannot_be_written_drops_and_counts(folder: Path) -> None:
    log_ = runner.Log(str(folder), 4096)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, log_.fd)
    log_.write(b"x" * 10_000)
    assert log_.dropped == 10_000
    os.close(full)
    os.close(log_.fd)


def test_binary_output_does_not_break_the_reply(folder: Path) -> None:
    blob = base64.b64encode(bytes(range(256))).decode()
    call("start", folder, order([sys.executable, "-c", f"import os,base64; os.write(1, base64.b64decode('{blob}'))"]))
    ended(folder)
    seen = call("logs", folder, {"cursor": 0})
    assert seen["next"] == seen["size"] == 256
