"""The rehearsal Hub's routes for jobs. `job_runs` runs the jobs as real processes."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import AsyncIterator, Iterable
from typing import Any

import anyio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute

from gpuwarden.rehearsal.hub.access import Access, HubError
from gpuwarden.rehearsal.hub.buckets import HubBuckets
from gpuwarden.rehearsal.hub.job_requests import FLAVORS, Expose, JobBody, LabelsBody
from gpuwarden.rehearsal.hub.job_runs import DEFAULT_TIMEOUT_S, FINAL, JobRuns, RunningJob
from gpuwarden.rehearsal.hub.store import HubStore, User, iso
from gpuwarden.rehearsal.hub.strict import parsed, route

PAGE = 100
STAGES = FINAL | {"SCHEDULING", "RUNNING"}
_PAIR = re.compile(r"[a-zA-Z0-9._-]+=[a-zA-Z0-9._-]*")


class HubJobs:
    """The routes for jobs."""

    def __init__(self, store: HubStore, buckets: HubBuckets, *, unsandboxed: bool = False) -> None:
        self.store = store
        self.access = Access(store)
        self.runs = JobRuns(store, buckets, unsandboxed=unsandboxed)
        self.jobs = self.runs.jobs

    def routes(self) -> list[BaseRoute]:
        """Return the routes for jobs."""
        space = "/api/jobs/{namespace}"
        one = space + "/{id}"
        return [
            route("/api/jobs/hardware", self.hardware),
            route(space, self.submit, methods=["POST"]),
            route(space, self.listing, query=("label", "stage", "cursor")),
            route(space + "/count", self.count, query=("stage",)),
            route(one, self.inspect),
            route(one + "/logs", self.logs, query=("tail",)),
            route(one + "/metrics", self.metrics),
            route(one + "/cancel", self.cancel, methods=["POST"]),
            route(one + "/duplicate", self.duplicate, methods=["POST"]),
            route(one + "/labels", self.labels, methods=["PUT"]),
            route(one + "/expose", self.expose, methods=["PUT"]),
        ]

    # --------------------------------------------------------------------------------------------------- answers

    async def hardware(self, _request: Request) -> Response:
        """GET the hardware flavors and their prices."""
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
        """POST a new job, which is started in a thread."""
        user = self.caller(request, write=True)
        raw = await request.json()
        self.check(parsed(JobBody, raw), user)
        who = {"type": "user", "id": "1" * 24, "name": user.name, "avatarUrl": ""}
        return JSONResponse(shown(self.runs.start(request.path_params["namespace"], user, raw, who)))

    def check(self, body: JobBody, user: User) -> None:
        """Raise HubError for a volume that the caller may not mount."""
        for volume in body.volumes:
            bucket = self.runs.buckets.seen(user, volume.source)
            repo = self.store.get(volume.type, volume.source)
            if volume.type == "bucket":
                there = bucket is not None and (not volume.writable or user.may_write(bucket.owner))
            else:
                there = repo is not None and (not repo.private or repo.owner in {user.name, *user.orgs})
            if not there:
                raise HubError(404, f"Volume source not found: {volume.type} {volume.source}")

    async def listing(self, request: Request) -> Response:
        """GET the jobs in a namespace, newest first, optionally filtered by stage and label."""
        self.caller(request)
        query = request.query_params
        found = self._in_stages(request)
        for label in query.getlist("label"):
            if not _PAIR.fullmatch(label):
                raise HubError(400, f"Invalid label filter {label!r}")
            key, _, value = label.partition("=")
            found = [j for j in found if j.request.get("labels", {}).get(key) == value]
        found.sort(key=lambda job: job.created_at, reverse=True)
        start = int(query.get("cursor", 0))
        url = request.url.include_query_params(cursor=start + PAGE)
        headers = {"Link": f'<{url}>; rel="next"'} if start + PAGE < len(found) else {}
        return JSONResponse([shown(j) for j in found[start : start + PAGE]], headers=headers)

    async def count(self, request: Request) -> Response:
        """GET the number of jobs in a namespace, optionally filtered by stage."""
        self.caller(request)
        return JSONResponse({"count": len(self._in_stages(request))})

    def _in_stages(self, request: Request) -> list[RunningJob]:
        stages = request.query_params.getlist("stage")
        if odd := set(stages) - STAGES:
            raise HubError(400, f"Invalid stage {sorted(odd)}")
        mine = [j for j in self.jobs.values() if j.owner == request.path_params["namespace"]]
        return [j for j in mine if not stages or j.stage in stages]

    async def inspect(self, request: Request) -> Response:
        """GET one job."""
        return JSONResponse(shown(self._job(request)))

    async def cancel(self, request: Request) -> Response:
        """POST to cancel a job and kill its process."""
        job = self._job(request, write=True)
        job.finish("CANCELED", None, self.store.clock.now())
        job.kill()
        return JSONResponse(shown(job))

    async def duplicate(self, request: Request) -> Response:
        """POST to run a copy of a job."""
        job = self._job(request, write=True)
        body, made = {**job.request}, {"type": "duplicated-job", "id": job.id}
        return JSONResponse(shown(self.runs.start(job.owner, self.caller(request), body, made)))

    async def labels(self, request: Request) -> Response:
        """PUT new labels for a job."""
        job = self._job(request, write=True)
        job.request["labels"] = parsed(LabelsBody, await request.json()).labels
        return JSONResponse(shown(job))

    async def expose(self, request: Request) -> Response:
        """PUT the ports on which a job is reachable."""
        job = self._job(request, write=True)
        job.request["expose"] = parsed(Expose, await request.json()).model_dump()
        return JSONResponse(shown(job))

    async def logs(self, request: Request) -> Response:
        """GET the log as server-sent events; the stream ends when the job does."""
        job, tail = self._job(request), request.query_params.get("tail", "")
        if tail and not tail.isdigit():
            raise HubError(400, "tail must be a number of lines")
        return StreamingResponse(_log_events(job, int(tail) if tail else None), media_type="text/event-stream")

    async def metrics(self, request: Request) -> Response:
        """GET one metrics event per second from a running job; 406 after it has ended."""
        job = self._job(request)
        if job.stage != "RUNNING":
            raise HubError(406, "The job is not running")
        return StreamingResponse(_metric_events(job), media_type="text/event-stream")

    # --------------------------------------------------------------------------------------------------- callers

    def caller(self, request: Request, *, write: bool = False) -> User:
        """Return the user who sent a request. Raises HubError if the user does not belong to its namespace."""
        user, owner = self.access.known_user(request), request.path_params["namespace"]
        if owner not in {user.name, *user.orgs}:
            raise HubError(404, "Not found")
        if write and not user.may_write(owner):
            raise HubError(403, "You need write access to this namespace to run jobs")
        return user

    def _job(self, request: Request, *, write: bool = False) -> RunningJob:
        self.caller(request, write=write)
        job = self.jobs.get(request.path_params["id"])
        if job is None or job.owner != request.path_params["namespace"]:
            raise HubError(404, "Job not found")
        return job


def spec_of(body: dict[str, Any]) -> dict[str, Any]:
    """Return the public part of a job's request body, with only the names of its secrets."""
    kept = ("dockerImage", "spaceId", "command", "arguments", "labels", "arch", "volumes", "expose", "network")
    spec: dict[str, Any] = {k: body[k] for k in kept if body.get(k) is not None}
    spec |= {"environment": body.get("environment", {}), "flavor": body["flavor"]}
    spec |= {"secrets": sorted(body.get("secrets", {})), "timeout": body.get("timeoutSeconds") or DEFAULT_TIMEOUT_S}
    return spec | ({"retry": body["attempts"] - 1} if body.get("attempts", 1) > 1 else {})


def shown(job: RunningJob) -> dict[str, Any]:
    """Return a job in the API's format."""
    body = job.request
    status: dict[str, Any] = {"stage": job.stage, "message": job.message}
    status |= {"failureCount": job.failures} if job.failures else {}
    ports: Iterable[int] = (body.get("expose") or {}).get("ports", ())
    status |= {"exposeUrls": [f"https://{job.id}--{port}.hf.jobs" for port in ports]} if ports else {}
    if (body.get("ssh") or {}).get("enabled"):
        status["sshUrl"] = f"ssh://{job.id}@ssh.hf.jobs"
    answer = spec_of(body) | {"id": job.id, "createdAt": iso(job.created_at), "type": "job", "status": status}
    times = {"startedAt": job.started_at, "finishedAt": job.finished_at}
    answer |= {k: iso(v) for k, v in times.items() if v is not None}
    if job.started_at is not None and job.finished_at is not None:
        waited, ran = job.started_at - job.created_at, job.finished_at - job.started_at
        answer["durations"] = {"schedulingSecs": round(waited), "runningSecs": round(ran)}
        answer["durations"]["totalSecs"] = round(waited + ran)
    answer |= {"createdBy": {"id": "1" * 24, "name": job.user.name}, "initiator": job.initiator}
    return answer | {"owner": {"id": "1" * 24, "name": job.owner, "type": "user", "avatarUrl": ""}}


async def _log_events(job: RunningJob, tail: int | None) -> AsyncIterator[str]:
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


async def _metric_events(job: RunningJob) -> AsyncIterator[str]:
    """Yield the resource usage of the job's processes once a second. GPUs are reported as idle, because no GPU is
    used.
    """
    import psutil

    _, _, gpus, vram = FLAVORS[job.request["flavor"]]
    idle = {"utilization": 0, "memory_used_bytes": 0, "memory_total_bytes": vram << 30}
    cards, replica = {secrets.token_hex(4): idle for _ in range(gpus)}, secrets.token_hex(3)
    while job.stage == "RUNNING" and job.process is not None:
        used = 0
        try:
            family = psutil.Process(job.process.pid)
            used = sum(p.memory_info().rss for p in (family, *family.children(recursive=True)))
        except psutil.Error:
            pass
        event: dict[str, Any] = {"cpu_usage_pct": 0, "cpu_millicores": 3500, "memory_used_bytes": used}
        event |= {"memory_total_bytes": 15 << 30, "rx_bps": 0, "tx_bps": 0, "gpus": cards, "replica": replica}
        yield f"event: metric\ndata: {json.dumps(event)}\n\n"
        for _ in range(20):  # so that the stream ends soon after the job
            if job.stage != "RUNNING":
                return
            await anyio.sleep(0.05)


def _event(timestamp: str, data: str) -> str:
    return f"data: {json.dumps({'timestamp': timestamp, 'data': data})}\n\n"
