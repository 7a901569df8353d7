"""Translate the errors of SQLite and of the file system into `LedgerError`."""

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
    "Keep it; `sqlite3 FILE .recover` may bring it back. Rented machines may be billing; see their consoles."
)


@contextlib.contextmanager
def translated(path: Path) -> Iterator[None]:
    """Raise `LedgerError` for what SQLite or the file system could not do with the ledger at `path`."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        raise LedgerError(*_explain(path, error)) from error
    except OSError as error:
        raise LedgerError(
            f"the ledger {path} can't be opened: {error.strerror or error}",
            ("Check the folder and its permissions.", do(Action.DOCTOR, "to see which one is in use")),
        ) from error


def may_be_read(error: sqlite3.Error) -> bool:
    """Return whether a ledger that could not be opened for writing may still be readable: no room, or no permission."""
    return _code(error) in _NO_ROOM | _NO_ACCESS


def damaged(what: str, why: object) -> LedgerError:
    """Make the error for a ledger that the database can read and this code can't: something changed its bytes."""
    return LedgerError(
        f"the ledger is damaged at {what} ({line(why, 120)}); nothing was written to it",
        "Bring a copy of it back if you have one. Rented machines may be billing; see their consoles.",
    )


def _code(error: sqlite3.Error) -> int:
    """Return the primary result code; 0 where SQLite gave none."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _explain(path: Path, error: sqlite3.DatabaseError) -> tuple[str, Hint]:
    code = _code(error)
    # A text column that is not UTF-8 has no code of SQLite's own: Python's reader refuses it.
    if code in _DAMAGED or (code == 0 and isinstance(error, sqlite3.OperationalError)):
        return f"the ledger {path} is damaged ({error}); nothing was written to it", _KEEP_IT
    if code in _NO_ROOM:
        return (
            f"the ledger {path} can't be written: {error}",
            "Free some disk space, then call again; nothing was launched.",
        )
    if code in _NO_ACCESS:
        return (
            f"the ledger {path} can't be opened for writing: {error}",
            "Check its permissions, or set GPUWARDEN_HOME to a folder of yours.",
        )
    return f"the ledger {path} answered: {error}", (do(Action.RETRY), do(Action.DOCTOR, "if it stays"))
