"""Receive one file. The part file is hashed while it is written, and renamed at the end.

The part is stored in the staging folder of the destination. Its name is derived from the artifact's identity, so the
transfer of a newer version of the same file never resumes from an older part. If the process is killed, it leaves
either a part file, which the next call continues, or a finished file.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from gpuwarden.core.models import Artifact

CHUNK = 1 << 20
FLUSH_BYTES = 32 << 20
HOLE = 32 << 10
_ZEROS = bytes(HOLE)


def part_name(artifact: Artifact) -> str:
    """Return the name of the part file: a hash of the artifact's path, size, and digest or times."""
    version = artifact.sha256 or f"{artifact.mtime_ns} {artifact.ctime_ns}"
    identity = [artifact.path, str(artifact.size), version]
    return hashlib.sha256("\0".join(identity).encode("utf-8", "surrogatepass")).hexdigest()[:40] + ".part"


def hash_file(path: Path) -> str:
    """Return the hex sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Part:
    """A part file. Its methods block, so call them from a worker thread."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        self.offset = self._begun = 0
        self._hash = hashlib.sha256()
        self._file: io.FileIO | None = None

    def open(self) -> int:
        """Open the part, hash its content, and return its size in bytes. A part that is too long is truncated to 0."""
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        fd = os.open(self.path, flags, 0o666)
        file = self._file = io.FileIO(fd, "r+b")
        if os.fstat(fd).st_size > self.size:
            file.truncate(0)
        piece = memoryview(bytearray(CHUNK))
        while count := file.readinto(piece):
            self._hash.update(piece[:count])
            self.offset += count
        self._begun = self.offset
        return self.offset

    def write(self, chunk: bytes | memoryview) -> int:
        """Append and hash a chunk, up to the expected size. Return the number of bytes written."""
        assert self._file is not None
        view = memoryview(chunk)[: self.size - self.offset]
        taken = len(view)
        self._hash.update(view)
        for stretch, hole in stretches(view):
            if hole:
                self._file.seek(len(stretch), os.SEEK_CUR)
                self._file.truncate()
            while stretch and not hole:
                stretch = stretch[self._file.write(stretch) :]
        self.offset += taken
        if self.offset - self._begun >= FLUSH_BYTES:
            # Linux starts writing a range to disk when the range is marked as not needed. The disk and the network
            # then work in parallel, and the sync in `finish` takes less time.
            if hasattr(os, "posix_fadvise"):
                came = self.offset - self._begun
                with contextlib.suppress(OSError):
                    os.posix_fadvise(self._file.fileno(), self._begun, came, os.POSIX_FADV_DONTNEED)
            self._begun = self.offset
        return taken

    def restart(self) -> None:
        """Discard the content after a digest mismatch."""
        assert self._file is not None
        self._file.truncate(0)
        self._file.seek(0)
        self.offset = self._begun = 0
        self._hash = hashlib.sha256()

    def sha256(self) -> str:
        """Return the hex digest of the content so far."""
        return self._hash.hexdigest()

    def finish(self, target: Path, mtime_ns: int) -> None:
        """Sync the part, set its mtime, and rename it to `target` atomically."""
        assert self._file is not None
        os.fsync(self._file.fileno())
        self.close()
        set_time(self.path, mtime_ns)
        self.path.replace(target)

    def close(self) -> None:
        """Close the file; the part is kept for the next call."""
        if self._file is not None:
            self._file.close()
            self._file = None


def stretches(view: memoryview) -> Iterator[tuple[memoryview, bool]]:
    """Split data into ranges. Yield each range, and whether it contains only zeros and can be written as a hole."""
    begun = 0
    for at in range(0, len(view), HOLE):
        block = view[at : at + HOLE]
        if len(block) == HOLE and not any(block[:16]) and block.tobytes() == _ZEROS:
            if begun < at:
                yield view[begun:at], False
            yield block, True
            begun = at + HOLE
    if begun < len(view):
        yield view[begun:], False


def set_time(path: Path | str | int, mtime_ns: int) -> None:
    """Set a file's mtime to its mtime on the machine. Ignore a time that this disk can't store."""
    if mtime_ns > 0:
        try:  # `suppress` would take as long as the call itself
            os.utime(path, ns=(mtime_ns, mtime_ns))
        except (OSError, OverflowError):
            pass


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that its file names are durable. Does nothing on Windows."""
    if os.name == "nt":
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_everything(folder: Path) -> None:
    """Sync all files in a folder: with one `syncfs` on Linux, otherwise one by one."""
    if sys.platform == "linux":
        fd = os.open(folder, os.O_RDONLY)
        try:
            if ctypes.CDLL(None).syncfs(fd) == 0:
                return
        except (OSError, AttributeError):
            pass  # a C library without syncfs
        finally:
            os.close(fd)
    for path, _, files in os.walk(folder):
        for name in files:
            with Path(path, name).open("rb+") as file:
                os.fsync(file.fileno())
        sync_folder(Path(path))
