"""Read and write status.json, the status of a job."""

from __future__ import annotations

import errno
import json
import os
import time

from gpuwarden.remote.runner.files import read_small, write_all, write_atomic
from gpuwarden.remote.runner.protocol import Json, Problem

FINAL = ("succeeded", "failed", "canceled", "preempted", "timeout")
PAD = 16_384  # space for the status to grow without new blocks


def write_status(folder: str, status: Json) -> bool:
    """Write status.json. On a full disk, overwrite its existing blocks. Return False if it can't be written."""
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
    """Return the status; None if there is no file. Raises Problem if it is invalid."""
    why = ""
    for _ in range(3):  # it may be rewritten in place on a full disk
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
