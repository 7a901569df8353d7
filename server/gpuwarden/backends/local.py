"""Runs jobs on this machine, or in the folder of a rehearsal instance, through the runner as a subprocess.

A job gets a minimal environment: the server's own tokens and keys never reach it unless its spec names them as secrets.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import Process

from gpuwarden.core.clock import Clock
from gpuwarden.core.errors import BadReply, BadRequest, Unreachable, WardenError
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
from gpuwarden.core.rules import Finding, Severity
from gpuwarden.remote import launch
from gpuwarden.remote.interpreter import interpreter_for

CALL_S = 60.0  # a verb that answers at once
SILENCE_S = 120.0  # a verb that works long gives a sign of life every few seconds
MAX_REPLY = 256 << 20
MARKER = "GPUWARDEN_REHEARSAL_INSTANCE"  # a rehearsal sets it for every process of an instance
LOW_DISK = 1 << 30
# What a program needs to work at all. Tokens and keys are not among it.
_NEEDED = (
    "PATH HOME LANG LC_ALL LC_CTYPE TMPDIR TZ USER LOGNAME SHELL LD_LIBRARY_PATH CUDA_HOME CUDA_VISIBLE_DEVICES "
    "SSL_CERT_FILE SSL_CERT_DIR HF_HOME XDG_CACHE_HOME UV_CACHE_DIR"
)
_PASSED = frozenset(_NEEDED.split())


def create(clock: Clock) -> LocalBackend:
    """The backend."""
    return LocalBackend(clock)


class LocalBackend:
    """Jobs as processes of this machine."""

    name = "local"

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    async def check(self, place: Place) -> list[Finding]:
        """Whether run folders can be made there, and whether the disk has room."""
        return await anyio.to_thread.run_sync(_check, place)

    async def submit(
        self, spec: JobSpec, place: Place, token: str, *, secrets: Mapping[str, str], attempt: int = 1
    ) -> Handle:
        """Start the job, or adopt it when this token and attempt were started before."""
        handle = Handle(backend=self.name, token=token, run_dir=str(_run_dir(place, token)), place=place)
        interpreter = interpreter_for(spec.script) if spec.script is not None else ()
        ready = launch.prepare(spec, place, handle.run_dir, interpreter)
        await anyio.to_thread.run_sync(_put_files, place, Path(handle.run_dir), ready.files)
        order = {"spec": ready.spec, "secrets": dict(secrets), "token": token, "attempt": attempt}
        runner = f"{handle.run_dir}/{ready.runner}"
        launch.raise_for(await _ask(place, "start", handle.run_dir, order, runner=runner))
        return handle

    async def find(self, place: Place, token: str) -> Answer[Handle | None]:
        """The job of a token, None when it was never launched here."""
        if not _present(place):
            return Unknown(f"the instance's folder {place.root} is not there")
        handle = Handle(backend=self.name, token=token, run_dir=str(_run_dir(place, token)), place=place)
        try:
            seen = (await self._look([handle]))[handle.run_dir]
        except WardenError as error:
            return Unknown(error.message)
        if seen.get("state") == "unreadable":
            return Unknown(str(seen.get("why")))
        launched = seen.get("state") not in {"missing", "absent"} and seen.get("token") == token
        return Known(handle if launched else None)

    async def poll(self, handles: Sequence[Handle]) -> dict[str, Observation]:
        """Observe all jobs with one subprocess."""
        if not handles:
            return {}
        jobs = await self._look(handles)
        return {h.token: launch.observation(jobs[h.run_dir]) for h in handles}

    async def _look(self, handles: Sequence[Handle]) -> dict[str, dict[str, Any]]:
        dirs = [h.run_dir for h in handles]
        reply = await _ask(handles[0].place, "poll", None, {"dirs": dirs})
        launch.raise_for(reply)
        jobs = reply.get("jobs")
        if not isinstance(jobs, dict) or not all(isinstance(jobs.get(d), dict) for d in dirs):
            raise BadReply("the runner's poll does not answer for every job", "Ask again.")
        return jobs

    async def logs(self, handle: Handle, cursor: int = 0, limit: int = 65_536) -> LogChunk:
        """Read the log from a byte cursor; a negative cursor counts from the end."""
        reply = await _ask(handle.place, "logs", handle.run_dir, {"cursor": cursor, "limit": limit})
        launch.raise_for(reply)
        return LogChunk(**{k: reply[k] for k in ("text", "next", "size", "truncated")})

    async def list_files(self, handle: Handle, paths: Iterable[str]) -> Manifest:
        """The files under `paths`, without digests."""
        return await self._roster("list", handle, paths)

    async def manifest(self, handle: Handle, paths: Iterable[str]) -> Manifest:
        """The files under `paths`, with digests."""
        return await self._roster("manifest", handle, paths)

    async def _roster(self, verb: str, handle: Handle, paths: Iterable[str]) -> Manifest:
        request = {"paths": list(paths), "root": handle.place.root}
        return launch.manifest(await _ask_lines(handle.place, verb, handle.run_dir, request))

    async def read(self, handle: Handle, artifact: Artifact, offset: int = 0) -> AsyncIterator[bytes]:
        """Stream one file's bytes from `offset`."""
        request = {"path": artifact.path, "offset": offset, "root": handle.place.root}
        async with await _open(handle.place, "read", handle.run_dir) as process:
            assert process.stdout and process.stderr
            try:
                await _send(process, request)
                while block := await _receive(process):
                    yield block
                errors = b"".join([part async for part in process.stderr])
                if await process.wait() != 0:
                    launch.raise_for(_parse(errors))
                    raise BadReply(f"reading {artifact.path} ended early without a reason", "Read it again.")
            except BaseException:
                _kill(process)
                raise

    async def disclose(self, handle: Handle) -> Disclosure:
        """Processes and fresh files that are no declared part of a job."""
        value = handle.place.env.get(MARKER)
        request = {"marker": f"{MARKER}={value}" if value else None, "root": handle.place.root}
        return launch.disclosure(await _ask(handle.place, "disclose", handle.run_dir, request))

    async def stop(self, handle: Handle, *, grace_s: float = 10.0) -> StopResult:
        """End the job's process group. Never raises for a job that is gone."""
        request = {"grace_s": grace_s, "wait_s": grace_s + 5, "token": handle.token}
        reply = await _ask(handle.place, "stop", handle.run_dir, request, silence_s=grace_s + CALL_S)
        launch.raise_for(reply)
        try:
            return StopResult(str(reply.get("result")))
        except ValueError as error:
            raise BadReply(f"the runner's stop answered {reply.get('result')!r}", "Look with check_job.") from error


# ------------------------------------------------------------------------------------------------------------ folders


def _present(place: Place) -> bool:
    """Whether an instance's folder is there; this machine always is."""
    return not place.root or Path(place.root).is_dir()


def _run_dir(place: Place, token: str) -> Path:
    """The real path of a token's run folder."""
    return _run_root(place) / launch.run_name(token)


def _run_root(place: Place) -> Path:
    rest = place.run_root
    if rest.startswith("~"):
        home = place.env.get("HOME") or ("/root" if place.root else str(Path.home()))
        rest = home + rest[1:]
    if place.root and not Path(rest).is_relative_to(place.root):
        rest = place.root + "/" + rest.lstrip("/")
    return Path(os.path.normpath(rest))


def _put_files(place: Place, run_dir: Path, files: Mapping[str, bytes]) -> None:
    """Write files under content-addressed names. The folder of an instance that is gone is never made anew."""
    base = Path(place.root or "/")
    if not _present(place):
        raise Unreachable(f"the instance's folder {base} is not there", "Look at it with list_instances.")
    try:
        folder = base
        for part in run_dir.relative_to(base).parts:
            folder /= part
            if not folder.is_dir():
                folder.mkdir(mode=0o700, exist_ok=True)
        for name, content in files.items():
            _put(run_dir / name, content)
    except OSError as error:
        raise BadRequest(
            f"the run folder {run_dir} can't be written: {error.strerror}",
            "Check the permissions and the free space there, or choose another run root.",
        ) from error


def _put(path: Path, content: bytes) -> None:
    if path.is_file() and not path.is_symlink() and path.read_bytes() == content:
        return
    temporary = path.with_name(f"{path.name}.{os.urandom(6).hex()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _check(place: Place) -> list[Finding]:
    root = _run_root(place)
    if place.root and not Path(place.root).is_dir():
        return [
            Finding(rule="PF-PLACE-001", severity=Severity.UNKNOWN, message=f"the folder {place.root} is not there")
        ]
    nearest = next(p for p in [root, *root.parents] if p.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        message, fix = f"run folders can't be made in {root}: {nearest} is not writable", "Choose another run root."
        return [Finding(rule="PF-PLACE-001", severity=Severity.ERROR, message=message, fix=fix)]
    free = shutil.disk_usage(nearest).free
    if free < LOW_DISK:
        message = f"only {free / 1e9:.1f} GB are free in {root}"
        return [Finding(rule="PF-PLACE-002", severity=Severity.WARNING, message=message, fix="Free some space first.")]
    return []


# ------------------------------------------------------------------------------------------------------------- runner


def base_env(place: Place) -> dict[str, str]:
    """What the runner, and so the job, is started with."""
    return {**{k: v for k, v in os.environ.items() if k in _PASSED}, **place.env}


async def _open(place: Place, verb: str, run_dir: str | None, runner: str | None = None) -> Process:
    argv = [sys.executable, "-I", "-S", runner or str(launch.RUNNER_FILE), verb, *([run_dir] if run_dir else [])]
    try:
        return await anyio.open_process(argv, env=base_env(place), cwd="/")
    except OSError as error:
        raise Unreachable(
            f"the runner can't be started: {error}", "Is the machine out of processes or memory?"
        ) from error


async def _send(process: Process, request: Mapping[str, Any]) -> None:
    assert process.stdin
    try:
        with anyio.fail_after(CALL_S):
            await process.stdin.send(json.dumps(request).encode())
            await process.stdin.aclose()
    except (anyio.BrokenResourceError, BrokenPipeError, ConnectionResetError):
        return  # it ended early; its answer says why
    except TimeoutError as error:
        raise Unreachable("the runner does not take its orders", "Try again.") from error


async def _receive(process: Process, seconds: float = SILENCE_S) -> bytes:
    """The next piece of output, empty at the end."""
    assert process.stdout
    try:
        with anyio.fail_after(seconds):
            return await process.stdout.receive()
    except anyio.EndOfStream:
        return b""
    except TimeoutError as error:
        raise Unreachable(f"the runner said nothing for {seconds:.0f} s", "Try again; it may have acted.") from error


def _kill(process: Process) -> None:
    """End a verb that is not waited for any more.

    By pid: `Process.kill` would reap one that has just ended under the eyes of asyncio's watcher, which then warns.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, getattr(signal, "SIGKILL", signal.SIGTERM))


async def _ask_lines(
    place: Place,
    verb: str,
    run_dir: str | None,
    request: Mapping[str, Any],
    *,
    silence_s: float = SILENCE_S,
    runner: str | None = None,
) -> list[dict[str, Any]]:
    """Run one verb and return its lines."""
    async with await _open(place, verb, run_dir, runner) as process:
        try:
            await _send(process, request)
            parts, size = [], 0
            while block := await _receive(process, silence_s):
                parts.append(block)
                size += len(block)
                if size > MAX_REPLY:
                    raise BadReply(
                        f"the runner's answer is longer than {MAX_REPLY:,} bytes", "Declare narrower outputs."
                    )
        except BaseException:
            _kill(process)
            raise
    return [_parse(line) for line in b"".join(parts).splitlines() if line.strip()]


async def _ask(place: Place, verb: str, run_dir: str | None, request: Mapping[str, Any], **how: Any) -> dict[str, Any]:
    """Run one verb that answers with one object."""
    lines = await _ask_lines(place, verb, run_dir, request, **{"silence_s": CALL_S, **how})
    if len(lines) != 1:
        raise BadReply(f"the runner's {verb} gave {len(lines)} answers instead of one", "Is the disk full there?")
    return lines[0]


def _parse(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise BadReply(f"the runner's answer is no JSON: {line[:80]!r}", "Try again.") from error
    if not isinstance(found, dict):
        raise BadReply("the runner's answer is no JSON object", "Try again.")
    return found
