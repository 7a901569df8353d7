"""Run jobs on a machine over SSH, with a runner that gpuwarden uploads.

The runner is stored in the run root under the digest of its content, so the runner of a live run never changes. All
jobs on an instance are polled with one command on one reused connection. Every handle contains the host key from the
first connection, and later connections accept no other key.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Any

import anyio

from gpuwarden.backends._runner import SILENCE_S, MachineBackend, parse, parsed
from gpuwarden.backends._ssh_start import TOOLS, SshStart
from gpuwarden.core.clock import Clock
from gpuwarden.core.errors import AuthFailed, BadReply, BadRequest, NotFound, NotSupported, Unreachable, WardenError
from gpuwarden.core.guidance import Hint, steps
from gpuwarden.core.models import Artifact, Handle, JobSpec, Manifest, Place
from gpuwarden.core.policy import Hosts
from gpuwarden.core.readiness import Needs, Readiness
from gpuwarden.core.rules import Finding, Severity
from gpuwarden.profiles import load_profile
from gpuwarden.remote import launch
from gpuwarden.remote.host.any_python import ANY_PYTHON, NO_PYTHON, no_python, python_command
from gpuwarden.remote.host.host_info import HostInfo, probe_host
from gpuwarden.remote.host.probe_findings import RENT_ANOTHER, ProbeContext, judge
from gpuwarden.remote.ssh.config import resolve
from gpuwarden.remote.ssh.host_keys import HostKey, HostKeyChanged
from gpuwarden.remote.ssh.machine import Dialogue, Ssh
from gpuwarden.remote.ssh.outcomes import CommandFailed, NoShell
from gpuwarden.remote.ssh.session import Take
from gpuwarden.remote.transfer.small_file import PUT_S, put
from gpuwarden.remote.transfer.stream_digest import Seal
from gpuwarden.remote.transfer.upload import push

MAX_REPLY = 256 << 20
CHECK_S = 55.0
DEFAULT_HUB = "https://huggingface.co"
_NO_RUNNER = 97
_END_OF_MANIFEST = b"\n\n"
_ANY = 'for path; do [ -e "$path" ] && exit 0; done; exit 1'
# Importing the runner instead of running it lets Python cache its bytecode, which halves the time per call.
_START = f"""
import os, sys
from importlib.machinery import SourceFileLoader
del sys.argv[0]
os.path.isfile(sys.argv[0]) or sys.exit({_NO_RUNNER})
runner = type(sys)("runner")
runner.__file__ = sys.argv[0]
SourceFileLoader("runner", sys.argv[0]).exec_module(runner)
runner.main(sys.argv[1:])
""".strip()


def create(clock: Clock) -> SshBackend:
    """Return a new backend for the registry."""
    return SshBackend(clock)


@dataclass
class _Machine:
    """A machine and the facts that it reported."""

    ssh: Ssh
    host: HostInfo | None = None
    polls: Dialogue | None = None


class SshBackend(MachineBackend):
    """Run jobs as processes on a machine that is reached over SSH."""

    name = "ssh"

    def __init__(self, clock: Clock, config: Path | None = None) -> None:
        self._clock = clock
        self._config = config
        self._machines: dict[tuple[str, int | None, str | None], _Machine] = {}
        self._policy: Callable[[], Hosts] = Hosts
        self._tools: Path | None = None

    async def aclose(self) -> None:
        """Close all connections; the next call reconnects."""
        machines, self._machines = list(self._machines.values()), {}
        for machine in machines:
            if machine.polls is not None:
                machine.polls.close()
            await machine.ssh.aclose()

    # ------------------------------------------------------------------------------------------------------- probe

    async def check(self, place: Place) -> list[Finding]:
        """Check the host key of a new machine, and whether the machine can run a job. This takes a minute at most."""
        try:
            with anyio.fail_after(CHECK_S):
                key = await self.host_key(place)
                fitness = await self._probe(place)
        except TimeoutError:
            return [_host(Severity.ERROR, f"the machine did not answer within {CHECK_S:.0f} s", RENT_ANOTHER)]
        except HostKeyChanged as changed:
            return [_host(Severity.ERROR, changed.message, changed.next_steps)]
        except (AuthFailed, NotSupported, NoShell) as refused:
            return [_host(Severity.ERROR, refused.message, refused.next_steps)]
        except WardenError as error:
            return [_host(Severity.UNKNOWN, error.message, error.next_steps)]
        if place.host_key or not key.first_contact:
            return [_host(Severity.INFO, f"{place.host} has the known host key {key.fingerprint}", ""), *fitness]
        message = (
            f"this is the first connection to {place.host}: from now on, only its host key {key.fingerprint} is trusted"
        )
        compare = "Compare it with the host key in the provider's console, if the console shows one."
        return [_host(Severity.INFO, message, compare), *fitness]

    async def host_key(self, place: Place) -> HostKey:
        """Connect to the machine and return its host key."""
        return await (await self._at(place)).ssh.open()

    async def _probe(self, place: Place) -> list[Finding]:
        host = await self.host_info(place)
        run_root = _run_root(place, host)
        profile = None  # the user's own machine may have no profile
        with suppress(WardenError):
            profile = load_profile(place.platform.partition("/")[0])
        # Storage tiers that are always present, are not the machine's own disk, and survive a stop or a termination.
        durable = [
            tier.path
            for tier in (profile.storage if profile and not place.root else ())
            if tier.present == "always" and tier.path != "/" and True in (tier.survives.stop, tier.survives.terminate)
        ]
        hub = place.env.get("HF_ENDPOINT") or DEFAULT_HUB
        request = json.dumps({"paths": [run_root, *durable], "urls": [hub]})
        machine = await self._at(place)
        sent = self._clock.now()
        ran = await machine.ssh.run([host.job_python, "-I", "-", request], stdin=_probe_source(), timeout_s=CHECK_S)
        metered = bool(profile and profile.meter.metered)
        asked = ProbeContext(run_root, durable, metered=metered, sent=sent, received=self._clock.now())
        return judge(parse(ran.out.strip().rpartition(b"\n")[2] or ran.err[:200]), asked)

    # ------------------------------------------------------------------------------------------------------- start

    def supply(self, policy: Callable[[], Hosts], tools: Path) -> None:
        """Set the policy that decides whether uv may be uploaded to machines, and the local folder that contains uv."""
        self._policy, self._tools = policy, tools

    async def readiness(self, place: Place, needs: Needs) -> Readiness:
        """Return the job's requirements that the machine and its interpreter for scripts do not meet."""
        return (await (await self._start(place)).look(needs))[0]

    async def _start(self, place: Place) -> SshStart:
        host = await self.host_info(place)
        tools = self._tools if self._policy().bring_uv else None
        return SshStart((await self._at(place)).ssh, host, place, _run_root(place, host), tools)

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
        """Start the job, or adopt it if this attempt was started before. The handle contains the host key."""
        handle, ready = await self.stage(spec, place, token, inputs)
        order = {"spec": ready.spec, "secrets": dict(secrets), "token": token, "attempt": attempt}
        reply = await self.ask(handle.place, "start", handle.run_dir, order)
        return handle.model_copy(update={"supervisor": launch.supervisor(reply)})

    async def prepare(self, spec: JobSpec, place: Place, token: str) -> tuple[Handle, launch.Launch]:
        """Return the job's handle and files. The job's PATH comes from the machine's own shell."""
        handle = await self.handle_of(place, token)
        host = await self.host_info(place)
        ready = launch.prepare(spec, place, handle.run_dir, await (await self._start(place)).interpreter(spec))
        return handle, replace(ready, spec={**ready.spec, "env": {"PATH": host.path, **place.env, **ready.spec["env"]}})

    async def stage(
        self, spec: JobSpec, place: Place, token: str, inputs: Mapping[str, Path] | None
    ) -> tuple[Handle, launch.Launch]:
        """Upload the job's files to its run folder."""
        handle, ready = await self.prepare(spec, place, token)
        for name, content in ready.files.items():
            await self.put_file(handle, name, content)
        if inputs:
            await self.bring(handle, inputs)
        return handle, ready

    async def bring(self, handle: Handle, inputs: Mapping[str, Path]) -> None:
        """Upload the inputs, but only before the first start, because the job may change them."""
        machine, host = await self._at(handle.place), await self.host_info(handle.place)
        signs = [f"{handle.run_dir}/{sign}" for sign in launch.STARTED]
        if (await machine.ssh.run(["/bin/sh", "-c", _ANY, "sh", *signs], timeout_s=PUT_S)).code != 0:
            await push(machine.ssh, inputs, f"{handle.run_dir}/work", python=host.runner_python)
            await put(machine.ssh, f"{handle.run_dir}/{launch.INPUTS_HERE}", b"whole\n")

    async def handle_of(self, place: Place, token: str) -> Handle:
        """Return the handle for a token, with the host key pinned."""
        key = await self.host_key(place)
        host = await self.host_info(place)
        run_dir = f"{_run_root(place, host)}/{launch.run_name(token)}"
        return Handle(
            backend=self.name, token=token, run_dir=run_dir, place=place.model_copy(update={"host_key": key.line})
        )

    # ------------------------------------------------------------------------------------------------------- files

    async def put_file(self, handle: Handle, name: str, content: bytes) -> None:
        """Write `content` to a file in a run folder."""
        await put((await self._at(handle.place)).ssh, f"{handle.run_dir}/{name}", content)

    async def read(self, handle: Handle, artifact: Artifact, offset: int = 0) -> AsyncIterator[bytes]:
        """Stream one file's bytes from `offset`."""
        request = {"path": artifact.path, "offset": offset, "declared": handle.declared, **handle.place.mapping}
        async with aclosing(self._stream(handle, "read", request)) as stream:
            async for chunk in stream:
                yield chunk

    async def bundle(self, handle: Handle, artifacts: Sequence[Artifact]) -> AsyncIterator[bytes]:
        """Stream many small files as one bundle, in which each file is named by its number in `artifacts`."""
        request = {"paths": [a.path for a in artifacts], "declared": handle.declared, **handle.place.mapping}
        async with aclosing(self._stream(handle, "bundle", request)) as stream:
            async for chunk in stream:
                yield chunk

    @asynccontextmanager
    async def fetch(
        self, handle: Handle, paths: Iterable[str]
    ) -> AsyncIterator[tuple[Manifest, AsyncGenerator[bytes, None]]]:
        """Return the manifest and a bundle of its small files.

        The machine sends the bundle without another request.
        """
        request = {"paths": list(paths), "declared": handle.declared, **handle.place.mapping}
        async with aclosing(self._stream(handle, "fetch", request)) as stream:
            out = bytearray()
            await _gather(stream, out, SILENCE_S, until=_END_OF_MANIFEST)
            rows, _, first = bytes(out).partition(_END_OF_MANIFEST)
            listed = await anyio.to_thread.run_sync(launch.fetched_manifest, rows)

            async def bundle() -> AsyncGenerator[bytes, None]:
                if first:
                    yield first
                async for chunk in stream:
                    yield chunk

            yield listed, bundle()

    async def _stream(self, handle: Handle, verb: str, request: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
        """Stream a verb's raw output. If the runner is missing, upload it again."""
        for _ in range(2):
            machine, argv = await self._verb(handle.place, verb, handle.run_dir)
            try:
                async with aclosing(machine.ssh.stream(argv, stdin=json.dumps(request).encode())) as stream:
                    async for chunk in stream:
                        yield chunk
                return
            except CommandFailed as failed:
                await self._ship_if_missing(handle, failed)
        raise _no_runner()

    async def pour(self, handle: Handle, artifact: Artifact, offset: int, take: Take) -> str | None:
        """Pass one file's bytes to `take`, starting at `offset`.

        If the whole file is sent and the manifest has no digest for it, the machine hashes the file while sending it.
        """
        request = {"path": artifact.path, "offset": offset, "declared": handle.declared, **handle.place.mapping}
        hashed = not offset and artifact.sha256 is None
        request |= {"seal": True, "size": artifact.size} if hashed else {}
        for _ in range(2):
            machine, argv = await self._verb(handle.place, "read", handle.run_dir)
            seal = Seal(artifact, take, artifact.size - offset)
            try:
                await machine.ssh.pour(argv, seal, stdin=json.dumps(request).encode())
                return seal.digest() if hashed else None
            except CommandFailed as failed:
                await self._ship_if_missing(handle, failed)
        raise _no_runner()

    async def _ship_if_missing(self, handle: Handle, failed: CommandFailed) -> None:
        if failed.exit_code != _NO_RUNNER:
            _raise_for(failed)
        await self._ship(handle.place, handle.run_dir)

    # ---------------------------------------------------------------------------------------------------- the runner

    async def ask_lines(
        self, place: Place, verb: str, run_dir: str | None, request: Mapping[str, Any], *, silence_s: float
    ) -> list[dict[str, Any]]:
        """Run one verb on the machine and return its lines."""
        if verb == "poll":
            with suppress(Unreachable, BadReply):  # on failure, the request is sent below as a single call
                return [parse(await self._ask_server(place, request, silence_s))]
        near = run_dir or next(iter(request.get("dirs") or []), None)
        for last in (False, True):
            machine, argv = await self._verb(place, verb, run_dir, near)
            out = bytearray()
            try:
                async with aclosing(machine.ssh.stream(argv, stdin=json.dumps(request).encode())) as stream:
                    await _gather(stream, out, silence_s)
            except CommandFailed as failed:
                if failed.exit_code == _NO_RUNNER and not last:
                    await self._ship(place, near)
                    continue
                if not out.strip():
                    _raise_for(failed)
            return await parsed(bytes(out))
        raise AssertionError("unreachable")

    async def _ask_server(self, place: Place, request: Mapping[str, Any], timeout_s: float) -> bytes:
        """Poll through a runner process that stays alive between polls. The process is started if necessary."""
        near = next(iter(request.get("dirs") or []), None)
        machine, argv = await self._verb(place, "serve", None, near)
        if machine.polls is None or machine.polls.argv != tuple(argv):
            if machine.polls is not None:
                machine.polls.close()
            machine.polls = Dialogue(machine.ssh, argv)
        return await machine.polls.ask(json.dumps(request).encode(), timeout_s=timeout_s)

    async def _verb(
        self, place: Place, verb: str, run_dir: str | None, near: str | None = None
    ) -> tuple[_Machine, list[str]]:
        """Return the machine, and the argument list that runs a verb of the shared runner.

        On a machine that has not been probed, the command itself finds a Python interpreter.
        """
        machine = await self._at(place)
        runner = await self._runner_path(place, near or run_dir)
        python = machine.host.runner_python if machine.host else ANY_PYTHON
        return machine, python_command(python, _START, runner, verb, *([run_dir] if run_dir else []))

    async def _runner_path(self, place: Place, run_dir: str | None) -> str:
        root = str(PurePosixPath(run_dir).parent) if run_dir else _run_root(place, await self.host_info(place))
        return f"{root}/{TOOLS}/{launch.content_name('runner', launch.runner_source())}"

    async def _ship(self, place: Place, run_dir: str | None) -> None:
        path = await self._runner_path(place, run_dir)
        await put((await self._at(place)).ssh, path, launch.runner_source())

    # --------------------------------------------------------------------------------------------------- connections

    async def _at(self, place: Place) -> _Machine:
        """Return the machine for a target. All jobs on the machine share one connection, pinned to the target's host
        key.
        """
        if not place.host:
            raise BadRequest(
                f"the target on {place.platform} has no host to connect to", "Check that the instance has booted."
            )
        key = (place.host, place.port, place.user)
        machine = self._machines.get(key)
        if machine is None:
            machine = self._machines.setdefault(key, _Machine(await self.reach(place)))
        if place.host_key and machine.ssh.pin != place.host_key:
            await machine.ssh.repin(place.host_key)
            machine.host = None
        return machine

    async def reach(self, place: Place) -> Ssh:
        """Return the SSH client for a machine, without connecting."""
        endpoint = await anyio.to_thread.run_sync(
            lambda: resolve(place.host or "", port=place.port, user=place.user, config=self._config)
        )
        return Ssh(endpoint, config=self._config)

    async def command(self, place: Place, argv: Sequence[str], stdin: bytes, *, timeout_s: float) -> bytes:
        """Run a command on the machine and return its output, regardless of the exit code."""
        return (await (await self._at(place)).ssh.run(argv, stdin=stdin, timeout_s=timeout_s, limit=MAX_REPLY)).out

    async def host_info(self, place: Place) -> HostInfo:
        """Return the facts that the machine reports. They are requested only once."""
        machine = await self._at(place)
        if machine.host is None:
            machine.host = await probe_host(machine.ssh)
        return machine.host


def _host(severity: Severity, message: str, fix: Hint) -> Finding:
    return Finding(rule="PF-HOST-001", severity=severity, message=message, fix=steps(fix))


@cache
def _probe_source() -> bytes:
    return files("gpuwarden.remote.host").joinpath("probe.py").read_bytes()


def _run_root(place: Place, host: HostInfo) -> str:
    """Return the absolute path of the folder that contains run folders."""
    rest = place.run_root
    if rest == "~" or rest.startswith("~/"):
        home = place.env.get("HOME") or ("/root" if place.root else host.home)
        rest = home + rest[1:]
    if place.root and not PurePosixPath(rest).is_relative_to(place.root):
        rest = place.root + "/" + rest.lstrip("/")
    return posixpath.normpath(rest)


def _no_runner() -> BadReply:
    return BadReply(
        "the runner is missing right after it was uploaded", "Check whether another program cleans up the run root."
    )


async def _gather(stream: AsyncIterator[bytes], out: bytearray, silence_s: float, until: bytes = b"") -> None:
    """Read a stream to its end, or up to the chunk that completes `until`."""
    try:
        while not until or until not in out:
            with anyio.fail_after(silence_s):
                chunk = await anext(stream, b"")
            if not chunk:
                return
            out += chunk
            if len(out) > MAX_REPLY:
                raise BadReply(
                    f"the runner's reply is longer than {MAX_REPLY:,} bytes", "Declare outputs with fewer files."
                )
    except TimeoutError as error:
        raise Unreachable(
            f"the runner sent nothing for {silence_s:.0f} s", "Try again; the request may have been carried out."
        ) from error


def _raise_for(failed: CommandFailed) -> None:
    """Raise the runner's own error if the last line of stderr contains it, or else an error for the failed command."""
    last = failed.err.strip().rpartition(b"\n")[2]
    if last.startswith(b"{"):
        launch.raise_for(parse(last))
    if failed.exit_code == NO_PYTHON:
        raise no_python() from failed
    if failed.exit_code in {126, 127}:
        raise NotFound(
            "the machine's Python no longer exists", "Check whether the image or its Python environment was changed."
        ) from failed
    raise failed
