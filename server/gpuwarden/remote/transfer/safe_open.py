"""Open a file of this machine that is to be sent: a regular one, and through no link."""

from __future__ import annotations

import os
import stat
from io import BufferedReader
from pathlib import Path

from gpuwarden.core.errors import BadRequest


def open_regular(path: Path) -> BufferedReader:
    """Open the file for reading. Raises `BadRequest` for anything else."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        fd = os.open(path, flags)
    except OSError as problem:
        raise BadRequest(
            f"{path} can't be sent: {problem.strerror}", "Links are not followed; name the file itself."
        ) from problem
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise BadRequest(f"{path} is not a regular file", "Devices, pipes and sockets are never sent.")
    return os.fdopen(fd, "rb")
