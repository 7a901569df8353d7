"""Open a regular file without blocking on a FIFO or following a link. Standard library only."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from gpuwarden.checkpoints.file_model import Broken, Doubtful
from gpuwarden.core.evidence import Cause

if TYPE_CHECKING:
    from typing import Self

_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
    | getattr(os, "O_NOFOLLOW", 0)
)


class Source:
    """One open file. Each read specifies its offset, so several threads can share the file."""

    def __init__(self, path: str | Path, name: str = "") -> None:
        self.path = Path(path)
        self.name = name or self.path.name
        try:
            self.fd = os.open(self.path, _FLAGS)
        except OSError as why:
            if why.errno == errno.ELOOP:
                raise Doubtful("is a link, which is not followed") from why
            raise Doubtful(f"can't be opened: {why.strerror}") from why
        self._first = os.fstat(self.fd)
        if not stat.S_ISREG(self._first.st_mode):
            os.close(self.fd)
            raise Doubtful(f"is {kind(self._first.st_mode)}, not a regular file, and was not opened")
        self.size = self._first.st_size
        self.mtime_ns = self._first.st_mtime_ns
        self.ctime_ns = self._first.st_ctime_ns
        self.took: Callable[[int], None] | None = None
        """`at` calls this function with the number of bytes to read. If the function raises an exception, nothing is
        read.
        """

    def at(self, offset: int, length: int) -> bytes:
        """Read exactly `length` bytes at `offset`. Raises Broken if the file has fewer bytes."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise Broken(f"ends at byte {self.size:,}, but bytes up to {offset + length:,} are needed")
        if self.took is not None:
            self.took(length)
        parts = []
        while length:
            part = _pread(self.fd, length, offset)
            if not part:
                raise Broken(f"could be read only up to byte {offset:,} of its {self.size:,} bytes")
            parts.append(part)
            offset += len(part)
            length -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def into(self, view: memoryview, offset: int) -> int:
        """Read at least one byte at `offset` into `view` and return the count. Raises Broken at the end of the file."""
        if hasattr(os, "preadv"):
            try:
                got = os.preadv(self.fd, [view], offset)
            except OSError as why:
                raise Doubtful(f"could not be read at byte {offset:,}: {why.strerror}", Cause.CHANGING) from why
        else:
            data = _pread(self.fd, len(view), offset)
            got = len(data)
            view[:got] = data
        if not got:
            raise Broken(f"could be read only up to byte {offset:,} of its {self.size:,} bytes")
        return got

    def head(self, length: int = 512) -> bytes:
        """Read the first `length` bytes, or fewer if the file is shorter."""
        return self.at(0, min(length, self.size))

    def beside(self, name: str) -> Source | None:
        """Open another file in the same folder or in a subfolder. Return None if the file does not exist."""
        place = self.path.parent / name
        return Source(place) if place.is_file() else None

    def changed(self) -> bool:
        """Return true if the file has been written to since it was opened."""
        now = os.fstat(self.fd)
        first = self._first
        return (now.st_size, now.st_mtime_ns) != (first.st_size, first.st_mtime_ns)

    def holes(self) -> int:
        """Return the total size of the holes in a sparse file; 0 if the file system does not report them."""
        seek_hole, seek_data = getattr(os, "SEEK_HOLE", None), getattr(os, "SEEK_DATA", None)
        if (
            seek_hole is None
            or seek_data is None
            or not self.size
            or getattr(self._first, "st_blocks", 1 << 62) * 512 >= self.size
        ):
            return 0
        total, at = 0, 0
        try:
            for _ in range(100_000):
                hole = os.lseek(self.fd, at, seek_hole)
                if hole >= self.size:
                    break
                try:
                    at = os.lseek(self.fd, hole, seek_data)
                except OSError as end:
                    if end.errno != errno.ENXIO:
                        raise
                    at = self.size
                total += at - hole
                if at >= self.size:
                    break
        except OSError:
            return 0
        return total

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Window(Source):
    """A part of a file that is read like a separate file named `name`."""

    def __init__(self, whole: Source, offset: int, size: int, name: str = "") -> None:
        self.whole, self.offset, self.size = whole, offset, size
        self.path, self.name, self.fd = whole.path, name or whole.name, -1

    def at(self, offset: int, length: int) -> bytes:
        """Read bytes at an offset in the part."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise Broken("a record is shorter than its structure requires")
        return self.whole.at(self.offset + offset, length)


class Reader:
    """Read a source sequentially through a buffer, in small pieces."""

    def __init__(self, source: Source, at: int = 0, end: int | None = None) -> None:
        self.source, self.at, self.end = source, at, source.size if end is None else end
        self._buffer, self._base = b"", at

    def take(self, n: int) -> bytes:
        """Return the next `n` bytes. Raises Broken if fewer bytes remain."""
        self.skip(n)
        begin = self.at - n
        if not self._base <= begin <= self.at <= self._base + len(self._buffer):
            self._base = begin
            self._buffer = self.source.at(begin, max(n, min(1 << 16, self.end - begin)))
        return self._buffer[begin - self._base : self.at - self._base]

    def skip(self, n: int) -> int:
        """Skip `n` bytes and return the offset of the first one. Raises Broken if fewer bytes remain."""
        if n < 0 or n > self.end - self.at:
            raise Broken(
                f"is truncated: {n:,} bytes are needed at byte {self.at:,}, but the data ends at byte {self.end:,}"
            )
        self.at += n
        return self.at - n


def kind(mode: int) -> str:
    """Describe the type of a special file."""
    for test, word in (
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISLNK, "a link"),
        (stat.S_ISFIFO, "a named pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a character device"),
        (stat.S_ISBLK, "a block device"),
    ):
        if test(mode):
            return word
    return "something else"


def _pread(fd: int, length: int, offset: int) -> bytes:
    try:
        if hasattr(os, "pread"):
            return os.pread(fd, length, offset)
        os.lseek(fd, offset, os.SEEK_SET)
        return os.read(fd, length)
    except OSError as why:
        raise Doubtful(f"could not be read at byte {offset:,}: {why.strerror}", Cause.CHANGING) from why
