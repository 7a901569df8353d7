"""Store reports from a job and its runner in a spool on this machine's disk, to be sent or pulled later.

The spool consists of two files of JSON lines, each with one writer. `spool.job.jsonl` contains the reports that the
relay accepts, and `spool.runner.jsonl` contains the supervisor's reports. A line is
`{"kind": "metrics" | "alerts", "body": ...}`, where `body` is a request body for the server's API. Readers keep byte
offsets, and lines are never deleted. A line that is sent or pulled twice is recognized by its job, step and time.
"""

from __future__ import annotations

import json
import os
import stat
import time
from typing import Any

from gpuwarden.remote.runner.files import write_all
from gpuwarden.remote.runner.protocol import Json, Problem

SPOOLS = ("job", "runner")
MAX_SPOOL = 256 << 20  # maximum size of one file, enough for weeks of metrics
MAX_SPOOL_PIECE = 4 << 20


def spool_path(folder: str, source: str) -> str:
    """Return the path of a source's spool file."""
    return f"{folder}/spool.{source}.jsonl"


def utc(at: float) -> str:
    """Return a Unix time in the API's format, in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at)) + f".{int(at % 1 * 1e6):06d}Z"


class Spool:
    """Appends to one spool file. Lines that can't be written are counted in `dropped`."""

    def __init__(self, folder: str, source: str) -> None:
        self.path, self.fd, self.size, self.dropped = spool_path(folder, source), -1, 0, 0

    def put(self, kind: str, body: Json) -> bool:
        """Append a line; return whether it was written completely."""
        line = json.dumps({"kind": kind, "body": body}).encode("ascii") + b"\n"
        if not self._open() or self.size + len(line) > MAX_SPOOL:
            self.dropped += 1
            return False
        done = write_all(self.fd, line)
        self.size += done
        if done < len(line):
            self.size += write_all(self.fd, b"\n")  # without a line break, the next line would be invalid too
            self.dropped += 1
        return done == len(line)

    def _open(self) -> bool:
        if self.fd >= 0:
            return True
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(self.path, flags, 0o600)
        except OSError:
            return False
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):  # the job may have created the file
            os.close(fd)
            return False
        self.fd, self.size = fd, info.st_size
        if info.st_size and not ends_with_line(self.path):  # a power failure may have left an incomplete line
            self.size += write_all(fd, b"\n")
        return True


def ends_with_line(path: str) -> bool:
    """Return whether a file ends with a line break."""
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def read_lines(folder: str, source: str, offset: int, limit: int = MAX_SPOOL_PIECE) -> tuple[bytes, int]:
    """Return complete lines from a byte offset, and the offset after them. A file that shrank is read again from 0."""
    try:
        fd = os.open(spool_path(folder, source), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b"", offset
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            return b"", offset
        start = offset if 0 <= offset <= info.st_size else 0
        data = os.pread(fd, limit, start)
    finally:
        os.close(fd)
    end = data.rfind(b"\n") + 1
    if not end and len(data) == limit:  # the runner never writes a line this long: skip it
        return b"", start + len(data)
    return data[:end], start + end


def parse_lines(text: bytes) -> list[Json]:
    """Parse lines into entries. Invalid lines are skipped."""
    found = []
    for line in text.splitlines():
        try:
            entry: Any = json.loads(line)
        except (ValueError, RecursionError):
            continue
        known = isinstance(entry, dict) and entry.get("kind") in ("metrics", "alerts")
        if known and isinstance(entry.get("body"), dict):
            found.append(entry)
    return found


def spool(folder: str, request: Json) -> Json:
    """Return the lines of both files after `cursors`, as text, with the next offsets."""
    if not os.path.isdir(folder):
        raise Problem("not_found", f"the run folder does not exist: {folder}")
    cursors = request.get("cursors") or {}
    limit = min(int(request.get("limit") or MAX_SPOOL_PIECE), MAX_SPOOL_PIECE)
    found = {}
    for source in SPOOLS:
        text, end = read_lines(folder, source, int(cursors.get(source) or 0), limit)
        found[source] = {"text": text.decode("utf-8", "replace"), "next": end}
    return {"ok": True, "files": found}
