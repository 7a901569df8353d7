"""The ledger's door: SQLite in WAL mode, events that are added and never changed.

A move of a state machine is checked against the present state inside the same transaction that records it, so two
processes can't both make it. Callers commit an intent here *before* they call the network, and the outcome after.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from gpuwarden.core.clock import Clock
from gpuwarden.core.errors import Conflict, LedgerError
from gpuwarden.core.guidance import Action, Hint, do
from gpuwarden.core.sanitize import line
from gpuwarden.core.states import Job, Lease, Teardown, check_move

APPLICATION_ID: Final = 0x67707577  # "gpuw"
VERSION: Final = 1
_MACHINES: Final = {"job": (Job, Job.DRAFT), "lease": (Lease, Lease.NONE), "teardown": (Teardown, None)}


@dataclass(frozen=True)
class Event:
    """One line of the ledger."""

    seq: int
    at: float
    subject: str
    kind: str
    state: str | None
    token: str | None
    actor: str
    body: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """The exported form, one JSON object per event."""
        return {
            "seq": self.seq,
            "at": self.at,
            "subject": self.subject,
            "kind": self.kind,
            "state": self.state,
            "actor": self.actor,
            "body": self.body,
        }


class Ledger:
    """One SQLite file. Open it in as many processes as you like."""

    def __init__(self, path: Path, clock: Clock, actor: str = "cli") -> None:
        self.path = path
        self.clock = clock
        self.actor = actor
        with _translated(path):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._db = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
            try:
                self._prepare()
            except BaseException:
                self._db.close()
                raise

    def _prepare(self) -> None:
        db = self._db
        db.execute("PRAGMA busy_timeout = 30000")
        found = db.execute("PRAGMA user_version").fetchone()[0]
        if found > VERSION:
            raise LedgerError(
                f"the ledger {self.path} is of version {found}; this gpuwarden reads up to {VERSION}",
                "Update gpuwarden, or point GPUWARDEN_HOME at another folder. The file was not touched.",
            )
        db.execute("PRAGMA journal_mode = WAL")
        # FULL: an intent must be on disk before the call that it announces.
        db.execute("PRAGMA synchronous = FULL")
        if found == 0:
            self._create()
        elif db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
            raise LedgerError(f"{self.path} is a database, but no gpuwarden ledger", "Move it away and try again.")

    def _create(self) -> None:
        with self._transaction():
            if self._db.execute("PRAGMA user_version").fetchone()[0]:
                return  # another process was faster
            if self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                raise LedgerError(f"{self.path} is a database, but no gpuwarden ledger", "Move it away and try again.")
            for statement in _statements(files("gpuwarden.ledger").joinpath("schema.sql").read_text("utf-8")):
                self._db.execute(statement)
            self._db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            self._db.execute(f"PRAGMA user_version = {VERSION}")

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Several events that are recorded together or not at all. No network call belongs inside."""
        with _translated(self.path):
            if self._db.in_transaction:
                yield
            else:
                with self._transaction():
                    yield

    # ------------------------------------------------------------------------------------------------ writing

    def add(
        self,
        subject: str,
        kind: str,
        body: dict[str, Any] | None = None,
        *,
        state: str | None = None,
        token: str | None = None,
    ) -> Event:
        """Record an event; with `state`, also a move, which must be legal from the present state.

        Raises Conflict for an illegal move or for a `token` that this kind of event has used already.
        """
        text = json.dumps(body or {}, ensure_ascii=False, allow_nan=False)
        with self.transaction():
            if state is not None:
                self._check(subject, state)
            try:
                at = self.clock.now()
                seq = self._db.execute(
                    "INSERT INTO events (at, subject, kind, state, token, actor, body) VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (at, subject, kind, state, token, self.actor, text),
                ).lastrowid
            except sqlite3.IntegrityError as clash:
                if "UNIQUE" not in str(clash):
                    raise
                raise Conflict(
                    f"{kind} happened already for {token}; it can happen only once",
                    do(Action.LIST_INSTANCES, "to see what became of it"),
                ) from clash
        assert seq is not None
        return Event(seq, at, subject, kind, state, token, self.actor, json.loads(text))

    def _check(self, subject: str, state: str) -> None:
        machine, first = _MACHINES[subject.partition("/")[0]]
        present = self.state(subject)
        if present is None and first is None:
            return  # the first event of a teardown sets its first state
        check_move(subject, machine(present) if present else first, machine(state))  # type: ignore[type-var]

    # ------------------------------------------------------------------------------------------------ reading

    def state(self, subject: str) -> str | None:
        """The present state of a subject, None before its first move."""
        row = self._one("SELECT state FROM current WHERE subject = ?", subject)
        return row[0] if row else None

    def last(self, subject: str, *kinds: str) -> Event | None:
        """The latest event of a subject, of these kinds when any are given."""
        where, marks = (f" AND kind IN ({','.join('?' * len(kinds))})", kinds) if kinds else ("", ())
        found = self._events(f"subject = ?{where} ORDER BY seq DESC LIMIT 1", subject, *marks)
        return found[0] if found else None

    def used(self, kind: str, token: str) -> Event | None:
        """The event of `kind` that used `token`, if there was one."""
        found = self._events("kind = ? AND token = ?", kind, token)
        return found[0] if found else None

    def events(
        self, subject: str | None = None, *, kind: str | None = None, after: int = 0, limit: int = 10_000
    ) -> list[Event]:
        """Events in order, of one subject or of all."""
        where, values = ["seq > ?"], [after]
        for column, value in (("subject", subject), ("kind", kind)):
            if value is not None:
                where.append(f"{column} = ?")
                values.append(value)  # type: ignore[arg-type]
        return self._events(" AND ".join(where) + " ORDER BY seq LIMIT ?", *values, limit)

    def subjects(self, machine: str, *states: str) -> list[str]:
        """The subjects of a machine, newest last; only those in the given states when any are given."""
        where = f" AND state IN ({','.join('?' * len(states))})" if states else ""
        with _translated(self.path):
            rows = self._db.execute(
                f"SELECT subject FROM current WHERE machine = ?{where} ORDER BY seq",  # noqa: S608 - marks only
                (machine, *states),
            ).fetchall()
        return [row[0] for row in rows]

    def count(self) -> int:
        """How many events there are."""
        row = self._one("SELECT count(*) FROM events")
        return int(row[0]) if row else 0

    def _one(self, sql: str, *values: object) -> tuple[Any, ...] | None:
        with _translated(self.path):
            row: tuple[Any, ...] | None = self._db.execute(sql, values).fetchone()
        return row

    def _events(self, where: str, *values: object) -> list[Event]:
        sql = f"SELECT seq, at, subject, kind, state, token, actor, body FROM events WHERE {where}"  # noqa: S608
        with _translated(self.path):
            rows = self._db.execute(sql, values).fetchall()
        return [_event(*row) for row in rows]


def _event(  # the columns, in the order of the query
    seq: int, at: float, subject: str, kind: str, state: str | None, token: str | None, actor: str, body: str
) -> Event:
    try:
        told = json.loads(body)
    except ValueError as error:
        raise damaged(f"event {seq} of {subject}", error) from error
    if not isinstance(told, dict):
        raise damaged(f"event {seq} of {subject}", "it is no JSON object")
    return Event(seq, at, subject, kind, state, token, actor, told)


def damaged(what: str, why: object) -> LedgerError:
    """The error for a ledger that the database can read and we can't: something changed its bytes."""
    return LedgerError(
        f"the ledger is damaged at {what} ({line(why, 120)}); nothing was written to it",
        "Bring a copy of it back if you have one. Rented machines may be billing; see their consoles.",
    )


def _statements(script: str) -> Iterator[str]:
    """The statements of an SQL script; `executescript` would commit behind our back."""
    statement = ""
    for text in script.splitlines(keepends=True):
        statement += text
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.DatabaseError as error:
        raise LedgerError(*_explain(path, str(error))) from error
    except OSError as error:
        raise LedgerError(
            f"the ledger {path} can't be opened: {error.strerror or error}",
            ("Check the folder and its permissions.", do(Action.DOCTOR, "to see which one is in use")),
        ) from error


def _explain(path: Path, text: str) -> tuple[str, Hint]:
    if any(words in text for words in ("malformed", "not a database", "Could not decode")):
        return (
            f"the ledger {path} is damaged ({text}); nothing was written to it",
            "Keep it; `sqlite3 FILE .recover` may bring it back. Rented machines may be billing; see their consoles.",
        )
    if "full" in text or "disk I/O" in text:
        return (
            f"the ledger {path} can't be written: {text}",
            "Free some disk space, then call again; nothing was launched.",
        )
    if "readonly" in text or "unable to open" in text:
        return (
            f"the ledger {path} can't be opened for writing: {text}",
            "Check its permissions, or set GPUWARDEN_HOME to a folder of yours.",
        )
    return f"the ledger {path} answered: {text}", (do(Action.RETRY), do(Action.DOCTOR, "if it stays"))
