"""The backend protocol. All of a backend's I/O is in its module; it never touches the ledger.

A backend's module offers `create(clock)`, annotated with the class that it returns. Methods raise `Unreachable` when no
answer came and `BadReply` when one came that is not understood; both leave the caller's knowledge as it was.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from anyio import to_thread

from gpuwarden import backends
from gpuwarden.core.clock import Clock
from gpuwarden.core.contract import Contract
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
    StopResult,
)
from gpuwarden.core.policy import Local
from gpuwarden.core.registry import Registry
from gpuwarden.core.rules import Finding
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
    """A backend whose machine sends the roster and, right behind it, the small files: one round trip for both."""

    def fetch(
        self, handle: Handle, paths: Iterable[str]
    ) -> AbstractAsyncContextManager[tuple[Manifest, AsyncIterator[bytes]]]:
        """Return the roster without digests, and the bundle of its small files, named by their number in the roster.

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

    def confine(self, policy: Local, hidden: Sequence[Path]) -> None:
        """Take what a person allows to jobs, and the folders that no job ever sees."""
        ...

    async def admit(self, spec: JobSpec, *, rehearsed: bool) -> None:
        """Raise `NoSandbox` where a job would run unconfined, BadRequest for what its sandbox would not let it do.

        `rehearsed`: its absolute paths are those of a rehearsal's machine.
        """
        ...


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
        """Return fresh digests from the machine for files that are still those of the roster."""
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


async def roster(backend: Backend, handle: Handle, paths: Iterable[str]) -> Manifest:
    """Return the files to receive under `paths`, with digests unless they are made while sending."""
    return await (backend.list_files if isinstance(backend, Sealer) else backend.manifest)(handle, paths)


@asynccontextmanager
async def artifacts(
    backend: Backend, handle: Handle, paths: Iterable[str], dest: Path
) -> AsyncIterator[tuple[Manifest, Source]]:
    """Return the roster to receive into `dest` and its source, together where nothing is in `dest` yet."""
    if isinstance(backend, Fetcher) and not await to_thread.run_sync(lambda: dest.is_dir() and any(dest.iterdir())):
        async with backend.fetch(handle, paths) as (listed, bundle):
            yield listed, FetchedSource(backend, handle, Begun(listed.files, bundle))
    else:
        yield await roster(backend, handle, paths), source(backend, handle)


BACKENDS: Final = Registry(
    "backend", backends, Contract(home=__name__, functions={"create": ("clock",)}, product=Backend)
)


def load_backend(name: str, clock: Clock) -> Backend:
    """The backend called `name`."""
    backend: Backend = BACKENDS.make(name, clock)
    return backend
