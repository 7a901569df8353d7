"""Run jobs in the queue of a cluster that was launched with SkyPilot, through the provider `sky`.

Files are copied over SSH, through the host alias that SkyPilot's client adds to the SSH configuration. The job is added
to SkyPilot's queue so that SkyPilot treats the cluster as busy; the job's command is gpuwarden's runner. A job's name
in the queue contains the token and the attempt. Jobs are found by that name, never by SkyPilot's number.

SkyPilot determines a job's state; the runner's status describes the command's result. The cluster is still billed after
the job ends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from gpuwarden.backends._engine import found
from gpuwarden.backends._slurm_observation import observation
from gpuwarden.backends._slurm_rows import Row, newest
from gpuwarden.backends.ssh import SshBackend
from gpuwarden.core.clock import Clock
from gpuwarden.core.errors import BadReply, NotFound, WardenError
from gpuwarden.core.models import (
    Allocation,
    Answer,
    Handle,
    JobSpec,
    LogChunk,
    Observation,
    Place,
    StopResult,
    Unknown,
)
from gpuwarden.core.sanitize import line
from gpuwarden.remote import launch
from gpuwarden.remote.sky.client import SkyClient
from gpuwarden.remote.sky.rows import Done, JobQueue, Launched, Log, read_options
from gpuwarden.remote.ssh.shell_quote import quote

STATES: Final = {
    "INIT": "PENDING",
    "PENDING": "PENDING",
    "SETTING_UP": "RUNNING",
    "RUNNING": "RUNNING",
    "SUCCEEDED": "COMPLETED",
    "FAILED": "FAILED",
    "FAILED_SETUP": "FAILED",
    "FAILED_DRIVER": "NODE_FAIL",
    "CANCELLED": "CANCELLED",
}
"""SkyPilot's states, mapped to the states that all engines share."""
_NAME = re.compile(r"(gw-.+)-a([1-9]\d{0,3})")


def create(clock: Clock) -> SkyBackend:
    """Return a new backend for the registry."""
    return SkyBackend(clock)


class SkyBackend(SshBackend):
    """Run jobs in the queues of SkyPilot clusters."""

    name = "sky"

    def __init__(self, clock: Clock, config: Path | None = None, sky: SkyClient | None = None) -> None:
        super().__init__(clock, config)
        self._sky = sky or SkyClient()

    def settle(self, spec: JobSpec) -> JobSpec:
        """Return the spec, with the platform `sky-jobs/` for a managed job. Raises BadRequest for an unknown option."""
        managed = read_options(spec.options).managed
        return spec.model_copy(update={"platform": spec.platform.replace("sky/", "sky-jobs/", 1)}) if managed else spec

    def attempts(self, spec: JobSpec) -> int:
        """Return 1, because SkyPilot never restarts a job in a cluster's queue."""
        return 1

    # ------------------------------------------------------------------------------------------------------ launch

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
        """Add the attempt to the cluster's queue, or adopt the job that already has the attempt's name.

        Secrets are passed as SkyPilot's task secrets: SkyPilot masks them, and its API server stores them.
        """
        handle, ready = await self.stage(spec, place, token, inputs)
        order = {"spec": ready.spec, "token": token, "attempt": attempt}
        await self.put_file(handle, f"order.{attempt}.json", json.dumps(order).encode())
        host = await self.host_info(handle.place)
        runner = f"{handle.run_dir}/{ready.runner}"
        words = [host.runner_python, "-I", "-S", runner, "allot", handle.run_dir]
        request = json.dumps({"attempt": attempt, "id": "SKYPILOT_TASK_ID"})
        await self._sky.ask(
            Launched,
            "execute",
            cluster=_cluster(handle.place),
            name=f"{launch.run_name(token)}-a{attempt}",
            run=f"exec {' '.join(map(quote, words))} <<'END_OF_REQUEST'\n{request}\nEND_OF_REQUEST\n",
            secrets={"GPUWARDEN_ORDER": json.dumps(dict(secrets))} if secrets else {},
        )
        return handle

    async def find(self, place: Place, token: str) -> Answer[Handle | None]:
        """Return a token's job if it is queued, is being submitted, or has a status in its run folder."""
        stem = launch.run_name(token)
        try:
            handle = await self.handle_of(place, token)
            queue, seen = await self._queue(place), (await self._look([handle]))[handle.run_dir]
        except WardenError as error:
            return Unknown(error.message)
        return found(handle, seen, _is_sending(queue, stem) or stem in _rows(queue))

    # ----------------------------------------------------------------------------------------------------- observe

    async def poll(self, handles: Sequence[Handle]) -> dict[str, Observation]:
        """Observe all jobs on a cluster with one poll of its queue and one poll of their run folders."""
        if not handles:
            return {}
        queue, seen = await self._queue(handles[0].place), await self._look(handles)
        rows = _rows(queue)
        observed = {}
        for handle in handles:
            row, status = rows.get(launch.run_name(handle.token)), seen[handle.run_dir]
            if row is not None and row.over and status.get("attempt") != row.attempt:
                row = replace(row, message=line((await self._log(handle, row.id)).text[-300:], 300))
            observed[handle.token] = observation(status, row).model_copy(update={"meter": True})
        return observed

    async def logs(self, handle: Handle, cursor: int = 0, limit: int = 65_536) -> LogChunk:
        """Read the runner's log from a byte cursor, or SkyPilot's log if the runner never started."""
        try:
            return await super().logs(handle, cursor, limit)
        except NotFound:
            row = await self._row(handle)
            if row is None:
                raise
        log = await self._log(handle, row.id)
        return LogChunk.cut(log.text.encode(), cursor, limit, log.missing)

    async def stop(self, handle: Handle, *, grace_s: float = 10.0) -> StopResult:
        """End the job. The runner stops a running job after a grace period; SkyPilot cancels any other job."""
        queue, stem = await self._queue(handle.place), launch.run_name(handle.token)
        row = _rows(queue).get(stem)
        if _is_sending(queue, stem):
            return StopResult.PENDING  # the job may start after this call
        if row is not None and row.over:
            return StopResult.GONE
        result = StopResult.GONE if row is not None and row.waits else await super().stop(handle, grace_s=grace_s)
        if row is None or result is not StopResult.GONE:
            return result
        await self._sky.ask(Done, "act", verb="cancel", cluster=_cluster(handle.place), job_ids=[row.id])
        again = await self._row(handle)
        return StopResult.STOPPED if again is None or again.over else StopResult.PENDING

    # ---------------------------------------------------------------------------------------------------- questions

    async def _queue(self, place: Place) -> JobQueue:
        return await self._sky.ask(JobQueue, "jobs", cluster=_cluster(place))

    async def _row(self, handle: Handle) -> Row | None:
        return _rows(await self._queue(handle.place)).get(launch.run_name(handle.token))

    async def _log(self, handle: Handle, job: int) -> Log:
        return await self._sky.ask(Log, "logs", cluster=_cluster(handle.place), job_id=job)


def _cluster(place: Place) -> str:
    """Return the cluster's name, which is also its SSH alias."""
    return place.instance_id or place.host or ""


def _named(name: str | None) -> tuple[str, int]:
    found = _NAME.fullmatch(name or "")
    return (found[1], int(found[2])) if found else ("", 0)


def _is_sending(queue: JobQueue, stem: str) -> bool:
    """Return whether SkyPilot is adding a job to the queue that is not yet listed there."""
    listed = {job.name for job in queue.rows}
    return any(_named(name)[0] == stem for name in queue.sent if name not in listed)


def _rows(queue: JobQueue) -> dict[str, Row]:
    """Return one row for each job: the first submission of its last attempt."""
    rows = {}
    for job in sorted(queue.rows, key=lambda job: -job.id):
        stem, attempt = _named(job.name)
        if not stem:
            continue
        if job.status not in STATES:
            raise BadReply(
                f"a job in SkyPilot's queue has the unknown state {line(job.status, 40)}",
                "Check that SkyPilot 0.14 is installed.",
            )
        rows[stem, attempt] = Row(
            stem=stem,
            attempt=attempt,
            id=job.id,
            state=STATES[job.status],
            flags=frozenset(),
            exit_code=None,
            signal=None,
            submitted_at=job.submitted_at,
            started_at=job.started_at,
            ended_at=job.ended_at,
            allocation=Allocation(engine="sky", id=str(job.id), state=job.status, resources=line(job.resources, 200)),
        )
    return newest(rows.values())
