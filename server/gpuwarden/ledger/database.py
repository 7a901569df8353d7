"""Access a ledger's SQLite file, which `opening.py` opens. Locks are files in a folder next to the ledger."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gpuwarden.core.errors import LedgerError
from gpuwarden.ledger.chain import Query, Row
from gpuwarden.ledger.failures import translated
from gpuwarden.ledger.migrate import INSERT
from gpuwarden.private import private_folder

if TYPE_CHECKING:
    from filelock import FileLock


class Database:
    """One open SQLite file. `readable_only` is the reason that the file can't be written to; None if it can. `behind`
    is true if the events in the write-ahead log could not be read.

    Every method raises `LedgerError` if SQLite or the file system reports an error.
    """

    def __init__(
        self, path: Path, connection: sqlite3.Connection, readable_only: str | None = None, *, behind: bool = False
    ) -> None:
        self.path = path
        self.connection = connection
        self.readable_only = readable_only
        self.behind = behind
        self._file = _identity(path)

    def in_place(self) -> bool:
        """Return whether the file at the path is still the file that was opened."""
        return self._file is None or _identity(self.path) == self._file

    def rows(self, sql: str, *values: object) -> list[Row]:
        """Return a query's rows."""
        with translated(self.path):
            return self.connection.execute(sql, values).fetchall()

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[Query]:
        """Yield a query function that reads a consistent snapshot of the file through a separate connection."""
        uri = f"{self.path.resolve().as_uri()}?mode=ro"
        with translated(self.path):
            db = sqlite3.connect(uri, uri=True, timeout=30, isolation_level=None)
            with contextlib.closing(db):
                db.execute("BEGIN")
                yield db.execute

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Acquire SQLite's write lock. Commit at the end, or roll back if the block raises an exception."""
        with translated(self.path):
            if self.readable_only is not None:
                raise LedgerError(
                    f"the ledger {self.path} can't be written: {self.readable_only}",
                    "Free some disk space or correct the file's permissions, then restart gpuwarden. "
                    "Nothing was launched.",
                )
            if not self.in_place():
                raise LedgerError(
                    f"the ledger {self.path} was moved, removed or replaced while it was open; nothing was written",
                    "Restore the file, then restart gpuwarden. Rented machines may be billed.",
                )
            self.connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self.connection.execute("COMMIT")
            except BaseException:
                if self.connection.in_transaction:
                    self.connection.execute("ROLLBACK")
                raise

    def insert(self, row: Row) -> bool:
        """Insert an event with its hash. Return False if its number, or its kind and token, are already taken."""
        with translated(self.path):
            try:
                self.connection.execute(INSERT, row)
            except sqlite3.IntegrityError as clash:
                if "UNIQUE" not in str(clash):
                    raise
                return False
        return True

    def lock(self, name: str) -> FileLock | None:
        """Acquire a file lock; None if another process holds it. The kernel releases it when the holder exits."""
        from filelock import FileLock, Timeout

        lock = FileLock(private_folder(self.path.parent / "locks") / f"{name}.lock", mode=0o600)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            return None
        return lock

    def close(self) -> None:
        """Close the file."""
        self.connection.close()


def _identity(path: Path) -> tuple[int, int] | None:
    """Return a file's device and inode; None if it does not exist."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
