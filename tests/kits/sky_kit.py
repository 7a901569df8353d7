"""A double of SkyPilot's API server for the real SDK, and the SDK's interpreter.

Paths, headers and fields match a real 0.14.1 server (`backends/test_sky_real.py` checks them). A cluster is
this machine: its jobs run as shell processes, in the order of their numbers.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import signal
import subprocess
import threading
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psutil
import pytest
import yaml

from gpuwarden.core.models import JobSpec
from gpuwarden.remote.sky import client
from gpuwarden.remote.sky.client import sky_python
from real_parts import need
from sshd import free_port
from waiting import PATIENCE, eventually

HEALTH = {
    "status": "healthy", "api_version": "62", "version": "0.14.1", "version_on_disk": "0.14.1", "commit": "0" * 40,
    "basic_auth_enabled": False, "user": None, "service_account_token_enabled": False,
    "ingress_basic_auth_enabled": False, "latest_version": None, "external_proxy_auth_enabled": True,
    "telemetry_enabled": False, "restrict_config_to_admins": True,
}  # fmt: skip
NOTHING = base64.b64encode(pickle.dumps(None)).decode()
# SkyPilot's server, with its queue for a single process. The other queue is a process at a fixed port, for which the
# server waits at most 60 s.
START = """
import runpy
from sky.server.requests.queues import base
base.set_queue_backend_factory(base.LocalQueueFactory())
runpy.run_module("sky.server.server", run_name="__main__", alter_sys=True)
"""
START_S = 200.0
"""Time limit for the start of SkyPilot's server, which imports every cloud first."""
NOW = datetime.now(UTC).timestamp()
"""The timestamp in the double's records. It is the real time, because gpuwarden compares it with its clock."""
REQUESTS = {"jobs/queue/v2": "sky.jobs.queue_v2", "jobs/launch": "sky.jobs.launch", "jobs/cancel": "sky.jobs.cancel"}
FINAL = {"SUCCEEDED", "FAILED", "FAILED_SETUP", "FAILED_DRIVER", "CANCELLED"}


def sky_env(home: Path, url: str) -> dict[str, str]:
    """Return the environment of an SDK with one server and no user settings. Skips if the SDK is not installed."""
    try:
        python = sky_python(os.environ)
    except Exception:
        python = ""
    need("SkyPilot", bool(python))
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    return {
        **kept, "HOME": str(home), "GPUWARDEN_SKY_PYTHON": python, "SKYPILOT_API_SERVER_ENDPOINT": url,
        "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
    }  # fmt: skip


@dataclass
class FarJob:
    """One job of a cluster's queue."""

    id: int
    name: str
    process: subprocess.Popen[bytes]
    log: Path
    submitted_at: float = NOW
    canceled: bool = False

    @property
    def status(self) -> str:
        code = self.process.poll()
        if code is None:
            return "RUNNING"
        return "CANCELLED" if self.canceled else "FAILED" if code else "SUCCEEDED"

    def row(self) -> dict[str, Any]:
        over = self.status in FINAL
        return {
            "job_id": self.id, "job_name": self.name, "username": "me", "user_hash": "abc", "resources": "1x[CPU:1]",
            "submitted_at": self.submitted_at, "start_at": self.submitted_at, "end_at": NOW if over else None,
            "status": self.status, "log_path": f"~/sky_logs/{self.id}", "metadata": {}, "links": {},
        }  # fmt: skip


@dataclass
class FarManaged:
    """A managed job: its command runs on "machines" that are local folders, one after the other."""

    id: int
    name: str
    task: dict[str, Any]
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    recoveries: int = 0
    forced: str = ""
    cleaned: bool = True
    submitted_at: float = NOW

    @property
    def log(self) -> Path:
        return self.folder / f"managed-{self.id}-{self.recoveries}.log"

    def start(self) -> None:
        """Run the command on a fresh machine."""
        home = self.folder / f"machine-{self.id}-{self.recoveries}"
        home.mkdir()
        env = {"PATH": os.environ["PATH"], "HOME": str(home), **(self.task.get("envs") or {})}
        env |= {"SKYPILOT_INTERNAL_JOB_ID": "1", **(self.task.get("secrets") or {})}
        script = home / "sky_run"  # SkyPilot also starts it from a file
        script.write_text(self.task["run"])
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                ["bash", script], env=env, stdout=out, stderr=out, stdin=subprocess.DEVNULL, cwd=home,
                start_new_session=True,
            )  # fmt: skip
        threading.Thread(target=self.take_machine, args=(self.process, str(home)), daemon=True).start()

    def take_machine(self, process: subprocess.Popen[bytes], home: str) -> None:
        """End the command and all other processes of a machine, as the controller does."""
        process.wait()
        for one in psutil.process_iter():
            with suppress(psutil.Error):
                if one.environ().get("HOME") == home:
                    one.kill()

    def end(self, forced: str) -> None:
        """End the machine, as its cloud or the controller does."""
        self.forced = forced
        if self.process is not None and self.process.poll() is None:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            self.process.kill()
            self.process.wait()

    def recover(self) -> None:
        self.recoveries += 1
        self.forced = ""
        self.start()

    @property
    def status(self) -> str:
        if self.forced or self.process is None:
            return self.forced or "PENDING"
        code = self.process.poll()
        return "RUNNING" if code is None else "FAILED" if code else "SUCCEEDED"

    def row(self) -> dict[str, Any]:
        """Return the job with the fields of SkyPilot's `ManagedJobRecord` and its controller's texts."""
        over = self.status in FINAL or self.status.startswith("FAILED")
        why = None
        if self.status == "FAILED" and self.process is not None:
            why = f"Job exited with exit code {self.process.poll()} (user program failure). To see the details, run: x"
        return {
            "job_id": self.id, "task_id": 0, "job_name": self.name, "task_name": self.name, "status": self.status,
            "schedule_state": "DONE" if over and self.cleaned else "ALIVE", "cloud": "AWS", "infra": "AWS (us-east-1)",
            "resources": "1x[CPU:1]", "cluster_resources": "1x(cpus=1)", "submitted_at": self.submitted_at,
            "start_at": self.submitted_at, "end_at": NOW if over else None, "recovery_count": self.recoveries,
            "failure_reason": why, "current_cluster_name": f"{self.name}-{self.id}",
        }  # fmt: skip

    def printed(self) -> bytes:
        """Return the log as SkyPilot prints it."""
        lines = self.log.read_bytes().splitlines(keepends=True) if self.log.exists() else []
        head = "├── Waiting for task resources on 1 node.\n".encode()
        return head + b"".join(f"\x1b[36m({self.name}, pid=2241)\x1b[0m ".encode() + line for line in lines)


@dataclass
class SkyServer:
    """The API server. `clusters` has each cluster's record, `mode` the server's fault."""

    folder: Path
    mode: str = ""
    clusters: dict[str, dict[str, Any]] = field(default_factory=dict)
    costs: list[dict[str, Any]] = field(default_factory=list)
    managed: list[dict[str, Any]] = field(default_factory=list)
    managed_jobs: list[FarManaged] = field(default_factory=list)
    held: bool = False
    """Whether managed job launches don't reach the controller."""
    jobs: dict[str, list[FarJob]] = field(default_factory=dict)
    requests: dict[str, dict[str, Any]] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    refusals: dict[str, tuple[str, str]] = field(default_factory=dict)
    lose: set[str] = field(default_factory=set)
    """Paths whose next call is carried out, but whose reply is lost."""

    def start(self) -> SkyServer:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.answer(self)

            def do_POST(self) -> None:
                server.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}"

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        for job in [job for queue in self.jobs.values() for job in queue]:
            with suppress(OSError):
                os.killpg(job.process.pid, signal.SIGKILL)
            job.process.wait()
        for managed in self.managed_jobs:
            managed.end("CANCELLED")

    def count(self, path: str) -> int:
        return sum(1 for asked, _ in self.asked if asked == path)

    def up(self, name: str, **changes: Any) -> None:
        """Add a cluster."""
        self.clusters[name] = {
            "name": name, "launched_at": int(NOW), "status": "UP", "autostop": -1, "to_down": False,
            "cluster_hash": uuid.uuid4().hex, "cluster_ever_up": True, "user_hash": "abc", "user_name": "me",
            "workspace": "default", "is_managed": False, "nodes": 1, "cloud": "aws", "region": "us-east-1",
            "last_use": "", "status_updated_at": 0, "labels": {}, **changes,
        }  # fmt: skip

    # ------------------------------------------------------------------------------------------------------ the wire

    def answer(self, http: BaseHTTPRequestHandler) -> None:
        """Carry out one call and answer it with the server's current fault."""
        path = urlsplit(http.path).path
        raw = http.rfile.read(int(http.headers.get("Content-Length") or 0))
        body = json.loads(raw) if raw else {k: v[0] for k, v in parse_qs(urlsplit(http.path).query).items()}
        if self.mode == "down":
            return http.close_connection  # as if no server were running
        self.asked.append((path, body))
        if self.mode == "odd":
            return self.send(http, 200, {"welcome": "to the server"})
        if path == "/api/health":
            return self.send(http, 200, HEALTH)
        if path == "/api/get":
            found = self.requests[body["request_id"]]
            return self.send(http, 500, {"detail": found}) if found["error"] != "null" else self.send(http, 200, found)
        if path == "/api/status":
            return self.send(http, 200, self.listed(body))
        request = self.carry_out(path.strip("/"), body)
        if path in self.lose:
            self.lose.discard(path)
            http.close_connection = True
            return None
        if path == "/jobs/logs":
            waiting = self.managed_jobs[int(body["job_id"]) - 1].status in {"PENDING", "STARTING", "RECOVERING"}
            assert not waiting, "the real server answers only once there is a machine"
            return self.send(http, 200, self.managed_jobs[int(body["job_id"]) - 1].printed(), request)
        if path == "/logs":
            text = self.jobs[body["cluster_name"]][int(body["job_id"]) - 1].log.read_bytes()
            return self.send(http, 200, text, request)
        return self.send(http, 200, None, request)

    def send(self, http: BaseHTTPRequestHandler, status: int, value: Any, request: str = "") -> None:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        http.send_response(status)
        http.send_header("X-Skypilot-API-Version", "62")
        http.send_header("X-Skypilot-Version", "0.14.1")
        if self.mode != "odd":
            http.send_header("X-Skypilot-Request-ID", request or str(uuid.uuid4()))
        http.send_header("Content-Length", str(len(body)))
        http.end_headers()
        http.wfile.write(body)

    def listed(self, query: dict[str, Any]) -> list[dict[str, Any]]:
        """Return requests with decoded bodies, as `/api/status` does."""
        found = [{**r, "request_body": r["body"], "entrypoint": ""} for r in self.requests.values()]
        wanted = query.get("request_ids")
        if wanted:
            found = [r for r in found if r["request_id"] == wanted]
        elif str(query.get("all_status")).lower() != "true":
            found = [r for r in found if r["status"] in {"PENDING", "RUNNING"}]
        name = query.get("cluster_name")
        newest = sorted((r for r in found if not name or r["cluster_name"] == name), key=lambda r: -r["created_at"])
        return [{k: v for k, v in r.items() if k != "body"} for r in newest[: int(query.get("limit") or len(newest))]]

    def carry_out(self, verb: str, body: dict[str, Any]) -> str:
        """Carry out a request, and record it with its result or its error."""
        ident, value, error = str(uuid.uuid4()), None, "null"
        name = body.get("cluster_name")
        needs_one = verb in {"queue", "exec", "cancel", "down", "stop", "start", "autostop", "logs"}
        missing = needs_one and name not in self.clusters
        if missing or verb in self.refusals:
            kind, said = self.refusals.get(verb, ("ClusterDoesNotExist", f"Cluster {name!r} does not exist."))
            thrown = {"type": kind, "message": said, "args": (said,), "attributes": {}, "stacktrace": ""}
            packed = base64.b64encode(pickle.dumps(thrown)).decode()
            error = json.dumps({"object": packed, "type": kind, "message": said})
        else:
            value = getattr(self, f"do_{verb.replace('/', '__')}")(body)
        self.requests[ident] = {
            "request_id": ident, "name": REQUESTS.get(verb, f"sky.{verb}"), "entrypoint": NOTHING,
            "request_body": NOTHING,
            "status": self.state_of(verb, error), "created_at": NOW + len(self.requests) / 1_000, "user_id": "abc",
            "return_value": json.dumps(value), "error": error, "pid": 1, "schedule_type": "short", "user_name": None,
            "cluster_name": name, "status_msg": None, "should_retry": False,
            "finished_at": NOW + len(self.requests) / 1_000,
            "file_mounts_blob_id": None, "body": json.dumps(body),
        }  # fmt: skip
        return ident

    def state_of(self, verb: str, error: str) -> str:
        if verb == "jobs/launch" and self.held:
            return "RUNNING"
        return "SUCCEEDED" if error == "null" else "FAILED"

    # ------------------------------------------------------------------------------------------------------ the verbs

    def do_enabled_clouds(self, body: dict[str, Any]) -> Any:
        return ["AWS", "RunPod"]

    def do_validate(self, body: dict[str, Any]) -> Any:
        return None

    def do_status(self, body: dict[str, Any]) -> Any:
        names = body.get("cluster_names")
        return [c for name, c in self.clusters.items() if names is None or name in names]

    def do_jobs__queue__v2(self, body: dict[str, Any]) -> Any:
        rows = [*self.managed, *(job.row() for job in self.managed_jobs)]
        rows = [row for row in rows if (body.get("name_match") or "") in (row.get("job_name") or "")]
        if body["skip_finished"]:
            rows = [row for row in rows if row["status"] not in FINAL and not row["status"].startswith("FAILED")]
        return {"jobs": rows, "total": len(rows)}

    def do_jobs__launch(self, body: dict[str, Any]) -> Any:
        if self.held:
            return None
        task = list(yaml.safe_load_all(body["task"]))[-1]
        job = FarManaged(len(self.managed_jobs) + 1, body["name"], task, self.folder)
        self.managed_jobs.append(job)
        job.start()
        return {"job_id": [job.id], "handle": NOTHING}

    def do_jobs__cancel(self, body: dict[str, Any]) -> Any:
        for job in self.managed_jobs:
            if job.id in body["job_ids"] and job.row()["end_at"] is None:
                job.end("CANCELLED")

    def do_jobs__logs(self, body: dict[str, Any]) -> Any:
        return 0

    def do_cost_report(self, body: dict[str, Any]) -> Any:
        none = {"num_nodes": 1, "resources": NOTHING, "usage_intervals": [], "launched_at": 1, "last_use": ""}
        live = [
            {**none, "name": c["name"], "cluster_hash": c["cluster_hash"], "status": c["status"], "duration": 9,
             "total_cost": 0.1}
            for c in self.clusters.values()
        ]  # fmt: skip
        return [*live, *({**none, **cost} for cost in self.costs)]

    def do_launch(self, body: dict[str, Any]) -> Any:
        if not body["dryrun"]:
            task = list(yaml.safe_load_all(body["task"]))[-1]
            stop = task["resources"].get("autostop") or {}
            if body["cluster_name"] not in self.clusters:
                self.up(body["cluster_name"], autostop=stop.get("idle_minutes", -1), to_down=bool(stop.get("down")))
        return {"job_id": None, "handle": NOTHING}

    def do_list_accelerators(self, body: dict[str, Any]) -> Any:
        return {
            "A100": [
                ["AWS", "p4-small", "A100", 1, 12, 40, 96, 4.5, 1.5, "us-east-1"],
                ["AWS", "p4-cheap", "A100", 1, 12, 40, 96, 3.5, 2.5, "us-west-2"],
                ["AWS", "p4-free", "A100", 1, 12, 40, 96, 0.0, None, "us-west-2"],
            ]
        }  # zero and None are not prices

    def do_start(self, body: dict[str, Any]) -> Any:
        self.clusters[body["cluster_name"]]["status"] = "UP"
        return NOTHING

    def do_stop(self, body: dict[str, Any]) -> Any:
        self.clusters[body["cluster_name"]]["status"] = "STOPPED"

    def do_down(self, body: dict[str, Any]) -> Any:
        gone = self.clusters.pop(body["cluster_name"])
        self.costs.append(
            {"name": gone["name"], "cluster_hash": gone["cluster_hash"], "status": None, "duration": 3600,
             "total_cost": 1.25}
        )  # fmt: skip

    def do_autostop(self, body: dict[str, Any]) -> Any:
        self.clusters[body["cluster_name"]] |= {"autostop": body["idle_minutes"], "to_down": body["down"]}

    def do_queue(self, body: dict[str, Any]) -> Any:
        return [job.row() for job in reversed(self.jobs.get(body["cluster_name"], []))]

    def do_exec(self, body: dict[str, Any]) -> Any:
        task = list(yaml.safe_load_all(body["task"]))[-1]
        queue = self.jobs.setdefault(body["cluster_name"], [])
        log = self.folder / f"job-{len(self.asked)}.log"
        env = {"PATH": os.environ["PATH"], "HOME": str(self.folder), **(task.get("secrets") or {})}
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["bash", "-c", task["run"]], env=env, stdout=out, stderr=out, stdin=subprocess.DEVNULL,
                cwd=self.folder, start_new_session=True,
            )  # fmt: skip
        queue.append(FarJob(len(queue) + 1, task["name"], process, log))
        return {"job_id": len(queue), "handle": NOTHING}

    def do_cancel(self, body: dict[str, Any]) -> Any:
        for job in self.jobs[body["cluster_name"]]:
            if job.id in body["job_ids"] and job.status not in FINAL:
                job.canceled = True
                os.killpg(job.process.pid, signal.SIGKILL)

    def do_logs(self, body: dict[str, Any]) -> Any:
        return 0


@dataclass
class RealServer:
    """The server's process, and the environment of its client."""

    process: subprocess.Popen[bytes]
    url: str
    env: dict[str, str]

    @classmethod
    def start(cls, home: Path) -> RealServer:
        """Start SkyPilot's API server on loopback, with a separate home folder."""
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        env = sky_env(home, url)
        argv = [env["GPUWARDEN_SKY_PYTHON"], "-c", START, "--host", "127.0.0.1", "--port", str(port)]
        small = {"SKYPILOT_POD_CPU_CORE_LIMIT": "1", "SKYPILOT_POD_MEMORY_GB_LIMIT": "6", "IS_SKYPILOT_SERVER": "true"}
        with (home / "server.log").open("wb") as log:
            process = subprocess.Popen(
                argv, env=env | small, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
        server = cls(process, url, env)

        def answers() -> bool:
            assert process.poll() is None, (home / "server.log").read_text()[-3000:]
            with suppress(OSError):
                server.read("/api/health")
                return True
            return False

        eventually(answers, START_S, every=0.2)
        return server

    def read(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=60 * PATIENCE) as reply:
            return json.load(reply)

    def stop(self) -> None:
        """End the server, its workers (in separate sessions), and its detached controllers."""
        others = []
        with suppress(psutil.NoSuchProcess):
            others = psutil.Process(self.process.pid).children(recursive=True)
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if "-msky.jobs.controller" in process.cmdline() and process.environ().get("HOME") == self.env["HOME"]:
                    others.append(process)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        for one in (self.process, *others):
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                one.kill()
        self.process.wait(30)


class SkyEngine:
    """The server as the engine of the backend contract."""

    submits, asks = "/exec", "/queue"

    def __init__(self, server: SkyServer) -> None:
        self.server = server

    def job(self, text: str, **fields: object) -> JobSpec:
        given = {"platform": "sky/aws", "command": ["sh", "-c", text], "timeout_s": 7200}
        return JobSpec.model_validate({**given, **fields})

    @contextmanager
    def _in(self, mode: str) -> Iterator[None]:
        self.server.mode = mode
        try:
            yield
        finally:
            self.server.mode = ""

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Break the connection after the server has accepted a job. The SDK retries such a call."""
        self.server.lose.add(self.submits)
        yield
        assert self.submits not in self.server.lose, "a job was submitted"

    def down(self) -> Any:
        return self._in("down")

    def odd(self) -> Any:
        return self._in("odd")

    def questions(self) -> int:
        return self.server.count(self.asks)


class ManagedEngine(SkyEngine):
    """The same engine for managed jobs."""

    submits, asks = "/jobs/launch", "/jobs/queue/v2"

    def job(self, text: str, **fields: object) -> JobSpec:
        return super().job(text, **{"platform": "sky-jobs/aws", **fields})


@pytest.fixture(name="patient_sky")
def patient_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the client's time limit for replies, for busy machines."""
    monkeypatch.setattr(client, "ANSWER_S", 900.0 * PATIENCE)


@pytest.fixture(scope="module", name="sky_server")
def server_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SkyServer]:
    """One server for a module."""
    server = SkyServer(tmp_path_factory.mktemp("sky")).start()
    yield server
    server.stop()
