"""Run jobs as SkyPilot managed jobs: `sky-jobs/INFRA`, or `sky/INFRA` with `options: {managed: true}`.

SkyPilot's jobs controller rents a machine for the job, replaces the machine if it is preempted, and terminates it when
the job ends. gpuwarden can't connect to these machines: it only reads the controller's queue and the job's log, and
outputs must be uploaded to an artifact store while the job runs. The job's command contains gpuwarden's runner, which
uploads the outputs. Once all outputs are in the store, the command exits and the machine is terminated.

A job's name in the queue contains the token and the attempt. Jobs are found by that name, never by SkyPilot's number.
On a new machine, the command starts in an empty folder, so the training resumes only if the script loads a checkpoint
from elsewhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from gpuwarden.backends._sky_jobs_task import command, machine, named, stem_of
from gpuwarden.core.clock import Clock
from gpuwarden.core.errors import BadReply, Conflict, NotSupported, Unreachable, WardenError
from gpuwarden.core.models import (
    Allocation,
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
from gpuwarden.core.reasons import Code, because
from gpuwarden.core.rules import Finding
from gpuwarden.core.sanitize import line
from gpuwarden.core.states import Job
from gpuwarden.remote.sky.client import SkyClient
from gpuwarden.remote.sky.rows import Done, Info, Launched, Log, ManagedJob, ManagedQueue, read_options

STATES: Final[dict[str, tuple[Job, Code]]] = {
    "PENDING": (Job.QUEUED, Code.ENGINE_QUEUE),
    "SUBMITTED": (Job.QUEUED, Code.ENGINE_QUEUE),
    "STARTING": (Job.QUEUED, Code.ENGINE_QUEUE),
    "RECOVERING": (Job.QUEUED, Code.ENGINE_QUEUE),
    "RUNNING": (Job.RUNNING, Code.ALIVE),
    "WINDING_DOWN": (Job.RUNNING, Code.ENDING),
    "CANCELLING": (Job.RUNNING, Code.ENDING),
    "SUCCEEDED": (Job.SUCCEEDED, Code.EXITED),
    "CANCELLED": (Job.CANCELED, Code.STOPPED),
    "FAILED": (Job.FAILED, Code.EXITED),
    "FAILED_SETUP": (Job.FAILED, Code.NOT_STARTED),
    "FAILED_PRECHECKS": (Job.FAILED, Code.NOT_STARTED),
    "FAILED_NO_RESOURCE": (Job.FAILED, Code.NOT_STARTED),
    "FAILED_CONTROLLER": (Job.FAILED, Code.PLATFORM_REPORT),
}
"""Maps SkyPilot's `ManagedJobStatus` to a job's state and reason."""
_EXIT: Final = re.compile(r"exit codes? \[?(\d{1,3})\b")
_AWAY: Final = "a managed job's machine can't be reached from this machine"


def create(clock: Clock) -> SkyJobsBackend:
    """Return a new backend for the registry."""
    return SkyJobsBackend(clock)


class SkyJobsBackend:
    """Run jobs through SkyPilot's jobs controller."""

    name = "sky_jobs"
    takes_inputs = False
    seals = True

    def __init__(self, clock: Clock, sky: SkyClient | None = None) -> None:
        self._clock = clock
        self._sky = sky or SkyClient()

    def settle(self, spec: JobSpec) -> JobSpec:
        """Return the spec without the `managed` option. Raises BadRequest for unknown options."""
        read_options(spec.options)
        return spec.model_copy(update={"options": {k: v for k, v in spec.options.items() if k != "managed"}})

    def attempts(self, spec: JobSpec) -> int:
        """Return the maximum number of times that the command may start, not counting restarts after interruptions.

        The controller itself has no limit; gpuwarden cancels a job that has started more often.
        """
        return 1 if spec.interruptible else 1 + spec.max_restarts

    async def check(self, place: Place) -> list[Finding]:
        """Check whether the API server answers."""
        try:
            await self._sky.ask(Info, "info")
        except WardenError as error:
            return [Finding.of(error, rule="sky")]
        return []

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
        """Submit the attempt's managed job, or adopt the job with its name or the job of a later attempt.

        Secrets are passed as SkyPilot task secrets, which SkyPilot masks and its API server stores.
        """
        if inputs:
            raise NotSupported("a managed job can't receive input files", "Upload them to a dataset on the Hub.")
        stem = stem_of(place, token)
        queue = await self._queue(stem)
        numbers = [number for name in (*(row.name for row in queue.rows), *queue.sent) for number in _of(stem, name)]
        last = max(numbers, default=0)
        if 0 < last < attempt and (before := _observed(queue, stem)).state in {Job.QUEUED, Job.RUNNING}:
            raise Conflict(
                f"attempt {before.attempt} of the managed job {stem} has not ended", "Try again after it has ended."
            )
        if last <= attempt:  # the helper adopts a job of the same name, and cancels duplicates
            await self._sky.ask(
                Launched,
                "submit_managed",
                name=f"{stem}-a{attempt}",
                task=machine(spec, place),
                run=command(spec, place, token, attempt),
                secrets={"GPUWARDEN_ORDER": json.dumps(dict(secrets))} if secrets else {},
            )
        return self._handle(place, token)

    def _handle(self, place: Place, token: str) -> Handle:
        return Handle(backend=self.name, token=token, run_dir=f"/managed/{stem_of(place, token)}", place=place)

    async def find(self, place: Place, token: str) -> Answer[Handle | None]:
        """Return the job with this token if the controller lists it or SkyPilot is submitting it."""
        stem = stem_of(place, token)
        try:
            queue = await self._queue(stem)
        except WardenError as error:
            return Unknown(error.message)
        there = any(named(name)[0] == stem for name in (*(row.name for row in queue.rows), *queue.sent))
        return Known(self._handle(place, token) if there else None)

    # ----------------------------------------------------------------------------------------------------- observe

    async def poll(self, handles: Sequence[Handle]) -> dict[str, Observation]:
        """Observe all jobs with one poll of the controller's queue."""
        if not handles:
            return {}
        queue = await self._queue(_stem(handles[0]) if len(handles) == 1 else "gw-")
        return {handle.token: _observed(queue, _stem(handle)) for handle in handles}

    async def logs(self, handle: Handle, cursor: int = 0, limit: int = 65_536) -> LogChunk:
        """Read the log of the newest start from a byte cursor; a negative cursor counts from the log's current end.

        The log is empty while the job has no machine, because SkyPilot returns a log only if the job has a machine.
        """
        job = newest(await self._queue(_stem(handle)), _stem(handle))
        waits = job is None or STATES.get(job.status, (Job.UNKNOWN,))[0] is Job.QUEUED
        log = Log(text="") if job is None or waits else await self._sky.ask(Log, "managed_logs", job_id=job.id)
        return LogChunk.cut(log.text.encode(), cursor, limit, log.missing)

    async def stop(self, handle: Handle, *, grace_s: float = 10.0) -> StopResult:
        """Cancel the job. Returns PENDING until the controller reports that the job and its machine have ended.

        Returns GONE if the job had already ended or the queue no longer lists it; the provider reports whether its
        machine is billed.
        """
        stem = _stem(handle)
        queue = await self._queue(stem)
        job = newest(queue, stem)
        if job is None:
            return StopResult.PENDING if any(_of(stem, name) for name in queue.sent) else StopResult.GONE
        if job.over:
            return StopResult.GONE
        refusal: WardenError | None = None
        try:
            await self._sky.ask(Done, "cancel_managed", job_id=job.id, graceful=grace_s >= 1)
        except WardenError as error:  # the job may have ended or left the queue since the first poll
            refusal = error
        again = newest(await self._queue(stem), stem)
        if again is None or (again.over and refusal is not None):
            return StopResult.GONE
        if refusal is not None:
            raise refusal
        return StopResult.STOPPED if again.over else StopResult.PENDING

    async def _queue(self, match: str) -> ManagedQueue:
        return await self._sky.ask(ManagedQueue, "managed", match=match, finished=True)

    # ------------------------------------------------------------------------------------------------------- files

    async def list_files(self, handle: Handle, paths: Iterable[str]) -> Manifest:
        """Raise Unreachable, because the job's files are available only in its artifact store."""
        raise Unreachable(_AWAY, "Pull the outputs from the job's artifact store once the machine has been terminated.")

    manifest = list_files

    async def read(self, handle: Handle, artifact: Artifact, offset: int = 0) -> AsyncIterator[bytes]:
        """Raise Unreachable, as `list_files` does."""
        await self.list_files(handle, ())
        yield b""

    async def disclose(self, handle: Handle) -> Disclosure:
        """Return an empty disclosure, because the machine is rented only for this job and is terminated after it."""
        return Disclosure()


def _stem(handle: Handle) -> str:
    return handle.run_dir.rpartition("/")[2]


def _of(stem: str, name: str) -> tuple[int, ...]:
    """Return the attempt number in a job's name as a one-element tuple; an empty tuple if the name is another job's."""
    found, attempt = named(name)
    return (attempt,) if found == stem else ()


def newest(queue: ManagedQueue, stem: str) -> ManagedJob | None:
    """Return the first job that was submitted for the last attempt; later submissions are duplicates."""
    ours = [(-number, row.id, row) for row in queue.rows for number in _of(stem, row.name)]
    return min(ours)[2] if ours else None


def _observed(queue: ManagedQueue, stem: str) -> Observation:
    """Return the observation of a job that SkyPilot lists, is submitting, or has rejected."""
    job = newest(queue, stem)
    sent = [number for name in queue.sent for number in _of(stem, name)]
    if sent and (job is None or max(sent) > named(job.name)[1]):
        reason = because(Code.ENGINE_QUEUE, why="SkyPilot is submitting the job")
        return Observation(state=Job.QUEUED, attempt=max(sent), reason=reason.code, why=reason.text)
    if job is not None:
        return observation(job)
    why = next((why for name, why in queue.failed.items() if _of(stem, name)), "")
    if why:
        reason = because(Code.NOT_STARTED, line(why, 300))
        return Observation(state=Job.FAILED, meter=False, reason=reason.code, why=reason.text)
    return Observation(state=Job.UNKNOWN, why="SkyPilot does not list this managed job")


def observation(job: ManagedJob) -> Observation:
    """Return the observation of a managed job. Raises BadReply for an unknown state.

    A recovering job counts as queued: it is waiting for another machine, and the old machine's files are lost.
    """
    if job.status not in STATES:
        raise BadReply(
            f"a managed job has the unknown state {line(job.status, 40)}", "Check that SkyPilot 0.14 is installed."
        )
    state, code = STATES[job.status]
    again = f"recovered {job.recoveries} times" if job.recoveries else ""
    message = line("; ".join(part for part in (again, job.why) if part), 300)
    waits = (
        f"{job.status}: its machine was preempted; SkyPilot is renting another"
        if job.status == "RECOVERING"
        else job.status
    )
    reason = because(code, message, why=waits, state=job.status)
    exits = _EXIT.search(job.why) if job.status == "FAILED" else None
    ended: dict[str, Any] = {"ended_at": job.ended_at} if job.over else {}
    return Observation(
        state=state,
        attempt=named(job.name)[1] or 1,
        reason=reason.code,
        why=reason.text,
        exit_code=0 if job.status == "SUCCEEDED" else int(exits[1]) if exits else None,
        started_at=job.started_at,
        meter=_bills(job),
        allocation=Allocation(
            engine="sky_jobs",
            id=str(job.id),
            state=job.status,
            why=message,
            nodes=line(job.where or job.cloud, 100),
            restarts=job.recoveries,
            resources=line(job.resources, 200),
        ),
        **ended,
    )


def _bills(job: ManagedJob) -> bool | None:
    """Return whether the job's machine is billed; None if unknown, for example while the machine starts or
    terminates.
    """
    if job.status in {"PENDING", "SUBMITTED"} and not job.recoveries:
        return False
    if job.over:
        return False if job.schedule == "DONE" and job.status != "FAILED_CONTROLLER" else None
    return True if job.status in {"RUNNING", "WINDING_DOWN"} else None
