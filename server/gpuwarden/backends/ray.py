"""Run jobs on a Ray cluster, through its dashboard's Jobs API.

The run folder is on a path that this machine and every node share. The runner is the job's entrypoint. It works on the
node as on any other machine, and the job's files are read on this machine. With `artifact_store`, it also uploads the
outputs. One request for Ray's job list returns the state of all jobs. A node's process id means nothing on this
machine, so the runner's status describes the command, and Ray determines whether the job can still run.

The submission id contains the token and the attempt, so Ray starts each attempt only once. The job's metadata contains
the path of its run folder. Ray does not restart a job: if its node is lost, the job counts as preempted, and the next
attempt continues in the same folder.

| variable | meaning |
|---|---|
| `RAY_AUTH_TOKEN` | the cluster's token, if the cluster requires one |
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import anyio
from anyio import to_thread

from gpuwarden.backends import _ray_options as options
from gpuwarden.backends._engine import EngineBackend
from gpuwarden.backends._ray_api import address, ask, is_here, last_line, python_of, read_limits, rows_of, submission_id
from gpuwarden.backends._runner import STOP_S
from gpuwarden.backends._slurm_observation import observation, unfinished
from gpuwarden.backends._slurm_rows import Row
from gpuwarden.backends.local import LocalBackend
from gpuwarden.core.clock import Clock
from gpuwarden.core.engine import EngineLimits
from gpuwarden.core.errors import AuthFailed, BadReply, BadRequest, Conflict, NoSandbox, Unreachable
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.models import Answer, Handle, JobSpec, Known, Observation, Place, StopResult
from gpuwarden.core.policy import Local
from gpuwarden.core.readiness import Needs, Readiness, Uv
from gpuwarden.core.rules import Finding
from gpuwarden.core.sanitize import line
from gpuwarden.private import write_private
from gpuwarden.remote import launch
from gpuwarden.static_analysis.script import Header, versions_allowed

JOBS: Final = "/api/jobs/"
SECOND_LOOK_S: Final = 2.0
STOP_LOOK_S: Final = 0.3


def create(clock: Clock) -> RayBackend:
    """Return a new backend for the registry."""
    return RayBackend(clock)


class _SharedFolder(LocalBackend):
    """Access to a cluster's files, through the path that the cluster shares with this machine."""

    name = "ray"

    def interpreter(self, spec: JobSpec) -> tuple[str, ...]:
        """Return the interpreter to use on a node. Ray's runtime environment provides the dependencies that the script
        header declares.
        """
        return (options.PYTHON,) if spec.script is not None else ()

    def mapping(self, place: Place) -> dict[str, object]:
        """Return the path mapping, limited to the shared path.

        A job could replace an output with a link, which this machine would follow to its own files.
        """
        return {**place.mapping, "within": [os.path.realpath(self.run_root(place))]}

    def run_root(self, place: Place) -> str:
        """Return the shared path, which contains the run folders."""
        return str(Path(self._handle(place, "any").run_dir).parent)


class RayBackend(EngineBackend):
    """Run jobs through a Ray cluster's Jobs API."""

    name = "ray"

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._files = _SharedFolder(clock)
        self._policy: Callable[[], Local] = Local
        self._hidden: tuple[Path, ...] = ()

    def files(self, place: Place) -> LocalBackend:
        """Return the backend for the files on the shared path."""
        return self._files

    def confine(self, policy: Callable[[], Local], hidden: Sequence[Path]) -> None:
        """Set the policy, which may allow jobs without a sandbox, and the paths of gpuwarden's own files."""
        self._policy, self._hidden = policy, tuple(hidden)

    async def admit(self, spec: JobSpec, *, rehearsed: bool) -> None:
        """Raise `NoSandbox` for a cluster on this machine, unless the policy allows unsandboxed jobs."""
        target = spec.platform.partition("/")[2]
        await self._allow("" if target == "local" else target)

    async def _allow(self, host: str, run_dir: str = "") -> None:
        """Raise `NoSandbox` for jobs that could change the user's policy, because they use this machine or its storage,
        unless the policy allows them.
        """
        if self._policy().unsandboxed:
            return
        here = not host or await to_thread.run_sync(is_here, host)
        if here or (run_dir and await to_thread.run_sync(_same_storage, run_dir, self._hidden)):
            raise NoSandbox(
                "jobs on this Ray cluster run without a sandbox and could write to gpuwarden's own files",
                (
                    "Use a cluster on other machines, and a shared path on separate storage.",
                    do(Action.ALLOW_LOCAL, "to allow these jobs", alternative=True),
                ),
            )

    def settle(self, spec: JobSpec) -> JobSpec:
        """Return the spec unchanged. Raises BadRequest for an option that Ray does not support."""
        options.read_options(spec)
        return spec

    def attempts(self, spec: JobSpec) -> int:
        """Return 1, because Ray never restarts a job."""
        return 1

    async def check(self, place: Place) -> list[Finding]:
        """Check whether run folders can be created on the shared path."""
        return await self._files.check(place)

    async def limits(self, spec: JobSpec, place: Place) -> EngineLimits:
        """Return the cluster's limits, based on its version, its nodes and its autoscaler."""
        version = await ask(place, "GET", "/api/version")
        nodes = await ask(place, "GET", "/api/v0/nodes?detail=true")
        cluster = await ask(place, "GET", "/api/cluster_status")
        return read_limits(version, nodes, cluster, options.engine_request(spec))

    async def readiness(self, place: Place, needs: Needs) -> Readiness:
        """Return the requirements that the cluster definitely does not meet: the Python version in a script header, or
        files on the shared path.

        Ray installs the packages in a script header into an environment that it creates with its own Python. The Python
        version for programs without packages, and other software on the nodes, are unknown.
        """
        shared = [path for path in needs.files if path.startswith(f"{place.run_root.rstrip('/')}/")]
        gone = await to_thread.run_sync(lambda: tuple(path for path in shared if not os.path.lexists(path)))
        found = Readiness(where="on the cluster's nodes", uv=Uv.UNUSED, no_files=gone)
        if not needs.dependencies or not needs.requires_python:
            return found
        python = python_of(await ask(place, "GET", "/nodes?view=summary"))
        allowed = versions_allowed(Header((), needs.requires_python))
        if python is None or not allowed or python in allowed:
            return found
        return replace(found, python=f"{python[0]}.{python[1]}", unmet=(f"Python {needs.requires_python}",))

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
        """Submit the attempt, or adopt the job that already has its id. Secrets are passed in a private file in the run
        folder.

        The job's entrypoint reads that file and removes it. If secrets were passed through Ray, its job list would
        show them.
        """
        handle, stem = await self.handle_of(place, token), launch.run_name(token)
        await self._allow(address(place)[0], handle.run_dir)
        if _has(await self._rows([handle]), stem, attempt):
            return handle
        if not spec.artifact_store:
            _check_outputs(spec, self._files.run_root(place))
        handle, ready = await self._files.stage(spec, place, token, inputs)
        order = {"spec": ready.spec, "token": token, "attempt": attempt}
        await self.put_file(handle, f"order.{attempt}.json", json.dumps(order).encode())
        await self.put_file(handle, options.secrets_name(attempt), json.dumps(dict(secrets)).encode())
        runner = f"{handle.run_dir}/{ready.runner}"
        request = options.request(spec, stem, attempt, handle.run_dir, runner)
        try:
            status, answer = await ask(place, "POST", JOBS, request)
        except AuthFailed:
            await to_thread.run_sync(_forget_secrets, handle, attempt)
            raise
        ident = submission_id(stem, attempt, handle.run_dir)
        if status == 200 and isinstance(answer, dict) and answer.get("submission_id") == ident:
            return handle
        listed = await ask(place, "GET", JOBS)
        if _has(rows_of(*listed, {stem: handle.run_dir}), stem, attempt):  # another call has submitted it
            return handle
        taken = any(row.get("submission_id") == ident for row in listed[1])
        if taken or status == 400:
            await to_thread.run_sync(_forget_secrets, handle, attempt)
        if taken:
            raise Conflict(
                f"a Ray job from another tool has the id {ident}; nothing was started",
                "Delete that job in Ray, then submit again.",
            )
        if status == 400:
            raise BadRequest(
                f"Ray refused the job: {last_line(answer)}", "Change the refused option, then submit again."
            )
        raise Unreachable(
            f"Ray did not confirm the job: {last_line(answer)}", "The job may have started; the next call will check."
        )

    # ----------------------------------------------------------------------------------------------------- observe

    async def poll(self, handles: Sequence[Handle]) -> dict[str, Observation]:
        """Observe all jobs on a target with one request for Ray's job list and one poll of their run folders."""
        if not handles:
            return {}
        rows, seen = await self._rows(handles), await self._look(handles)
        lost = [h for h in handles if launch.run_name(h.token) not in rows and unfinished(seen[h.run_dir])]
        if lost:  # a job counts as lost only if a second poll confirms it
            await self._clock.sleep(SECOND_LOOK_S)
            rows, seen = {**rows, **await self._rows(lost)}, {**seen, **await self._look(lost)}
        for handle in handles:
            if (row := rows.get(launch.run_name(handle.token))) and row.over:
                await to_thread.run_sync(_forget_secrets, handle, row.attempt)
        return {h.token: observation(seen[h.run_dir], rows.get(launch.run_name(h.token))) for h in handles}

    async def listed(self, handle: Handle) -> Answer[bool]:
        """Return whether Ray lists a job for this handle."""
        return Known(launch.run_name(handle.token) in await self._rows([handle]))

    async def _rows(self, handles: Sequence[Handle]) -> dict[str, Row]:
        """Return Ray's entry for each job's last attempt, keyed by the name that all attempts of the job share."""
        folders = {launch.run_name(h.token): h.run_dir for h in handles}
        return rows_of(*await ask(handles[0].place, "GET", JOBS), folders)

    async def stop(self, handle: Handle, *, grace_s: float = 10.0) -> StopResult:
        """End the job: Ray sends SIGTERM, and the runner kills the command after the grace period in `stop.json`."""
        stem, asked = launch.run_name(handle.token), False
        with anyio.move_on_after(min(grace_s + 5, STOP_S)):
            while (row := (await self._rows([handle])).get(stem)) is not None and not row.over:
                if not asked:
                    await to_thread.run_sync(_order_stop, handle, grace_s)
                    asked = await self._end(handle, row)
                await self._clock.sleep(STOP_LOOK_S)
            await to_thread.run_sync(_forget_secrets, handle)  # also if Ray never received the submission
            return StopResult.STOPPED if asked else StopResult.GONE
        return StopResult.PENDING

    async def _end(self, handle: Handle, row: Row) -> bool:
        """Ask Ray to end one job. Return False if its process has not started yet."""
        ident = submission_id(row.stem, row.attempt, handle.run_dir)
        status, answer = await ask(handle.place, "POST", f"{JOBS}{ident}/stop", {})
        if status == 200 and isinstance(answer, dict) and isinstance(answer.get("stopped"), bool):
            return bool(answer["stopped"])
        if status >= 500:
            raise Unreachable(f"Ray did not confirm the stop: {last_line(answer)}", do(Action.CHECK))
        raise BadReply("Ray's reply to the stop request has an unknown format", do(Action.CHECK))


def _check_outputs(spec: JobSpec, shared: str) -> None:
    """Raise BadRequest for an absolute output outside the shared path, where this machine can't read the job's files.

    The folder may not exist yet, so links are not resolved.
    """
    tops = tuple(f"{top.rstrip('/')}/" for top in (shared, os.path.realpath(shared)))
    for output in spec.outputs:
        if output.startswith("/") and not os.path.normpath(output).startswith(tops):
            raise BadRequest(
                f"the output {line(output, 100)} is not on the cluster's shared path {line(shared, 100)}",
                "Write to the working folder or another folder on the shared path.",
            )


def _has(rows: Mapping[str, Row], stem: str, attempt: int) -> bool:
    """Return whether Ray has this attempt or a later one. If so, a repeated call must not start the attempt again."""
    return stem in rows and rows[stem].attempt >= attempt


def _order_stop(handle: Handle, grace_s: float) -> None:
    """Write the grace period to `stop.json` unless an earlier call did. Ray ends the job even without this file."""
    path = Path(handle.run_dir) / "stop.json"
    with suppress(OSError):
        if path.parent.is_dir() and not os.path.lexists(path):
            write_private(path, json.dumps({"grace_s": grace_s}).encode())


def _forget_secrets(handle: Handle, attempt: int | None = None) -> None:
    """Remove the secrets files that no entrypoint has read, for one attempt or for all attempts."""
    for path in Path(handle.run_dir).glob(options.secrets_name(attempt)):
        with suppress(OSError):  # the path may be a folder, because the job can write to its run folder
            path.unlink()


def _same_storage(run_dir: str, hidden: Sequence[Path]) -> bool:
    """Return whether run folders are on the same storage as gpuwarden's own files."""

    def device(path: Path) -> int:
        return next(p for p in (path, *path.parents) if p.exists()).stat().st_dev

    return any(device(path.absolute()) == device(Path(run_dir)) for path in hidden)
