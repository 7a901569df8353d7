"""Receive the files in a manifest, verify their digests, and resume interrupted transfers.

The digests are in the manifest, or the machine computes them while it sends (`Sealing`), so that it reads each file
only once. A digest that was recorded right after the save is not computed again. Either way, each file is hashed on
both machines. No file is written outside the destination.

`receive` works with any `Source`: a machine reached over SSH, a rehearsal instance, or a local folder. Each file is
written to a part file in `dest/.gpuwarden/`, hashed as it arrives, and renamed only if its size and digest match the
manifest. After a stall or a lost connection, the transfer resumes after the last received byte. If the process is
killed, the next call continues its part files. Files that can't be received because they are missing, have an invalid
name, or changed after the manifest was created are listed in the result with the reason; the others are still received.
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
    """A source of file contents."""

    def read(self, artifact: Artifact, offset: int = 0) -> AsyncIterator[bytes]:
        """Stream one file from `offset`. If the stream ends without an error, the file is complete.

        Raises `NotFound` if the file is missing and `Unreachable` if the connection is lost.
        """
        ...


@runtime_checkable
class Bundling(Source, Protocol):
    """A source that can send many small files at once."""

    def bundle(self, artifacts: Sequence[Artifact]) -> AsyncIterator[bytes]:
        """Stream these files in the format of `file_bundle`. A file's number is its index in `artifacts`."""
        ...


@runtime_checkable
class Sealing(Bundling, Protocol):
    """A source whose machine hashes files while sending them, so that the manifest does not need digests."""

    async def pour(self, artifact: Artifact, offset: int, take: Callable[[memoryview], object]) -> str | None:
        """Pass a file's bytes from `offset` to `take` in a worker thread. `take` is not called after a cancellation.

        Returns the file's hex sha256 if `offset` is 0 and the artifact has no digest, because the machine then computes
        the digest while sending. Raises the same errors as `read`, and `BadReply` if the file no longer matches the
        artifact.
        """
        ...

    async def digests(self, artifacts: Sequence[Artifact]) -> Mapping[str, str]:
        """Hash files on the machine, and return their hex sha256 digests by path. Changed files are omitted."""
        ...


@dataclass(frozen=True)
class Begun:
    """A bundle of small files that the machine is already sending. A file's number is its index in `listed`."""

    listed: Sequence[Artifact]
    stream: AsyncIterator[bytes]

    @property
    def small(self) -> Sequence[Artifact]:
        """Return the files that the bundle may contain."""
        return [a for a in self.listed if a.size <= SMALL_BYTES]

    @property
    def numbers(self) -> Mapping[str, int]:
        """Map each file's path to its number."""
        return {a.path: number for number, a in enumerate(self.listed)}


@runtime_checkable
class Fetched(Sealing, Protocol):
    """A source whose machine is already sending the small files."""

    begun: Begun


@dataclass(frozen=True)
class Progress:
    """The progress of a transfer. Bytes that were already present are counted as done."""

    path: str
    bytes_done: int
    bytes_total: int
    files_done: int
    files_total: int


Replacing = Callable[[Mapping[str, str]], None]
"""Prepares a folder before files in it are replaced. The argument maps paths in the manifest to hex sha256 digests; a
file with the same digest is not replaced."""


class ReceivedFile(Frozen):
    """One received file. `sha256` is its local digest; `verified` is true if the machine's file has the same digest."""

    path: str
    local: str
    size: int
    sha256: str
    verified: bool


class Problem(Frozen):
    """One file in the manifest that was not received, and the reason."""

    path: str
    why: str


class Received(Frozen):
    """The result of a transfer.

    `bytes_sent` counts the bytes that were transferred, `bytes_resumed` those found in part files, and `bytes_skipped`
    those in files that were already complete. `retries` counts reopened connections.
    """

    files: tuple[ReceivedFile, ...]
    problems: tuple[Problem, ...] = ()
    bytes_sent: int = 0
    bytes_resumed: int = 0
    bytes_skipped: int = 0
    retries: int = 0

    @property
    def complete(self) -> bool:
        """Return whether every file in the manifest has been received and matches the machine's digest."""
        return not self.problems and all(f.verified for f in self.files)

    def sealed(self, manifest: Manifest) -> Manifest:
        """Return the manifest with digests computed during the transfer. Files that were not received may have none."""
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
    replacing: Replacing | None = None,
    parallel: int = PARALLEL,
    stall_s: float = STALL_S,
    tries: int = TRIES,
    clock: Clock | None = None,
) -> Received:
    """Copy every file of `manifest` to `dest` and compare digests.

    If `owner` is given, `dest` must be new, empty, or already claimed by this owner. `replacing` is called once, before
    the first file in `dest` is replaced, with the known digests by path. Raises `Unreachable` if a file fails `tries`
    times in a row without receiving any new data. Received bytes are kept, and the next call continues after them.
    Raises `BadRequest` if there are too few free bytes or inodes, or if `dest` contains another owner's files, and
    `Conflict` if another process is receiving files into `dest`.
    """
    folder = await to_thread.run_sync(Destination, dest, owner)
    with folder.only_writer():
        receiver = _Receiver(source, folder, progress, stall_s, tries, clock or SystemClock())
        return await receiver.run(manifest, parallel, replacing)


_Portion = tuple[Sequence[Entry], Begun | None]


class _Receiver:
    """The state of one call to `receive`, and its work on a single file or bundle."""

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

    async def run(self, manifest: Manifest, parallel: int, replacing: Replacing | None) -> Received:
        """Receive all files, several at a time, the largest first."""
        entries, self.refused = await to_thread.run_sync(self.dest.entries, manifest.files)
        try:
            await to_thread.run_sync(self.tree.adopt, entries, self.dest.target)
        except OSError as problem:
            raise _disk_error(self.dest.path, problem) from problem
        await to_thread.run_sync(self.dest.check_room, entries)
        self.digests = {a.path: bare(a.sha256) for a, _ in entries if a.sha256}
        if not self.dest.fresh:
            await self._learn([a for a, n in entries if self.dest.holds(a, n)])
        if replacing is not None:
            try:
                replacing(self.digests)
            except OSError as problem:
                raise _disk_error(self.dest.path, problem) from problem
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
        """Yield the files in a bundle in progress, then large files (largest first), then bundles of small files."""
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
                raise _disk_error(self.dest.path, problem) from problem

    # -------------------------------------------------------------------------------------------------- small files

    async def _bundle(self, portion: Sequence[Entry], begun: Begun | None) -> Sequence[Entry]:
        """Receive small files as bundles. Return the missing files, which are then requested one by one."""
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
        """Read one bundle; return whether the connection was lost before the bundle ended."""
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
                with anyio.move_on_after(END_S):  # let the command exit, so that it does not have to be killed
                    await anext(stream, b"")
        except (Unreachable, TimeoutError):
            self.retries += 1
            return not unpacker.ended
        except (BadReply, NotFound):
            pass  # missing files are then requested one by one, and those requests report the reason
        return False

    def _publish(self, entries: Sequence[Entry]) -> None:
        """Rename the received small files. A file that can't be renamed becomes a `Problem`."""
        try:
            changed, kept = self.tree.publish(self.dest.path)
        except OSError as problem:
            raise _disk_error(self.dest.path, problem) from problem
        self.dest.note(changed)
        for artifact, name in entries if kept else ():
            if kept & {name, *map(str, PurePosixPath(name).parents)} and artifact.path in self.files:
                del self.files[artifact.path]
                self.refused[artifact.path] = f"another file or folder in {self.dest.path} has the same name"

    # -------------------------------------------------------------------------------------------------- single files

    async def _take_or_refuse(self, artifact: Artifact, name: str) -> None:
        """Receive one file, or record why it can't be received. Raises an error if the disk is full."""
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
            self.refused[artifact.path] = f"the file can't be written on this machine: {problem.strerror or problem}"

    async def _fill(self, artifact: Artifact, part: Part) -> None:
        """Receive a file and compare its digest. If a resumed part has a wrong digest, receive the file once more."""
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
                    f"{artifact.path} changed on the machine after the manifest was created",
                    "Create a new manifest when no process is writing to the file.",
                )
            raise BadReply(
                f"{artifact.path} no longer matches the digest that was recorded right after its save, "
                "although its timestamps are unchanged",
                "The machine's disk or memory is corrupting data. Use an earlier checkpoint, and rent another machine.",
            )

    async def _matches(self, artifact: Artifact, part: Part) -> bool:
        """Return whether the part's digest equals the machine's. Also true if the source does not provide digests."""
        await self._learn([artifact])
        digest = self.digests.get(artifact.path)
        return part.sha256() == digest if digest or isinstance(self.source, Sealing) else True

    async def _learn(self, artifacts: Sequence[Artifact]) -> None:
        """Request the missing digests from the machine."""
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
        """Read until the part is complete; reopen the stream after a stall or a lost connection."""
        failures = 0
        while part.offset < artifact.size:
            before = part.offset
            try:
                await self._stream_once(artifact, part)
                if part.offset < artifact.size:
                    raise BadReply(f"{artifact.path} is shorter on the machine than in the manifest")
            except (Unreachable, TimeoutError) as lost:
                failures = 1 if part.offset > before else failures + 1
                self.retries += 1
                if failures >= self.tries:
                    raise Unreachable(
                        f"the transfer of {artifact.path} stopped after {part.offset:,} of {artifact.size:,} bytes: "
                        f"{str(lost) or f'no data for {self.stall_s:g} s'}",
                        "Pull again to continue: the received bytes are kept.",
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
        """Receive the rest of a file in a worker thread, checking progress at least every `LOOK_S` seconds."""
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
        if digest is not None and artifact.sha256 is None:  # a digest in the manifest takes precedence
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


def _disk_error(dest: Path, problem: OSError) -> BadRequest:
    if problem.errno in FULL:
        return BadRequest(f"the disk under {dest} is full", "Free some space and pull again to resume the transfer.")
    return BadRequest(f"{dest} can't be written: {problem.strerror or problem}", "Choose another destination.")


@asynccontextmanager
async def _closing(stream: AsyncIterator[bytes]) -> AsyncIterator[AsyncIterator[bytes]]:
    try:
        yield stream
    finally:
        close = getattr(stream, "aclose", None)
        if close is not None:
            await close()
