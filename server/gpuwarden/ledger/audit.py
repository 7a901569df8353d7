"""Check a whole ledger: the chain of its events, and the tables that follow from them."""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpuwarden.ledger.chain import Break, first_break
from gpuwarden.ledger.failures import translated
from gpuwarden.ledger.migrate import rebuilt

TABLES: Final = ("current", "alerts")


@dataclass(frozen=True)
class Audit:
    """What was found. `differs` are the tables that say something else than the events do."""

    broken: Break | None
    differs: tuple[str, ...] = ()


def audit(path: Path) -> Audit:
    """Read every event of a ledger. It takes about 20 s for a million; call it in a thread.

    Raises `LedgerError` for what SQLite can't read.
    """
    uri = f"{path.resolve().as_uri()}?mode=ro"
    with translated(path), contextlib.closing(sqlite3.connect(uri, uri=True, timeout=30, isolation_level=None)) as db:
        db.execute("BEGIN")  # one view of the file, whatever others add meanwhile
        broken = first_break(db)
        if broken is not None:
            return Audit(broken)
        with contextlib.closing(rebuilt(db)) as fresh:
            return Audit(None, tuple(name for name in TABLES if _rows(db, name) != _rows(fresh, name)))


def _rows(db: sqlite3.Connection, table: str) -> list[tuple[object, ...]]:
    return db.execute(f"SELECT * FROM {table} ORDER BY 1, 2, 3").fetchall()  # noqa: S608 - one of TABLES
