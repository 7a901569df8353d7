"""Check an entire ledger: the hash chain of the events, and the tables that are derived from them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Final

from gpuwarden.ledger.chain import Break, Query, Row, first_break
from gpuwarden.ledger.migrate import rebuilt
from gpuwarden.ledger.store import Ledger

TABLES: Final = ("current", "alerts")


@dataclass(frozen=True)
class Audit:
    """The result of an audit. `broken` is the first break in the hash chain, and `differs` lists the
    derived tables that do not match the events.
    """

    broken: Break | None
    differs: tuple[str, ...] = ()


def audit(ledger: Ledger) -> Audit:
    """Check every event of a ledger. This takes about 20 s for a million events, so call it in a thread.

    Raises `LedgerError` if SQLite can't read the file.
    """
    with ledger.snapshot() as query:
        broken = first_break(query)
        if broken is not None:
            return Audit(broken)
        with contextlib.closing(rebuilt(query)) as fresh:
            return Audit(None, tuple(name for name in TABLES if _rows(query, name) != _rows(fresh.execute, name)))


def _rows(query: Query, table: str) -> list[Row]:
    return list(query(f"SELECT * FROM {table} ORDER BY 1, 2, 3"))  # noqa: S608 - one of TABLES; keys come first
