"""Read and write small files safely, despite links, crashes and full disks."""

from __future__ import annotations

import errno
import os
import stat

from gpuwarden.remote.runner.protocol import Json


def read_small(path: str, limit: int) -> bytes:
    """Return at most `limit` bytes of a regular file. Links are not followed, and pipes do not block."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        parts, left = [], limit
        while left > 0:
            part = os.read(fd, left)
            if not part:
                break
            parts.append(part)
            left -= len(part)
        return b"".join(parts)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> int:
    """Write as much as possible; return the number of bytes written."""
    done = 0
    while done < len(data):
        try:
            done += os.write(fd, data[done:])
        except OSError as error:
            if error.errno != errno.EINTR:
                break
    return done


def write_atomic(path: str, data: bytes) -> None:
    """Replace a file atomically, so that a reader gets either the old or the new content."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if write_all(fd, data) != len(data):
                raise OSError(errno.ENOSPC, "no space left for", path)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except OSError:
        try:
            os.unlink(temporary)
        except OSError:
            pass
        raise


def stamp(info: os.stat_result) -> Json:
    """Return a file's size and times, which together show whether its content has been changed or replaced."""
    return {"size": info.st_size, "mtime_ns": info.st_mtime_ns, "ctime_ns": info.st_ctime_ns}
