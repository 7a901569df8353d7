"""Read and write the seal log: digests computed right after a save, one JSON line per file, outside the outputs.

A line is valid only while the file still has the recorded size and times: a write to the file updates its change
time, which invalidates the line. Lines are only appended. If a path has several lines, the line with the latest sealing
time applies, so appending an older line again has no effect. An incomplete line, left by a killed process, is skipped.
The runner reads the same file (`seals.jsonl`). Standard library only.

The job runs as the same user, so it may write lines too. If a key is given, each line has a MAC, which only a process
with the key can compute. The key is passed on stdin and is never stored on the machine's disks.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gpuwarden.checkpoints.findings import Expected

LIMIT = 64 << 20
STAMP = ("size", "mtime_ns", "ctime_ns")
_SHA256 = re.compile("[0-9a-f]{64}")
_SAFE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
"""Flags for opening the log. The job can write to the log's folder, so do not follow links or block on a pipe."""


def stamp(row: dict[str, Any]) -> tuple[int, ...]:
    """Return the fields that change when a sealed file is written to: its size and times."""
    return tuple(int(row[k]) for k in STAMP)


def stamp_of(path: str) -> tuple[int, ...] | None:
    """Return a file's current stamp, or None if the file does not exist."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


def mac(key: bytes, row: dict[str, Any]) -> str:
    """Return a line's MAC. It covers the file's digests, size and times, but not its name."""
    parts = ("part_size", "parts_sha256") if row.get("parts_sha256") else ()
    row_text = json.dumps([row[k] for k in (*STAMP, "sha256", "sealed_at", *parts)])
    return hmac.new(key, row_text.encode("ascii"), "sha256").hexdigest()


def made_with(key: bytes, row: dict[str, Any]) -> bool:
    """Return true if a line was signed with `key`."""
    return hmac.compare_digest(mac(key, row).encode(), str(row["mac"]).encode())


def enter(log: Path, base: Path, taken: dict[str, Any], key: bytes = b"") -> bool:
    """Append the entries in `base`'s manifest to the log, signed if a key is given.

    If a file has been written to since the manifest was made, append nothing and return false; the next examination
    tries again.
    """
    rows = []
    for row in taken["files"]:
        place = os.path.realpath(base / row["path"])
        if stamp_of(place) != stamp(row):
            return False
        line = {**row, "path": place, "sealed_at": taken["taken_at"]}
        rows.append({**line, "mac": mac(key, line)} if key else line)
    add(log, rows)
    return True


def add(log: Path, rows: list[dict[str, Any]]) -> None:
    """Append lines and flush them to the disk. Each starts with a line break, since the last line may be incomplete."""
    text = "".join("\n" + json.dumps(row, sort_keys=True) for row in rows) + "\n"
    fd = os.open(str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND | _SAFE, 0o600)
    try:
        data = text.encode("ascii")
        while data:
            data = data[os.write(fd, data) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def read(log: Path, key: bytes = b"") -> dict[str, dict[str, Any]]:
    """Return the latest line for each real path; {} if no log exists. With a key, ignore lines without a valid MAC."""
    try:
        fd = os.open(str(log), os.O_RDONLY | _SAFE)
        with os.fdopen(fd, "rb") as file:
            data = file.read(LIMIT) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    except OSError:
        return {}
    rows: dict[str, dict[str, Any]] = {}
    for line in data.splitlines():
        try:
            row = json.loads(line)
            path, at = str(row["path"]), float(row.get("sealed_at", 0))
            sound = _SHA256.fullmatch(row["sha256"]) and all(type(row[k]) is int for k in STAMP)
            newest = at >= 0 and (path not in rows or at >= float(rows[path].get("sealed_at", 0)))
            if sound and newest and (not key or made_with(key, row)):
                rows[path] = row
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
            continue
    return rows


def covers(log: Path, files: Iterable[Path], key: bytes = b"") -> bool:
    """Return true if the log has a valid line for every file."""
    rows = read(log, key)
    places = [os.path.realpath(p) for p in files]
    return all(p in rows and stamp(rows[p]) == stamp_of(p) for p in places)


def seals_below(log: Path, path: Path) -> dict[str, Expected]:
    """Return the sealed sizes and digests of files under a path. Omit files that changed after they were sealed."""
    base = os.path.realpath(path if path.is_dir() else path.parent) + "/"
    return {
        place[len(base) :]: Expected(row["size"], {"sha256": row["sha256"]})
        for place, row in read(log).items()
        if place.startswith(base) and stamp_of(place) == stamp(row)
    }
