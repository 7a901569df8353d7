"""Read and write a job's status (status.json)."""

from __future__ import annotations

import errno
import json
import os
import time

from gpuwarden.remote.runner.files import read_small, write_all, write_atomic
from gpuwarden.remote.runner.protocol import Json, Problem

FINAL = ("succeeded", "failed", "canceled", "preempted", "timeout")
PAD = 16_384  # reserved space, so that the status can grow without new blocks


def write_status(folder: str, status: Json) -> bool:
    """Write status.json. If the disk is full, overwrite the file's existing blocks. Return False if that fails."""
    path = folder + "/status.json"
    data = json.dumps(status, allow_nan=False).encode("ascii")
    data = data.ljust(-(-len(data) // PAD) * PAD)
    try:
        write_atomic(path, data)
        return True
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return False
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        size = os.fstat(fd).st_size
        return len(data) <= size and write_all(fd, data.ljust(size)) == size
    finally:
        os.close(fd)


def read_status(folder: str) -> Json | None:
    """Return the status; None if the file does not exist. Raises Problem if it is invalid."""
    why = ""
    for _ in range(3):  # on a full disk, the file is overwritten in place and may be incomplete
        try:
            found = json.loads(read_small(folder + "/status.json", 1 << 20).decode("utf-8"))
            if isinstance(found, dict) and isinstance(found.get("state"), str):
                return found
            why = "it contains no status"
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            why = str(error)
        time.sleep(0.01)
    raise Problem("bad_reply", f"{folder}/status.json can't be read: {why}")
