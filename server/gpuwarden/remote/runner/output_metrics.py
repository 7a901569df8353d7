"""Read progress from files that trainers save in the outputs: `trainer_state.json` and TensorBoard's event files.

Each search has limits on depth, entries, time and bytes. Only numbers are read from the files.
"""

from __future__ import annotations

import json
import os
import stat
import struct
import time
from typing import Iterator

from gpuwarden.remote.runner.files import read_small
from gpuwarden.remote.runner.heartbeat import ThreadedReader
from gpuwarden.remote.runner.log_lines import Lazy
from gpuwarden.remote.runner.path_mapping import PathMapping
from gpuwarden.remote.runner.protocol import Json

MAX_ENTRIES, MAX_DEPTH, LOOK_S = 2000, 4, 2.0
TAIL, MAX_PIECE, MAX_RECORD = 1 << 15, 1 << 20, 1 << 16
EVENTS = "events.out.tfevents."
STATE = "trainer_state.json"
GLOBAL_STEP = Lazy(rb'"global_step": (\d{1,12})')
MAX_STEPS = Lazy(rb'"max_steps": (\d{1,12})')
ENTRY = Lazy(rb"\{[^{}]{1,8192}\}")
TAGS = {
    "loss": "loss", "train/loss": "loss", "train_loss": "loss", "loss/train": "loss", "training/loss": "loss",
    "train/train_loss": "loss", "train_loss_step": "loss", "learning_rate": "learning_rate", "lr": "learning_rate",
    "train/learning_rate": "learning_rate", "train/lr": "learning_rate", "eval/loss": "val_loss",
    "val_loss": "val_loss", "train/grad_norm": "grad_norm",
}  # fmt: skip


class OutputMetrics(ThreadedReader):
    """Searches the declared outputs in a thread, because disks may hang. `values` contains `rows` and `total`."""

    def __init__(self, folder: str, spec: Json, since: float) -> None:
        super().__init__()
        mapping, outputs = PathMapping(spec), [str(p) for p in spec.get("outputs") or []][:16]
        self.tops = [mapping.locate(folder, path)[0] for path in outputs]
        self.since = since  # older files belong to an earlier attempt
        self.offsets: dict[str, int] = {}

    def _query(self) -> None:
        newest: tuple[float, str] = (self.since, "")
        rows: list[dict[str, float]] = []
        for path, changed in self.files_of_interest():
            if os.path.basename(path) == STATE:
                newest = max(newest, (changed, path))
            else:
                rows += self.new_events(path)
        total = None
        if newest[1]:
            row, total = trainer_state(newest[1])
            rows += [row] if row else []
        self.values = {"rows": rows[-200:], "total": total}

    def files_of_interest(self) -> Iterator[tuple[str, float]]:
        """Yield the trainer states and event files that have changed since the launch, with the mtime in seconds."""
        left, until = MAX_ENTRIES, time.monotonic() + LOOK_S
        folders = [(top, 0) for top in self.tops]
        while folders and left > 0 and time.monotonic() < until:
            folder, depth = folders.pop()
            try:
                entries = sorted(os.scandir(folder), key=lambda e: e.name)[:left]
            except OSError:
                continue
            left -= len(entries) + 1
            for entry in entries:
                try:
                    if entry.is_dir(follow_symlinks=False):
                        folders += [(entry.path, depth + 1)] if depth < MAX_DEPTH else []
                    elif entry.name == STATE or entry.name.startswith(EVENTS):
                        info = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(info.st_mode) and info.st_mtime >= self.since:
                            yield entry.path, info.st_mtime
                except OSError:
                    continue

    def new_events(self, path: str) -> list[dict[str, float]]:
        """Return the scalars added to an event file since the last call."""
        if path not in self.offsets and len(self.offsets) >= 64:
            return []
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return []
        try:
            data = os.pread(fd, MAX_PIECE, self.offsets.get(path, 0))
        except OSError:
            return []
        finally:
            os.close(fd)
        rows, used = read_events(data)
        self.offsets[path] = self.offsets.get(path, 0) + (used or (MAX_PIECE if len(data) == MAX_PIECE else 0))
        return rows


def trainer_state(path: str) -> tuple[dict[str, float], int | None]:
    """Return the last numbers in a `trainer_state.json` of any size, and the run's total number of steps."""
    try:
        head = read_small(path, TAIL)
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            tail = os.pread(fd, TAIL, max(0, os.fstat(fd).st_size - TAIL))
        finally:
            os.close(fd)
    except OSError:
        return {}, None
    row: dict[str, float] = {}
    for entry in ENTRY.findall(tail):
        try:
            found = json.loads(entry)
        except (ValueError, RecursionError):
            continue
        for name, key in (("loss", "loss"), ("learning_rate", "learning_rate"), ("eval_loss", "val_loss")):
            if isinstance(found.get(name), float):
                row[key] = found[name]
    step, total = GLOBAL_STEP.search(head), MAX_STEPS.search(tail)
    if step is not None:
        row["step"] = int(step.group(1))
    return row, int(total.group(1)) or None if total is not None else None


def read_events(data: bytes) -> tuple[list[dict[str, float]], int]:
    """Return the scalars in complete TensorBoard records, and the size of these records. Images are skipped."""
    rows, at = [], 0
    while at + 12 <= len(data):
        size = int(struct.unpack_from("<Q", data, at)[0])
        end = at + 12 + size + 4
        if end > len(data):
            break
        if size <= MAX_RECORD:
            try:
                row = read_event(data[at + 12 : end - 4])
            except (IndexError, struct.error, ValueError):
                row = {}
            if len(row) > 1:
                rows.append(row)
        at = end
    return rows, at


def read_event(record: bytes) -> dict[str, float]:
    """Return the step and the known scalars of one record (protocol buffer `Event`)."""
    row: dict[str, float] = {}
    for number, value in fields(record):
        if number == 2 and isinstance(value, int):
            row["step"] = value
        elif number == 5 and isinstance(value, bytes):
            for inner, summary in fields(value):
                if inner == 1 and isinstance(summary, bytes):
                    tag, scalar = read_scalar(summary)
                    if tag in TAGS and scalar is not None:
                        row[TAGS[tag]] = scalar
    return row


def read_scalar(summary: bytes) -> tuple[str, float | None]:
    """Return the tag and the number in one `Summary.Value`. The number is its `simple_value` or its tensor's value."""
    tag, scalar = "", None
    for number, value in fields(summary):
        if not isinstance(value, bytes):
            continue
        if number == 1:
            tag = value.decode("utf-8", "replace").lower()
        elif number == 2 and len(value) == 4:
            scalar = struct.unpack("<f", value)[0]
        elif number == 8:
            inside = [v for n, v in fields(value) if n in (4, 5) and isinstance(v, bytes) and len(v) == 4]
            scalar = struct.unpack("<f", inside[0])[0] if inside else scalar
    return tag, scalar


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the fields in a protocol buffer message: the field number, and an integer or bytes."""
    at = 0
    while at < len(message):
        key, at = varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = varint(message, at)
            yield key >> 3, value
            continue
        size = 8 if kind == 1 else 4
        if kind == 2:
            size, at = varint(message, at)
        elif kind not in (1, 5):
            raise ValueError("unknown wire type")
        if at + size > len(message):
            raise ValueError("truncated field")
        yield key >> 3, message[at : at + size]
        at += size


def varint(message: bytes, at: int) -> tuple[int, int]:
    """Parse a variable-length integer. Return the integer and the offset after it."""
    found = shift = 0
    while shift < 64:
        byte = message[at]
        found |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return found, at
    raise ValueError("unterminated integer")
