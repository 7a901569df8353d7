"""Runs jobs as Hugging Face Jobs.

The job carries gpuwarden's token in its labels, so that it can be found again after a lost reply. Its container dies
with its files: the only outputs that can be listed, read and verified are repos on the Hub, which are addressed as
`/hub/models/OWNER/NAME` and `/hub/datasets/OWNER/NAME`.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio

from gpuwarden.core.clock import Clock
from gpuwarden.core.errors import BadReply, BadRequest, NotFound, NotSupported, Unreachable, WardenError
from gpuwarden.core.models import (
    Answer,
    Artifact,
    Disclosure,
    Handle,
    JobSpec,
    Known,
    LogChunk,
    Manifest,
    Observation,
    Place,
    StopResult,
    Unknown,
)
from gpuwarden.core.reasons import Code
from gpuwarden.core.rules import Finding, Severity
from gpuwarden.core.states import Job
from gpuwarden.hub import jobs
from gpuwarden.hub.client import HubClient, HubConfig

IMAGE = "ghcr.io/astral-sh/uv:python3.12-bookworm"
MAX_SCRIPT = 96 << 10  # one argument of a Linux process has at most 128 KiB
MAX_HASHED = 32 << 20  # files that are not LFS are small; the Hub reports the digest of the others
_RUN = 'd=$(mktemp -d) && printf %s "$0" | base64 -d | gunzip > "$d/job.py" && exec uv run "$d/job.py" "$@"'
_HUB_PATH = re.compile(r"/hub/(models|datasets)/([^/]+/[^/]+)(?:/(.+))?")
_STATES = {
    "SCHEDULING": Job.QUEUED,
    "RUNNING": Job.RUNNING,
    "COMPLETED": Job.SUCCEEDED,
    "CANCELED": Job.CANCELED,
    "ERROR": Job.FAILED,
    "DELETED": Job.UNKNOWN,
}


def create(clock: Clock) -> HfJobsBackend:
    """Return the backend."""
    return HfJobsBackend(clock)


class HfJobsBackend:
    """Jobs on the Hub's machines."""

    name = "hf_jobs"
    takes_inputs = False
    seals = False

    def __init__(self, clock: Clock, config: HubConfig | None = None) -> None:
        self._clock = clock
        self._config = config

    def _hub(self) -> HubClient:
        return HubClient(self._config or HubConfig.from_env(), clock=self._clock)

    async def check(self, place: Place) -> list[Finding]:
        """Return whether a token is set, and the Hub knows it."""
        try:
            async with self._hub() as hub:
                await jobs.namespace(hub)
        except WardenError as error:
            severity = Severity.UNKNOWN if error.retry else Severity.ERROR
            return [Finding(rule="hf_jobs", severity=severity, message=error.message, fix=error.next_steps)]
        return []

    async def submit(
        self,
        spec: JobSpec,
        place: Place,
        token: str,
        *,
        secrets: Mapping[str, str],
        attempt: int = 1,
        inputs: Mapping[str, Path] | None = None,
    ) -> Handle:
        """Start the job, or adopt the one that carries this token and attempt already."""
        if inputs:
            raise NotSupported("a job on the Hub's machines gets no files", "Put them into a dataset on the Hub.")
        labels = {jobs.JOB: token, jobs.ATTEMPT: str(attempt)}
        async with self._hub() as hub:
            owner = await jobs.namespace(hub)
            found = await jobs.listed(hub, owner, labels)
            if not found:
                body = await self._body(
                    hub, spec, labels | ({jobs.LEASE: place.instance_id} if place.instance_id else {})
                )
                body |= {"secrets": dict(secrets)} if secrets else {}
                found = [await self._start(hub, owner, body, labels)]
        return self._handle(place, token, owner, str(found[0]["id"]))

    async def _start(
        self, hub: HubClient, owner: str, body: dict[str, Any], labels: Mapping[str, str]
    ) -> dict[str, Any]:
        try:
            return await jobs.submit(hub, owner, body)
        except (Unreachable, BadReply):
            # The job may run. Looking right away finds it before a caller submits it a second time.
            for _ in range(3):
                await self._clock.sleep(1.0)
                if adopted := await jobs.listed(hub, owner, labels):
                    return adopted[0]
            raise

    async def _body(self, hub: HubClient, spec: JobSpec, labels: Mapping[str, str]) -> dict[str, Any]:
        flavor = jobs.flavor_of(spec.gpu, spec.gpu_count, await jobs.prices(hub))
        env = spec.env | {"GPUWARDEN_JOB": labels[jobs.JOB], "GPUWARDEN_ATTEMPT": labels[jobs.ATTEMPT]}
        body: dict[str, Any] = {
            "dockerImage": IMAGE,
            "command": list(spec.command) or script_command(spec),
            "arguments": [],
            "environment": env,
            "flavor": flavor,
            "labels": {"name": spec.name, **labels},
        }
        return body | ({"timeoutSeconds": spec.timeout_s} if spec.timeout_s else {})

    def _handle(self, place: Place, token: str, owner: str, job_id: str) -> Handle:
        return Handle(backend=self.name, token=token, run_dir=f"/jobs/{owner}/{job_id}", place=place)

    async def find(self, place: Place, token: str) -> Answer[Handle | None]:
        """Return the newest attempt of a token, None when no job carries it."""
        try:
            async with self._hub() as hub:
                owner = await jobs.namespace(hub)
                found = await jobs.listed(hub, owner, {jobs.JOB: token})
        except WardenError as error:
            return Unknown(error.message)
        newest = max(found, key=_attempt, default=None)
        return Known(None if newest is None else self._handle(place, token, owner, str(newest["id"])))

    async def poll(self, handles: Sequence[Handle]) -> dict[str, Observation]:
        """Observe each job; one that can't be seen is left out."""
        seen: dict[str, Observation] = {}

        async def one(hub: HubClient, handle: Handle) -> None:
            with suppress(WardenError):
                owner, job_id = _where(handle)
                job = await jobs.inspect(hub, owner, job_id)
                why = "the Hub no longer has this job"
                seen[handle.token] = observation(job) if job else Observation(state=Job.UNKNOWN, why=why)

        async with self._hub() as hub, anyio.create_task_group() as group:
            for handle in handles:
                group.start_soon(one, hub, handle)
        if handles and not seen:
            raise Unreachable("the Hub returned nothing about these jobs", "Ask again in a moment.")
        return seen

    async def logs(self, handle: Handle, cursor: int = 0, limit: int = 65_536) -> LogChunk:
        """Read the log from a byte cursor; a negative cursor counts from its present end."""
        upto = cursor + limit if cursor >= 0 else 64 << 20
        async with self._hub() as hub:
            text, _ = await jobs.read_log(hub, *_where(handle), upto=upto)
        start = min(cursor, len(text)) if cursor >= 0 else max(0, len(text) + cursor)
        piece = text[start : start + limit]
        end = start + len(piece)
        shown = piece.decode("utf-8", "replace")
        return LogChunk(text=shown, next=end, size=len(text), truncated=end < len(text))

    async def list_files(self, handle: Handle, paths: Iterable[str]) -> Manifest:
        """Return the files of the repos that `paths` name. Paths inside the container are missing: the container is
        gone.
        """
        return await self._files(paths, digests=False)

    async def manifest(self, handle: Handle, paths: Iterable[str]) -> Manifest:
        """Return the same with sha256 digests: the Hub's own for LFS files, made here for small ones."""
        return await self._files(paths, digests=True)

    async def _files(self, paths: Iterable[str], *, digests: bool) -> Manifest:
        files: list[Artifact] = []
        missing: list[str] = []
        async with self._hub() as hub:
            for path in paths:
                found = await self._repo_files(hub, path, digests=digests)
                files += found
                missing += [] if found else [path]
        return Manifest(taken_at=self._clock.now(), files=tuple(files), missing=tuple(missing))

    async def _repo_files(self, hub: HubClient, path: str, *, digests: bool) -> list[Artifact]:
        where = _HUB_PATH.fullmatch(path)
        if where is None:
            return []
        kind, repo, inner = where[1], where[2], where[3] or ""
        reply = await hub.get(f"/api/{kind}/{repo}", {"blobs": "true"})
        if reply.status == 404:
            return []
        siblings = reply.json.get("siblings") if isinstance(reply.json, dict) else None
        if reply.status != 200 or not isinstance(siblings, list):
            raise BadReply(f"the Hub answered {reply.status} for {repo}: {reply.said}", "Ask again.")
        found = []
        for item in siblings:
            name, size = str(item.get("rfilename")), item.get("size")
            if (inner and name != inner and not name.startswith(inner + "/")) or not isinstance(size, int):
                continue
            full = f"/hub/{kind}/{repo}/{name}"
            sha = (item.get("lfs") or {}).get("sha256")
            if digests and not sha and size <= MAX_HASHED:
                digest = hashlib.sha256()
                async for chunk in _download(hub, full, 0):
                    digest.update(chunk)
                sha = digest.hexdigest()
            found.append(Artifact(path=full, size=size, sha256=sha))
        return found

    async def read(self, handle: Handle, artifact: Artifact, offset: int = 0) -> AsyncIterator[bytes]:
        """Stream one file of a repo."""
        async with self._hub() as hub:
            async for chunk in _download(hub, artifact.path, offset):
                yield chunk

    async def disclose(self, handle: Handle) -> Disclosure:
        """Return an empty disclosure: the container runs this job only."""
        return Disclosure()

    async def stop(self, handle: Handle, *, grace_s: float = 10.0) -> StopResult:
        """Cancel the job. The Hub gives it no grace."""
        owner, job_id = _where(handle)
        async with self._hub() as hub:
            job = await jobs.inspect(hub, owner, job_id)
            if job is None or jobs.stage_of(job) in jobs.FINAL:
                return StopResult.GONE
            await jobs.cancel(hub, owner, job_id)
            job = await jobs.inspect(hub, owner, job_id)
        ended = job is None or jobs.stage_of(job) in jobs.FINAL
        return StopResult.STOPPED if ended else StopResult.PENDING


def script_command(spec: JobSpec) -> list[str]:
    """Return the command that runs a script: it is compressed into one argument, never quoted for a shell."""
    packed = base64.b64encode(gzip.compress((spec.script or "").encode(), mtime=0)).decode()
    if len(packed) > MAX_SCRIPT:
        raise BadRequest(
            f"the script is too long for a job's command line: {len(packed):,} bytes packed, {MAX_SCRIPT:,} fit",
            "Put it into a repo or behind a raw address, and run that with `uv run`.",
        )
    return ["/bin/sh", "-c", _RUN, packed, *spec.args]


def observation(job: Mapping[str, Any]) -> Observation:
    """Return the observation of a job's response."""
    stage, message = jobs.stage_of(job), jobs.message_of(job)
    exit_code = re.search(r"exit code:? (\d+)", message)
    state = _STATES[stage]
    why, reason = message or f"the Hub says {stage}", Code.PLATFORM_REPORT
    if stage == "ERROR" and "timeout" in message.lower():  # no stage says that a job met its time limit
        why = f"ended by the platform at its time limit ({message}); what was not pushed is gone"
        reason = Code.TIME_LIMIT
    return Observation(
        state=state,
        meter={"RUNNING": True, "SCHEDULING": None}.get(stage, False),
        why=why,
        reason=reason,
        exit_code=0 if state is Job.SUCCEEDED else int(exit_code[1]) if exit_code else None,
        attempt=_attempt(job),
        started_at=jobs.moment(job.get("startedAt")),
        ended_at=jobs.moment(job.get("finishedAt")),
    )


async def _download(hub: HubClient, path: str, offset: int) -> AsyncIterator[bytes]:
    where = _HUB_PATH.fullmatch(path)
    if where is None or not where[3]:
        raise NotFound(f"{path} is not a file on the Hub", "Only paths below /hub can be read after a job's end.")
    root = "" if where[1] == "models" else "/datasets"
    url = f"{root}/{where[2]}/resolve/main/{where[3]}"
    async with hub.stream("GET", url, timeout_s=3600, start=offset) as response:
        if response.status_code not in {200, 206}:
            raise NotFound(f"the Hub answered {response.status_code} for {path}")
        skip = offset if response.status_code == 200 else 0
        async for chunk in response.aiter_bytes():
            yield chunk[skip:] if skip < len(chunk) else b""
            skip = max(0, skip - len(chunk))


def _where(handle: Handle) -> tuple[str, str]:
    _, _, owner, job_id = handle.run_dir.split("/")
    return owner, job_id


def _attempt(job: Mapping[str, Any]) -> int:
    text = jobs.labels_of(job).get(jobs.ATTEMPT, "1")
    return int(text) if text.isdigit() and text != "0" else 1
