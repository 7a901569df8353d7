"""Shared base class for backends that run jobs through the runner. These backends differ only in transport."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from anyio import to_thread
from pydantic import ValidationError

from gpuwarden.core.errors import BadReply, WardenError
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.models import (
    Answer,
    CommandOutput,
    Disclosure,
    Handle,
    JobSpec,
    Known,
    Level,
    LogChunk,
    Manifest,
    Observation,
    Place,
    SpoolPiece,
    StopResult,
    Unknown,
)
from gpuwarden.core.sanitize import line
from gpuwarden.remote import launch

CALL_S = 60.0  # for a verb that returns immediately
STOP_S = 15.0  # maximum wait for a stop; a job with a longer grace period may still be saving
SILENCE_S = 120.0  # for a slow verb, which sends a progress line every few seconds
MAX_REPLY = 256 << 20
MAX_LINES = 210_000  # up to 200,000 lines for files, plus the progress lines
SHORT = 1 << 20


class RunnerBackend:
    """Implements the methods that only call the runner. Subclasses supply `name`, `ask_lines` and `handle_of`.

    If an engine's machines share a file system with a reachable host, the engine's backend uses a subclass for the
    files on that host, and the engine starts the staged job: see `slurm`.
    """

    name: str
    takes_inputs = True
    seals = True

    async def ask_lines(
        self, place: Place, verb: str, run_dir: str | None, request: Mapping[str, Any], *, silence_s: float
    ) -> list[dict[str, Any]]:
        """Run one verb on the target and return its lines. Raises `Unreachable` after `silence_s` without a line."""
        raise NotImplementedError

    async def handle_of(self, place: Place, token: str) -> Handle:
        """Return the handle for a token on a target. Raises a `WardenError` if the target can't be reached."""
        raise NotImplementedError

    async def stage(
        self, spec: JobSpec, place: Place, token: str, inputs: Mapping[str, Path] | None
    ) -> tuple[Handle, launch.Launch]:
        """Write a job's files to its run folder unless they exist, without starting the job."""
        raise NotImplementedError

    async def ask(
        self, place: Place, verb: str, run_dir: str | None, request: Mapping[str, Any], *, silence_s: float = CALL_S
    ) -> dict[str, Any]:
        """Run one verb that returns one object. An error reply is raised as the corresponding exception."""
        lines = await self.ask_lines(place, verb, run_dir, request, silence_s=silence_s)
        if len(lines) != 1:
            raise BadReply(
                f"the runner's {verb} returned {len(lines)} replies instead of one",
                "Check that the machine's disk is not full.",
            )
        launch.raise_for(lines[0])
        return lines[0]

    async def find(self, place: Place, token: str) -> Answer[Handle | None]:
        """Return the job for a token, or None if it was never launched on the target."""
        try:
            handle = await self.handle_of(place, token)
            seen = (await self._look([handle]))[handle.run_dir]
        except WardenError as error:
            return Unknown(error.message)
        folder = seen.get("folder", seen.get("state"))
        if folder == "unreadable":
            return Unknown(line(seen.get("why")))
        launched = folder not in {"missing", "absent"} and seen.get("token") == token
        return Known(handle if launched else None)

    async def poll(self, handles: Sequence[Handle]) -> dict[str, Observation]:
        """Observe all jobs on a target with one call."""
        if not handles:
            return {}
        jobs = await self._look(handles)
        return {h.token: launch.observation(jobs[h.run_dir]) for h in handles}

    async def _look(self, handles: Sequence[Handle]) -> dict[str, dict[str, Any]]:
        dirs = [h.run_dir for h in handles]
        launched = {h.run_dir: h.supervisor.model_dump() for h in handles if h.supervisor}
        reply = await self.ask(handles[0].place, "poll", None, {"dirs": dirs, "launched": launched})
        jobs = reply.get("jobs")
        if not isinstance(jobs, dict) or not all(isinstance(jobs.get(d), dict) for d in dirs):
            raise BadReply("the runner's poll reply omits some jobs", "Try again.")
        return jobs

    async def logs(self, handle: Handle, cursor: int = 0, limit: int = 65_536) -> LogChunk:
        """Read the log from a byte cursor; a negative cursor counts from the end."""
        reply = await self.ask(handle.place, "logs", handle.run_dir, {"cursor": cursor, "limit": limit})
        try:
            return LogChunk.model_validate({k: reply[k] for k in LogChunk.model_fields if k in reply})
        except ValidationError as error:
            raise BadReply(f"the runner's log reply has {error.error_count()} invalid fields", "Try again.") from error

    async def spooled(self, handle: Handle, cursors: Mapping[str, int]) -> dict[str, SpoolPiece]:
        """Return a limited number of bytes from each of a job's spool files, starting at its cursor."""
        reply = await self.ask(handle.place, "spool", handle.run_dir, {"cursors": dict(cursors)})
        try:
            return {name: SpoolPiece.model_validate(piece) for name, piece in reply["files"].items()}
        except (ValidationError, AttributeError, KeyError) as error:
            raise BadReply("the runner's spool reply has an unknown format", "Try again.") from error

    def mapping(self, place: Place) -> dict[str, object]:
        """Return the fields in the runner's requests that map a target's absolute paths."""
        return place.mapping

    async def list_files(self, handle: Handle, paths: Iterable[str]) -> Manifest:
        """Return the files under `paths`, without digests."""
        return await self._listed("list", handle, paths)

    async def manifest(self, handle: Handle, paths: Iterable[str]) -> Manifest:
        """Return the files under `paths`, with digests."""
        return await self._listed("manifest", handle, paths)

    async def _listed(self, verb: str, handle: Handle, paths: Iterable[str]) -> Manifest:
        request = {"paths": list(paths), "parts": verb == "manifest", **self.mapping(handle.place)}
        lines = await self.ask_lines(handle.place, verb, handle.run_dir, request, silence_s=SILENCE_S)
        return await to_thread.run_sync(launch.manifest, lines)

    async def examine(
        self, handle: Handle, paths: Iterable[str], *, level: Level, seconds: float, against: str | None = None
    ) -> dict[str, dict[str, Any]]:
        """Run the checker on the machine, after uploading it if necessary. Return its unverified findings by output."""
        archive, content = launch.checker()
        request = {"paths": list(paths), "archive": archive, "seconds": seconds, "against": against, "deeper": level}
        request |= {"structure": level is Level.STRUCTURE, **self.mapping(handle.place)}
        for last in (False, True):
            lines = await self.ask_lines(handle.place, "examine", handle.run_dir, request, silence_s=SILENCE_S)
            try:
                return launch.findings(lines)
            except launch.NoArchive:
                if last:
                    raise
                await self.put_file(handle, archive, content)
        raise AssertionError("unreachable")

    async def put_file(self, handle: Handle, name: str, content: bytes) -> None:
        """Write `content` to a file in a run folder."""
        raise NotImplementedError

    async def disclose(self, handle: Handle) -> Disclosure:
        """Return the unknown processes on the machine, and the new files there that are not declared outputs."""
        request = {**launch.marked(handle.place), **handle.place.mapping}
        return launch.disclosure(await self.ask(handle.place, "disclose", handle.run_dir, request))

    async def arm(self, handle: Handle, attempt: int) -> None:
        """Start the self-stop timer on a launched job's machine, with the settings from that launch. Idempotent."""
        if handle.place.self_stop_order is not None:
            order = {"self_stop": handle.place.self_stop_order.order, "attempt": attempt}
            await self.ask(handle.place, "self_stop", handle.run_dir, order)

    async def hold(self, handle: Handle) -> None:
        """Permanently disable self-stop on a job's machine."""
        await self.ask(handle.place, "hold", handle.run_dir, {})

    async def stop(self, handle: Handle, *, grace_s: float = 10.0) -> StopResult:
        """End the job's process group. Never raises for a missing job. Returns PENDING during a long grace period."""
        wait_s = min(grace_s + 5, STOP_S)
        request = {"grace_s": grace_s, "wait_s": wait_s, "token": handle.token}
        reply = await self.ask(handle.place, "stop", handle.run_dir, request, silence_s=wait_s + CALL_S)
        try:
            return StopResult(str(reply.get("result")))
        except ValueError as error:
            raise BadReply(f"the runner's stop command returned {reply.get('result')!r}", do(Action.CHECK)) from error


class MachineBackend(RunnerBackend):
    """A backend whose runner is on the job's own machine, not on a machine that an engine manages."""

    async def look(self, handle: Handle, commands: Mapping[str, Sequence[str]]) -> dict[str, CommandOutput]:
        """Run read-only commands on the machine, and return each command's output by its name."""
        request = {"commands": {name: list(argv) for name, argv in commands.items()}}
        reply = await self.ask(handle.place, "look", handle.run_dir, request)
        try:
            return {name: CommandOutput.model_validate(reply["answers"][name]) for name in commands}
        except (ValidationError, KeyError, TypeError) as error:
            raise BadReply("the runner's reply to `look` has an unknown format", "Try again.") from error


async def parsed(raw: bytes) -> list[dict[str, Any]]:
    """Return a verb's parsed lines. Long output is parsed in a thread, because parsing it takes seconds."""
    if len(raw) < SHORT:
        return _parsed(raw)
    return await to_thread.run_sync(_parsed, raw)


def _parsed(raw: bytes) -> list[dict[str, Any]]:
    if raw.count(b"\n") > MAX_LINES:
        raise BadReply(f"the runner's reply has more than {MAX_LINES:,} lines", "Declare outputs with fewer files.")
    return [parse(line) for line in raw.splitlines() if line.strip()]


def parse(line: bytes) -> dict[str, Any]:
    """Parse one line of the runner's output."""
    try:
        found = json.loads(line)
        if b"\\ud" in line.lower():  # an unpaired surrogate can't be stored, compared or displayed
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadReply(f"the runner's reply is not JSON: {line[:80]!r}", "Try again.") from error
    if not isinstance(found, dict):
        raise BadReply("the runner's reply is not a JSON object", "Try again.")
    return found
