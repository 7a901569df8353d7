"""Reports from a job and its runner: posted on the machine, kept on its disk, forwarded, and pulled."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.remote.runner import relay as relays
from gpuwarden.remote.runner.progress import GPU_OOM
from gpuwarden.remote.runner.relay import Intake, Sender
from gpuwarden.remote.runner.reports import ALERTS_PATH, METRICS_PATH
from gpuwarden.remote.runner.spool import Spool, parse_lines, read_lines, spool_path
from runner_kit import call, ended, linux, log, order, until
from waiting import eventually
from wording import Wording

KEYS = {"GPUWARDEN_REPORT_TOKEN": "gwj_metrics-token", "GPUWARDEN_REPORT_KEY": "gwk_alerts-key"}
POSTS = """
import json, os, sys, urllib.error, urllib.request
def post(url, body, **headers):
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=300) as reply:
            return reply.status
    except urllib.error.HTTPError as refusal:
        return refusal.code
env, bearer = os.environ, {"Authorization": "Bearer " + os.environ.get("JOB_TOKEN", "")}
key = {"X_API_Key": os.environ.get("INTERNAL_API_KEY", "")}
point = {"step": 3, "train_loss": 0.5, "timestamp": "2026-01-01T00:00:00Z"}
mine = {"job_id": env["JOB_ID"], "metrics": [point]}
"""


def script(text: str, **more: Any) -> dict[str, Any]:
    return order([sys.executable, "-c", POSTS + text], secrets={**KEYS, **more.pop("secrets", {})}, **more)


def entries(folder: Path, source: str) -> list[dict[str, Any]]:
    return parse_lines(read_lines(str(folder), source, 0)[0])


@contextmanager
def server(answer: Callable[[str, dict[str, Any]], int]) -> Iterator[tuple[str, list[Any]]]:
    """Run a server that answers posts with the status from `answer`. Yield its address and the accepted posts."""
    received: list[Any] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status = answer(self.path, body)
            if status == 200:
                proof = self.headers["Authorization"] or self.headers["X-API-Key"]
                received.append((self.path, proof, body))
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{found.server_port}", received
        finally:
            found.shutdown()
            thread.join()


@pytest.mark.slow
def test_posts_of_a_job_are_stored_in_the_spool(folder: Path) -> None:
    text = """
print(post(env["METRICS_API_URL"], mine, **bearer), post(env["ALERT_API_URL"],
      {"type": "job_started", "job_id": env["JOB_ID"], "user_id": env["USER_ID"]}, **key))
"""
    call("start", folder, script(text))
    assert ended(folder)["state"] == "succeeded", log(folder)
    assert log(folder).split() == ["200", "200"]
    metrics, alert = entries(folder, "job")
    assert metrics == {"kind": "metrics", "body": {"job_id": "t", "metrics": [
        {"step": 3, "train_loss": 0.5, "timestamp": "2026-01-01T00:00:00Z"}]}}  # fmt: skip
    assert (alert["kind"], alert["body"]["type"], alert["body"]["user_id"]) == ("alerts", "job_started", "local")
    assert alert["body"]["timestamp"].endswith("Z")


@pytest.mark.slow
@pytest.mark.attack("metrics", "posts without its token, for another job, or rubbish")
def test_the_relay_rejects_bad_posts_and_stores_nothing(folder: Path) -> None:
    text = """
url, alerts = env["METRICS_API_URL"], env["ALERT_API_URL"]
print(
    post(url, mine), post(url, mine, Authorization="Bearer other"), post(url, mine, **key),
    post(alerts, {"type": "job_started", "job_id": "t"}, **bearer),
    post(url, {**mine, "job_id": "another"}, **bearer), post(url, b"{", **bearer), post(url, b"[" * 9999, **bearer),
    post(url, {"job_id": "t", "metrics": []}, **bearer), post(alerts, {"type": "x", "job_id": "t"}, **key),
    post(url + "/t", mine, **bearer), post(url, None, **bearer),
)
import http.client, urllib.parse
where = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc)
where.request("GET", "/api/training/local/metrics")
reply = where.getresponse()
print(reply.status, reply.headers["Allow"])
where = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc)
where.putrequest("POST", "/api/training/local/metrics")
where.putheader("Authorization", bearer["Authorization"])
where.putheader("Content-Length", str(1 << 40))
where.endheaders()
print(where.getresponse().status)
"""
    call("start", folder, script(text))
    assert ended(folder)["state"] == "succeeded", log(folder)
    statuses = "401 401 401 401 422 422 422 422 422 404 422 405 POST 413"
    assert log(folder).split() == statuses.split()
    assert entries(folder, "job") == []


@pytest.mark.slow
@linux
def test_no_token_is_on_disk_or_in_a_command_line(folder: Path) -> None:
    text = """
post(env["METRICS_API_URL"], mine, **bearer)
print(env["JOB_TOKEN"], env["INTERNAL_API_KEY"], [n for n in env if n.startswith("GPUWARDEN_REPORT")])
import glob
def words(path):
    try:
        return open(path, "rb").read()
    except OSError:  # the process has ended since the listing
        return b""
print([p for p in glob.glob("/proc/[0-9]*/cmdline") if b"gwj_" in words(p) and str(os.getpid()) not in p])
"""
    call("start", folder, script(text))
    assert ended(folder)["state"] == "succeeded", log(folder)
    assert log(folder).split() == ["***", "***", "[]", "[]"]
    for path in folder.rglob("*"):
        if path.is_file():
            assert b"gwj_" not in path.read_bytes(), path


def test_a_job_with_its_own_addresses_gets_none_of_our_keys(folder: Path) -> None:
    text = """
names = ("METRICS_API_URL", "JOB_TOKEN", "ALERT_API_URL", "INTERNAL_API_KEY", "JOB_ID", "USER_ID", "MODEL_NAME")
print([env.get(name) for name in names])
"""
    own = {"METRICS_API_URL": "https://example.org/m", "JOB_ID": "uuid", "USER_ID": "u", "MODEL_NAME": "m/n"}
    spec = script(text)
    spec["spec"]["env"] = own
    spec["secrets"] |= {"ALERT_API_URL": "https://example.org/a"}
    call("start", folder, spec)
    assert ended(folder)["state"] == "succeeded", log(folder)
    assert log(folder).strip() == "['https://example.org/m', None, '***', None, 'uuid', 'u', 'm/n']"


def test_without_a_relay_the_job_gets_no_address(folder: Path) -> None:
    call("start", folder, script('print("METRICS_API_URL" in env, "JOB_TOKEN" in env)', relay=False))
    assert ended(folder)["state"] == "succeeded"
    assert log(folder).split() == ["False", "False"]


def test_the_runner_reports_metrics_and_alerts(folder: Path, wording: Wording) -> None:
    text = """
with open(env["GPUWARDEN_METRICS"], "a") as file:
    file.write('{"step": 1, "loss": 2.0}\\n{"step": 2, "loss": NaN, "timestamp": "2026-01-01T00:00:00Z"}\\n')
print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")
sys.exit(3)
"""
    call("start", folder, script(text))
    assert ended(folder)["state"] == "failed"
    found = entries(folder, "runner")
    points = [point for one in found if one["kind"] == "metrics" for point in one["body"]["metrics"]]
    assert [(p["step"], p["loss"]) for p in points] == [(1, 2.0), (2, "nan")]
    assert points[1]["timestamp"] == "2026-01-01T00:00:00Z"
    alerts = {one["body"]["type"]: one["body"] for one in found if one["kind"] == "alerts"}
    assert set(alerts) == {"job_started", "gpu_oom", "job_failed"}
    assert {body["source"] for body in alerts.values()} == {"runner"}
    wording(alerts["job_failed"]["error_message"], 3)


@pytest.mark.parametrize(
    ("text", "oom"),
    [
        (b"torch.OutOfMemoryError: CUDA out of memory. Tried", True),
        (b"RuntimeError: CUDA error: out of memory", True),
        (b"HIP out of memory", True),
        (b"java.lang.OutOfMemoryError: Java heap space", False),
        (b"cuda memory: 3 GiB out of 80", False),
    ],
)
def test_gpu_out_of_memory_is_recognized_by_its_message(text: bytes, oom: bool) -> None:
    assert bool(GPU_OOM.search(text)) is oom


@pytest.mark.slow
def test_the_timeout_is_announced_in_advance(folder: Path) -> None:
    call("start", folder, script("import time; time.sleep(60)", timeout_s=1.0, warn_before_s=0.9, grace_s=0.1))
    ended(folder)
    kinds = [one["body"]["type"] for one in entries(folder, "runner")]
    assert kinds == ["job_started", "timeout_warning", "job_failed"]


@linux
@pytest.mark.slow
def test_a_killed_relay_is_restarted_and_nothing_is_lost(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
import time
for step in range(40):
    while True:
        try:
            code = post(env["METRICS_API_URL"], {"job_id": "t", "metrics": [{"step": step, "loss": 1}]}, **bearer)
            break
        except OSError:
            pass
    assert code == 200, code
    if step == 10:
        open("killed", "w").close()
        while os.path.exists("killed"):
            time.sleep(0.01)
"""
    call("start", folder, script(text))
    until(folder, lambda s: (folder / "work" / "killed").exists())
    relay = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if b"relay\0" + os.fsencode(folder) in _read(path)
    ]
    assert len(relay) == 1
    os.kill(relay[0], signal.SIGKILL)
    (folder / "work" / "killed").unlink()
    assert ended(folder)["state"] == "succeeded", log(folder)
    steps = [one["body"]["metrics"][0]["step"] for one in entries(folder, "job")]
    assert sorted(set(steps)) == list(range(40))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.slow
def test_reports_reach_a_server_in_order_with_the_jobs_keys(folder: Path) -> None:
    with server(lambda *_: 200) as (url, received):
        text = """
for step in range(5):
    post(env["METRICS_API_URL"], {"job_id": "t", "metrics": [{"step": step, "loss": 1}]}, **bearer)
post(env["ALERT_API_URL"], {"type": "job_completed", "job_id": "t"}, **key)
"""
        call("start", folder, script(text, secrets={"GPUWARDEN_REPORT_URL": url}))
        assert ended(folder)["state"] == "succeeded", log(folder)
        eventually(lambda: sum(body.get("type") == "job_completed" for *_, body in received) >= 2)
    steps = [p["step"] for path, proof, body in received if path == METRICS_PATH for p in body["metrics"]]
    assert steps == [0, 1, 2, 3, 4]
    assert {proof for _, proof, _ in received} == {"Bearer gwj_metrics-token", "gwk_alerts-key"}
    assert [body["type"] for *_, body in received if "type" in body].count(
        "job_completed"
    ) == 2  # the job's own and the runner's


# ---------------------------------------------------------------------------------------------------------- sending


def sender(folder: Path, url: str) -> Sender:
    return Sender(str(folder), {"keys": {"TOKEN": "t", "KEY": "k", "URL": url}})


def spooled(folder: Path, count: int) -> None:
    spool = Spool(str(folder), "job")
    for step in range(count):
        assert spool.put("metrics", {"job_id": "t", "metrics": [{"step": step, "loss": 1.0}]})
        if step % 10 == 9:
            assert spool.put("alerts", {"job_id": "t", "type": "timeout_warning", "timestamp": step + 1})


@pytest.mark.slow
def test_nothing_is_lost_or_out_of_order_while_the_server_is_away(tmp_path: Path, closed_port: int) -> None:
    failures = iter([503, 503, 429])
    with server(lambda *_: next(failures, 200)) as (url, received):
        away = sender(tmp_path, f"http://127.0.0.1:{closed_port}")
        spooled(tmp_path, 2_000)
        assert [away.send_all() for _ in range(8)] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
        back = sender(tmp_path, url)
        assert [back.send_all() for _ in range(4)] == [1.0, 2.0, 4.0, None]
        seen = [p["step"] for path, _, body in received if path == METRICS_PATH for p in body["metrics"]]
        assert seen == list(range(2_000))
        assert sum(path == ALERTS_PATH for path, *_ in received) == 200
        received.clear()
        assert sender(tmp_path, url).send_all() is None  # another process knows what was sent
        assert received == []


def test_a_permanently_refused_post_does_not_block_later_posts(tmp_path: Path) -> None:
    def answer(path: str, body: dict[str, Any]) -> int:
        return 422 if path == ALERTS_PATH else 200

    with server(answer) as (url, received):
        spooled(tmp_path, 20)
        assert sender(tmp_path, url).send_all() is None
        assert [p["step"] for _, _, body in received for p in body["metrics"]] == list(range(20))


def test_long_posts_are_split_to_fit_the_servers_limit(tmp_path: Path) -> None:
    Spool(str(tmp_path), "job").put("metrics", {"job_id": "t", "metrics": [{"step": n} for n in range(1_200)]})
    with server(lambda *_: 200) as (url, received):
        assert sender(tmp_path, url).send_all() is None
    assert [len(body["metrics"]) for *_, body in received] == [500, 500, 200]


# ------------------------------------------------------------------------------------------------------- the file


def test_the_spool_is_read_by_offset_in_whole_lines(tmp_path: Path) -> None:
    spooled(tmp_path, 2)
    path = Path(spool_path(str(tmp_path), "job"))
    whole = path.stat().st_size
    with path.open("ab") as file:
        file.write(b'{"kind": "met')
    first = call("spool", tmp_path, {"limit": 100})["files"]["job"]
    assert len(parse_lines(first["text"].encode())) == 1
    rest = call("spool", tmp_path, {"cursors": {"job": first["next"]}})["files"]["job"]
    assert (len(parse_lines(rest["text"].encode())), rest["next"]) == (1, whole)
    Spool(str(tmp_path), "job").put("metrics", {"job_id": "t", "metrics": [{"step": 9}]})  # after a power cut
    last = call("spool", tmp_path, {"cursors": {"job": whole}})["files"]["job"]["text"].encode()
    assert [one["body"]["metrics"][0]["step"] for one in parse_lines(last)] == [9]
    path.write_bytes(path.read_bytes()[:50])  # the file was truncated
    assert call("spool", tmp_path, {"cursors": {"job": whole}})["files"]["job"]["next"] == 0


@pytest.mark.attack("metrics", "puts a link, a pipe or rubbish where the spool is written")
def test_a_spool_replaced_by_the_job_is_harmless(tmp_path: Path) -> None:
    path = Path(spool_path(str(tmp_path), "job"))
    for place in (lambda: path.symlink_to("/etc/passwd"), lambda: os.mkfifo(path), lambda: path.mkdir()):
        place()
        assert read_lines(str(tmp_path), "job", 0) == (b"", 0)
        assert not Spool(str(tmp_path), "job").put("metrics", {})
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    path.write_bytes(b'[]\n{"kind": 1}\n{"kind": "metrics"}\n{"kind": "metrics", "body": []}\n' + b"[" * 99999 + b"\n")
    assert parse_lines(read_lines(str(tmp_path), "job", 0)[0]) == []


def test_a_full_spool_answers_507(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    intake = Intake(str(tmp_path), {"job": "t", "names": ["t"], "keys": {"TOKEN": "x", "KEY": "y"}})
    body = json.dumps({"job_id": "t", "metrics": [{"step": 1}]}).encode()
    assert intake.take(METRICS_PATH, body) == (200, "")
    monkeypatch.setattr("gpuwarden.remote.runner.spool.MAX_SPOOL", 10)
    assert intake.take(METRICS_PATH, body) == (507, "disk_full")
    assert {
        "job_started", "job_completed", "job_failed", "job_cancelled", "gpu_oom", "timeout_warning"
    } == relays.TYPES  # fmt: skip
