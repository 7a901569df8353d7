"""Write the job's log in segments, and read it from an absolute cursor."""

from __future__ import annotations

import errno
import os
import re
import stat

from gpuwarden.remote.runner.files import write_all
from gpuwarden.remote.runner.protocol import Json, Problem

SEGMENT = re.compile(r"out\.(\d{15})\.log")


def segments(folder: str) -> list[tuple[int, str]]:
    """Return the remaining segments of the log as (absolute offset, path), oldest first."""
    try:
        found = (SEGMENT.fullmatch(name) for name in os.listdir(folder))
    except OSError:
        return []
    return sorted((int(m.group(1)), folder + "/" + m.group(0)) for m in found if m)


def log_size(folder: str) -> int:
    """Return the absolute offset of the log's end, in bytes."""
    for base, path in reversed(segments(folder)):
        try:
            return base + os.lstat(path).st_size
        except OSError:
            continue
    return 0


class Log:
    """Appends to the log and rotates it. Bytes that can't be written are dropped and counted, so the job never waits.

    `echo` is a second descriptor to which all output is written; -1 for none.
    """

    def __init__(self, folder: str, max_bytes: int) -> None:
        self.folder, self.half, self.dropped = folder, max(max_bytes // 2, 1024), 0
        self.fd = self.echo = -1
        known = segments(folder)
        self._open(known[-1][0] if known else 0)

    def write(self, data: bytes) -> None:
        """Append data; start a new segment if the current one is full."""
        if self.echo >= 0:
            write_all(self.echo, data)
        while data:
            if self.size >= self.half:
                self._open(self.base + self.size)
            room = self.half - self.size if self.size < self.half else len(data)  # no limit if the rotation failed
            part, data = data[:room], data[room:]
            done = write_all(self.fd, part) if self.fd >= 0 else 0
            self.size += done
            self.dropped += len(part) - done
            if done < len(part):
                self.dropped += len(data)
                return

    def _open(self, base: int) -> None:
        name = f"out.{base:015d}.log"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(self.folder + "/" + name, flags, 0o600)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                raise OSError(errno.EINVAL, "not a regular file", name)
        except OSError:
            if self.fd < 0:
                self.base, self.size = base, 0
            return  # continue with the old segment
        if self.fd >= 0:
            os.close(self.fd)
        self.fd, self.base, self.size = fd, base, os.fstat(fd).st_size
        try:
            link = self.folder + "/out.log"
            os.symlink(name, link + ".tmp")
            os.rename(link + ".tmp", link)
            for _, path in segments(self.folder)[:-2]:
                os.unlink(path)
        except OSError:
            pass


def logs(folder: str, request: Json) -> Json:
    """Return the requested piece of the log. Raises Problem if the run folder does not exist."""
    if not os.path.isdir(folder):
        raise Problem("not_found", f"the run folder does not exist: {folder}")
    return read_log(folder, int(request.get("cursor") or 0), int(request.get("limit") or 1 << 16))


def read_log(folder: str, cursor: int, limit: int) -> Json:
    """Return a piece of the log from an absolute cursor. A negative cursor counts from the end of the log.

    `truncated` is true if the text starts elsewhere, because the log has no bytes at the cursor.
    """
    limit = max(4, min(limit, 1 << 20))
    known = segments(folder)
    size = log_size(folder)
    first = known[0][0] if known else 0
    start = cursor if cursor >= 0 else max(first, size + cursor)
    truncated = start < first or start > size
    if truncated:
        start = first
    data = b""
    for base, path in known:
        if start + len(data) < base:  # another process truncated the previous segment
            if data:
                break
            start, truncated = base, True
        if len(data) < limit:
            data += read_at(path, start + len(data) - base, limit - len(data))
    if cursor < 0:
        lead = next((i for i, b in enumerate(data[:4]) if b & 0xC0 != 0x80), 0)
        start, data = start + lead, data[lead:]
    data = whole_characters(data)
    end, text = start + len(data), data.decode("utf-8", "replace")
    return {
        "ok": True,
        "text": text,
        "latin": "" if text.encode() == data else data.decode("latin-1"),  # the exact bytes
        "next": end,
        "size": max(size, end),
        "truncated": truncated,
    }


def read_at(path: str, offset: int, limit: int) -> bytes:
    """Return bytes from one segment; empty if the segment no longer exists."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.pread(fd, limit, offset)
    finally:
        os.close(fd)


def whole_characters(data: bytes) -> bytes:
    """Return data without an incomplete UTF-8 character at its end, unless the data has no other content."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:
            need = 4 if 0xF0 <= byte < 0xF8 else 3 if 0xE0 <= byte < 0xF0 else 2 if 0xC0 <= byte < 0xE0 else 1
            return data[:-back] if back < need and back < len(data) else data
    return data
