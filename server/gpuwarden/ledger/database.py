"""Describe what a database must offer to be the home of a ledger. The tables and what follows from events are equal.

Queries are written once, in `reading.py`, in the SQL that every home understands, with `?` where a value goes. What
each home says in its own words (the schema, an insert, a lock, JSON) is in the module of that home.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Final, Protocol

Row = tuple[Any, ...]
Query = Callable[[str], Iterator[Row]]
"""Yield the rows of a query one by one; the events of a ledger may not fit into memory."""
COLUMNS: Final = "seq, at, subject, kind, version, state, token, actor, body"
"""Columns of an event that its hash covers."""


class Held(Protocol):
    """A lock that this process has."""

    def release(self) -> None:
        """Let others have it."""


class Database(Protocol):
    """One open database. Every method raises `LedgerError` for what the database can't do."""

    readable_only: str | None
    """Why it can't be written; None where it can."""
    behind: bool
    """The newest events may be missing."""
    ended_leases: ClassVar[str]
    """SQL of the rows of `EndedLease` after a time."""
    jobs_of_script: ClassVar[str]
    """SQL of the subjects of jobs: those in a state with a script's digest, then those in a state without any."""

    @property
    def name(self) -> str:
        """Return the path or the address, for people; a secret is never part of it."""

    @property
    def in_transaction(self) -> bool:
        """Return whether a transaction is open."""

    def in_place(self) -> bool:
        """Return whether what was opened is still where it was."""

    def rows(self, sql: str, *values: object) -> list[Row]:
        """Return the rows of a query."""

    def snapshot(self) -> AbstractContextManager[Query]:
        """Let a query see one state of the database, whatever others add meanwhile."""

    def transaction(self) -> AbstractContextManager[None]:
        """Keep other writers out, and commit at the end or take everything back."""

    def insert(self, row: Row) -> bool:
        """Add an event with its hash. False where its number, or its kind and token, are in the ledger already."""

    def lock(self, name: str) -> Held | None:
        """Take a lock that ends with this process at the latest; None while somebody else has it."""

    def close(self) -> None:
        """Close the database and give every lock back."""
