"""Hash every event together with its predecessor's hash, so that any change to recorded events is detected.

The chain detects an event that was changed, removed or inserted. A truncated or replaced ledger still has a valid
chain. To detect that, the file `ledger.head` beside the ledger keeps the number and the hash of the last event. It is
written after the commit, so it may be behind the ledger but never ahead. A process with write access to both files can
forge both.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

Row = tuple[Any, ...]
Query = Callable[[str], Iterator[Row]]
"""Yields the rows of a query one by one, because a ledger's events may not fit in memory."""
COLUMNS: Final = "seq, at, subject, kind, version, state, token, actor, body"
"""Columns of an event that are covered by its hash."""
GENESIS: Final = "0" * 64
"""The hash before the first event."""
_LOST: Final = "lost"
_WIDTH: Final = 96
"""Size of the head file in bytes: fixed, so that a single write in place replaces it."""


def link(before: str, row: Row) -> str:
    """Hash one event with the hash of the previous event. The columns are in the order of `COLUMNS`."""
    text = json.dumps([before, *row], ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


BreakCode = Literal["changed", "missing", "undecodable"]


@dataclass(frozen=True)
class Break:
    """The first event that does not fit the chain."""

    seq: int
    code: BreakCode
    subject: str = ""
    kind: str = ""


def first_break(query: Query) -> Break | None:
    """Check the full chain and return the first break, None if it is intact."""
    before, expected = GENESIS, 1
    try:
        for *row, kept in query(f"SELECT {COLUMNS}, hash FROM events ORDER BY seq"):  # noqa: S608 - a constant
            if row[0] != expected:
                return Break(expected, "missing")
            if link(before, tuple(row)) != kept:
                return Break(expected, "changed", str(row[2]), str(row[3]))
            before, expected = kept, expected + 1
    except sqlite3.OperationalError:  # text that is not UTF-8
        return Break(expected, "undecodable")
    return None


@dataclass(frozen=True)
class Head:
    """The number and hash of the last recorded event. `lost` means that this ledger replaced an earlier, lost one."""

    seq: int
    hash: str
    lost: bool = False


class HeadFile:
    """The file `ledger.head` beside a ledger."""

    def __init__(self, ledger: Path) -> None:
        self.path = ledger.with_suffix(".head")

    def read(self) -> Head | None:
        """Return the recorded head; None if the file is missing, or incomplete after a power failure."""
        try:
            words = self.path.read_text("ascii").split()
            return Head(int(words[0]), words[1], lost=words[2:] == [_LOST])
        except (OSError, ValueError, IndexError):
            return None

    def write(self, head: Head) -> None:
        """Record a head in place. Failures are ignored, because the file may be behind."""
        text = f"{head.seq} {head.hash}{' ' + _LOST if head.lost else ''}"
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.write(fd, f"{text:<{_WIDTH - 1}}\n".encode("ascii"))
            finally:
                os.close(fd)
        except OSError:
            return
