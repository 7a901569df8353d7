"""Open a file of this machine that is to be sent: a regular one, and through no link."""

from __future__ import annotations

import os
import stat
from io import BufferedReader
from pathlib import Path

from gpuwarden.core.errors import BadRequest

_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


Identity = tuple[int, int]
"""Device and inode of a file: the same path may lead elsewhere later, where a folder above it became a link."""


def identity_of(info: os.stat_result) -> Identity:
    """Return the identity of a file."""
    return info.st_dev, info.st_ino


def open_regular(path: Path, identity: Identity | None = None) -> BufferedReader:
    """Open the file for reading. Raises `BadRequest` for anything else, and for a file of another identity."""
    return os.fdopen(_opened(path, identity), "rb")


def read_regular(path: Path, limit: int, identity: Identity) -> bytes:
    """Return at most `limit` bytes of the file, without the cost of a file object. Raises `BadRequest` as above."""
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
            f"{path} can't be sent: {problem.strerror}", "Links are not followed; name the file itself."
        ) from problem
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        os.close(fd)
        raise BadRequest(f"{path} is not a regular file", "Devices, pipes and sockets are never sent.")
    if identity not in {None, identity_of(info)}:
        os.close(fd)
        raise BadRequest(f"{path} was replaced after it was listed", "Send it when nothing writes to it.")
    return fd
