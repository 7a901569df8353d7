"""Run jobs as Hugging Face Jobs.

The job's labels contain gpuwarden's token, so that the job can be found after a lost reply. Its container and files are
deleted when it ends, so only outputs on the Hub can be listed, read and verified. Repos that the job pushes to are
addressed as `/hub/models/OWNER/NAME` and `/hub/datasets/OWNER/NAME`. A folder in a bucket is addressed as
`/hub/buckets/OWNER/NAME/FOLDER`; the bucket is mounted at this path, so the job writes its output there.
"""

from __future__ import annotations

import base64
import gzip
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio

from gpuwarden.backends._hf_options import read_options, settle, volumes_of
from gpuwarden.backends._hub_files import HubOutputs
from gpuwarden.core.clock import Clock
from gpuwarden.core.errors import BadReply, BadRequest, NotSupported, Unreachable, WardenError
from gpuwarden.core.models import (
    Answer,
    Handle,
    Heartbeat,
    JobSpec,
    Known,
    LogChunk,
    Observation,
    Place,
    StopResult,
    Unknown,
)
from gpuwarden.core.reasons import Code
from gpuwarden.core.rules import Finding
from gpuwarden.core.states import Job
from gpuwarden.hub import jobs
from gpuwarden.hub.client import HubClient

IMAGE = "ghcr.io/astral-sh/uv:python3.12-bookworm"
MOST_BYTES = 2**53
MAX_SCRIPT = 96 << 10  # an argument of a Linux process can have at most 128 KiB
_RUN = 'd=$(mktemp -d) && printf %s "$0" | base64 -d | gunzip > "$d/job.py" && exec uv run "$d/job.py" "$@"'
_STATES = {
    "SCHEDULING": Job.QUEUED,
    "RUNNING": Job.RUNNING,
    "COMPLETED": Job.SUCCEEDED,
    "CANCELED": Job.CANCELED,
    "ERROR": Job.FAILED,
    "DELETED": Job.UNKNOWN,
}


def create(clock: Clock) -> HfJobsBackend:
    """Return a new backend for the registry."""
    return HfJobsBackend(clock)


class HfJobsBackend(HubOutputs):
    """Run jobs on the Hub's machines."""

    name = "hf_jobs"
    takes_inputs = False
    seals = False

    def settle(self, spec: JobSpec) -> JobSpec:
        """Return the spec with bucket paths for outputs on a mounted bucket. Raises BadRequest for invalid options."""
        return settle(spec)

    def attempts(self, spec: JobSpec) -> int:
        """Return the maximum number of times that the Hub runs the command.

        It is unknown whether each run gets the full time limit.
        """
        return read_options(spec).attempts

    async def check(self, place: Place) -> list[Finding]:
        """Check that a token is set and that the Hub accepts it."""
        try:
            async with self._hub() as hub:
                await jobs.namespace(hub)
        except WardenError as error:
            return [Finding.of(error, rule="hf_jobs")]
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
        """Start the job, or adopt the job with this token and attempt."""
        if inputs:
            raise NotSupported(
                "a job on the Hub's machines can't receive input files", "Upload them to a dataset on the Hub."
            )
        labels = {jobs.JOB: token, jobs.ATTEMPT: str(attempt)}
        async with self._hub() as hub:
            owner = read_options(spec).namespace or await jobs.namespace(hub)
            found = await jobs.listed(hub, owner, labels)
            if not found:
                body = await self._body(
                    hub, spec, labels | ({jobs.LEASE: place.instance_id} if place.instance_id else {})
                )
                body |= {"secrets": dict(secrets)} if secrets else {}
                found = [await self._start(hub, owner, body, labels)]
        return self._handle(place, token, owner, str(_first(found)["id"]))

    async def _start(
        self, hub: HubClient, owner: str, body: dict[str, Any], labels: Mapping[str, str]
    ) -> dict[str, Any]:
        try:
            return await jobs.submit(hub, owner, body)
        except (Unreachable, BadReply):
            # The job may be running. Find it now, before a caller submits it a second time.
            for _ in range(3):
                await self._clock.sleep(1.0)
                if adopted := await jobs.listed(hub, owner, labels):
                    return _first(adopted)
            raise

    async def _body(self, hub: HubClient, spec: JobSpec, labels: Mapping[str, str]) -> dict[str, Any]:
        flavor = jobs.flavor_of(spec.gpu, spec.gpu_count, await jobs.prices(hub))
        env = spec.env | {"GPUWARDEN_JOB": labels[jobs.JOB], "GPUWARDEN_ATTEMPT": labels[jobs.ATTEMPT]}
        options, volumes = read_options(spec), volumes_of(spec)
        for bucket in dict.fromkeys(v.source for v in volumes if v.writable):
            await jobs.make_bucket(hub, bucket)
        body: dict[str, Any] = {
            **({"spaceId": options.space} if options.space else {"dockerImage": options.image or IMAGE}),
            "command": list(spec.command) or script_command(spec),
            "arguments": [],
            "environment": env,
            "flavor": flavor,
            "labels": {"name": spec.name, **options.labels, **labels},
        }
        body |= {"timeoutSeconds": spec.timeout_s} if spec.timeout_s else {}
        body |= {"attempts": options.attempts} if options.attempts > 1 else {}
        body |= {"ssh": {"enabled": True}} if options.ssh else {}
        return body | ({"volumes": [volume.body for volume in volumes]} if volumes else {})

    def _handle(self, place: Place, token: str, owner: str, job_id: str) -> Handle:
        return Handle(backend=self.name, token=token, run_dir=f"/jobs/{owner}/{job_id}", place=place)

    async def find(self, place: Place, token: str) -> Answer[Handle | None]:
        """Return the newest attempt for a token, or None if no job has the token."""
        try:
            async with self._hub() as hub:
                owner = place.user or await jobs.namespace(hub)
                found = await jobs.listed(hub, owner, {jobs.JOB: token})
        except WardenError as error:
            return Unknown(error.message)
        last = max(map(_attempt, found), default=0)
        newest = _first([j for j in found if _attempt(j) == last]) if found else None
        return Known(None if newest is None else self._handle(place, token, owner, str(newest["id"])))

    async def poll(self, handles: Sequence[Handle]) -> dict[str, Observation]:
        """Observe all jobs in a namespace. Live jobs are read with one list request; others are requested one by one.

        A job that can't be read is omitted.
        """
        seen: dict[str, Observation] = {}

        async def some(hub: HubClient, owner: str, handles: Sequence[Handle]) -> None:
            rows: dict[str, dict[str, Any]] = {}
            if len(handles) > 1:
                with suppress(WardenError):
                    rows = {str(job["id"]): job for job in await jobs.live(hub, owner)}
            async with anyio.create_task_group() as group:
                for handle in handles:
                    group.start_soon(one, hub, handle, rows.get(_where(handle)[1]))

        async def one(hub: HubClient, handle: Handle, job: dict[str, Any] | None) -> None:
            with suppress(WardenError):
                owner, job_id = _where(handle)
                job = job or await jobs.inspect(hub, owner, job_id)
                if job is None:
                    seen[handle.token] = Observation(state=Job.UNKNOWN, why="the Hub no longer has this job")
                    return
                seen[handle.token] = found = observation(job)
                if found.state is Job.RUNNING:
                    beat = beat_of(await jobs.usage(hub, owner, job_id))
                    seen[handle.token] = found.model_copy(update={"beat": beat})

        async with self._hub() as hub, anyio.create_task_group() as group:
            for owner in dict.fromkeys(_where(handle)[0] for handle in handles):
                group.start_soon(some, hub, owner, [h for h in handles if _where(h)[0] == owner])
        if handles and not seen:
            raise Unreachable("the Hub returned no state for any of these jobs", "Try again in a moment.")
        return seen

    async def logs(self, handle: Handle, cursor: int = 0, limit: int = 65_536) -> LogChunk:
        """Read the log from a byte cursor; a negative cursor counts from its current end."""
        upto = cursor + limit if cursor >= 0 else 64 << 20
        async with self._hub() as hub:
            text, _ = await jobs.read_log(hub, *_where(handle), upto=upto)
        return LogChunk.cut(text, cursor, limit)

    async def stop(self, handle: Handle, *, grace_s: float = 10.0) -> StopResult:
        """Cancel the job. The Hub has no grace period."""
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
    """Return the command that runs a script, compressed into one argument so that no shell quoting is needed."""
    packed = base64.b64encode(gzip.compress((spec.script or "").encode(), mtime=0)).decode()
    if len(packed) > MAX_SCRIPT:
        raise BadRequest(
            f"the script is too long for a job's command line: {len(packed):,} bytes packed, more than {MAX_SCRIPT:,}",
            "Upload the script to a repo or another URL, and run it from there with `uv run`.",
        )
    return ["/bin/sh", "-c", _RUN, packed, *spec.args]


def observation(job: Mapping[str, Any]) -> Observation:
    """Convert the Hub's description of a job to an observation."""
    stage, message = jobs.stage_of(job), jobs.message_of(job)
    exit_code = re.search(r"exit code:? (\d+)", message)
    state = _STATES[stage]
    why, reason = message or f"the Hub reports {stage}", Code.PLATFORM_REPORT
    if (address := ssh_of(job)) and stage == "RUNNING":
        why = f"{why}; ssh {address}"
    # the Hub reports no separate stage for a job that reached its time limit
    if stage == "ERROR" and "timeout" in message.lower():
        why = f"ended by the platform at its time limit ({message}); outputs that were not pushed are lost"
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


def ssh_of(job: Mapping[str, Any]) -> str:
    """Return the address of a job's SSH server, such as `ID@ssh.hf.jobs`; empty if it has none."""
    status = job.get("status")
    url = str(status.get("sshUrl") or "") if isinstance(status, dict) else ""
    return found[1] if (found := re.fullmatch(r"ssh://([0-9a-f]{24}@[a-z0-9.-]+)", url)) else ""


def beat_of(usage: Mapping[str, Any]) -> Heartbeat | None:
    """Return a heartbeat from the Hub's measurements, with the maximum across GPUs; None without measurements."""
    given = usage.get("gpus")
    gpus = [gpu for gpu in given.values() if isinstance(gpu, dict)] if isinstance(given, dict) else []
    beat = Heartbeat(
        gpu_util=max((_number(gpu.get("utilization")) or 0.0 for gpu in gpus), default=None),
        gpu_mem_used=_whole(max((_number(gpu.get("memory_used_bytes")) or 0.0 for gpu in gpus), default=None)),
        mem_used=_whole(_number(usage.get("memory_used_bytes"))),
        mem_limit=_whole(_number(usage.get("memory_total_bytes"))),
    )
    return None if beat == Heartbeat() else beat


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and 0 <= value < MOST_BYTES else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _first(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the oldest job, which is gpuwarden's; newer jobs with the same labels are manual reruns by a user."""
    return min(found, key=lambda job: jobs.moment(job.get("createdAt")) or 0.0)


def _where(handle: Handle) -> tuple[str, str]:
    _, _, owner, job_id = handle.run_dir.split("/")
    return owner, job_id


def _attempt(job: Mapping[str, Any]) -> int:
    text = jobs.labels_of(job).get(jobs.ATTEMPT, "1")
    return int(text) if text.isdigit() and text != "0" else 1
