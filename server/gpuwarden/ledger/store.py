"""SQLite event store: WAL mode, events that are added and never changed.

A move of a state machine is checked against the present state inside the same transaction that records it, so two
processes can't both make it. Callers commit an intent here *before* they call the network, and the outcome after.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from gpuwarden.core.clock import Clock
from gpuwarden.core.errors import Conflict
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.states import Job, Lease, Teardown, check_move
from gpuwarden.ledger.chain import GENESIS, Head, HeadFile, link
from gpuwarden.ledger.event import Event
from gpuwarden.ledger.events import Body
from gpuwarden.ledger.failures import translated
from gpuwarden.ledger.migrate import INSERT
from gpuwarden.ledger.opening import Opened, open_ledger
from gpuwarden.ledger.reading import Reader
from gpuwarden.ledger.trouble import Trouble, trouble_of
from gpuwarden.private import private_file

B = TypeVar("B", bound=Body)
_MACHINES: Final = {"job": (Job, Job.DRAFT), "lease": (Lease, Lease.NONE), "teardown": (Teardown, None)}


class Ledger(Reader):
    """One SQLite file. Open it in as many processes as you like.

    Where it can't be opened for writing it is opened for reading, and every write raises `LedgerError`.
    """

    def __init__(self, path: Path, clock: Clock, actor: str = "cli") -> None:
        self.clock = clock
        self.actor = actor
        self._head = HeadFile(path)
        self._tail: Head | None = None
        self._opened: Opened = open_ledger(path, self._head)
        super().__init__(path, self._opened.db)
        try:
            self._sound = self._is_sound()
            for ending in ("", "-wal", "-shm"):  # SQLite makes them as the umask says
                private_file(path.with_name(path.name + ending))
        except BaseException:
            self.close()
            raise

    def _is_sound(self) -> bool:
        """Whether the head may follow this ledger: not one that lost events, or the loss would be forgotten."""
        sound = self.readable_only is None and self.trouble() is None
        if sound and self._head.read() is None and (last := self._last()).seq:
            self._head.write(last)
        return sound

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
            self._known.clear()  # it may contain events that are taken back
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

    def add(self, subject: str, body: B, *, token: str | None = None, moves: bool = True) -> Event[B]:
        """Record an event, and the move that it makes unless `moves` is false or the subject has no states.

        Raises Conflict for an illegal move or for a `token` that this kind of event has used already.
        """
        moved = body.MOVES_TO if moves and subject.partition("/")[0] in _MACHINES else None
        event: Event[B] = self.append(
            subject, body.kind(), body.stored(), version=body.VERSION, state=moved, token=token
        )
        return event

    def append(
        self,
        subject: str,
        kind: str,
        body: Mapping[str, Any] | None = None,
        *,
        version: int = 1,
        state: str | None = None,
        token: str | None = None,
    ) -> Event[Any]:
        """Record an event as it is stored. Use `add`, whose events are declared and checked."""
        text = json.dumps(body or {}, ensure_ascii=False, allow_nan=False)
        with self.transaction():
            if state is not None:
                machine, first = _MACHINES[subject.partition("/")[0]]
                present = self.state(subject)
                before = machine(present) if present else first
                if before is not None:  # the first event of a teardown sets its first state
                    check_move(subject, before, machine(state))  # type: ignore[type-var]
            last, at = self._tail or self._last(), float(self.clock.now())
            row = (last.seq + 1, at, subject, kind, version, state, token, self.actor, text)
            digest = link(last.hash, row)
            try:
                self._db.execute(INSERT, (*row, digest))
            except sqlite3.IntegrityError as clash:
                if "UNIQUE" not in str(clash):
                    raise
                raise Conflict(
                    f"{kind} happened already for {token}; it can happen only once",
                    do(Action.LIST_INSTANCES, "to see what became of it"),
                ) from clash
            self._tail = Head(last.seq + 1, digest)
        return Event(*row)

    def _last(self) -> Head:
        row = self._one("SELECT seq, hash FROM events ORDER BY seq DESC LIMIT 1")
        return Head(int(row[0]), str(row[1])) if row else Head(0, GENESIS)
