"""Translate SQLite and file system errors into `LedgerError`."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gpuwarden.core.errors import LedgerError
from gpuwarden.core.guidance import Action, Hint, do
from gpuwarden.core.sanitize import line

_DAMAGED: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_NO_ROOM: Final = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR})
_NO_ACCESS: Final = frozenset({sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM})
_KEEP_IT: Final = (
    "Keep the file; `sqlite3 FILE .recover` may restore it. Rented machines may be billed; check "
    "the platforms' consoles."
)


@contextlib.contextmanager
def translated(path: Path) -> Iterator[None]:
    """Raise `LedgerError` if SQLite or the file system reports an error about the ledger at `path`."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        raise LedgerError(*_explain(path, error)) from error
    except OSError as error:
        raise LedgerError(
            f"the ledger {path} can't be opened: {error.strerror or error}",
            ("Check the folder and its permissions.", do(Action.DOCTOR, "to see which folder is in use")),
        ) from error


def may_be_read(error: sqlite3.Error) -> bool:
    """Return whether the error is due to a lack of disk space or permissions. The ledger may then still be readable."""
    return _code(error) in _NO_ROOM | _NO_ACCESS


def damaged(what: str, why: object) -> LedgerError:
    """Return the error for a ledger that SQLite can read but whose content is invalid."""
    return LedgerError(
        f"the ledger is damaged at {what} ({line(why, 120)}); nothing was written to it",
        "Restore a backup if you have one. Rented machines may be billed; check the platforms' consoles.",
    )


def _code(error: sqlite3.Error) -> int:
    """Return SQLite's primary result code, or 0 if the error has none."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _explain(path: Path, error: sqlite3.DatabaseError) -> tuple[str, Hint]:
    code = _code(error)
    # If a text column is not UTF-8, the error comes from Python and has no SQLite code.
    if code in _DAMAGED or (code == 0 and isinstance(error, sqlite3.OperationalError)):
        return f"the ledger {path} is damaged ({error}); nothing was written to it", _KEEP_IT
    if code in _NO_ROOM:
        return (
            f"the ledger {path} can't be written: {error}",
            "Free some disk space, then try again. Nothing was launched.",
        )
    if code in _NO_ACCESS:
        return (
            f"the ledger {path} can't be opened for writing: {error}",
            "Check its permissions, or set GPUWARDEN_HOME to a writable folder.",
        )
    return f"the ledger {path} failed: {error}", (do(Action.RETRY), do(Action.DOCTOR, "if the error persists"))
