"""Create the schema, or migrate a ledger from an older version, in the caller's transaction.

Version 1 events are copied to the new table one at a time, in order and unchanged. Each event is hashed together with
the hash of the previous event, and the triggers fill the derived tables.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from importlib.resources import files
from typing import Final

from gpuwarden.ledger.chain import COLUMNS, GENESIS, Query, link

APPLICATION_ID: Final = 0x67707577  # "gpuw"
VERSION: Final = 3
INSERT: Final = f"INSERT INTO events ({COLUMNS}, hash) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"  # noqa: S608


def create(db: sqlite3.Connection) -> None:
    """Create the tables for an empty ledger."""
    for statement in _schema():
        db.execute(statement)
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {VERSION}")


def _schema() -> Iterator[str]:
    """Yield the schema's statements separately, because `executescript` would commit the caller's transaction."""
    statement = ""
    for text in files("gpuwarden.ledger").joinpath("schema.sql").read_text("utf-8").splitlines(keepends=True):
        statement += text
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def migrate(db: sqlite3.Connection) -> None:
    """Migrate a ledger from an older version. Its events keep their numbers, times and bodies."""
    if db.execute("PRAGMA user_version").fetchone()[0] == 1:  # in version 1, events have no hash
        for view in ("jobs", "leases", "teardowns", "current"):
            db.execute(f"DROP VIEW {view}")
        db.execute("ALTER TABLE events RENAME TO events_v1")
        for name in ("events_never_change", "events_never_vanish", "events_are_new"):
            db.execute(f"DROP TRIGGER {name}")
        for name in ("events_by_subject", "events_by_kind", "once"):
            db.execute(f"DROP INDEX {name}")
        create(db)
        before = GENESIS
        columns = COLUMNS.replace("version", "1")
        for row in db.execute(f"SELECT {columns} FROM events_v1 ORDER BY seq"):  # noqa: S608 - constants
            before = link(before, row)
            db.execute(INSERT, (*row, before))
        db.execute("DROP TABLE events_v1")
        return
    db.execute("DROP VIEW live_runs")  # version 2's view, which omits paused jobs
    db.execute(next(statement for statement in _schema() if "CREATE VIEW live_runs" in statement))
    db.execute(f"PRAGMA user_version = {VERSION}")


def rebuilt(query: Query) -> sqlite3.Connection:
    """Return a temporary database in which the derived tables are rebuilt from the events."""
    fresh = sqlite3.connect("", isolation_level=None)
    create(fresh)
    fresh.execute("BEGIN")
    for row in query(f"SELECT {COLUMNS}, hash FROM events ORDER BY seq"):  # noqa: S608 - a constant
        fresh.execute(INSERT, row)
    fresh.execute("COMMIT")
    return fresh
