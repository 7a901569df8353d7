"""Hash every event together with its predecessor's hash, so that changes to recorded events can be detected.

The chain reveals an event that was changed, removed or inserted. A truncated or replaced ledger still has a valid
chain. To detect these cases, the file `ledger.head` next to the ledger contains the last event's number and hash. This
file is written after the commit, so its number is never higher than the ledger's. A process with write access to both
files can forge both.
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
"""A function that yields a query's rows one at a time, because a ledger's events may not fit in memory."""
COLUMNS: Final = "seq, at, subject, kind, version, state, token, actor, body"
"""The event columns that the hash covers."""
GENESIS: Final = "0" * 64
"""Used as the previous hash for the first event."""
_LOST: Final = "lost"
_WIDTH: Final = 96
"""The size of the head file in bytes. The size is fixed, so that a single write replaces the content."""


def link(before: str, row: Row) -> str:
    """Hash one event together with the hash of the previous event. `row` is in the order of `COLUMNS`."""
    text = json.dumps([before, *row], ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


BreakCode = Literal["changed", "missing", "undecodable"]


@dataclass(frozen=True)
class Break:
    """The first event that does not match the chain."""

    seq: int
    code: BreakCode
    subject: str = ""
    kind: str = ""


def first_break(query: Query) -> Break | None:
    """Check the entire chain. Return its first break, or None if the chain is intact."""
    before, expected = GENESIS, 1
    try:
        for *row, kept in query(f"SELECT {COLUMNS}, hash FROM events ORDER BY seq"):  # noqa: S608 - a constant
            if row[0] != expected:
                return Break(expected, "missing")
            if link(before, tuple(row)) != kept:
                return Break(expected, "changed", str(row[2]), str(row[3]))
            before, expected = kept, expected + 1
    except sqlite3.OperationalError:  # a column is not UTF-8
        return Break(expected, "undecodable")
    return None


@dataclass(frozen=True)
class Head:
    """The number and hash of the last recorded event. `lost` means that an earlier ledger in this folder was lost."""

    seq: int
    hash: str
    lost: bool = False


class HeadFile:
    """The file `ledger.head` next to a ledger."""

    def __init__(self, ledger: Path) -> None:
        self.path = ledger.with_suffix(".head")

    def read(self) -> Head | None:
        """Return the recorded head; None if the file is missing, or if a power failure left it incomplete."""
        try:
            words = self.path.read_text("ascii").split()
            return Head(int(words[0]), words[1], lost=words[2:] == [_LOST])
        except (OSError, ValueError, IndexError):
            return None

    def write(self, head: Head) -> None:
        """Overwrite the recorded head. Errors are ignored, because an older head is still valid."""
        text = f"{head.seq} {head.hash}{' ' + _LOST if head.lost else ''}"
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.write(fd, f"{text:<{_WIDTH - 1}}\n".encode("ascii"))
            finally:
                os.close(fd)
        except OSError:
            return
