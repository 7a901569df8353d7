"""Open a ledger's SQLite file and migrate it to the current schema. Open it read-only if it can't be written to."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gpuwarden.core.errors import LedgerError
from gpuwarden.ledger.chain import GENESIS, Head, HeadFile
from gpuwarden.ledger.database import Database
from gpuwarden.ledger.failures import may_be_read, translated
from gpuwarden.ledger.migrate import APPLICATION_ID, VERSION, create, migrate
from gpuwarden.ledger.traces import traces
from gpuwarden.private import private_file, private_folder

SYNCHRONOUS: Final = "FULL"
"""SQLite's setting for commits: an intent must be on disk before the network call that it announces."""


def open_database(path: Path, head: HeadFile) -> Database:
    """Open a ledger. Raises `LedgerError` if the file is not a ledger, has a newer version, or can't be read."""
    with translated(path):
        private_folder(path.parent)
        try:
            opened = _for_writing(path, head)
        except sqlite3.Error as error:
            if not (may_be_read(error) and path.exists() and path.stat().st_size):
                raise
            opened = _for_reading(path, str(error), error)
        with _closed_on_error(opened.connection):
            for ending in ("", "-wal", "-shm"):  # SQLite creates these files with the umask's permissions.
                private_file(path.with_name(path.name + ending))
        return opened


@contextlib.contextmanager
def _closed_on_error(db: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    try:
        yield db
    except BaseException:
        db.close()
        raise


def _for_writing(path: Path, head: HeadFile) -> Database:
    db = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
    with _closed_on_error(db):
        db.execute("PRAGMA busy_timeout = 30000")
        found = _version(db, path)
        db.execute(f"PRAGMA synchronous = {SYNCHRONOUS}")
        db.execute("PRAGMA journal_mode = WAL")
        if found != VERSION:
            _prepare(db, path, head)
        elif db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
            raise _foreign(path)
    return Database(path, db)


def _version(db: sqlite3.Connection, path: Path) -> int:
    found = int(db.execute("PRAGMA user_version").fetchone()[0])
    if found > VERSION:
        raise LedgerError(
            f"the ledger {path} has version {found}, but this gpuwarden supports versions up to {VERSION}",
            "Update gpuwarden, or set GPUWARDEN_HOME to another folder. The file was not changed.",
        )
    return found


def _prepare(db: sqlite3.Connection, path: Path, head: HeadFile) -> None:
    """Create or migrate the tables in one transaction, unless another process has already done this."""
    db.execute("BEGIN IMMEDIATE")
    try:
        found = _version(db, path)
        if found == 0:
            if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                raise _foreign(path)
            create(db)
            if head.read() is None and traces(path.parent):
                head.write(Head(0, GENESIS, lost=True))
        elif found < VERSION:
            if db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
                raise _foreign(path)
            migrate(db)
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def _for_reading(path: Path, why: str, error: sqlite3.Error) -> Database:
    """Open a ledger that can't be written to. Without SQLite's shared memory, events in the WAL can't be read."""
    uri = path.resolve().as_uri()
    wal = path.with_name(f"{path.name}-wal")
    for mode, behind in (("mode=ro", False), ("mode=ro&immutable=1", wal.exists() and wal.stat().st_size > 0)):
        db = sqlite3.connect(f"{uri}?{mode}", uri=True, timeout=5, isolation_level=None, check_same_thread=False)
        with contextlib.suppress(sqlite3.Error), _closed_on_error(db):
            return Database(path, _at_present(db, path), why, behind=behind)
    raise error


def _at_present(db: sqlite3.Connection, path: Path) -> sqlite3.Connection:
    """Check a database that was opened for reading. If it has an older version, migrate a copy in memory."""
    found = _version(db, path)
    if db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        raise _foreign(path)
    db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if found == VERSION:
        return db
    copy = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    db.backup(copy)
    db.close()
    copy.execute("BEGIN")
    migrate(copy)
    copy.execute("COMMIT")
    return copy


def _foreign(path: Path) -> LedgerError:
    return LedgerError(f"{path} is a database, but not a gpuwarden ledger", "Move the file away and try again.")
