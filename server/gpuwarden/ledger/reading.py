"""Read the ledger: the events of a subject or a kind, and the current state of every job, lease and teardown.

The time that a query takes does not depend on the number of ended jobs, unless the query returns ended jobs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from itertools import takewhile
from typing import Any, Final, NamedTuple, TypeVar, overload

from gpuwarden.ledger.chain import COLUMNS
from gpuwarden.ledger.database import Database
from gpuwarden.ledger.event import Event
from gpuwarden.ledger.events import AlertRaised, Body, kinds_of

B = TypeVar("B", bound=Body)
KEPT_SUBJECTS: Final = 500
"""The default number of subjects whose events a process caches."""
PIECE: Final = 25
"""The number of events to read at a time if the required number is unknown."""
ROW: Final = "subject, state, since, seq, opened, job, platform, name"


class Row(NamedTuple):
    """The current state of a job, lease or teardown. Times are in seconds since the epoch. `seq` is the last event's
    number.
    """

    subject: str
    state: str
    since: float
    seq: int
    opened: float
    job: str | None
    platform: str | None
    name: str | None


class EndedLease(NamedTuple):
    """A lease whose billing has stopped. `cost` is its recorded cost in US dollars; None if none was reported."""

    lease: str
    job: str
    platform: str
    project: str
    actor: str
    """The actor of the event that accepted the job."""
    opened: float
    since: float
    cost: float | None


class Reader:
    """Queries on a ledger."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._known: OrderedDict[str, tuple[Event[Any], ...]] = OrderedDict()
        self._kept = KEPT_SUBJECTS

    def keep(self, subjects: int) -> None:
        """Set the number of subjects whose events are cached. The most recently read subjects stay in the cache.

        If a caller repeatedly reads more subjects than this in the same order, the cache has no effect.
        """
        self._kept = max(KEPT_SUBJECTS, subjects)

    def state(self, subject: str) -> str | None:
        """Return the current state of a subject; None before its first transition."""
        row = self._one("SELECT state FROM current WHERE subject = ?", subject)
        return row[0] if row else None

    def history(self, subject: str) -> tuple[Event[Any], ...]:
        """Return all events of a subject, in order. Cached events are not read again, because events never change."""
        known = self._known.get(subject, ())
        new = self._events("subject = ? AND seq > ? ORDER BY seq", subject, known[-1].seq if known else 0)
        if new:
            known = self._known[subject] = (*known, *new)
        if known:
            self._known.move_to_end(subject)
        while len(self._known) > self._kept:
            self._known.popitem(last=False)
        return known

    @overload
    def last(self, subject: str, kind: str | None = None) -> Event[Any] | None: ...

    @overload
    def last(self, subject: str, kind: type[B]) -> Event[B] | None: ...

    def last(self, subject: str, kind: type[Body] | str | None = None) -> Event[Any] | None:
        """Return the latest event of a subject, or None. If `kind` is a base class, it selects all of its kinds."""
        kinds = _kinds(kind)
        return next((e for e in reversed(self.history(subject)) if not kinds or e.kind in kinds), None)

    def used(self, kind: type[B] | str, token: str) -> Event[B] | None:
        """Return the event with this kind and token, or None."""
        (name,) = _kinds(kind)
        return next(iter(self._events("kind = ? AND token = ?", name, token)), None)

    @overload
    def events(
        self, subject: str | None = None, *, kind: str | None = None, after: int = 0, limit: int = 10_000
    ) -> list[Event[Any]]: ...

    @overload
    def events(
        self, subject: str | None = None, *, kind: type[B], after: int = 0, limit: int = 10_000
    ) -> list[Event[B]]: ...

    def events(
        self,
        subject: str | None = None,
        *,
        kind: type[Body] | str | None = None,
        after: int = 0,
        limit: int = 10_000,
    ) -> list[Event[Any]]:
        """Return at most `limit` events after the number `after`, in order. `subject` and `kind` select events. If
        `kind` is a base class, it selects all of its kinds.
        """
        where, values = ["seq > ?"], list[object]([after])
        if subject is not None:
            where.append("subject = ?")
            values.append(subject)
        if kinds := _kinds(kind):
            where.append(f"kind IN ({_marks(kinds)})")
            values += sorted(kinds)
        return self._events(" AND ".join(where) + " ORDER BY seq LIMIT ?", *values, limit)

    # -------------------------------------------------------------------------------------------- present states

    def subjects(self, machine: str, *states: str, job: str | None = None, since: float | None = None) -> list[str]:
        """Return the subjects of a state machine, oldest transition first. If `states` are given, return only the
        subjects in these states.

        `job` selects the subjects of one job, and `since` those whose last transition is later than this time, in
        seconds since the epoch.
        """
        where, values = ["machine = ?"], list[object]([machine])
        if states:
            where.append(f"state IN ({_marks(states)})")
            values += states
        if job is not None:
            where.append("job = ?")
            values.append(job)
        if since is not None:
            where.append("since > ?")
            values.append(since)
        rows = self._db.rows(f"SELECT subject FROM current WHERE {' AND '.join(where)} ORDER BY seq", *values)  # noqa: S608
        return [row[0] for row in rows]

    def jobs_with_leases(self, *states: str, since: float | None = None) -> list[str]:
        """Return the ids of jobs that have a lease in one of these states.

        If `since` is given, `states` are ignored: return the ids of jobs with a lease that changed after this time.
        """
        where, values = ("since > ?", [since]) if since is not None else (f"state IN ({_marks(states)})", [*states])
        sql = f"SELECT job, min(seq) FROM current WHERE machine = 'lease' AND {where} GROUP BY job ORDER BY 2"  # noqa: S608
        return [row[0] for row in self._db.rows(sql, *values)]

    def page(self, machine: str, *states: str, limit: int = 50, before: Row | None = None) -> list[Row]:
        """Return a page of subjects, latest transition first. If `before` is given, return the page after that row."""
        where, values = ["machine = ?"], list[object]([machine])
        if states:
            where.append(f"state IN ({_marks(states)})")
            values += states
        if before is not None:
            where.append("(since, seq) < (?, ?)")
            values += (before.since, before.seq)
        sql = f"SELECT {ROW} FROM current WHERE {' AND '.join(where)} ORDER BY since DESC, seq DESC LIMIT ?"  # noqa: S608
        return [Row(*row) for row in self._db.rows(sql, *values, limit)]

    def row(self, subject: str) -> Row | None:
        """Return the row of one subject; None before its first transition."""
        found = self._one(f"SELECT {ROW} FROM current WHERE subject = ?", subject)  # noqa: S608 - a constant
        return Row(*found) if found else None

    def ended_leases(self, since: float) -> list[EndedLease]:
        """Return the leases whose machine no longer exists and whose billing stopped after `since`, earliest first."""
        sql = (
            "SELECT substr(c.subject, 7), c.job, c.platform, coalesce((SELECT json_extract(a.body, '$.spec.project') "
            "FROM events a WHERE a.subject = 'job/' || c.job AND +a.kind = 'job.accepted' LIMIT 1), ''), "
            "coalesce((SELECT a.actor FROM events a WHERE a.subject = 'job/' || c.job AND +a.kind = 'job.accepted' "
            "LIMIT 1), ''), "
            "c.opened, c.since, json_extract(e.body, '$.cost_usd') "
            "FROM current c JOIN events e ON e.seq = c.seq WHERE c.machine = 'lease' AND c.state = 'stopped' "
            "AND c.since > ? AND c.rest IS NOT 'stopped' ORDER BY c.since"
        )
        return [EndedLease(*row) for row in self._db.rows(sql, since)]

    def platforms(self) -> list[str]:
        """Return every platform from which a machine was rented."""
        found: list[str] = []
        sql = "SELECT min(platform) FROM current WHERE machine = 'lease' AND platform > ?"
        while (row := self._one(sql, found[-1] if found else "")) is not None and row[0] is not None:
            found.append(row[0])
        return found

    def jobs_of_script(self, digest: str, state: str) -> list[str]:
        """Return the subjects of the jobs in a state whose script has this digest or has no recorded digest."""
        sql = (
            "SELECT subject FROM current WHERE machine = 'job' AND state = ? AND script = ? UNION ALL SELECT subject "
            # Without INDEXED BY, SQLite would scan all jobs in the state, because it assumes that NULL is frequent.
            "FROM current INDEXED BY current_by_script WHERE machine = 'job' AND state = ? AND script IS NULL"
        )
        return [row[0] for row in self._db.rows(sql, state, digest, state)]

    def leases_of_instance(self, instance_id: str) -> list[str]:
        """Return the subjects of the leases whose machine was last reported with this provider id, oldest first."""
        sql = "SELECT subject FROM current WHERE instance = ? AND machine = 'lease' ORDER BY seq"
        return [row[0] for row in self._db.rows(sql, instance_id)]

    def resting(self) -> list[str]:
        """Return the subjects of the leases whose machines are stopped and still have their disks."""
        sql = "SELECT subject FROM current WHERE rest = 'stopped' AND state = 'stopped' ORDER BY seq"
        return [row[0] for row in self._db.rows(sql)]

    def recent(self, kind: type[B], since: float, limit: int = 1_000) -> list[Event[B]]:
        """Return the events of a kind that are later than `since`, in seconds since the epoch, newest first."""
        (name,) = kinds_of(kind)
        found: list[Event[B]] = []
        below = 1 << 62
        while len(found) < limit:  # Read small batches, because most requested periods are short.
            piece = self._events("kind = ? AND seq < ? ORDER BY seq DESC LIMIT ?", name, below, min(PIECE, limit))
            fresh = list(takewhile(lambda e: e.at > since, piece))
            found += fresh
            if len(fresh) < PIECE:
                break
            below = fresh[-1].seq
        return found[:limit]

    def alert(self, subject: str, condition: str, mark: str) -> Event[AlertRaised] | None:
        """Return the open alert for a subject, a condition and a mark, or None."""
        sql = "SELECT seq FROM alerts WHERE subject = ? AND kind = ? AND mark = ?"
        row = self._one(sql, subject, condition, mark)
        return self._events("seq = ?", row[0])[0] if row else None

    def standing_alerts(self) -> list[Event[AlertRaised]]:
        """Return the open alerts, except those that report a single event."""
        return self._events("seq IN (SELECT seq FROM alerts WHERE mark = '') ORDER BY seq")

    def last_seq(self) -> int:
        """Return the number of the latest event; 0 in an empty ledger."""
        row = self._one("SELECT max(seq) FROM events")
        return int(row[0] or 0) if row else 0

    def count(self) -> int:
        """Return the number of events."""
        row = self._one("SELECT count(*) FROM events")
        return int(row[0]) if row else 0

    def _one(self, sql: str, *values: object) -> tuple[Any, ...] | None:
        return next(iter(self._db.rows(sql, *values)), None)

    def _events(self, where: str, *values: object) -> list[Event[Any]]:
        rows = self._db.rows(f"SELECT {COLUMNS} FROM events WHERE {where}", *values)  # noqa: S608 - conditions of this file
        return [Event(*row) for row in rows]


def _kinds(kind: type[Body] | str | None) -> frozenset[str]:
    """Return the selected event kinds; an empty result means all kinds."""
    if kind is None:
        return frozenset()
    return frozenset({kind}) if isinstance(kind, str) else kinds_of(kind)


def _marks(values: Collection[object]) -> str:
    return ",".join("?" * len(values))
