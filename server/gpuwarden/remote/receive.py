"""Receive the files of a manifest: resumed, compared by digest, and never outside the destination.

A destination belongs to one owner, a job: a folder that holds anything else is refused, so no file of anybody is ever
replaced by another's of the same name.

`receive` works over any `Source`: a machine behind SSH, a rehearsal instance, a folder of this machine. Each file
grows as a part below `dest/.gpuwarden/`, is hashed as it arrives, and takes its name only when size and digest are
those of the manifest. A stall or a lost connection is retried from where it stopped; `kill -9` at any line leaves
parts that the next call continues. Files that can't be taken (bad name, vanished, changed since the manifest) are
listed in the answer with the reason; the rest still arrives.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

import anyio
from anyio import to_thread
from filelock import FileLock, Timeout

from gpuwarden.core.clock import Clock, SystemClock
from gpuwarden.core.errors import BadReply, BadRequest, Conflict, NotFound, Unreachable
from gpuwarden.core.models import Artifact, Frozen, Manifest
from gpuwarden.remote.names import STAGING, UnsafeName, collision_key, folds_names, local_name, make_parents
from gpuwarden.remote.part import Part, hash_file, part_name, sync_folder

PARALLEL = 4
STALL_S = 30.0
TRIES = 6
SPARE_BYTES = 16 << 20
SPARE_INODES = 64
OWNER = "owner"
_FULL = {errno.ENOSPC, errno.EDQUOT}


class Source(Protocol):
    """Where the bytes come from."""

    def read(self, artifact: Artifact, offset: int = 0) -> AsyncIterator[bytes]:
        """Stream one file from `offset`. An end without an error is the file's end.

        Raises `NotFound` when the file is gone and `Unreachable` when the line is.
        """
        ...


@dataclass(frozen=True)
class Progress:
    """How far a transfer is. Bytes that were there already count as done."""

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
    """What came of a transfer. `bytes_sent` crossed the line, `bytes_resumed` were found in parts and
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
        """Whether every file of the manifest is here with the digest the machine computed."""
        return not self.problems and all(f.verified for f in self.files)


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

    `owner`, where given, is whose files these are: `dest` is new or empty then, or was this owner's before.
    `tries` is how often in a row a file may fail without a new byte before `Unreachable` is raised; what arrived
    stays and the next call continues. Raises `BadRequest` when space or inodes can't hold it or `dest` holds what is
    not the owner's, and `Conflict` when another process is receiving into `dest`.
    """
    if owner:
        await to_thread.run_sync(_refuse_others, dest, owner)
    dest = await to_thread.run_sync(_prepare, dest)
    with _only_writer(dest):
        if owner:
            await to_thread.run_sync(_claim, dest, owner)
        job = _Receiver(source, dest, progress or (lambda _: None), stall_s, tries, clock or SystemClock())
        return await job.run(manifest, parallel)


def _prepare(dest: Path) -> Path:
    (dest / STAGING).mkdir(parents=True, exist_ok=True)
    if (dest / STAGING).is_symlink():
        raise BadRequest(f"{dest / STAGING} is a symbolic link; parts are not written through it", "Remove the link.")
    return dest.resolve()


def _refuse_others(dest: Path, owner: str) -> None:
    """Refuse a folder in another owner's, or that holds anything before it was claimed."""
    holder = next((h for h in map(_holder, (dest, *dest.parents)) if h), "")
    others = not holder and dest.is_dir() and any(entry.name != STAGING for entry in dest.iterdir())
    if others or holder not in {"", owner}:
        what = f"the files of {holder[:80]}" if holder else "files that are no copies of this job"
        raise BadRequest(
            f"{dest} holds {what}; nothing there is replaced", "Choose a new or an empty folder, one for each job."
        )


def _holder(folder: Path) -> str:
    """Whose folder it is, empty when nobody's."""
    mark = folder / STAGING / OWNER
    return mark.read_text("utf-8", "replace") if mark.is_file() and not mark.is_symlink() else ""


def _claim(dest: Path, owner: str) -> None:
    """Write down whose folder this is. The caller holds the folder's lock."""
    _refuse_others(dest, owner)
    draft = dest / STAGING / f"{OWNER}.draft"
    draft.write_text(owner, "utf-8")
    draft.replace(dest / STAGING / OWNER)


@contextmanager
def _only_writer(dest: Path) -> Iterator[None]:
    lock = FileLock(dest / STAGING / "lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise Conflict(
            f"another process is receiving into {dest}", "Wait for it; both would get the same files."
        ) from None
    try:
        yield
    finally:
        lock.release()


class _Receiver:
    """One call of `receive`: the roster, the counters and the work on one file."""

    def __init__(
        self, source: Source, dest: Path, progress: Callable[[Progress], None], stall_s: float, tries: int, clock: Clock
    ) -> None:
        self.source, self.dest, self.progress = source, dest, progress
        self.stall_s, self.tries, self.clock = stall_s, tries, clock
        self.staging = dest / STAGING
        self.files: dict[str, ReceivedFile] = {}
        self.problems: dict[str, Problem] = {}
        self.sent = self.resumed = self.skipped = self.retries = 0
        self.total = 0
        self.count = 0
        self.folders: set[Path] = set()

    async def run(self, manifest: Manifest, parallel: int) -> Received:
        """Take all files, several at a time, the largest first."""
        roster = await to_thread.run_sync(self._roster, manifest)
        await to_thread.run_sync(self._check_room, [a for a, _ in roster])
        self.total, self.count = sum(a.size for a, _ in roster), len(roster)
        queue = iter(sorted(roster, key=lambda pair: -pair[0].size))
        with first_error():
            async with anyio.create_task_group() as group:
                for _ in range(min(parallel, len(roster))):
                    group.start_soon(self._work, queue)
        await to_thread.run_sync(self._settle)
        order = [a.path for a in manifest.files]
        return Received(
            files=tuple(self.files[p] for p in order if p in self.files),
            problems=tuple(self.problems[p] for p in order if p in self.problems),
            bytes_sent=self.sent,
            bytes_resumed=self.resumed,
            bytes_skipped=self.skipped,
            retries=self.retries,
        )

    def _roster(self, manifest: Manifest) -> list[tuple[Artifact, PurePosixPath]]:
        fold = folds_names(self.staging)
        taken: dict[str, str] = {}
        roster = []
        for artifact in manifest.files:
            try:
                name = local_name(artifact.path)
            except UnsafeName as unsafe:
                self._refuse(artifact, unsafe.message)
                continue
            key = collision_key(name) if fold else str(name)
            if key in taken:
                self._refuse(artifact, f"its name is the same as that of {taken[key]!r} on this disk")
                continue
            taken[key] = artifact.path
            roster.append((artifact, name))
        return roster

    def _refuse(self, artifact: Artifact, why: str) -> None:
        self.problems[artifact.path] = Problem(path=artifact.path, why=why)

    def _check_room(self, roster: Sequence[Artifact]) -> None:
        need = files = 0
        for artifact in roster:
            target = self.dest / local_name(artifact.path)
            if _size(target) != artifact.size:
                need += artifact.size - min(artifact.size, _size(self.staging / part_name(artifact)) or 0)
                files += 1
        check_room(self.dest, need, files)

    async def _work(self, queue: Iterator[tuple[Artifact, PurePosixPath]]) -> None:
        for artifact, name in queue:
            try:
                await self._take(artifact, name)
            except (NotFound, BadReply) as gone:
                self._refuse(artifact, gone.message)
            except OSError as problem:
                if problem.errno in _FULL:
                    raise _disk_full(self.dest) from problem
                self._refuse(artifact, f"this machine could not write it: {problem.strerror or problem}")

    async def _take(self, artifact: Artifact, name: PurePosixPath) -> None:
        target = await to_thread.run_sync(make_parents, self.dest, name)
        if await self._here_already(artifact, target):
            return
        part = Part(self.staging / part_name(artifact), artifact.size)
        try:
            found = await to_thread.run_sync(part.open)
            self.resumed += found
            self._report(artifact)
            await self._fill(artifact, part)
            await to_thread.run_sync(part.finish, target, artifact.mtime_ns)
        finally:
            part.close()
        self.folders.add(target.parent)
        self._done(artifact, target, part.sha256())

    async def _here_already(self, artifact: Artifact, target: Path) -> bool:
        if artifact.sha256 is None or _size(target) != artifact.size:
            return False
        if await to_thread.run_sync(hash_file, target) != bare(artifact.sha256):
            return False
        self.skipped += artifact.size
        self._done(artifact, target, bare(artifact.sha256))
        return True

    async def _fill(self, artifact: Artifact, part: Part) -> None:
        """Fill the part and compare. A part from before that turns out wrong is fetched anew, once."""
        resumed = part.offset
        await self._stream(artifact, part)
        if resumed and not _matches(artifact, part):
            self.resumed -= resumed
            await to_thread.run_sync(part.restart)
            await self._stream(artifact, part)
        if not _matches(artifact, part):
            await to_thread.run_sync(part.restart)
            raise BadReply(
                f"{artifact.path} changed on the machine after its manifest was taken",
                "Take a new manifest when nothing writes to it any more.",
            )

    async def _stream(self, artifact: Artifact, part: Part) -> None:
        """Read until the part has its size, opening the stream again after a stall or a lost line."""
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
                await self.clock.sleep(min(2.0 ** (failures - 1) / 2, 15.0))

    async def _stream_once(self, artifact: Artifact, part: Part) -> None:
        async with _closing(self.source.read(artifact, part.offset)) as stream:
            while part.offset < artifact.size:
                with anyio.fail_after(self.stall_s):
                    chunk = await anext(stream, b"")
                if not chunk:
                    return
                taken = await to_thread.run_sync(part.write, chunk)
                self.sent += taken
                self._report(artifact)

    def _done(self, artifact: Artifact, target: Path, sha256: str) -> None:
        self.files[artifact.path] = ReceivedFile(
            path=artifact.path,
            local=str(target),
            size=artifact.size,
            sha256=sha256,
            verified=artifact.sha256 is not None,
        )
        self._report(artifact)

    def _report(self, artifact: Artifact) -> None:
        done = self.sent + self.resumed + self.skipped
        self.progress(Progress(artifact.path, min(done, self.total), self.total, len(self.files), self.count))

    def _settle(self) -> None:
        """Make the names durable; drop parts that no longer belong to anything once all is here."""
        for folder in sorted(self.folders):
            sync_folder(folder)
        if not self.problems:
            for stale in self.staging.glob("*.part"):
                stale.unlink(missing_ok=True)


def check_room(folder: Path, need: int, files: int) -> None:
    """Raise `BadRequest` unless the file system of `folder` has room for `need` bytes and `files` inodes more."""
    free = shutil.disk_usage(folder).free
    if need and free < need + SPARE_BYTES:
        raise BadRequest(
            f"{folder} has {free:,} bytes free and the transfer needs {need:,} and a little to spare",
            "Free some space or choose another destination; nothing was copied.",
        )
    if hasattr(os, "statvfs"):
        room = os.statvfs(folder)
        if room.f_files and room.f_favail < files + SPARE_INODES:
            raise BadRequest(
                f"{folder} has {room.f_favail:,} free inodes and the transfer needs {files:,}",
                "Bytes are not the problem: the file system can't hold more files. Choose another destination.",
            )


def _disk_full(dest: Path) -> BadRequest:
    return BadRequest(
        f"the disk under {dest} is full", "Free some space and pull again: it continues where it stopped."
    )


@contextmanager
def first_error() -> Iterator[None]:
    """Raise the first error of a task group instead of a group of one."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


@asynccontextmanager
async def _closing(stream: AsyncIterator[bytes]) -> AsyncIterator[AsyncIterator[bytes]]:
    try:
        yield stream
    finally:
        close = getattr(stream, "aclose", None)
        if close is not None:
            await close()


def _matches(artifact: Artifact, part: Part) -> bool:
    return artifact.sha256 is None or part.sha256() == bare(artifact.sha256)


def bare(sha256: str) -> str:
    """A digest without its `sha256:` prefix."""
    return sha256.removeprefix("sha256:")


def _size(path: Path) -> int | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None
