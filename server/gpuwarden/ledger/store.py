"""SQLite event store: WAL mode, events that are added and never changed.

A move of a state machine is checked against the present state inside the same transaction that records it, so two
processes can't both make it. Callers commit an intent here *before* they call the network, and the outcome after.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpuwarden.core.clock import Clock
from gpuwarden.core.errors import Conflict
from gpuwarden.core.states import Job, Lease, Teardown, check_move
from gpuwarden.ledger.chain import GENESIS, Head, HeadFile, link
from gpuwarden.ledger.failures import damaged, translated
from gpuwarden.ledger.migrate import INSERT
from gpuwarden.ledger.opening import Opened, open_ledger
from gpuwarden.ledger.trouble import Trouble, trouble_of

_MACHINES: Final = {"job": (Job, Job.DRAFT), "lease": (Lease, Lease.NONE), "teardown": (Teardown, None)}
_KEPT_SUBJECTS: Final = 1_000
"""Subjects whose events this process keeps in memory."""


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
        """Return the exported form, one JSON object per event."""
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
    """One SQLite file. Open it in as many processes as you like.

    Where it can't be opened for writing it is opened for reading, and every write raises `LedgerError`.
    """

    def __init__(self, path: Path, clock: Clock, actor: str = "cli") -> None:
        self.path = path
        self.clock = clock
        self.actor = actor
        self._head = HeadFile(path)
        self._tail: Head | None = None
        self._known: OrderedDict[str, tuple[Event, ...]] = OrderedDict()
        self._opened: Opened = open_ledger(path, self._head)
        self._db = self._opened.db
        self._sound = self._opened.readable_only is None and self.trouble() is None
        if self._sound and self._head.read() is None and (last := self._last()).seq:
            self._head.write(last)

    @property
    def readable_only(self) -> str | None:
        """Why this ledger can only be read; None where it can be written."""
        return self._opened.readable_only

    def trouble(self) -> Trouble | None:
        """Return what makes this ledger's word doubtful, such as events that are lost; None where nothing does."""
        with translated(self.path):
            return trouble_of(self.path, self._opened, self._head)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            self._tail = None
            self._known.clear()  # it may hold events that are taken back
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        if self._tail is not None and self._sound:
            self._head.write(self._tail)
        self._tail = None

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Record several events together or not at all. No network call belongs inside."""
        with translated(self.path):
            if self._db.in_transaction:
                yield
                return
            self._opened.check_writable(self.path)
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
            last, at = self._tail or self._last(), float(self.clock.now())
            row = (last.seq + 1, at, subject, kind, 1, state, token, self.actor, text)
            digest = link(last.hash, row)
            try:
                self._db.execute(INSERT, (*row, digest))
            except sqlite3.IntegrityError as clash:
                if "UNIQUE" not in str(clash):
                    raise
                raise Conflict(
                    f"{kind} happened already for {token}; it can happen only once",
                    "Look at what became of it with check_job or list_instances.",
                ) from clash
            self._tail = Head(last.seq + 1, digest)
        return Event(last.seq + 1, at, subject, kind, state, token, self.actor, json.loads(text))

    def _check(self, subject: str, state: str) -> None:
        machine, first = _MACHINES[subject.partition("/")[0]]
        present = self.state(subject)
        if present is None and first is None:
            return  # the first event of a teardown sets its first state
        check_move(subject, machine(present) if present else first, machine(state))  # type: ignore[type-var]

    def _last(self) -> Head:
        row = self._one("SELECT seq, hash FROM events ORDER BY seq DESC LIMIT 1")
        return Head(int(row[0]), str(row[1])) if row else Head(0, GENESIS)

    # ------------------------------------------------------------------------------------------------ reading

    def state(self, subject: str) -> str | None:
        """Return the present state of a subject, None before its first move."""
        row = self._one("SELECT state FROM current WHERE subject = ?", subject)
        return row[0] if row else None

    def history(self, subject: str) -> tuple[Event, ...]:
        """Return every event of a subject, in order. Events never change, so only new ones are read."""
        known = self._known.get(subject, ())
        new = self._events("subject = ? AND seq > ? ORDER BY seq", subject, known[-1].seq if known else 0)
        if new:
            known = self._known[subject] = (*known, *new)
            if len(self._known) > _KEPT_SUBJECTS:
                self._known.popitem(last=False)
        return known

    def last(self, subject: str, *kinds: str) -> Event | None:
        """Return the latest event of a subject, of these kinds when any are given."""
        return next((e for e in reversed(self.history(subject)) if not kinds or e.kind in kinds), None)

    def used(self, kind: str, token: str) -> Event | None:
        """Return the event of `kind` that used `token`, if there was one."""
        found = self._events("kind = ? AND token = ?", kind, token)
        return found[0] if found else None

    def events(
        self, subject: str | None = None, *, kind: str | None = None, after: int = 0, limit: int = 10_000
    ) -> list[Event]:
        """Return events in order, of one subject or of all."""
        where, values = ["seq > ?"], [after]
        for column, value in (("subject", subject), ("kind", kind)):
            if value is not None:
                where.append(f"{column} = ?")
                values.append(value)  # type: ignore[arg-type]
        return self._events(" AND ".join(where) + " ORDER BY seq LIMIT ?", *values, limit)

    def subjects(self, machine: str, *states: str) -> list[str]:
        """Return the subjects of a machine, newest last; only those in the given states when any are given."""
        where = f" AND state IN ({','.join('?' * len(states))})" if states else ""
        with translated(self.path):
            rows = self._db.execute(
                f"SELECT subject FROM current WHERE machine = ?{where} ORDER BY seq",  # noqa: S608 - marks only
                (machine, *states),
            ).fetchall()
        return [row[0] for row in rows]

    def count(self) -> int:
        """Return how many events there are."""
        row = self._one("SELECT count(*) FROM events")
        return int(row[0]) if row else 0

    def _one(self, sql: str, *values: object) -> tuple[Any, ...] | None:
        with translated(self.path):
            row: tuple[Any, ...] | None = self._db.execute(sql, values).fetchone()
        return row

    def _events(self, where: str, *values: object) -> list[Event]:
        sql = f"SELECT seq, at, subject, kind, state, token, actor, body FROM events WHERE {where}"  # noqa: S608
        with translated(self.path):
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
        raise damaged(f"event {seq} of {subject}", "it is not a JSON object")
    return Event(seq, at, subject, kind, state, token, actor, told)
