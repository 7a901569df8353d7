"""Store metrics in SQLite: points and alerts. A point or alert that is posted again is not stored twice.

The store is one file next to the ledger, in WAL mode, so that the server can write while the page and the watch read.
If the file is lost, only curves are lost, so a commit does not wait for the disk (`synchronous = NORMAL`). If a process
crashes, no committed post is lost; after a power failure, the most recent posts may be lost.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from gpuwarden.core.errors import DiskError
from gpuwarden.metrics.points import NO_STEP, Ignored, PostedAlert, PostedPoints, Problem, Row
from gpuwarden.private import private_file, private_folder

FILE: Final = "metrics.db"
VERSION: Final = 1
APPLICATION_ID: Final = 0x67776D73  # "gwms"
MAX_SERIES: Final = 512
"""Maximum number of metrics per job."""
MAX_JOB_POINTS: Final = 20_000_000
MIN_FREE: Final = 256 << 20
"""Disk space in bytes reserved for the ledger, which must stay writable while a machine is billed."""
MAX_ALERTS: Final = 1_000
"""Maximum number of alerts per job; further alerts are not stored."""
MAX_MARKERS: Final = 1_000
_FINITE: Final = "value BETWEEN -1.7976931348623157e308 AND 1.7976931348623157e308"
_ODD: Final = "value IS NULL OR value > 1.7976931348623157e308 OR value < -1.7976931348623157e308"
"""This condition must match the condition in the index `odd_points`."""
_SERIES: Final = "(SELECT id FROM series WHERE job = ? AND name = ?)"

Cursor = tuple[int, int]
"""The step of the last point read and the point's time in microseconds. Pass the cursor to read the next page."""


class Point(NamedTuple):
    """One point: its step or None, its time in seconds since the epoch or None if unknown, and its value."""

    step: int | None
    at: float | None
    value: float


class Page(NamedTuple):
    """A page of points in order, and the cursor for the next page; None on the last page."""

    points: tuple[Point, ...]
    next: Cursor | None


class Series(NamedTuple):
    """One of a job's metrics: its name, number of points, and last point."""

    name: str
    total: int
    last: Point


class Marker(NamedTuple):
    """The position and time of a value that a chart can't show: `nan`, `inf` or `-inf`."""

    x: float
    value: str
    at: float | None = None


class Curve(NamedTuple):
    """A downsampled curve. `x` contains steps, or seconds since the epoch if `by_time` is true. `values` are finite.

    `total` is the number of points that the curve represents, and `odd` is the number of non-finite points. `markers`
    may list only some of the non-finite points. `times` contains each value's time in seconds since the epoch, or None
    if the time is unknown.
    """

    x: tuple[float, ...]
    values: tuple[float, ...]
    markers: tuple[Marker, ...]
    total: int
    odd: int
    by_time: bool
    times: tuple[float | None, ...] = ()


class StoredAlert(NamedTuple):
    """One alert as the job reported it. Pass its `id` to read the alerts that follow."""

    id: int
    type: str
    at: float
    fields: dict[str, Any]


@dataclass
class Batch:
    """Data to write in one transaction. `cursors` maps (job, source) to the offset after the batch's points."""

    posts: Sequence[PostedPoints] = ()
    alerts: Sequence[PostedAlert] = ()
    cursors: Mapping[tuple[str, str], int] = field(default_factory=dict)


class PostResult(NamedTuple):
    """The result for one post: the number of new points, the number already stored, and the omitted values."""

    stored: int
    known: int
    ignored: tuple[Ignored, ...]


class MetricStore:
    """The metrics in one state folder. Any number of processes may open the store, and each object is thread-safe."""

    def __init__(self, home: Path) -> None:
        self.path = private_folder(home) / FILE
        self._lock = threading.Lock()
        self._series: dict[tuple[str, str], int] = {}
        self._names: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        with self._translated():
            self._db = self._open()
            for ending in ("", "-wal", "-shm"):
                private_file(self.path.with_name(self.path.name + ending))

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    # ------------------------------------------------------------------------------------------------ writing

    def write(self, batch: Batch) -> list[PostResult]:
        """Store a batch in one transaction; return each post's result. If it raises DiskError, nothing is stored."""
        with self._lock, self._translated():
            if shutil.disk_usage(self.path.parent).free < MIN_FREE:
                raise OSError(f"the free disk space is below the {MIN_FREE >> 20} MiB reserved for the ledger")
            self._db.execute("BEGIN IMMEDIATE")
            try:
                written = [self._add(post) for post in batch.posts]
                self._db.executemany(
                    "INSERT OR IGNORE INTO alerts (job, key, type, at, body) SELECT ?, ?, ?, ?, ?"
                    " WHERE (SELECT count(*) FROM alerts WHERE job = ?) < ?",
                    [(a.job, a.key, a.type, a.at, json.dumps(a.fields), a.job, MAX_ALERTS) for a in batch.alerts],
                )
                self._db.executemany(
                    "INSERT INTO cursors VALUES (?, ?, ?)"
                    " ON CONFLICT DO UPDATE SET offset = max(offset, excluded.offset)",
                    [(job, source, offset) for (job, source), offset in batch.cursors.items()],
                )
                self._db.execute("COMMIT")
            except BaseException:
                # The rollback also removes the series that this transaction created.
                self._series.clear()
                self._names.clear()
                self._counts.clear()
                self._db.execute("ROLLBACK")
                raise
        return written

    def _add(self, post: PostedPoints) -> PostResult:
        if post.job not in self._counts:
            sql = "SELECT count(*) FROM points WHERE series IN (SELECT id FROM series WHERE job = ?)"
            self._counts[post.job] = int(self._db.execute(sql, (post.job,)).fetchone()[0])
        room = MAX_JOB_POINTS - self._counts[post.job]
        rows: list[tuple[int, int, int, float | None]] = []
        ignored = list(post.ignored)
        for row in post.rows:
            series = self._series_of(post.job, row.name)
            if series is None or len(rows) >= room:
                ignored.append(Ignored(row.name, Problem.TOO_MANY_NAMES if series is None else Problem.FULL))
            else:
                rows.append((series, row.step, row.at, None if math.isnan(row.value) else row.value))
        done = self._db.executemany("INSERT OR IGNORE INTO points VALUES (?, ?, ?, ?)", rows).rowcount if rows else 0
        self._counts[post.job] += done
        return PostResult(done, len(rows) - done, tuple(ignored))

    def _series_of(self, job: str, name: str) -> int | None:
        """Return the id of a series, creating it if necessary; None if the job has too many series."""
        found = self._series.get((job, name))
        if found is not None:
            return found
        sql = "SELECT id FROM series WHERE job = ? AND name = ?"
        row = self._db.execute(sql, (job, name)).fetchone()
        if row is None:
            if job not in self._names:
                counted = self._db.execute("SELECT count(*) FROM series WHERE job = ?", (job,)).fetchone()
                self._names[job] = int(counted[0])
            if self._names[job] >= MAX_SERIES:
                return None
            self._names[job] += 1
            row = self._db.execute("INSERT INTO series (job, name) VALUES (?, ?) RETURNING id", (job, name)).fetchone()
        if len(self._series) > 100_000:
            self._series.clear()
        self._series[(job, name)] = int(row[0])
        return int(row[0])

    # ------------------------------------------------------------------------------------------------ reading

    def version(self) -> int:
        """Return a number that changes with every commit by this object or by another process."""
        with self._lock, self._translated():
            other = int(self._db.execute("PRAGMA data_version").fetchone()[0])
            return (other << 32) + self._db.total_changes

    def cursor(self, job: str, source: str) -> int:
        """Return the byte offset up to which a spool file has been read; 0 if none of it has been read."""
        with self._reading() as db:
            row = db.execute("SELECT offset FROM cursors WHERE job = ? AND source = ?", (job, source)).fetchone()
        return int(row[0]) if row else 0

    def series(self, job: str) -> tuple[Series, ...]:
        """Return all of a job's metrics, sorted by name."""
        with self._reading() as db:
            named = db.execute("SELECT id, name FROM series WHERE job = ? ORDER BY name", (job,)).fetchall()
            return tuple(
                Series(name, self._size(db, key), self._last(db, key)) for key, name in named if self._size(db, key)
            )

    def latest(self, job: str) -> dict[str, Point]:
        """Return the last point of each of a job's metrics. The query time does not depend on the number of points."""
        with self._reading() as db:
            named = db.execute("SELECT id, name FROM series WHERE job = ? ORDER BY name", (job,)).fetchall()
            return {name: self._last(db, key) for key, name in named}

    @staticmethod
    def _size(db: sqlite3.Connection, series: int) -> int:
        return int(db.execute("SELECT count(*) FROM points WHERE series = ?", (series,)).fetchone()[0])

    @staticmethod
    def _last(db: sqlite3.Connection, series: int) -> Point:
        sql = "SELECT step, at, value FROM points WHERE series = ? ORDER BY step DESC, at DESC LIMIT 1"
        row = db.execute(sql, (series,)).fetchone()
        return _point(*row) if row else Point(None, None, math.nan)

    def points(self, job: str, metric: str, after: Cursor | None = None, limit: int = 10_000) -> Page:
        """Return the points after a cursor, unchanged, in order of step and time."""
        begin = after or (-2, -1)
        wanted = f"series = {_SERIES} AND (step, at) > (?, ?)"
        sql = f"SELECT step, at, value FROM points WHERE {wanted} ORDER BY step, at LIMIT ?"  # noqa: S608
        with self._reading() as db:
            rows = db.execute(sql, (job, metric, *begin, limit)).fetchall()
        last = (int(rows[-1][0]), int(rows[-1][1])) if len(rows) == limit and rows else None
        return Page(tuple(_point(*row) for row in rows), last)

    def downsampled(
        self, job: str, metric: str, points: int = 2_000, between: tuple[float, float] | None = None
    ) -> Curve:
        """Return a curve with about `points` points: the lowest and highest in each of `points / 2` buckets.

        A curve with fewer points is returned unchanged. The x axis is the step, or the time if no point has a step;
        points without a step are omitted if any other point has one. `between` selects a range of the x axis; `total`
        and `odd` then count only the points in this range.
        """
        with self._reading() as db:
            found = db.execute("SELECT id FROM series WHERE job = ? AND name = ?", (job, metric)).fetchone()
            return _downsampled(db, int(found[0]), points, between) if found else Curve((), (), (), 0, 0, False)

    def alerts(self, job: str, after: int = 0, limit: int = 100) -> tuple[StoredAlert, ...]:
        """Return a job's alerts that were stored after the alert with the id `after`, in order."""
        sql = "SELECT id, type, at, body FROM alerts WHERE job = ? AND id > ? ORDER BY id LIMIT ?"
        with self._reading() as db:
            rows = db.execute(sql, (job, after, limit)).fetchall()
        return tuple(StoredAlert(int(key), kind, at / 1e6, json.loads(body)) for key, kind, at, body in rows)

    def last_alert(self, job: str) -> int:
        """Return the id of a job's last alert; 0 if it has none."""
        with self._reading() as db:
            return int(db.execute("SELECT coalesce(max(id), 0) FROM alerts WHERE job = ?", (job,)).fetchone()[0])

    # --------------------------------------------------------------------------------------------------- the file

    def _open(self) -> sqlite3.Connection:
        db = self._connect()
        try:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute("BEGIN IMMEDIATE")
            found = int(db.execute("PRAGMA user_version").fetchone()[0])
            if found == 0 and not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                for statement in Path(__file__).with_name("schema.sql").read_text("utf-8").split(";"):
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {VERSION}")
                db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            elif found != VERSION or db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
                raise DiskError(
                    f"{self.path} is not a metric store that this version can read",
                    "Move the file to another folder. gpuwarden then creates a new, empty store.",
                )
            db.execute("COMMIT")
        except BaseException:
            db.close()
            raise
        return db

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path, timeout=30, isolation_level=None, check_same_thread=False)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """Open a separate connection, so that a long read never blocks a writer or another reader."""
        with self._translated(), contextlib.closing(self._connect()) as db:
            db.execute("PRAGMA query_only = 1")
            yield db

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise DiskError(
                f"the metric store {self.path} can't be used: {error}",
                "Free some disk space, or move the file to another folder.",
            ) from error


def _point(step: int, at: int, value: float | None) -> Point:
    return Point(None if step == NO_STEP else step, at / 1e6 if at else None, math.nan if value is None else value)


def _downsampled(db: sqlite3.Connection, series: int, points: int, between: tuple[float, float] | None = None) -> Curve:
    """Read a curve with SQLite, because reading a million rows in Python would be slower."""
    (last_step,) = db.execute("SELECT max(step) FROM points WHERE series = ?", (series,)).fetchone()
    if last_step is None:
        return Curve((), (), (), 0, 0, False)
    # Points without a step, stored as NO_STEP, are shown only if no point has a step; the x axis is then time.
    by_time = last_step == NO_STEP
    x, within = ("at", f"series = ? AND step = {NO_STEP} AND at") if by_time else ("step", "series = ? AND step")
    scale = 1e6 if by_time else 1
    ends = f"SELECT {x} FROM points WHERE {within} >= 0 ORDER BY {x} %s LIMIT 1"  # noqa: S608
    low, high = (int(db.execute(ends % way, (series,)).fetchone()[0]) for way in ("ASC", "DESC"))
    if between is not None:
        low, high = (min(max(round(place * scale), low), high) for place in between)
    odd = db.execute(
        f"SELECT {x}, value, at FROM points INDEXED BY odd_points WHERE series = ? AND ({_ODD}) ORDER BY step, at",  # noqa: S608
        (series,),
    ).fetchall()
    odd = [row for row in odd if low <= row[0] <= high]
    sql = f"SELECT {x}, value, at FROM points WHERE {within} BETWEEN ? AND ? AND {_FINITE} ORDER BY step, at LIMIT ?"  # noqa: S608
    rows = db.execute(sql, (series, low, high, points + 1)).fetchall()
    finite = len(rows)
    if finite > points:
        rows, finite = _extremes(db, series, (low, high, (high - low) // max(points // 2, 1) + 1), within)
    return Curve(
        x=tuple(place / scale for place, _, _ in rows),
        values=tuple(value for _, value, _ in rows),
        markers=tuple(
            Marker(place / scale, "nan" if value is None else "inf" if value > 0 else "-inf", at / 1e6 if at else None)
            for place, value, at in odd[:: len(odd) // MAX_MARKERS + 1]
        ),
        total=finite + len(odd),
        odd=len(odd),
        by_time=by_time,
        times=tuple(at / 1e6 if at else None for _, _, at in rows),
    )


def _extremes(
    db: sqlite3.Connection, series: int, bounds: tuple[int, int, int], within: str
) -> tuple[list[tuple[int, float, int]], int]:
    """Return the lowest and highest finite points in each bucket and both ends, in order; count the finite points.

    `bounds` is (first, last, width). Reading both values at once and then looking up their points is faster than
    reading the lowest and highest points separately.
    """
    x, (low, high, width) = within.rpartition(" ")[2], bounds
    finite = f"FROM points WHERE {within} BETWEEN ? AND ? AND {_FINITE}"
    rows: set[tuple[int, float, int]] = set()
    total = 0
    for begin in range(low, high + 1, width):
        piece = (series, begin, min(begin + width - 1, high))
        found = db.execute(f"SELECT count(*), min(value), max(value) {finite}", piece).fetchone()
        total += found[0]
        sql = f"SELECT {x}, value, at FROM points WHERE {within} BETWEEN ? AND ? AND value = ? LIMIT 1"  # noqa: S608
        rows |= {db.execute(sql, (*piece, value)).fetchone() for value in found[1:] if value is not None}
    end = f"SELECT {x}, value, at {finite} ORDER BY {x} %s LIMIT 1"
    ends = (db.execute(end % way, (series, low, high)).fetchone() for way in ("ASC", "DESC"))
    return sorted(rows.union(row for row in ends if row is not None)), total


__all__ = ["Batch", "Cursor", "Curve", "Marker", "MetricStore", "Page", "Point", "Row", "Series", "StoredAlert"]
