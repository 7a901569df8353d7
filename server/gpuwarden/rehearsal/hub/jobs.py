"""The rehearsal Hub's jobs: each really runs its command as a process, and its files go when it ends.

A job's log is a file of JSON lines that the log route streams as server-sent events. The time limit is enforced, a
cancel is a signal, secrets reach the process and are answered as names only. `uv run` is simulated by a small program
that runs the script with this Python and installs nothing.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from gpuwarden.rehearsal.hub.app import HubError, HubRoutes
from gpuwarden.rehearsal.hub.store import HubStore, User, iso
from gpuwarden.remote.sandbox import boxes
from gpuwarden.remote.sandbox.detect import detect
from gpuwarden.remote.sandbox.start import start
from gpuwarden.remote.sandbox.words import Kind, words

# name: (display name, dollars per hour, GPUs, gigabytes of GPU memory each); the Hub's list of August 2026.
FLAVORS: dict[str, tuple[str, float, int, int]] = {
    "cpu-basic": ("CPU basic", 0.01, 0, 0),
    "cpu-upgrade": ("CPU upgrade", 0.03, 0, 0),
    "t4-small": ("Nvidia T4", 0.40, 1, 16),
    "t4-medium": ("Nvidia T4", 0.60, 1, 16),
    "l4x1": ("Nvidia L4", 0.80, 1, 24),
    "l40sx1": ("Nvidia L40S", 1.80, 1, 48),
    "a10g-small": ("Nvidia A10G", 1.00, 1, 24),
    "a10g-large": ("Nvidia A10G", 1.50, 1, 24),
    "a100-large": ("Nvidia A100", 2.50, 1, 80),
    "a100x4": ("Nvidia A100", 10.00, 4, 80),
    "h200": ("Nvidia H200", 5.00, 1, 141),
    "rtx-pro-6000": ("Nvidia RTX PRO 6000", 2.75, 1, 96),
}
DEFAULT_TIMEOUT_S = 1800
FINAL = frozenset({"COMPLETED", "CANCELED", "ERROR", "DELETED"})
_LABEL = re.compile(r"[A-Za-z0-9._-]{1,100}")

_UV = """#!{python}
# Replaces uv in a rehearsal: runs the script with this Python and installs nothing.
import os, sys
args = sys.argv[1:]
if args[:1] != ["run"]:
    sys.exit("uv (rehearsal): only `uv run` is simulated")
args, takes = args[1:], {{"--with", "-p", "--python", "--index-url", "--extra-index-url", "--index"}}
while args and args[0].startswith("-") and args[0] != "-":
    flag = args.pop(0)
    if flag in takes:
        args.pop(0)
if not args:
    sys.exit("uv (rehearsal): nothing to run")
program = args[1:] if args[0] == "python" else args
os.execv(sys.executable, [sys.executable, *program])
"""


@dataclass
class RunningJob:
    """One job."""

    id: str
    owner: str
    request: dict[str, Any]
    created_at: float
    log: Path
    stage: str = "SCHEDULING"
    message: str | None = None
    started_at: float | None = None
    finished_at: float | None = None
    process: subprocess.Popen[str] | None = None
    thread: threading.Thread | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class HubJobs:
    """The routes of jobs. `start_after_s` is how long a job waits in the queue.

    `unsandboxed` says that a person allows jobs to run without a sandbox where none works.
    """

    def __init__(self, store: HubStore, *, start_after_s: float = 0.0, unsandboxed: bool = False) -> None:
        self.store = store
        self.hub = HubRoutes(store)
        self.jobs: dict[str, RunningJob] = {}
        self.start_after_s = start_after_s
        self.unsandboxed = unsandboxed
        self.endpoint = ""
        self._folder = store.root / "jobs"
        self._bin = store.root / "bin"

    def routes(self) -> list[BaseRoute]:
        """Return all routes."""
        one = "/api/jobs/{namespace}/{id}"
        return [
            Route("/api/jobs/hardware", self.hardware),
            Route("/api/jobs/{namespace}", self.submit, methods=["POST"]),
            Route("/api/jobs/{namespace}", self.list),
            Route(one, self.inspect),
            Route(one + "/logs", self.logs),
            Route(one + "/metrics", self.metrics),
            Route(one + "/cancel", self.cancel, methods=["POST"]),
            Route(one + "/labels", self.labels, methods=["PUT"]),
        ]

    # --------------------------------------------------------------------------------------------------- answers

    async def hardware(self, _request: Request) -> Response:
        """GET the flavors with their prices."""
        rows: list[dict[str, Any]] = []
        for name, (pretty, hourly, gpus, vram) in FLAVORS.items():
            card = {"type": "gpu", "model": pretty.removeprefix("Nvidia "), "quantity": str(gpus), "vram": f"{vram} GB"}
            cost = round(hourly * 1e6 / 60)
            rows.append(
                {
                    "name": name,
                    "prettyName": pretty,
                    "cpu": "4 vCPU",
                    "ram": "16 GB",
                    "ephemeralStorage": "50 GB",
                    "accelerator": card | {"manufacturer": "Nvidia"} if gpus else None,
                    "unitCostMicroUSD": cost,
                    "unitCostUSD": cost / 1e6,
                    "unitLabel": "minute",
                }
            )
        return JSONResponse(rows)

    async def submit(self, request: Request) -> Response:
        """POST a job; it is started in a thread."""
        user, owner = self._user(request, write=True), request.path_params["namespace"]
        body = await request.json()
        _check(body)
        job_id = secrets.token_hex(12)
        self._folder.mkdir(parents=True, exist_ok=True)
        job = RunningJob(job_id, owner, body, self.store.clock.now(), self._folder / f"{job_id}.jsonl")
        job.log.touch()
        self.jobs[job_id] = job
        job.thread = threading.Thread(target=self._run, args=(job,), daemon=True)
        job.thread.start()
        return JSONResponse(_shown(job, user))

    async def list(self, request: Request) -> Response:
        """GET all jobs of a namespace, by stage and by label."""
        user, query = self._user(request), request.query_params
        found = [j for j in self.jobs.values() if j.owner == request.path_params["namespace"]]
        if stages := query.getlist("stage"):
            found = [j for j in found if j.stage in stages]
        for label in query.getlist("label"):
            key, _, value = label.partition("=")
            found = [j for j in found if (j.request.get("labels") or {}).get(key) == value]
        return JSONResponse([_shown(j, user) for j in reversed(found)])

    async def inspect(self, request: Request) -> Response:
        """GET one job."""
        return JSONResponse(_shown(self._job(request), self._user(request)))

    async def cancel(self, request: Request) -> Response:
        """POST: end the process."""
        self._user(request, write=True)
        job = self._job(request)
        with job.lock:
            if job.stage not in FINAL:
                _finish(job, "CANCELED", None, self.store.clock.now())
        _kill(job)
        return JSONResponse(_shown(job, self._user(request)))

    async def labels(self, request: Request) -> Response:
        """PUT the labels."""
        self._user(request, write=True)
        job = self._job(request)
        job.request["labels"] = (await request.json())["labels"]
        return JSONResponse(_shown(job, self._user(request)))

    async def logs(self, request: Request) -> Response:
        """GET the log as server-sent events; the stream ends with the job."""
        self._user(request)
        tail = request.query_params.get("tail")
        events = self._events(self._job(request), int(tail) if tail else None)
        return StreamingResponse(events, media_type="text/event-stream")

    async def metrics(self, request: Request) -> Response:
        """GET one metrics event of a running job; 406 when it is over."""
        self._user(request)
        job = self._job(request)
        if job.stage != "RUNNING":
            raise HubError(406, "The job is not running")
        event = {"cpu_usage_pct": 0, "memory_used_bytes": 0, "memory_total_bytes": 1 << 30, "rx_bps": 0, "tx_bps": 0}
        lines = f"event: metric\ndata: {json.dumps(event | {'gpus': {}, 'replica': job.id})}\n\n"
        return Response(lines, media_type="text/event-stream")

    async def _events(self, job: RunningJob, tail: int | None) -> AsyncIterator[str]:
        yield _event(iso(job.created_at), f"===== Job started at {iso(job.created_at)} =====")
        at = 0
        if tail is not None:
            lines = job.log.read_bytes().splitlines(keepends=True)
            at = sum(map(len, lines[: max(0, len(lines) - tail)]))
        while True:
            over = job.stage in FINAL
            with job.log.open("rb") as file:
                file.seek(at)
                chunk = file.read()
            whole = chunk[: chunk.rfind(b"\n") + 1]
            at += len(whole)
            for line in whole.splitlines():
                item = json.loads(line)
                yield _event(item["timestamp"], item["data"])
            if over:
                return
            await anyio.sleep(0.05)

    # ----------------------------------------------------------------------------------------------------- runs

    def _run(self, job: RunningJob) -> None:
        """Run a job to its end. Its folder is removed with every file in it."""
        if self.start_after_s:
            threading.Event().wait(self.start_after_s)
        folder = self._folder / job.id
        (folder / "work").mkdir(parents=True)
        with job.lock:
            if job.stage in FINAL:
                return
            try:
                job.process = self._start(job, folder)
            except OSError as error:
                _finish(job, "ERROR", f"failed to create containerd task: {error}", self.store.clock.now())
                return
            job.stage, job.started_at = "RUNNING", self.store.clock.now()
        timer = threading.Timer(job.request.get("timeoutSeconds") or DEFAULT_TIMEOUT_S, self._time_out, (job,))
        timer.daemon = True
        timer.start()
        assert job.process.stdout is not None
        with job.process.stdout as output, job.log.open("a", encoding="utf-8") as log:
            for line in output:
                log.write(json.dumps({"timestamp": iso(self.store.clock.now()), "data": line.rstrip("\n")}) + "\n")
                log.flush()
        code = job.process.wait()
        timer.cancel()
        with job.lock:
            if job.stage not in FINAL:
                message = None if code == 0 else f"Job failed with exit code: {code}. Reason: Error"
                _finish(job, "ERROR" if code else "COMPLETED", message, self.store.clock.now())
        shutil.rmtree(folder, ignore_errors=True)

    def _start(self, job: RunningJob, folder: Path) -> subprocess.Popen[str]:
        """Start the command, in a sandbox where one works. It has the network, since the Hub is on loopback."""
        argv = [*job.request.get("command", ()), *job.request.get("arguments", ())]
        self._bin.mkdir(exist_ok=True)
        uv = self._bin / "uv"
        if not uv.exists():
            uv.write_text(_UV.format(python=sys.executable))
            uv.chmod(0o755)
        env = {"PATH": f"{self._bin}:{os.environ.get('PATH', '')}", "HOME": str(folder / "work"), "JOB_ID": job.id}
        env |= {"ACCELERATOR": job.request["flavor"], "HF_ENDPOINT": self.endpoint, "PYTHONUNBUFFERED": "1"}
        env |= (job.request.get("environment") or {}) | (job.request.get("secrets") or {})
        found = detect()
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        options |= {"errors": "replace"}
        if found.kind is Kind.NONE and not self.unsandboxed:
            raise OSError("no sandbox works on this machine, and no person allowed jobs without one")
        if found.kind is Kind.NONE:
            return subprocess.Popen(
                argv, cwd=folder / "work", env=env, stdin=subprocess.DEVNULL, start_new_session=True, **options
            )
        allowed = boxes.Allowed(network=True, caches=False)
        program = shutil.which(argv[0], path=env.get("PATH"))
        box = boxes.box_for(str(folder), env, allowed, [p for p in (program, str(uv)) if p])
        boxes.prepare(box)
        name, content = boxes.init_source()
        (folder / name).write_bytes(content)
        given = {**boxes.environment(found, box), **env}
        return start(words(found, box, boxes.system(), str(folder / name)), argv, given, **options)

    def _time_out(self, job: RunningJob) -> None:
        with job.lock:
            if job.stage not in FINAL:
                _finish(job, "ERROR", "Job timeout", self.store.clock.now())
        _kill(job)

    def close(self) -> None:
        """End everything that still runs."""
        for job in self.jobs.values():
            _kill(job)
            if job.thread is not None:
                job.thread.join(timeout=2)

    # ---------------------------------------------------------------------------------------------------- callers

    def _user(self, request: Request, *, write: bool = False) -> User:
        user, owner = self.hub.known_user(request), request.path_params["namespace"]
        if owner not in {user.name, *user.orgs}:
            raise HubError(404, "Not found")
        if write and not user.may_write(owner):
            raise HubError(403, "You need write access to this namespace to run jobs")
        return user

    def _job(self, request: Request) -> RunningJob:
        job = self.jobs.get(request.path_params["id"])
        if job is None or job.owner != request.path_params["namespace"]:
            raise HubError(404, "Job not found")
        return job


def _check(body: dict[str, Any]) -> None:
    if body.get("flavor") not in FLAVORS:
        raise HubError(400, f"Invalid flavor {body.get('flavor')!r}")
    if not body.get("command") or not (body.get("dockerImage") or body.get("spaceId")):
        raise HubError(400, "a job needs a command and an image")
    for key, value in (body.get("labels") or {}).items():
        if not _LABEL.fullmatch(key) or not (value == "" or _LABEL.fullmatch(value)):
            raise HubError(400, f"Invalid label {key}={value}")
    if not isinstance(body.get("secrets") or {}, dict) or (body.get("timeoutSeconds") or 1) < 1:
        raise HubError(400, "secrets must be an object, timeoutSeconds positive")


def _shown(job: RunningJob, user: User) -> dict[str, Any]:
    body = job.request
    status = {"stage": job.stage, "message": job.message}
    who = {"id": "1" * 24, "name": user.name}
    times = {"startedAt": job.started_at, "finishedAt": job.finished_at}
    shown: dict[str, Any] = {"id": job.id, "createdAt": iso(job.created_at), "type": "job", "status": status}
    shown |= {k: body[k] for k in ("dockerImage", "spaceId", "command", "arguments", "labels") if k in body}
    shown |= {k: iso(v) for k, v in times.items() if v is not None}
    shown |= {"environment": body.get("environment") or {}, "flavor": body["flavor"]}
    shown |= {"secrets": sorted(body.get("secrets") or {}), "timeout": body.get("timeoutSeconds") or DEFAULT_TIMEOUT_S}
    shown |= {"createdBy": who, "owner": {"id": "1" * 24, "name": job.owner, "type": "user", "avatarUrl": ""}}
    return shown


def _finish(job: RunningJob, stage: str, message: str | None, now: float) -> None:
    job.stage, job.message, job.finished_at = stage, message, now


def _kill(job: RunningJob) -> None:
    process = job.process
    if process is not None and process.poll() is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def _event(timestamp: str, data: str) -> str:
    return f"data: {json.dumps({'timestamp': timestamp, 'data': data})}\n\n"
