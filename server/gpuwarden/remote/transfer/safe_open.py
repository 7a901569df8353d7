"""Open local files for sending. Only regular files are opened, and links are not followed."""

from __future__ import annotations

import os
import stat
from io import BufferedReader
from pathlib import Path

from gpuwarden.core.errors import BadRequest

_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


Identity = tuple[int, int]
"""A file's device and inode. A path does not identify a file, because a parent folder may be replaced by a link."""


def identity_of(info: os.stat_result) -> Identity:
    """Return a file's identity."""
    return info.st_dev, info.st_ino


def open_regular(path: Path, identity: Identity | None = None) -> BufferedReader:
    """Open a regular file for reading. Raises `BadRequest` if it is not a regular file or has another identity."""
    return os.fdopen(_opened(path, identity), "rb")


def read_regular(path: Path, limit: int, identity: Identity) -> bytes:
    """Return at most `limit` bytes of a file. This is faster than `open_regular` and raises the same errors."""
    fd = _opened(path, identity)
    try:
        content = piece = os.read(fd, limit)
        while piece and len(content) < limit:
            piece = os.read(fd, limit - len(content))
            content += piece
        return content
    finally:
        os.close(fd)


def _opened(path: Path, identity: Identity | None) -> int:
    try:
        fd = os.open(path, _FLAGS)
    except OSError as problem:
        raise BadRequest(
            f"{path} can't be sent: {problem.strerror}", "Links are not followed. Specify the path of the target file."
        ) from problem
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        os.close(fd)
        raise BadRequest(f"{path} is not a regular file", "Devices, pipes and sockets are never sent.")
    if identity not in {None, identity_of(info)}:
        os.close(fd)
        raise BadRequest(f"{path} was replaced after it was listed", "Send it again once no process is replacing it.")
    return fd
