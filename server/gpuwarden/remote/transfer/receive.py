"""Receive the files of a manifest: resumed, compared by digest, and never outside the destination.

The digests are in the manifest, or the machine makes them while it sends (`Sealing`), so that it reads each file
once; a digest from right after the save is not made again. Either way a file that arrived was hashed twice: there by
the machine, here by us.

`receive` works over any `Source`: a machine behind SSH, a rehearsal instance, a folder of this machine. Each file
grows as a part below `dest/.gpuwarden/`, is hashed as it arrives, and takes its name only when size and digest are
those of the manifest. A stall or a lost connection is retried from where it stopped; `kill -9` at any line leaves
parts that the next call continues. Files that can't be taken (bad name, vanished, changed since the manifest) are
listed in the answer with the reason; the rest still arrives.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import compress
from pathlib import Path, PurePosixPath
from typing import Protocol, runtime_checkable

import anyio
from anyio import to_thread

from gpuwarden.core.clock import Clock, SystemClock
from gpuwarden.core.errors import BadReply, BadRequest, NotFound, Unreachable
from gpuwarden.core.models import Artifact, Frozen, Manifest
from gpuwarden.core.task_groups import first_error
from gpuwarden.remote.transfer.destination import FULL, Destination, Entry, bare
from gpuwarden.remote.transfer.file_bundle import SMALL_BYTES, Unpacker, batches
from gpuwarden.remote.transfer.partial_file import Part
from gpuwarden.remote.transfer.staging_tree import Tree

PARALLEL = 3
STALL_S = 30.0
LOOK_S = 0.2
END_S = 1.0
TRIES = 6


class Source(Protocol):
    """The source of the bytes."""

    def read(self, artifact: Artifact, offset: int = 0) -> AsyncIterator[bytes]:
        """Stream one file from `offset`. An end without an error is the file's end.

        Raises `NotFound` when the file is gone and `Unreachable` when the connection is.
        """
        ...


@runtime_checkable
class Bundling(Source, Protocol):
    """A source that can send many small files at once."""

    def bundle(self, artifacts: Sequence[Artifact]) -> AsyncIterator[bytes]:
        """Return a stream of these files, each named by its number in `artifacts`, as `file_bundle` describes it."""
        ...


@runtime_checkable
class Sealing(Bundling, Protocol):
    """A source whose machine hashes what it sends: a manifest without digests is enough. Bundles have digests."""

    async def pour(self, artifact: Artifact, offset: int, take: Callable[[memoryview], object]) -> str | None:
        """Hand a file's bytes from `offset` to `take`, in a worker thread, none after it was canceled.

        Returns the file's hex sha256 where the machine hashed it while sending: it does from offset 0, when the
        artifact has no digest. Raises as `read` does, and `BadReply` for a file that is not the artifact any more.
        """
        ...

    async def digests(self, artifacts: Sequence[Artifact]) -> Mapping[str, str]:
        """Return fresh hex sha256 digests from the machine, by path; a file that changed is left out."""
        ...


@dataclass(frozen=True)
class Begun:
    """A bundle that the machine sends already: of the small files of a manifest, each named by its number there."""

    listed: Sequence[Artifact]
    stream: AsyncIterator[bytes]

    @property
    def small(self) -> Sequence[Artifact]:
        """Return the files that may be in it."""
        return [a for a in self.listed if a.size <= SMALL_BYTES]

    @property
    def numbers(self) -> Mapping[str, int]:
        """Return the number of each file."""
        return {a.path: number for number, a in enumerate(self.listed)}


@runtime_checkable
class Fetched(Sealing, Protocol):
    """A source whose machine sends the small files already."""

    begun: Begun


@dataclass(frozen=True)
class Progress:
    """The progress of a transfer. Bytes that were there already count as done."""

    path: str
    bytes_done: int
    bytes_total: int
    files_done: int
    files_total: int


class ReceivedFile(Frozen):
    """One file that is here now. `sha256` is of the local bytes; `verified` says that the manifest had the same."""

    path: str
    local: str
    size: int
    sha256: str
    verified: bool


class Problem(Frozen):
    """One file of the manifest that was not taken, and why."""

    path: str
    why: str


class Received(Frozen):
    """The result of a transfer. `bytes_sent` crossed the network, `bytes_resumed` were found in parts and
    `bytes_skipped` in finished files; `retries` counts connections that were opened again.
    """

    files: tuple[ReceivedFile, ...]
    problems: tuple[Problem, ...] = ()
    bytes_sent: int = 0
    bytes_resumed: int = 0
    bytes_skipped: int = 0
    retries: int = 0

    @property
    def complete(self) -> bool:
        """Return whether every file of the manifest is here with the digest the machine computed."""
        return not self.problems and all(f.verified for f in self.files)

    def sealed(self, manifest: Manifest) -> Manifest:
        """Return the manifest with the digests that the machine made while it sent; a file not taken may have none."""
        made = {f.path: f.sha256 for f in self.files if f.verified}
        files = (a if a.sha256 else a.model_copy(update={"sha256": made.get(a.path)}) for a in manifest.files)
        return manifest.model_copy(update={"files": tuple(files)})


async def receive(
    source: Source,
    manifest: Manifest,
    dest: Path,
    *,
    owner: str = "",
    progress: Callable[[Progress], None] | None = None,
    parallel: int = PARALLEL,
    stall_s: float = STALL_S,
    tries: int = TRIES,
    clock: Clock | None = None,
) -> Received:
    """Copy every file of `manifest` below `dest` and compare digests.

    `owner`, where given, is the owner of these files: `dest` is new or empty then, or was this owner's before.
    `tries` is how often in a row a file may fail without a new byte before `Unreachable` is raised; what arrived
    stays and the next call continues. Raises `BadRequest` when space or inodes don't suffice or `dest` has files that
    are not the owner's, and `Conflict` when another process is receiving into `dest`.
    """
    folder = await to_thread.run_sync(Destination, dest, owner)
    with folder.only_writer():
        return await _Receiver(source, folder, progress, stall_s, tries, clock or SystemClock()).run(manifest, parallel)


_Portion = tuple[Sequence[Entry], Begun | None]


class _Receiver:
    """One call of `receive`: the counters, and the work on one file or one bundle."""

    def __init__(
        self,
        source: Source,
        dest: Destination,
        progress: Callable[[Progress], None] | None,
        stall_s: float,
        tries: int,
        clock: Clock,
    ) -> None:
        self.source, self.dest, self.progress = source, dest, progress
        self.stall_s, self.tries, self.clock = stall_s, tries, clock
        self.prefix = f"{dest.path}{os.sep}"
        self.files: dict[str, ReceivedFile] = {}
        self.digests: dict[str, str] = {}
        self.tree = Tree(dest.staging)
        self.refused: dict[str, str] = {}
        self.sent = self.resumed = self.skipped = self.retries = 0
        self.total = self.count = 0

    async def run(self, manifest: Manifest, parallel: int) -> Received:
        """Take all files, several at a time, the largest first."""
        entries, self.refused = await to_thread.run_sync(self.dest.entries, manifest.files)
        try:
            await to_thread.run_sync(self.tree.adopt, entries, self.dest.target)
        except OSError as problem:
            raise _disk_trouble(self.dest.path, problem) from problem
        await to_thread.run_sync(self.dest.check_room, entries)
        self.digests = {a.path: bare(a.sha256) for a, _ in entries if a.sha256}
        if not self.dest.fresh:
            await self._learn([a for a, n in entries if self.dest.holds(a, n)])
        self.total, self.count = sum(a.size for a, _ in entries), len(entries)
        queue = iter(list(self._portions(entries)))
        try:
            with first_error():
                async with anyio.create_task_group() as group:
                    for _ in range(min(parallel, len(entries))):
                        group.start_soon(self._work, queue)
        finally:
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(self._publish, entries)
        await to_thread.run_sync(lambda: self.dest.settle(complete=not self.refused))
        order = [a.path for a in manifest.files]
        return Received(
            files=tuple(self.files[p] for p in order if p in self.files),
            problems=tuple(Problem(path=p, why=self.refused[p]) for p in order if p in self.refused),
            bytes_sent=self.sent,
            bytes_resumed=self.resumed,
            bytes_skipped=self.skipped,
            retries=self.retries,
        )

    def _portions(self, entries: Sequence[Entry]) -> Iterator[_Portion]:
        """Yield what a bundle that has begun brings, each large file, the largest first, and bundles of small files."""
        bundling, sealing = isinstance(self.source, Bundling), isinstance(self.source, Sealing)
        small = [e for e in entries if bundling and (sealing or e[0].sha256) and e[0].size <= SMALL_BYTES]
        bundled = {a.path for a, _ in small}
        if isinstance(self.source, Fetched) and small:
            yield small, self.source.begun
            small = []
        yield from (([e], None) for e in sorted(entries, key=lambda e: -e[0].size) if e[0].path not in bundled)
        yield from ((some, None) for some in batches(small))

    async def _work(self, queue: Iterator[_Portion]) -> None:
        for portion, begun in queue:
            try:
                rest = await self._bundle(portion, begun) if begun or len(portion) > 1 else portion
                for artifact, name in rest:
                    await self._take_or_refuse(artifact, name)
            except OSError as problem:
                raise _disk_trouble(self.dest.path, problem) from problem

    # -------------------------------------------------------------------------------------------------- small files

    async def _bundle(self, portion: Sequence[Entry], begun: Begun | None) -> Sequence[Entry]:
        """Take small files as bundles; return those that did not arrive, to be taken alone."""
        wanted = portion
        if not self.dest.fresh:
            here = await to_thread.run_sync(lambda: [self.dest.has(a, n, self.digests.get(a.path)) for a, n in portion])
            for artifact, name in compress(portion, here):
                self.skipped += artifact.size
                self._done(artifact, name, self.digests[artifact.path])
            wanted = [e for e, there in zip(portion, here, strict=True) if not there]
        failures = 0
        while wanted and failures < self.tries:
            asked = [a for a, _ in wanted]
            numbers = begun.numbers if begun else {a.path: number for number, a in enumerate(asked)}
            numbered = {numbers[a.path]: (a, n) for a, n in wanted}
            unpacker = Unpacker(numbered, self.tree, begun.small if begun else asked)
            assert isinstance(self.source, Bundling)
            lost = await self._unpack(unpacker, begun.stream if begun else self.source.bundle(asked))
            begun = None
            for number, sha256 in unpacker.landed.items():
                artifact, name = numbered.pop(number)
                self.digests[artifact.path] = sha256
                self._done(artifact, name, sha256)
            wanted = list(numbered.values())
            if not lost:
                break
            failures = 1 if unpacker.landed else failures + 1
            await self._pause(failures)
        return wanted

    async def _unpack(self, unpacker: Unpacker, bundle: AsyncIterator[bytes]) -> bool:
        """Read one bundle; return whether the connection was lost before its end."""
        first = next(iter(unpacker.wanted.values()))[0]
        try:
            async with _closing(bundle) as stream:
                while not unpacker.ended:
                    with anyio.fail_after(self.stall_s):
                        chunk = await anext(stream, b"")
                    if not chunk:
                        break
                    taken = await to_thread.run_sync(unpacker.feed, chunk)
                    self.sent += taken
                    self._report(first)
                with anyio.move_on_after(END_S):  # a command that ends by itself need not be killed
                    await anext(stream, b"")
        except (Unreachable, TimeoutError):
            self.retries += 1
            return not unpacker.ended
        except (BadReply, NotFound):
            pass  # what is missing now is asked for alone, which says why
        return False

    def _publish(self, entries: Sequence[Entry]) -> None:
        """Rename the small files that came; one that can't be placed is a separate problem."""
        try:
            changed, kept = self.tree.publish(self.dest.path)
        except OSError as problem:
            raise _disk_trouble(self.dest.path, problem) from problem
        self.dest.note(changed)
        for artifact, name in entries if kept else ():
            if kept & {name, *map(str, PurePosixPath(name).parents)} and artifact.path in self.files:
                del self.files[artifact.path]
                self.refused[artifact.path] = f"something else is in its place in {self.dest.path}"

    # -------------------------------------------------------------------------------------------------- single files

    async def _take_or_refuse(self, artifact: Artifact, name: str) -> None:
        """Take one file alone, or note why it can't be had; a full disk is raised."""
        try:
            if await to_thread.run_sync(self.dest.has, artifact, name, self.digests.get(artifact.path)):
                self.skipped += artifact.size
                self._done(artifact, name, self.digests[artifact.path])
                return
            target = await to_thread.run_sync(self.dest.target, name)
            part = Part(self.dest.part(artifact), artifact.size)
            try:
                found = await to_thread.run_sync(part.open)
                self.resumed += found
                self._report(artifact)
                await self._fill(artifact, part)
                await to_thread.run_sync(part.finish, target, artifact.mtime_ns)
            finally:
                part.close()
            self._done(artifact, name, part.sha256())
        except (NotFound, BadReply) as gone:
            self.refused[artifact.path] = gone.message
        except OSError as problem:
            if problem.errno in FULL:
                raise
            self.refused[artifact.path] = f"this machine could not write it: {problem.strerror or problem}"

    async def _fill(self, artifact: Artifact, part: Part) -> None:
        """Fill the part and compare. An earlier part that turns out wrong is fetched again, once."""
        resumed = part.offset
        await self._stream(artifact, part)
        if resumed and not await self._matches(artifact, part):
            self.resumed -= resumed
            await to_thread.run_sync(part.restart)
            await self._stream(artifact, part)
        if not await self._matches(artifact, part):
            await to_thread.run_sync(part.restart)
            untouched = artifact.sealed_at is not None
            if untouched and isinstance(self.source, Sealing):
                untouched = artifact.path in await self.source.digests([artifact])
            if not untouched:
                raise BadReply(
                    f"{artifact.path} changed on the machine after its manifest was taken",
                    "Take a new manifest when nothing writes to it any more.",
                )
            raise BadReply(
                f"{artifact.path} no longer has the bytes whose digest was recorded right after its save, "
                "though by its times nobody wrote to it",
                "The machine's disk or memory damages files: use an earlier checkpoint, and rent another machine.",
            )

    async def _matches(self, artifact: Artifact, part: Part) -> bool:
        """Return whether the part's digest equals the machine's, where it has one."""
        await self._learn([artifact])
        digest = self.digests.get(artifact.path)
        return part.sha256() == digest if digest or isinstance(self.source, Sealing) else True

    async def _learn(self, artifacts: Sequence[Artifact]) -> None:
        """Ask the machine for digests that are missing."""
        wanted = [a for a in artifacts if a.path not in self.digests]
        if not wanted or not isinstance(self.source, Sealing):
            return
        for failures in range(1, self.tries + 1):
            try:
                self.digests.update(await self.source.digests(wanted))
                return
            except Unreachable:
                self.retries += 1
                if failures == self.tries:
                    raise
                await self._pause(failures)

    async def _stream(self, artifact: Artifact, part: Part) -> None:
        """Read until the part has its size, opening the stream again after a stall or a lost connection."""
        failures = 0
        while part.offset < artifact.size:
            before = part.offset
            try:
                await self._stream_once(artifact, part)
                if part.offset < artifact.size:
                    raise BadReply(f"{artifact.path} is shorter on the machine now than its manifest says")
            except (Unreachable, TimeoutError) as lost:
                failures = 1 if part.offset > before else failures + 1
                self.retries += 1
                if failures >= self.tries:
                    raise Unreachable(
                        f"{artifact.path} stopped at {part.offset:,} of {artifact.size:,} bytes: "
                        f"{str(lost) or f'no byte for {self.stall_s:g} s'}",
                        "What arrived is kept; the next pull continues there.",
                    ) from lost
                await self._pause(failures)

    async def _stream_once(self, artifact: Artifact, part: Part) -> None:
        if isinstance(self.source, Sealing):
            await self._pour(self.source, artifact, part)
            return
        async with _closing(self.source.read(artifact, part.offset)) as stream:
            while part.offset < artifact.size:
                with anyio.fail_after(self.stall_s):
                    chunk = await anext(stream, b"")
                if not chunk:
                    return
                taken = await to_thread.run_sync(part.write, chunk)
                self.sent += taken
                self._report(artifact)

    async def _pour(self, source: Sealing, artifact: Artifact, part: Part) -> None:
        """Let a thread fill the part, and check its progress now and then."""
        begun, sent = part.offset, 0

        def count() -> None:
            nonlocal sent
            new = part.offset - begun - sent
            sent, self.sent = sent + new, self.sent + new

        async def watch() -> None:
            seen, since = -1, anyio.current_time()
            while anyio.current_time() - since < self.stall_s:
                if part.offset != seen:
                    seen, since = part.offset, anyio.current_time()
                    count()
                    self._report(artifact)
                await anyio.sleep(min(LOOK_S, self.stall_s / 4))
            raise TimeoutError

        with first_error():
            async with anyio.create_task_group() as group:
                group.start_soon(watch)
                try:
                    digest = await source.pour(artifact, begun, part.write)
                finally:
                    count()
                group.cancel_scope.cancel()
        if digest is not None and artifact.sha256 is None:  # a digest from the time of the save takes precedence
            self.digests[artifact.path] = digest

    async def _pause(self, failures: int) -> None:
        await self.clock.sleep(min(2.0 ** (failures - 1) / 2, 15.0))

    def _done(self, artifact: Artifact, name: str, sha256: str) -> None:
        self.files[artifact.path] = ReceivedFile(
            path=artifact.path,
            local=f"{self.prefix}{name}",
            size=artifact.size,
            sha256=sha256,
            verified=artifact.path in self.digests,
        )
        self._report(artifact)

    def _report(self, artifact: Artifact) -> None:
        if self.progress is not None:
            done = min(self.sent + self.resumed + self.skipped, self.total)
            self.progress(Progress(artifact.path, done, self.total, len(self.files), self.count))


def _disk_trouble(dest: Path, problem: OSError) -> BadRequest:
    if problem.errno in FULL:
        return BadRequest(
            f"the disk under {dest} is full", "Free some space and pull again: it continues where it stopped."
        )
    return BadRequest(f"{dest} can't be written: {problem.strerror or problem}", "Choose another destination.")


@asynccontextmanager
async def _closing(stream: AsyncIterator[bytes]) -> AsyncIterator[AsyncIterator[bytes]]:
    try:
        yield stream
    finally:
        close = getattr(stream, "aclose", None)
        if close is not None:
            await close()
