"""Store events in an append-only log in a SQLite file.

Each state transition is checked against the current state in the transaction that records it, so two processes can't
make the same transition. Callers commit an intent *before* they make a network call, and record the result afterward.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from gpuwarden.core.clock import Clock
from gpuwarden.core.errors import Conflict
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.states import Job, Lease, Teardown, check_move
from gpuwarden.ledger.chain import GENESIS, Head, HeadFile, Query, link
from gpuwarden.ledger.event import Event
from gpuwarden.ledger.events import Body
from gpuwarden.ledger.opening import open_database
from gpuwarden.ledger.reading import Reader
from gpuwarden.ledger.trouble import Trouble, integrity_problem
from gpuwarden.people import acting

if TYPE_CHECKING:
    from filelock import FileLock

B = TypeVar("B", bound=Body)
_MACHINES: Final = {"job": (Job, Job.DRAFT), "lease": (Lease, Lease.NONE), "teardown": (Teardown, None)}


class Ledger(Reader):
    """One ledger. Several processes may open it.

    If the file can't be opened for writing, it is opened read-only, and every write raises `LedgerError`.
    """

    def __init__(self, path: Path, clock: Clock, actor: str = "cli") -> None:
        self.path = path
        self.clock = clock
        self.actor = actor
        self._head = HeadFile(path)
        self._tail: Head | None = None
        self._before = Head(0, GENESIS)
        """The last event before the current transaction. It is set when the transaction records its first event."""
        super().__init__(open_database(path, self._head))
        try:
            self._sound = self.readable_only is None and self.trouble() is None
            # Never overwrite the recorded head if events were lost, because that would hide the loss.
            if self._sound and self._head.read() is None and (last := self._last()).seq:
                self._head.write(last)
        except BaseException:
            self.close()
            raise

    @property
    def acting(self) -> str:
        """Return the actor for new events: this process's actor, or the user whose request is being handled."""
        return acting(self.actor)

    @property
    def readable_only(self) -> str | None:
        """Return the reason that this ledger can't be written to; None if it can."""
        return self._db.readable_only

    def trouble(self) -> Trouble | None:
        """Return the ledger's integrity problem, such as lost events, or None."""
        return integrity_problem(self._db, self._head)

    def lock(self, name: str) -> FileLock | None:
        """Acquire a lock that all processes using this ledger share. Return None if another process holds it."""
        return self._db.lock(name)

    def snapshot(self) -> contextlib.AbstractContextManager[Query]:
        """Return a context manager that yields a query function for a consistent snapshot of the ledger."""
        return self._db.snapshot()

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            with self._db.transaction():
                yield
                # The file may be overwritten while this process runs. The recorded head must be the event before
                # this transaction or, if another process has recorded an event, any other event in this ledger.
                kept = self._head.read() if self._tail else None
                self._sound &= kept is None or kept == self._before or not kept.seq or self.has(kept)
        except BaseException:
            self._tail = None
            self._known.clear()  # the cache may contain events from the rolled-back transaction
            raise
        if self._tail is not None and self._sound:
            self._head.write(self._tail)
        self._tail = None

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Record several events atomically. Don't make network calls in the block."""
        if self._db.connection.in_transaction:
            yield
            return
        with self._transaction():
            yield

    # ------------------------------------------------------------------------------------------------ writing

    def add(self, subject: str, body: B, *, token: str | None = None, moves: bool = True) -> Event[B]:
        """Record an event and its state transition. If `moves` is false or the subject has no states, record only the
        event.

        Raises Conflict for an invalid transition, or if an event of this kind with this `token` exists.
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
        """Record an event in its stored form. Prefer `add`, which accepts only declared and validated events."""
        text = json.dumps(body or {}, ensure_ascii=False, allow_nan=False)
        with self.transaction():
            if state is not None:
                machine, first = _MACHINES[subject.partition("/")[0]]
                present = self.state(subject)
                before = machine(present) if present else first
                if before is not None:  # a teardown has no state before its first event
                    check_move(subject, before, machine(state))  # type: ignore[type-var]
            if self._tail is None:
                self._before = self._last()
            last, at = self._tail or self._before, float(self.clock.now())
            row = (last.seq + 1, at, subject, kind, version, state, token, self.acting, text)
            digest = link(last.hash, row)
            if not self._db.insert((*row, digest)):
                raise Conflict(
                    f"{kind} is already recorded for {token} and can be recorded only once",
                    do(Action.LIST_INSTANCES, "to see its result"),
                )
            self._tail = Head(last.seq + 1, digest)
        return Event(*row)

    def has(self, head: Head) -> bool:
        """Return whether an event with this number and hash is in the ledger."""
        return self._db.rows("SELECT hash FROM events WHERE seq = ?", head.seq) == [(head.hash,)]

    def _last(self) -> Head:
        row = self._one("SELECT seq, hash FROM events ORDER BY seq DESC LIMIT 1")
        return Head(int(row[0]), str(row[1])) if row else Head(0, GENESIS)
