"""Write file contents to stdout."""

from __future__ import annotations

import json
import os
import stat
import struct
import sys
from typing import Callable, Iterable

from gpuwarden.remote.runner.files import stamp
from gpuwarden.remote.runner.protocol import Json, Problem
from gpuwarden.remote.runner.readable_files import ReadableFiles

MAX_MEMBER = 1 << 20
PIECE = 1 << 18
FIRST = 32 << 10
COUNT, ROW = struct.Struct(">I"), struct.Struct(">IIqq32s")  # as in transfer/file_bundle.py
SOME, SOME_BYTES = 500, 64 << 10
MAX_TIME = (1 << 63) - 1


def put_out(data: bytes | bytearray | memoryview) -> None:
    """Write all of `data` to stdout."""
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


def read(folder: str, request: Json) -> None:
    """Write one file from an offset to stdout. On an error, write the message to stderr and exit with code 1.

    If `seal` is set, exactly `size` bytes are sent and hashed, followed by one line with the digest and times.
    """
    fd = ReadableFiles(folder, request).open(str(request["path"]))
    try:
        offset, size = int(request.get("offset") or 0), os.fstat(fd).st_size
        if not 0 <= offset <= size:
            raise Problem("bad_request", f"the offset {offset} is beyond the end of the file")
        os.lseek(fd, offset, os.SEEK_SET)
        widen(1)
        if not request.get("seal"):
            pass_on(fd, None, lambda _: None)
        elif size != request.get("size"):
            raise Problem("bad_reply", "the file's size differs from the manifest")
        else:
            sealed(fd, size)
    finally:
        os.close(fd)


def pass_on(fd: int, size: int | None, see: Callable[[memoryview], None]) -> int:
    """Copy at most `size` bytes of a file to stdout; return the number of bytes.

    `see` is called with each piece, which is small enough for the CPU cache.
    """
    piece, count = memoryview(bytearray(PIECE)), 0
    while size is None or count < size:
        got = os.readv(fd, [piece if size is None else piece[: size - count]])
        if not got:
            break
        see(piece[:got])
        put_out(piece[:got])
        count += got
    return count


def sealed(fd: int, size: int) -> None:
    """Write a complete file, then a line with its digest and times."""
    import hashlib

    sha = hashlib.sha256()
    if pass_on(fd, size, sha.update) != size:
        raise Problem("bad_reply", "the file became shorter while it was read")
    put_out(json.dumps({**stamp(os.fstat(fd)), "sha256": sha.hexdigest()}).encode() + b"\n")


def widen(pipe: int) -> None:
    """Enlarge the buffer of a pipe or socket if possible, to reduce context switches."""
    try:
        import socket

        kind = os.fstat(pipe).st_mode
        if stat.S_ISSOCK(kind):
            with socket.socket(fileno=os.dup(pipe)) as line:
                line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        elif stat.S_ISFIFO(kind) and sys.platform == "linux":
            import fcntl

            fcntl.fcntl(pipe, 1031, 1 << 20)  # F_SETPIPE_SZ, which is in fcntl since Python 3.10
    except OSError:
        pass


def bundle(folder: str, request: Json) -> None:
    """Write the files in `paths` to stdout as one stream. A file's number is its index in `paths`."""
    pack(folder, request, enumerate(map(str, request.get("paths") or [])))


def pack(folder: str, request: Json, named: Iterable[tuple[int, str]]) -> None:
    """Write small files to stdout as one stream, each identified by its number.

    A group consists of the number of files, a row for each file (number, size, times and digest), and then the files'
    contents. A count of 0 ends the stream. A file that can't be read or is larger than `MAX_MEMBER` is left out.
    """
    import hashlib

    readable, rows, contents, size = ReadableFiles(folder, request), [], [], 0
    for number, path in named:
        try:
            fd = readable.open(path)
        except (OSError, Problem):
            continue
        try:
            content = os.read(fd, FIRST)  # a larger buffer would be memory-mapped again for each file
            if len(content) == FIRST:
                content += os.read(fd, MAX_MEMBER + 1 - FIRST)
            info = os.fstat(fd)
        except OSError:
            continue
        finally:
            os.close(fd)
        if len(content) == info.st_size <= MAX_MEMBER:
            times = clamp(info.st_mtime_ns), clamp(info.st_ctime_ns)
            rows.append(ROW.pack(number, len(content), *times, hashlib.sha256(content).digest()))
            contents.append(content)
            size += len(content)
        if size > SOME_BYTES or len(rows) == SOME:
            put_out(b"".join([COUNT.pack(len(rows)), *rows, *contents]))
            rows, contents, size = [], [], 0
    if rows:
        put_out(b"".join([COUNT.pack(len(rows)), *rows, *contents]))
    put_out(COUNT.pack(0))


def clamp(time_ns: int) -> int:
    """Return a time, clamped to the range that a row can store. A clamped time never matches a manifest."""
    return max(min(time_ns, MAX_TIME), -MAX_TIME)
