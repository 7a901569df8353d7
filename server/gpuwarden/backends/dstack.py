"""Run jobs as dstack tasks, in one project of a dstack server: `dstack/PROJECT`.

Each run is named after the attempt's token, which is an identifier and not a credential. Its tags contain the token,
the attempt and the lease. dstack has one run per name: applying a specification with the name of an ended run deletes
that run's record and starts a new run. So `submit` first looks up the name. It adopts a run of the same or a later
attempt, and never changes a run with that name that lacks gpuwarden's tags.

The container and its files are deleted when the run ends. Only outputs on the Hub can be listed, read and verified.
They are addressed as for Hugging Face Jobs, under `/hub/models`, `/hub/datasets` and `/hub/buckets`.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from gpuwarden.backends._dstack_api import JOB, DstackServer, Run
from gpuwarden.backends._dstack_observation import observation
from gpuwarden.backends._dstack_options import project_of, read_options, run_name, run_spec
from gpuwarden.backends._hub_files import HubOutputs
from gpuwarden.backends.hf_jobs import script_command
from gpuwarden.core.clock import Clock
from gpuwarden.core.errors import BadReply, BadRequest, Conflict, NotSupported, Unreachable, WardenError
from gpuwarden.core.models import (
    Answer,
    Handle,
    JobSpec,
    Known,
    LogChunk,
    Observation,
    Place,
    StopResult,
    Unknown,
)
from gpuwarden.core.rules import Finding
from gpuwarden.core.sanitize import line
from gpuwarden.core.states import Job
from gpuwarden.hub.client import HubConfig

MOST_LOG: Final = 64 << 20
MOST_PAGES: Final = 1_000
"""Maximum number of log pages that one call reads, in case a server always announces another page."""
LOOKS: Final = 3
SAVES_S: Final = 5.0
"""If a job's grace period in seconds is shorter than this, its run is aborted without dstack's own grace period."""


def create(clock: Clock) -> DstackBackend:
    """Return a new backend for the registry."""
    return DstackBackend(clock)


class DstackBackend(HubOutputs):
    """Run jobs as dstack tasks."""

    name = "dstack"
    takes_inputs = False
    seals = False

    def __init__(self, clock: Clock, env: Mapping[str, str] | None = None, hub: HubConfig | None = None) -> None:
        super().__init__(clock, hub)
        self._env = env
        self._servers: list[DstackServer] = []

    def _server(self) -> DstackServer:
        """Return the server set in the environment. Raises BadRequest for an address that would leak the token."""
        if not self._servers:
            self._servers.append(DstackServer(self._clock, self._env))
        return self._servers[0]

    def settle(self, spec: JobSpec) -> JobSpec:
        """Return the spec unchanged. Raises BadRequest for an option that dstack does not support."""
        read_options(spec.options)
        if any("\0" in text for text in (*spec.command, *spec.args)):
            raise BadRequest("an argument contains a NUL character", "Remove it; command lines can't contain NUL.")
        return spec

    def attempts(self, spec: JobSpec) -> int:
        """Return 1, because dstack retries only while the run has no machine."""
        return 1

    async def check(self, place: Place) -> list[Finding]:
        """Check that the server answers and that the token has access to the project."""
        try:
            await self._server().fleets(project_of(place.platform))
        except WardenError as error:
            return [Finding.of(error, rule="dstack")]
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
        """Start the run, or adopt the run with the token's name. Secret values are never sent."""
        if inputs:
            raise NotSupported("a dstack run can't receive input files", "Upload them to a dataset on the Hub.")
        project = project_of(place.platform)
        found = await self._ours(project, token)
        if found is None or found.attempt < attempt:
            if found is not None and not found.ended:
                raise Conflict(
                    f"attempt {found.attempt} of the run {run_name(token)} has not ended",
                    "Try again after it has ended.",
                )
            argv = [*spec.command, *spec.args] if spec.command else script_command(spec)
            found = await self._start(project, run_spec(spec, argv, place, token, attempt), token, attempt)
        return self._handle(place, token, project, found)

    async def _start(self, project: str, wanted: Mapping[str, object], token: str, attempt: int) -> Run:
        """Start the run. After an error, check whether it was started anyway."""
        try:
            return await self._server().apply(project, wanted)
        except (Unreachable, BadReply, BadRequest) as trouble:
            for _ in range(LOOKS if trouble.retry else 1):
                if trouble.retry:
                    await self._clock.sleep(1.0)
                found = await self._ours(project, token)
                if found is not None and found.attempt >= attempt:
                    return found
            raise

    async def _ours(self, project: str, token: str) -> Run | None:
        """Return the run with a token's name. Raises Conflict if gpuwarden did not start it."""
        name = run_name(token)
        run = await self._server().run_named(project, name)
        if run is not None and not run.ours:
            raise Conflict(
                f"the project {project} has a run {name}, which {line(run.user, 60)} started without gpuwarden",
                "Nothing was started, and that run is unchanged. Submit the job again.",
            )
        return run

    def _handle(self, place: Place, token: str, project: str, run: Run) -> Handle:
        return Handle(backend=self.name, token=token, run_dir=f"/runs/{project}/{run.id}", place=place)

    async def find(self, place: Place, token: str) -> Answer[Handle | None]:
        """Return a token's run, or None if the project has no run with the token's name."""
        try:
            project = project_of(place.platform)
            run = await self._ours(project, token)
        except WardenError as error:
            return Unknown(error.message)
        return Known(None if run is None else self._handle(place, token, project, run))

    # ----------------------------------------------------------------------------------------------------- observe

    async def poll(self, handles: Sequence[Handle]) -> dict[str, Observation]:
        """Observe all runs in a project with one list of active runs; runs that are not in the list are requested one
        by one.

        A run that can't be read is omitted.
        """
        rows: dict[str, Run] = {}
        if len(handles) > 1:
            for project in dict.fromkeys(_where(h)[0] for h in handles):
                rows |= {run.id: run for run in await self._server().runs(project, active=True)}
        seen: dict[str, Observation] = {}
        trouble: WardenError | None = None
        for handle in handles:
            project, ident = _where(handle)
            try:
                run = rows.get(ident) or await self._server().run_with_id(project, ident)
            except WardenError as error:
                trouble = error
                continue
            seen[handle.token] = (
                Observation(state=Job.UNKNOWN, why="dstack no longer has this run")
                if run is None or run.tags.get(JOB) != run_name(handle.token)
                else observation(run)
            )
        if trouble is not None and not seen:
            raise trouble
        return seen

    async def logs(self, handle: Handle, cursor: int = 0, limit: int = 65_536) -> LogChunk:
        """Read the log of the newest submission from a byte cursor; a negative cursor counts from its current end."""
        project, ident = _where(handle)
        run = await self._server().run_with_id(project, ident)
        if run is None or not run.submissions:
            return LogChunk.cut(b"", cursor, limit)
        upto = cursor + limit if cursor >= 0 else MOST_LOG
        text, token = bytearray(), None
        for _ in range(MOST_PAGES):  # from the log's first byte, because dstack has no byte cursor
            if len(text) > upto:
                break
            page = await self._server().logs(project, run, run.submissions[-1].id, token)
            try:
                text += b"".join(base64.b64decode(event.message, validate=True) for event in page.logs)
            except ValueError as error:
                raise BadReply("dstack's log has an unknown format", "Try again.") from error
            if page.next_token is None or page.next_token == token:
                break
            token = page.next_token
        return LogChunk.cut(bytes(text), cursor, limit)

    async def stop(self, handle: Handle, *, grace_s: float = 10.0) -> StopResult:
        """Stop the run. Returns PENDING until dstack reports that it has ended.

        dstack's grace period is the same for all runs: dstack signals the command, and kills it some seconds later.
        """
        project, ident = _where(handle)
        run = await self._server().run_with_id(project, ident)
        if run is None or run.ended or run.tags.get(JOB) != run_name(handle.token):
            return StopResult.GONE
        await self._server().stop(project, run.run_spec.run_name, abort=grace_s < SAVES_S)
        run = await self._server().run_with_id(project, ident)
        return StopResult.STOPPED if run is None or run.ended else StopResult.PENDING


def _where(handle: Handle) -> tuple[str, str]:
    _, _, project, ident = handle.run_dir.split("/")
    return project, ident
