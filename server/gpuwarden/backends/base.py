"""The backend protocol. All of a backend's I/O is in its module; it never touches the ledger.

A backend's module offers `create(clock)`, annotated with the class that it returns. Methods raise `Unreachable` when no
answer came and `BadReply` when one came that is not understood; both leave the caller's knowledge as it was.

What every backend promises, and `tests/kits/contract_backend.py` holds against each:

- `submit` starts a token's attempt once, however often and from wherever it is called. The token goes into the engine's
  own record of the job, so that a lost reply is found there by the next call.
- `find` returns Known(None) only where the engine answered in full and has no such job.
- `poll` asks for all jobs of a place at once: one list, not one question a job.
- An engine that is down, too old, or answers something unexpected is Unknown, `Unreachable` or `BadReply`. An engine's
  own job id is no identity: it may be given to another job, so the token is compared at every look.
- `logs` reads from a byte cursor. `stop` is GONE for a job that has ended, and asking again is harmless.

What a backend can do besides has its protocol below; `isinstance` decides, and nothing else names a backend.
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
    Disclosure,
    Handle,
    JobSpec,
    Level,
    LogChunk,
    Manifest,
    Observation,
    Place,
    Printed,
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
    """Runs jobs at a place."""

    name: str
    takes_inputs: bool
    """Whether files can be put into a job's working folder before it starts."""
    seals: bool
    """Whether gpuwarden's sealer runs beside its jobs and takes `GPUWARDEN_SEAL_KEY` out of the secrets for itself."""

    async def check(self, place: Place) -> list[Finding]:
        """Return the problems of a place before a job is sent there."""
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
        """Start the job and return at once. The same token and attempt start it once, however often it is called.

        `inputs`, path below the working folder -> local file, are there before the first start and are never touched
        after it. A call that ends early leaves what arrived; the next one goes on.
        """
        ...

    async def find(self, place: Place, token: str) -> Answer[Handle | None]:
        """Find a job that was submitted with `token`, after a crash or a lost reply."""
        ...

    async def poll(self, handles: Sequence[Handle]) -> dict[str, Observation]:
        """Observe all handles of one place in one call; the keys are their tokens."""
        ...

    async def logs(self, handle: Handle, cursor: int = 0, limit: int = 65_536) -> LogChunk:
        """Read the log from a byte cursor; a negative cursor counts from the end."""
        ...

    async def list_files(self, handle: Handle, paths: Iterable[str]) -> Manifest:
        """Return the files under `paths` (relative to the working folder, or absolute), without digests."""
        ...

    async def manifest(self, handle: Handle, paths: Iterable[str]) -> Manifest:
        """Return the same with sha256 digests, made on the machine."""
        ...

    def read(self, handle: Handle, artifact: Artifact, offset: int = 0) -> AsyncIterator[bytes]:
        """Stream one file's bytes from `offset`."""
        ...

    async def disclose(self, handle: Handle) -> Disclosure:
        """Return other content of the place: unknown processes, fresh files nobody declared."""
        ...

    async def stop(self, handle: Handle, *, grace_s: float = 10.0) -> StopResult:
        """End the job's process group: signal, grace, kill. Never raises for a job that is gone.

        PENDING while it still saves; asking again changes nothing about its grace.
        """
        ...


@dataclass(frozen=True)
class HandleSource:
    """One job's files, as `remote.transfer.receive` takes them."""

    backend: Backend
    handle: Handle

    def read(self, artifact: Artifact, offset: int = 0) -> AsyncIterator[bytes]:
        """Stream one file from `offset`."""
        return self.backend.read(self.handle, artifact, offset)


@runtime_checkable
class Sealer(Backend, Protocol):
    """A backend that sends many small files as one stream, and whose machine hashes what it sends."""

    def bundle(self, handle: Handle, artifacts: Sequence[Artifact]) -> AsyncIterator[bytes]:
        """Return a stream as `remote.transfer.file_bundle` describes it; unreadable files are left out."""
        ...

    async def pour(
        self, handle: Handle, artifact: Artifact, offset: int, take: Callable[[memoryview], object]
    ) -> str | None:
        """Hand one file's bytes to `take`, as `remote.transfer.receive.Sealing` describes it."""
        ...


@runtime_checkable
class Fetcher(Sealer, Protocol):
    """A backend whose machine sends the manifest and, right behind it, the small files: one round trip for both."""

    def fetch(
        self, handle: Handle, paths: Iterable[str]
    ) -> AbstractAsyncContextManager[tuple[Manifest, AsyncIterator[bytes]]]:
        """Return the manifest without digests, and the bundle of its small files, named by their number in the
        manifest.

        What is not read of the bundle is given up on leaving.
        """
        ...


@runtime_checkable
class Examiner(Protocol):
    """A backend that can examine checkpoints in place, so that their bytes need not travel."""

    async def examine(
        self, handle: Handle, paths: Iterable[str], *, level: Level, seconds: float, against: str | None = None
    ) -> dict[str, dict[str, Any]]:
        """Return findings by output, as `checkpoints.archive` makes them. They are claims of that machine.

        `against` is a path of that machine, as outputs are.
        """
        ...


@runtime_checkable
class Looker(Protocol):
    """A backend that can run commands that only read on the job's own machine."""

    async def look(self, handle: Handle, commands: Mapping[str, Sequence[str]]) -> dict[str, Printed]:
        """Return what each command printed, by its name; they are claims of that machine."""
        ...


@runtime_checkable
class Spooling(Protocol):
    """A backend whose runner keeps what its jobs report until it is fetched."""

    async def spooled(self, handle: Handle, cursors: Mapping[str, int]) -> dict[str, SpoolPiece]:
        """Return what each spool file has after its cursor, a bounded piece of it."""
        ...


@runtime_checkable
class Parking(Protocol):
    """A backend whose machines may stop themselves when nobody comes, as `Place.park` says."""

    async def arm(self, handle: Handle, attempt: int) -> None:
        """Begin to wait for silence, on a machine that was started again."""
        ...

    async def hold(self, handle: Handle) -> None:
        """Keep the machine on, for good."""
        ...


@runtime_checkable
class Keyed(Backend, Protocol):
    """A backend whose machines prove who they are by a host key."""

    async def host_key(self, place: Place) -> HostKey:
        """Connect, and return the key that the machine shows. Raises `HostKeyChanged` for another than the place's."""
        ...


@runtime_checkable
class Confining(Backend, Protocol):
    """A backend whose jobs run on this machine, in a sandbox."""

    def confine(self, policy: Callable[[], Local], hidden: Sequence[Path]) -> None:
        """Take what a person allows to jobs, which is asked at each start, and the folders that no job ever sees."""
        ...

    async def admit(self, spec: JobSpec, *, rehearsed: bool) -> None:
        """Raise `NoSandbox` where a job would run unconfined, BadRequest for what keeps it from starting.

        `rehearsed`: its absolute paths are those of a rehearsal's machine.
        """
        ...


@runtime_checkable
class Startable(Backend, Protocol):
    """A backend whose places can be looked at before a job starts there."""

    async def readiness(self, place: Place, needs: Needs) -> Readiness:
        """Return what the place lacks of what a job needs. Raises a `WardenError` where it does not answer."""
        ...


@runtime_checkable
class Supplying(Backend, Protocol):
    """A backend that may put programs on machines."""

    def supply(self, policy: Callable[[], Hosts], tools: Path) -> None:
        """Take what a person allows on machines, asked at each start, and the folder here for fetched programs."""
        ...


@runtime_checkable
class Bounded(Backend, Protocol):
    """A backend of an engine with queues and limits, which the submit gate reads before a job is sent."""

    async def limits(self, spec: JobSpec, place: Place) -> EngineLimits:
        """Return the limits that hold for this job. Raises a `WardenError` where the engine does not tell them."""
        ...


@dataclass(frozen=True)
class ArrayTask:
    """One job of an array: what `submit` takes for a job by itself."""

    spec: JobSpec
    token: str
    secrets: Mapping[str, str] = field(default_factory=dict)
    attempt: int = 1
    inputs: Mapping[str, Path] | None = None


@runtime_checkable
class Arrayed(Bounded, Protocol):
    """A backend of an engine that starts many jobs as one, such as Slurm's job arrays or Kubernetes' indexed Jobs.

    Every task is a job as any other: its handle is polled, read and stopped by itself, it is found by its own token,
    and what happens to it leaves the others alone, an interruption and a repetition by the engine included. Nothing but
    `submit_array` knows of the array.
    """

    async def submit_array(
        self, tasks: Sequence[ArrayTask], place: Place, token: str, *, at_once: int
    ) -> dict[str, Handle]:
        """Submit the tasks as one array, of which the engine runs `at_once` at a time; return their handles by token.

        Returns at once. The array is sent once for each `token`: after a lost reply the next call finds it. A task is
        started once for its token and attempt, by whichever way it was submitted first: one that `submit` was called
        for is left out and its handle returned, and `submit` after this finds the task of the array. A repeated call
        may leave out tasks, but brings none that the first did not have. After `Unreachable` or `BadReply` the array
        may have been sent.

        Raises BadRequest before anything is sent where there is no task, two have one token, they differ in what the
        engine is asked for, or there are more than the engine takes.
        """
        ...


def check_tasks(tasks: Sequence[ArrayTask], asked: Callable[[ArrayTask], object]) -> None:
    """Raise BadRequest for tasks that can't be one array: `asked` returns what a task asks the engine for."""
    if not tasks:
        raise BadRequest("an array without a task was to be submitted; nothing was sent")
    twice = next((token for token, count in Counter(task.token for task in tasks).items() if count > 1), None)
    if twice is not None:
        raise BadRequest(f"two tasks of an array have the token {line(twice, 80)}; nothing was sent")
    apart = next((task for task in tasks if asked(task) != asked(tasks[0])), None)
    if apart is not None:
        raise BadRequest(
            f"the tasks {line(tasks[0].token, 80)} and {line(apart.token, 80)} of an array ask for different machines, "
            "limits or restarts; nothing was sent",
            "Submit them by themselves.",
        )


@runtime_checkable
class Optioned(Backend, Protocol):
    """A backend whose platform has options of its own."""

    def settle(self, spec: JobSpec) -> JobSpec:
        """Return the spec as it will run. Raises BadRequest for an option that the platform lacks or refuses."""
        ...

    def attempts(self, spec: JobSpec) -> int:
        """Return how often the platform itself may run the command."""
        ...


@dataclass(frozen=True)
class SealingSource(HandleSource):
    """The same, of a backend that is a `Sealer`."""

    backend: Sealer

    def bundle(self, artifacts: Sequence[Artifact]) -> AsyncIterator[bytes]:
        """Many small files as one stream."""
        return self.backend.bundle(self.handle, artifacts)

    async def pour(self, artifact: Artifact, offset: int, take: Callable[[memoryview], object]) -> str | None:
        """Return one file's bytes from `offset`, and its digest where it was hashed while sending."""
        return await self.backend.pour(self.handle, artifact, offset, take)

    async def digests(self, artifacts: Sequence[Artifact]) -> dict[str, str]:
        """Return fresh digests from the machine for files that are still those of the manifest."""
        manifest = await self.backend.manifest(self.handle, [a.path for a in artifacts])
        now = {a.path: a for a in manifest.files}
        same = (a for a in artifacts if a.path in now and now[a.path].stamp == a.stamp)
        return {a.path: bare(now[a.path].sha256 or "") for a in same}


@dataclass(frozen=True)
class FetchedSource(SealingSource):
    """The same, of a backend that is a `Fetcher`, whose machine sends the small files already."""

    begun: Begun


def source(backend: Backend, handle: Handle) -> Source:
    """Return the source of a job's files; the machine hashes while sending where the backend can."""
    return SealingSource(backend, handle) if isinstance(backend, Sealer) else HandleSource(backend, handle)


async def list_artifacts(backend: Backend, handle: Handle, paths: Iterable[str]) -> Manifest:
    """Return the files to receive under `paths`, with digests unless they are made while sending."""
    return await (backend.list_files if isinstance(backend, Sealer) else backend.manifest)(handle, paths)


@asynccontextmanager
async def artifacts(
    backend: Backend, handle: Handle, paths: Iterable[str], dest: Path
) -> AsyncIterator[tuple[Manifest, Source]]:
    """Return the manifest to receive into `dest` and its source, together where nothing is in `dest` yet."""
    if isinstance(backend, Fetcher) and not await to_thread.run_sync(lambda: dest.is_dir() and any(dest.iterdir())):
        async with backend.fetch(handle, paths) as (listed, bundle):
            yield listed, FetchedSource(backend, handle, Begun(listed.files, bundle))
    else:
        yield await list_artifacts(backend, handle, paths), source(backend, handle)


BACKENDS: Final = Registry(
    "backend", backends, Contract(home=__name__, functions={"create": ("clock",)}, product=Backend)
)


def load_backend(name: str, clock: Clock) -> Backend:
    """The backend called `name`."""
    backend: Backend = BACKENDS.make(name, clock)
    return backend
