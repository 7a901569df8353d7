"""dstack for tests: a fake built from the recorded replies of a real server, and the real server itself.

For both, this kit emulates dstack's machines: each submitted run becomes a local process whose output is the log and
whose exit ends the run. The real server runs without its background work, which needs clouds and a shim with Docker.
The kit writes the resulting states to the server's database, and every reply comes from the server.
`tests/fixtures/dstack` has replies from dstack 0.22.5, with machine data as its models write it.
"""

from __future__ import annotations

import base64
import copy
import json
import os
import signal
import socket
import sqlite3
import subprocess
import threading
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.backends.dstack import DstackBackend
from gpuwarden.core.models import JobSpec, Place, Unknown
from gpuwarden.providers._http import ApiResponse
from paths import FIXTURES
from waiting import eventually

TOKEN = "dstack-token-of-the-tests"
PLACE = Place(platform="dstack/main", instance_id="lease-1", run_root="/job")
REPLIES = FIXTURES / "dstack"


def recorded(name: str) -> Any:
    """Return a recorded reply of the real server."""
    return json.loads((REPLIES / f"{name}.json").read_text())


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class Processes:
    """The containers: one process per run, with its output in a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, ident: str, configuration: Mapping[str, Any]) -> None:
        given = {k: v.replace("$$", "$") for k, v in configuration["env"].items()}
        with (self.folder / ident).open("wb") as log:
            self.running[ident] = subprocess.Popen(
                ["sh", "-c", configuration["commands"][0]],
                stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
                env={"PATH": os.environ["PATH"], "HOME": str(self.folder), **given},
            )  # fmt: skip

    def code(self, ident: str) -> int | None:
        return self.running[ident].poll()

    def log(self, ident: str) -> list[str]:
        file = self.folder / ident
        return file.read_text(errors="replace").splitlines(keepends=True) if file.exists() else []

    def kill(self, ident: str) -> None:
        if ident in self.running:
            with suppress(ProcessLookupError):
                os.killpg(self.running[ident].pid, signal.SIGKILL)
            self.running[ident].wait()

    def close(self) -> None:
        for ident in self.running:
            self.kill(ident)
        self.running.clear()


class FakeDstack:
    """The fake server. `replies` maps the end of a path to a reply that replaces the usual one."""

    def __init__(self, folder: Path) -> None:
        self.processes = Processes(folder)
        self.runs: dict[str, dict[str, Any]] = {}
        self.fleets: list[dict[str, Any]] = []
        self.gateways: list[dict[str, Any]] = []
        self.offers: list[dict[str, Any]] = recorded("offers")
        self.asked: list[tuple[str, Any]] = []
        self.replies: dict[str, tuple[int, bytes]] = {}
        self.version = "0.22.5"
        self.lock = threading.Lock()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    @property
    def env(self) -> dict[str, str]:
        return {"DSTACK_SERVER_URL": f"http://127.0.0.1:{self.http.server_port}", "DSTACK_TOKEN": TOKEN}

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.processes.close()

    def answer(self, path: str, token: str, body: Any) -> tuple[int, Any]:
        """Return the status and body that the real server would reply with."""
        self.asked.append((path, body))
        if path.endswith("/server/get_info"):
            return 200, {"server_version": self.version}
        if token != f"Bearer {TOKEN}":
            return 403, {"detail": {"msg": "Invalid token", "code": None}}
        _, _, kind, *rest = path.split("/")
        if kind == "project" and rest[0] != "main":
            return 404, {"detail": {"msg": "Not found", "code": None}}
        self.advance()
        name = "_".join(rest[1:] if kind == "project" else [kind, *rest])
        reply: tuple[int, Any] = getattr(self, f"on_{name}")(body)
        return reply

    def advance(self) -> None:
        """Apply the changes that dstack's background work and its machines would have made by now."""
        for ident, run in self.runs.items():
            start = run["jobs"][0]["job_submissions"][-1]
            if run["status"] == "submitted":
                self.processes.start(ident, run["run_spec"]["configuration"])
                run["status"] = start["status"] = "running"
                start["job_provisioning_data"] = recorded("machine")
            elif run["status"] == "running" and (code := self.processes.code(ident)) is not None:
                why = "done_by_runner" if code == 0 else "container_exited_with_error"
                self.end(ident, "done" if code == 0 else "failed", why, code)
            elif run["status"] == "terminating":
                self.processes.kill(ident)
                self.end(ident, "terminated", "terminated_by_user", None)

    def end(self, ident: str, status: str, why: str, code: int | None) -> None:
        """End a run, with a termination reason for its job."""
        run = self.runs[ident]
        run["status"] = status
        run["cost"] = 0.0125
        run["termination_reason"] = run["termination_reason"] or {"done": "all_jobs_done"}.get(status, "job_failed")
        job = {"status": status, "termination_reason": why, "exit_status": code, "finished_at": now()}
        run["jobs"][0]["job_submissions"][-1] |= job

    def named(self, name: str) -> dict[str, Any] | None:
        return next((r for r in self.runs.values() if r["run_spec"]["run_name"] == name and not r["deleted"]), None)

    def on_users_get_my_user(self, body: Any) -> tuple[int, Any]:
        return 200, {"username": "admin", "creds": {"token": TOKEN}, "ssh_private_key": "never read"}

    def on_runs_get_plan(self, body: Any) -> tuple[int, Any]:
        plan = recorded("plan")
        plan["job_plans"][0] |= {"offers": self.offers, "total_offers": len(self.offers)}
        return 200, plan

    def on_runs_apply(self, body: Any) -> tuple[int, Any]:
        spec = body["plan"]["run_spec"]
        before = self.named(spec["run_name"])
        if before is not None and before["status"] not in {"terminated", "failed", "done"}:
            said = "Failed to apply plan. Resource has been changed. Try again or use force apply."
            return 400, {"detail": [{"msg": said, "code": "error"}]}
        if before is not None:
            before["deleted"] = True
        run = copy.deepcopy(recorded("run"))
        run["id"], run["submitted_at"] = str(uuid.uuid4()), now()
        run["run_spec"]["run_name"] = spec["run_name"]
        run["run_spec"]["configuration"] |= spec["configuration"]
        run["jobs"][0]["job_submissions"][0] |= {"id": str(uuid.uuid4()), "submitted_at": now()}
        self.runs[run["id"]] = run
        return 200, run

    def on_runs_get(self, body: Any) -> tuple[int, Any]:
        run = self.runs.get(body["id"]) if "id" in body else self.named(body["run_name"])
        if run is None:
            return 400, {"detail": [{"msg": "Run not found", "code": "resource_not_exists"}]}
        return 200, run

    def on_runs_list(self, body: Any) -> tuple[int, Any]:
        rows = [r for r in self.runs.values() if body["project_name"] == "main"]
        rows = [r for r in rows if not (body["only_active"] and r["status"] in {"terminated", "failed", "done"})]
        rows.sort(key=lambda r: str(r["submitted_at"]), reverse=True)
        if before := body.get("prev_run_id"):
            rows = rows[[r["id"] for r in rows].index(before) + 1 :]
        return 200, rows[: body["limit"]]

    def on_runs_stop(self, body: Any) -> tuple[int, Any]:
        for name in body["runs_names"]:
            run = self.named(name)
            if run is not None and run["status"] not in {"terminated", "failed", "done"}:
                reason = "aborted_by_user" if body["abort"] else "stopped_by_user"
                run |= {"status": "terminating", "termination_reason": reason}
        return 200, None

    def on_logs_poll(self, body: Any) -> tuple[int, Any]:
        ident = next(i for i, r in self.runs.items() if r["run_spec"]["run_name"] == body["run_name"]
                     and r["jobs"][0]["job_submissions"][-1]["id"] == body["job_submission_id"])  # fmt: skip
        lines, first = self.processes.log(ident), int(body.get("next_token") or 0)
        page = lines[first : first + body["limit"]]
        after = first + len(page)
        events = [
            {"timestamp": now(), "log_source": "stdout", "message": base64.b64encode(text.encode()).decode()}
            for text in page
        ]
        return 200, {"logs": events, "external_url": None, "next_token": str(after) if after < len(lines) else None}

    def on_fleets_list(self, body: Any) -> tuple[int, Any]:
        return 200, self.fleets

    def on_gateways_list(self, body: Any) -> tuple[int, Any]:
        return 200, self.gateways


def _handler(fake: FakeDstack) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"null")
            canned = next((reply for end, reply in fake.replies.items() if self.path.endswith(end)), None)
            if canned is not None:
                status, raw = canned
            else:
                with fake.lock:
                    status, said = fake.answer(self.path, self.headers.get("Authorization", ""), body)
                raw = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, format: str, *args: object) -> None:
            """Suppress the log."""

    return Handler


class RealDstack:
    """The real server on loopback, with machines emulated in its database."""

    def __init__(self, program: Path, folder: Path) -> None:
        self.folder = folder
        self.processes = Processes(folder / "containers")
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        self.env = {"DSTACK_SERVER_URL": f"http://127.0.0.1:{port}", "DSTACK_TOKEN": TOKEN}
        own = {
            "HOME": str(folder), "PATH": os.environ["PATH"], "DSTACK_SERVER_DIR": str(folder),
            "DSTACK_SERVER_ADMIN_TOKEN": TOKEN, "DSTACK_SERVER_BACKGROUND_PROCESSING_DISABLED": "1",
            "DSTACK_SERVER_CONFIG_DISABLED": "1",
        }  # fmt: skip
        self.log = (folder / "server.log").open("wb")
        argv = [str(program), "server", "--host", "127.0.0.1", "--port", str(port), "-y"]
        self.process = subprocess.Popen(argv, env=own, stdout=self.log, stderr=subprocess.STDOUT, cwd=folder)

    def start(self) -> RealDstack:
        eventually(self._answers, 90, every=0.2)  # it creates its database first
        return self

    def _answers(self) -> bool:
        assert self.process.poll() is None, (self.folder / "server.log").read_text(errors="replace")[-2000:]
        with suppress(OSError):
            self.call("/api/server/get_info", {})
            return True
        return False

    def close(self) -> None:
        self.processes.close()
        self.process.terminate()
        self.process.wait(30)
        self.log.close()

    def call(self, path: str, body: Any, token: str = TOKEN) -> Any:
        """Call the server directly."""
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        url = self.env["DSTACK_SERVER_URL"] + path
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60) as r:
            return json.loads(r.read() or b"null")

    def write(self, text: str, *values: object) -> list[tuple[Any, ...]]:
        """Write to the server's database, as its background work does."""
        with closing(sqlite3.connect(self.folder / "data" / "sqlite.db", timeout=30)) as db, db:
            return db.execute(text, values).fetchall()

    def advance(self) -> None:
        """Apply the changes that dstack's background work and its machines would have made by now."""
        rows = self.write(
            "SELECT r.id, j.id, r.run_name, r.status, r.run_spec FROM runs r JOIN jobs j ON j.run_id = r.id"
            " WHERE r.status IN ('SUBMITTED', 'RUNNING', 'TERMINATING')"
        )
        for run, job, name, status, spec in rows:
            if status == "SUBMITTED":
                self.processes.start(run, json.loads(spec)["configuration"])
                self.write("UPDATE runs SET status = 'RUNNING' WHERE id = ?", run)
                machine = json.dumps(recorded("machine"))
                self.write("UPDATE jobs SET status = 'RUNNING', job_provisioning_data = ? WHERE id = ?", machine, job)
            elif status == "RUNNING" and (code := self.processes.code(run)) is not None:
                self._log(run, job, name)
                why = "DONE_BY_RUNNER" if code == 0 else "CONTAINER_EXITED_WITH_ERROR"
                self._end(run, job, ("DONE", "ALL_JOBS_DONE") if code == 0 else ("FAILED", "JOB_FAILED"), why, code)
            elif status == "TERMINATING":
                self.processes.kill(run)
                self._log(run, job, name)
                self._end(run, job, ("TERMINATED", None), "TERMINATED_BY_USER", None)

    def _log(self, run: str, job: str, name: str) -> None:
        folder = self.folder / "projects" / "main" / "logs" / name / str(uuid.UUID(job))
        folder.mkdir(parents=True, exist_ok=True)
        events = ({"timestamp": now(), "log_source": "stdout", "message": text} for text in self.processes.log(run))
        (folder / "job.log").write_text("".join(json.dumps(event) + "\n" for event in events))

    def _end(self, run: str, job: str, ends: tuple[str, str | None], why: str, code: int | None) -> None:
        self.write(
            "UPDATE runs SET status = ?, termination_reason = coalesce(?, termination_reason) WHERE id = ?", *ends, run
        )
        self.write(
            "UPDATE jobs SET status = ?, termination_reason = ?, exit_status = ? WHERE id = ?", ends[0], why, code, job
        )


class DstackEngine:
    """A server as the backend contract's engine, with faults injected into calls to it."""

    def __init__(self, world: FakeDstack | RealDstack, backend: DstackBackend, patch: pytest.MonkeyPatch) -> None:
        self.world, self.patch, self.asked = world, patch, 0
        self.client = backend._server()._client
        self.plain = self.client._send
        patch.setattr(self.client, "_send", self._counted)

    async def _counted(self, method: str, path: str, params: Any, body: Any) -> ApiResponse | Unknown:
        self.asked += path.endswith(("/runs/list", "/runs/get"))
        if isinstance(self.world, RealDstack):
            self.world.advance()
        return await self.plain(method, path, params, body)

    @contextmanager
    def _instead(self, way: Any) -> Iterator[None]:
        with self.patch.context() as patch:
            patch.setattr(self.client, "_send", way)
            yield

    def job(self, text: str, **fields: object) -> JobSpec:
        given = {"platform": "dstack/main", "command": ["sh", "-c", text], "timeout_s": 600, "gpu": "H100"}
        return JobSpec.model_validate(given | fields)

    def cut(self) -> AbstractContextManager[None]:
        async def lost(method: str, path: str, params: Any, body: Any) -> ApiResponse | Unknown:
            reply = await self._counted(method, path, params, body)
            return Unknown("the reply was lost") if path.endswith("/runs/apply") else reply

        return self._instead(lost)

    def down(self) -> AbstractContextManager[None]:
        async def silent(*_: Any) -> ApiResponse | Unknown:
            return Unknown("nobody answers")

        return self._instead(silent)

    def odd(self) -> AbstractContextManager[None]:
        async def strange(*_: Any) -> ApiResponse | Unknown:
            return ApiResponse(200, b'{"welcome": "to dstack"}')

        return self._instead(strange)

    def questions(self) -> int:
        return self.asked
