"""Open a file of this machine that is to be sent: a regular one, and through no link."""

from __future__ import annotations

import os
import stat
from io import BufferedReader
from pathlib import Path

from gpuwarden.core.errors import BadRequest

_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def open_regular(path: Path) -> BufferedReader:
    """Open the file for reading. Raises `BadRequest` for anything else."""
    return os.fdopen(_opened(path), "rb")


def read_regular(path: Path, limit: int) -> bytes:
    """Return at most `limit` bytes of the file, without the cost of a file object. Raises `BadRequest` as above."""
    fd = _opened(path)
    try:
        content = piece = os.read(fd, limit)
        while piece and len(content) < limit:
            piece = os.read(fd, limit - len(content))
            content += piece
        return content
    finally:
        os.close(fd)


def _opened(path: Path) -> int:
    try:
        fd = os.open(path, _FLAGS)
    except OSError as problem:
        raise BadRequest(
            f"{path} can't be sent: {problem.strerror}", "Links are not followed; name the file itself."
        ) from problem
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise BadRequest(f"{path} is not a regular file", "Devices, pipes and sockets are never sent.")
    return fd
