"""Read the lines that a job writes to metrics.jsonl."""

from __future__ import annotations

import json
import os
import stat

from gpuwarden.remote.runner.protocol import Json


class Tail:
    """Follows a JSON lines file that another process writes, replaces or truncates."""

    def __init__(self, path: str) -> None:
        self.path, self.offset, self.inode, self.part = path, 0, 0, b""

    def skip(self) -> None:
        """Skip the current content."""
        try:
            info = os.lstat(self.path)
        except OSError:
            return
        self.offset, self.inode = info.st_size, info.st_ino

    def read(self) -> list[Json]:
        """Return the objects that have been completed since the last call. Other content is skipped."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return []
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                return []
            if info.st_ino != self.inode or info.st_size < self.offset:
                self.offset, self.inode, self.part = 0, info.st_ino, b""
            data = os.pread(fd, 1 << 18, self.offset)
        finally:
            os.close(fd)
        self.offset += len(data)
        *lines, rest = (self.part + data).split(b"\n")
        self.part = rest if len(rest) <= 1 << 16 else b"?"  # too long; `?` makes the rest of the line invalid JSON
        found = []
        for line in lines:
            try:
                row = json.loads(line.decode("utf-8")) if len(line) <= 1 << 16 else None
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                found.append(row)
        return found


def split_metrics(row: Json) -> tuple[int | None, dict[str, float], list[str]]:
    """Return the step, the finite numbers, and the names of values that are NaN or infinite."""
    step, finite, bad = None, {}, []
    for name, value in list(row.items())[:64]:
        if isinstance(value, str) and value.lower().lstrip("+-") in ("nan", "inf", "infinity"):
            value = float("nan")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        try:
            number = float(value)
        except OverflowError:
            number = float("inf")
        name = str(name)[:64].encode("utf-8", "replace").decode("utf-8")
        if number != number or number in (float("inf"), float("-inf")):
            bad.append(name)
        elif name in ("step", "global_step") and 0 <= number < 1 << 53:
            step = int(number)
        else:
            finite[name] = number
    return step, finite, bad
