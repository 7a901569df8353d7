"""The backend protocol. A backend does all of its I/O in its own module, and never reads or writes the ledger.

A backend's module provides `create(clock)`, annotated with the class that it returns. Methods raise `Unreachable` if no
reply arrives and `BadReply` if the reply can't be parsed; neither changes the caller's last known state.

Every backend guarantees the following, and `tests/kits/contract_backend.py` checks it for each:

- `submit` starts a token's attempt once, no matter how often and from which machine it is called. The engine's own
  record of the job contains the token, so the next call finds the job even if the reply was lost.
- `find` returns Known(None) only if the engine sent a complete reply that does not contain the job.
- `poll` requests all jobs on a target in one list, not one by one.
- If an engine is down, is too old or sends an unexpected reply, the result is Unknown, `Unreachable` or `BadReply`. An
  engine may reuse its own job ids, so every poll compares the token.
- `logs` reads from a byte cursor. `stop` returns GONE for a job that has ended, and can be repeated safely.

Optional capabilities have their own protocols below. Callers test for them with `isinstance`, never by a backend's
name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from anyio import to_thread

from gpuwarden import backends
from gpuwarden.core.clock import Clock
from gpuwarden.core.contract import Contract
from gpuwarden.core.engine import EngineLimits
from gpuwarden.core.errors import BadRequest
from gpuwarden.core.models import (
    Answer,
    Artifact,
    CommandOutput,
    Disclosure,
    Handle,
    JobSpec,
    Level,
    LogChunk,
    Manifest,
    Observation,
    Place,
    SpoolPiece,
    StopResult,
)
from gpuwarden.core.policy import Hosts, Local
from gpuwarden.core.readiness import Needs, Readiness
from gpuwarden.core.registry import Registry
from gpuwarden.core.rules import Finding
from gpuwarden.core.sanitize import line
from gpuwarden.remote.ssh.host_keys import HostKey
from gpuwarden.remote.transfer.destination import bare
from gpuwarden.remote.transfer.receive import Begun, Source


class Backend(Protocol):
    """Runs jobs on targets. A `Place` describes a target, such as a machine or a cluster."""

    name: str
    takes_inputs: bool
    """Whether files can be copied to a job's working folder before the job starts."""
    seals: bool
    """Whether gpuwarden's sealer runs alongside each job. The sealer gets `GPUWARDEN_SEAL_KEY`; the job does not."""

    async def check(self, place: Place) -> list[Finding]:
        """Check a target before a job is sent there, and return the findings."""
        ...

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
        """Start the job and return immediately. Repeated calls with the same token and attempt start it once.

        `inputs` maps paths in the working folder to local files. The files are copied before the first start and are
        not changed later. If a call is interrupted, the files copied so far are kept, and the next call copies the
        rest.
        """
        ...

    async def find(self, place: Place, token: str) -> Answer[Handle | None]:
        """Find a job that was submitted with `token`, after a crash or a lost reply."""
        ...

    async def poll(self, handles: Sequence[Handle]) -> dict[str, Observation]:
        """Observe several jobs on the same target in one call. Return the observations by token."""
        ...

    async def logs(self, handle: Handle, cursor: int = 0, limit: int = 65_536) -> LogChunk:
        """Read the log from a byte cursor; a negative cursor counts from the end."""
        ...

    async def list_files(self, handle: Handle, paths: Iterable[str]) -> Manifest:
        """Return the files under `paths` (relative to the working folder, or absolute), without digests."""
        ...

    async def manifest(self, handle: Handle, paths: Iterable[str]) -> Manifest:
        """Return the files under `paths` with sha256 digests, computed on the machine."""
        ...

    def read(self, handle: Handle, artifact: Artifact, offset: int = 0) -> AsyncIterator[bytes]:
        """Stream one file's bytes from `offset`."""
        ...

    async def disclose(self, handle: Handle) -> Disclosure:
        """Return the unknown processes on the target, and the new files there that are not declared outputs."""
        ...

    async def stop(self, handle: Handle, *, grace_s: float = 10.0) -> StopResult:
        """End the job's process group: signal it, wait for the grace period, then kill it. Never raises for a job
        that does not exist.

        Returns PENDING while the job is still saving; a repeated call does not change the grace period.
        """
        ...


@dataclass(frozen=True)
class HandleSource:
    """One job's files, as the source for `remote.transfer.receive`."""

    backend: Backend
    handle: Handle

    def read(self, artifact: Artifact, offset: int = 0) -> AsyncIterator[bytes]:
        """Stream one file from `offset`."""
        return self.backend.read(self.handle, artifact, offset)


@runtime_checkable
class Bundler(Backend, Protocol):
    """A backend whose machines send many small files as one stream."""

    def bundle(self, handle: Handle, artifacts: Sequence[Artifact]) -> AsyncIterator[bytes]:
        """Stream the files in the format of `remote.transfer.file_bundle`; unreadable files are omitted."""
        ...


@runtime_checkable
class Sealer(Bundler, Protocol):
    """A backend whose machines also hash files while sending them."""

    async def pour(
        self, handle: Handle, artifact: Artifact, offset: int, take: Callable[[memoryview], object]
    ) -> str | None:
        """Pass one file's bytes to `take`; see `remote.transfer.receive.Sealing`."""
        ...


@runtime_checkable
class Fetcher(Sealer, Protocol):
    """A backend whose machines send the manifest and the small files in one round trip."""

    def fetch(
        self, handle: Handle, paths: Iterable[str]
    ) -> AbstractAsyncContextManager[tuple[Manifest, AsyncIterator[bytes]]]:
        """Return the manifest without digests, and a bundle of its small files, each named by its number in the
        manifest.

        Leaving the context discards the unread part of the bundle.
        """
        ...


@runtime_checkable
class ExaminingBackend(Protocol):
    """A backend that can examine checkpoints on the machine, so that they do not have to be downloaded."""

    async def examine(
        self, handle: Handle, paths: Iterable[str], *, level: Level, seconds: float, against: str | None = None
    ) -> dict[str, dict[str, Any]]:
        """Return the findings of `checkpoints.archive` for each output. The machine reports them, and they are not
        verified.

        `against` is the path of the checkpoint or model to compare with. All paths are on the machine.
        """
        ...


@runtime_checkable
class CommandBackend(Protocol):
    """A backend that can run read-only commands on the job's machine."""

    async def look(self, handle: Handle, commands: Mapping[str, Sequence[str]]) -> dict[str, CommandOutput]:
        """Return each command's output by its name. The output comes from the machine and is not verified."""
        ...


@runtime_checkable
class Spooling(Protocol):
    """A backend whose runner stores its jobs' reports until they are fetched."""

    async def spooled(self, handle: Handle, cursors: Mapping[str, int]) -> dict[str, SpoolPiece]:
        """Return a limited number of bytes from each spool file, starting at its cursor."""
        ...


@runtime_checkable
class SelfStopping(Protocol):
    """A backend whose machines stop themselves some time after a job ends, as `Place.self_stop_order` specifies."""

    async def arm(self, handle: Handle, attempt: int) -> None:
        """Start the self-stop timer on a restarted machine."""
        ...

    async def hold(self, handle: Handle) -> None:
        """Permanently disable self-stop on the machine."""
        ...


@runtime_checkable
class HostKeyBackend(Backend, Protocol):
    """A backend whose machines prove their identity with a host key."""

    async def host_key(self, place: Place) -> HostKey:
        """Connect, and return the machine's host key. Raises `HostKeyChanged` if it differs from the pinned key."""
        ...


@runtime_checkable
class SandboxBackend(Backend, Protocol):
    """A backend whose jobs run on this machine, in a sandbox."""

    def confine(self, policy: Callable[[], Local], hidden: Sequence[Path]) -> None:
        """Set the policy for local jobs and the folders to hide from them. The policy is read whenever a job starts."""
        ...

    async def admit(self, spec: JobSpec, *, rehearsed: bool) -> None:
        """Raise `NoSandbox` if no sandbox works but the policy requires one, or BadRequest if the job can't be started.

        `rehearsed` is true if the job's absolute paths are paths on a machine in a rehearsal.
        """
        ...


@runtime_checkable
class ReadinessBackend(Backend, Protocol):
    """A backend that can check whether a target meets a job's requirements."""

    async def readiness(self, place: Place, needs: Needs) -> Readiness:
        """Return the job's requirements that the target does not meet.

        Raises a `WardenError` if the target does not respond.
        """
        ...


@runtime_checkable
class InstallingBackend(Backend, Protocol):
    """A backend that can install programs on machines."""

    def supply(self, policy: Callable[[], Hosts], tools: Path) -> None:
        """Set the policy for machines, and the local folder for downloaded programs.

        The policy is read whenever a job starts.
        """
        ...


@runtime_checkable
class LimitedBackend(Backend, Protocol):
    """A backend for an engine with queues and limits. The submit gate reads the limits before a job is submitted."""

    async def limits(self, spec: JobSpec, place: Place) -> EngineLimits:
        """Return the limits that apply to this job. Raises a `WardenError` if the engine does not report them."""
        ...


@dataclass(frozen=True)
class ArrayTask:
    """One job in an array, with the arguments that `submit` takes for a single job."""

    spec: JobSpec
    token: str
    secrets: Mapping[str, str] = field(default_factory=dict)
    attempt: int = 1
    inputs: Mapping[str, Path] | None = None


@runtime_checkable
class ArrayBackend(LimitedBackend, Protocol):
    """A backend for an engine that starts many jobs in one request, such as a Slurm array or a Kubernetes Indexed Job.

    Every task is an ordinary job: it is polled, read and stopped separately through its handle, `find` finds it by its
    own token, and an interruption or a restart by the engine does not affect the other tasks. Only `submit_array`
    handles the tasks as an array.
    """

    async def submit_array(
        self, tasks: Sequence[ArrayTask], place: Place, token: str, *, at_once: int
    ) -> dict[str, Handle]:
        """Submit the tasks as one array, and return their handles by token. The engine runs `at_once` tasks at a time.

        Returns immediately. The array is sent once for each `token`: after a lost reply, the next call finds it. A task
        starts once for its token and attempt. If `submit` was already called for a task, the array omits the task and
        the handle of the existing job is returned; a later `submit` finds the task in the array. A repeated call may
        omit tasks from the first call, but must not add any. After `Unreachable` or `BadReply`, the array may have been
        sent.

        Raises BadRequest, before anything is sent, if there are no tasks, if two tasks have the same token, if the
        tasks' requests to the engine differ, or if there are more tasks than the engine allows.
        """
        ...


def check_tasks(tasks: Sequence[ArrayTask], asked: Callable[[ArrayTask], object]) -> None:
    """Raise BadRequest if the tasks can't form one array. `asked` returns a task's request to the engine."""
    if not tasks:
        raise BadRequest("the array has no tasks; nothing was sent")
    twice = next((token for token, count in Counter(task.token for task in tasks).items() if count > 1), None)
    if twice is not None:
        raise BadRequest(f"two tasks in an array have the token {line(twice, 80)}; nothing was sent")
    apart = next((task for task in tasks if asked(task) != asked(tasks[0])), None)
    if apart is not None:
        raise BadRequest(
            f"the tasks {line(tasks[0].token, 80)} and {line(apart.token, 80)} request different machines, "
            "limits or restarts; nothing was sent",
            "Submit them separately.",
        )


@runtime_checkable
class Optioned(Backend, Protocol):
    """A backend with platform-specific options."""

    def settle(self, spec: JobSpec) -> JobSpec:
        """Return the spec with its final options. Raises BadRequest for an option that the platform does not accept."""
        ...

    def attempts(self, spec: JobSpec) -> int:
        """Return the maximum number of times that the platform itself runs the command."""
        ...


@dataclass(frozen=True)
class BundlingSource(HandleSource):
    """One job's files on a backend that is a `Bundler`."""

    backend: Bundler

    def bundle(self, artifacts: Sequence[Artifact]) -> AsyncIterator[bytes]:
        """Stream many small files as one bundle."""
        return self.backend.bundle(self.handle, artifacts)


@dataclass(frozen=True)
class SealingSource(BundlingSource):
    """One job's files on a backend that is a `Sealer`."""

    backend: Sealer

    async def pour(self, artifact: Artifact, offset: int, take: Callable[[memoryview], object]) -> str | None:
        """Pass one file's bytes from `offset` to `take`; return its digest if it was hashed while sending."""
        return await self.backend.pour(self.handle, artifact, offset, take)

    async def digests(self, artifacts: Sequence[Artifact]) -> dict[str, str]:
        """Return new digests from the machine for the files that have not changed since the manifest was made."""
        manifest = await self.backend.manifest(self.handle, [a.path for a in artifacts])
        now = {a.path: a for a in manifest.files}
        same = (a for a in artifacts if a.path in now and now[a.path].stamp == a.stamp)
        return {a.path: bare(now[a.path].sha256 or "") for a in same}


@dataclass(frozen=True)
class FetchedSource(SealingSource):
    """One job's files on a backend that is a `Fetcher`, whose machine is already sending the small files."""

    begun: Begun


def source(backend: Backend, handle: Handle) -> Source:
    """Return the source for a job's files. It bundles files, and hashes them while sending, if the backend can."""
    if isinstance(backend, Sealer):
        return SealingSource(backend, handle)
    return BundlingSource(backend, handle) if isinstance(backend, Bundler) else HandleSource(backend, handle)


async def list_artifacts(backend: Backend, handle: Handle, paths: Iterable[str]) -> Manifest:
    """Return the files to receive under `paths`, with digests unless the machine computes digests while sending."""
    return await (backend.list_files if isinstance(backend, Sealer) else backend.manifest)(handle, paths)


@asynccontextmanager
async def artifacts(
    backend: Backend, handle: Handle, paths: Iterable[str], dest: Path
) -> AsyncIterator[tuple[Manifest, Source]]:
    """Yield the manifest of the files to receive into `dest`, and their source. If `dest` is empty, one request gets
    both.
    """
    if isinstance(backend, Fetcher) and not await to_thread.run_sync(lambda: dest.is_dir() and any(dest.iterdir())):
        async with backend.fetch(handle, paths) as (listed, bundle):
            yield listed, FetchedSource(backend, handle, Begun(listed.files, bundle))
    else:
        yield await list_artifacts(backend, handle, paths), source(backend, handle)


BACKENDS: Final = Registry(
    "backend", backends, Contract(home=__name__, functions={"create": ("clock",)}, product=Backend)
)


def load_backend(name: str, clock: Clock) -> Backend:
    """Return the backend named `name`."""
    backend: Backend = BACKENDS.make(name, clock)
    return backend
