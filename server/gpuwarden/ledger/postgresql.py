"""Keep the ledger on a PostgreSQL server, where one SQLite file is not enough.

One writer at a time: a transaction begins with an advisory lock, so that numbers have no gaps and every hash is over
the event before it. A lock on a job is an advisory lock of the session. It ends with the process, and when the
connection is lost; then this process writes nothing more before it has given that lock up.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from importlib.resources import files
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar, Final

from gpuwarden.core.errors import LedgerError, NotSupported
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.policy import LedgerServer
from gpuwarden.core.sanitize import line
from gpuwarden.ledger.chain import GENESIS, Head, HeadFile
from gpuwarden.ledger.database import Query, Row
from gpuwarden.ledger.failures import explain_postgresql
from gpuwarden.ledger.migrate import INSERT, VERSION
from gpuwarden.ledger.traces import traces
from gpuwarden.private import write_private

if TYPE_CHECKING:
    from psycopg import Connection, Cursor

_SESSION: Final = {
    "random_page_cost": "1.1",  # what is read is of live jobs, so it is in memory: an index and not the whole table
    "lock_timeout": "30s",
    "idle_in_transaction_session_timeout": "60s",  # a process that was stopped keeps nobody else from writing
    "tcp_keepalives_idle": "30",  # a machine that is gone loses its locks within a minute
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
}
_WRITERS: Final = "writers"
LIVE_RUNS: Final = "live_runs.json"
"""Beside the head: the run folders of jobs that are not over, for the guard, which can't ask a server at each call."""
_VARIABLES = threading.Lock()


class PostgresServer:
    """One session with a server. A lost one is opened again, except within a transaction."""

    ended_leases: ClassVar[str] = (
        "SELECT substr(c.subject, 7), c.job, c.platform, coalesce((SELECT readable(a.body)#>>'{spec,project}' "
        "FROM events a WHERE a.subject = 'job/' || c.job AND a.kind = 'job.accepted' LIMIT 1), ''), "
        "coalesce((SELECT a.actor FROM events a WHERE a.subject = 'job/' || c.job AND a.kind = 'job.accepted' "
        "LIMIT 1), ''), "
        "c.opened, c.since, (readable(e.body)->>'cost_usd')::float8 "
        "FROM current c JOIN events e ON e.seq = c.seq WHERE c.machine = 'lease' AND c.state = 'stopped' "
        "AND c.since > ? AND c.rest IS DISTINCT FROM 'stopped' ORDER BY c.since"
    )
    jobs_of_script: ClassVar[str] = (
        "SELECT subject FROM current WHERE machine = 'job' AND state = ? AND script = ? UNION ALL "
        "SELECT subject FROM current WHERE machine = 'job' AND state = ? AND script IS NULL"
    )

    def __init__(self, server: LedgerServer, head: HeadFile) -> None:
        self.server = server
        self._head = head
        self.readable_only: str | None = None
        self.behind = False
        self.locks: dict[str, Connection] = {}
        """By name: the session that took the lock. Where it is not the present one, the lock was lost with it."""
        self._inside = False
        self._moved = False
        with self._translated():
            self.connection = connect(server)

    @property
    def name(self) -> str:
        """Return the address; the password is no part of it."""
        s = self.server
        return f"postgresql://{s.user}@{s.host}:{s.port}/{s.database}, schema {s.schema_name}"

    @property
    def in_transaction(self) -> bool:
        """Return whether a transaction is open, or was when the connection was lost."""
        return self._inside

    def in_place(self) -> bool:
        """Return true: there is no file that could be moved away."""
        return True

    def rows(self, sql: str, *values: object) -> list[Row]:
        """Return the rows of a query."""
        with self._translated():
            return self._ask(sql.replace("?", "%s"), *values).fetchall()

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[Query]:
        """Let a query see one state of the ledger, over a session of its own, with rows sent in pieces."""
        numbers = count()
        with self._translated(), connect(self.server) as session:
            session.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")

            def query(sql: str) -> Iterator[Row]:
                with session.cursor(name=f"ledger{next(numbers)}") as cursor:
                    cursor.itersize = 2_000
                    yield from cursor.execute(sql.encode())

            yield query

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Keep every other writer out, and commit at the end or take everything back."""
        with self._translated():
            # Whatever a role's default is: a snapshot from before the lock would not have the event before.
            self._ask("BEGIN ISOLATION LEVEL READ COMMITTED")
            session, self._inside, self._moved = self.connection, True, False
            try:
                self._check_writable()
                session.execute("SELECT pg_advisory_xact_lock(%s)", [self._number(_WRITERS)])
                yield
                runs = self.rows("SELECT run_dir FROM live_runs ORDER BY 1") if self._moved else None
                session.execute("COMMIT")
            except BaseException:
                if not session.closed:
                    session.execute("ROLLBACK")
                raise
            finally:
                self._inside = False
        if runs is not None:
            with contextlib.suppress(OSError):  # the ledger has it; the guard's next look is a little older
                write_private(self._head.path.with_name(LIVE_RUNS), json.dumps([run for (run,) in runs]))

    def insert(self, row: Row) -> bool:
        """Add an event with its hash. False where its number, or its kind and token, are in the ledger already.

        An error would end the whole transaction, so a second one of a kind is passed over and not refused.
        """
        sql = INSERT.replace("?", "%s") + " ON CONFLICT DO NOTHING"
        self._moved = self._moved or (row[2].startswith("job/") and row[5] is not None)
        with self._translated():
            return self._session().execute(sql.encode(), row).rowcount == 1

    def lock(self, name: str) -> AdvisoryLock | None:
        """Take a lock of this session; None while another process, or another task of this one, has it."""
        if name in self.locks:  # the server would give a session its own lock a second time
            return None
        if not self.rows("SELECT pg_try_advisory_lock(?)", self._number(name))[0][0]:
            return None
        self.locks[name] = self.connection
        return AdvisoryLock(self, name)

    def unlock(self, name: str) -> None:
        """Give a lock back. One that was lost with its session is only forgotten."""
        session = self.locks.pop(name)
        with self._translated():
            try:
                session.execute("SELECT pg_advisory_unlock(%s)", [self._number(name)])
            except Exception:
                if not session.closed:
                    raise

    def close(self) -> None:
        """End the session, and with it every lock."""
        self.connection.close()

    def prepare(self) -> None:
        """Create the tables where there are none, and find out whether they can be written.

        Raises `LedgerError` for tables that are not a ledger's, or of a newer version than this code.
        """
        if not self._version():
            with self.transaction():
                if not self._version():  # another process was faster
                    self._create()
        ((standby, encoding, may_add),) = self.rows(
            "SELECT pg_is_in_recovery(), current_setting('server_encoding'), has_table_privilege('events', 'INSERT')"
        )
        if encoding != "UTF8":
            raise LedgerError(
                f"the database of {self.name} has the encoding {encoding}, which can't keep every text",
                "Create a database with the encoding UTF8 for the ledger.",
            )
        self.behind = standby
        if standby:
            self.readable_only = "the server is a standby of another one"
        elif not may_add:
            self.readable_only = f"the role {self.server.user} may not add to it"

    def _version(self) -> int:
        """Return the version of the tables; 0 where there are none."""
        # Read from the catalog's rows: `to_regclass` may answer from a cache, older than a lock that was waited for.
        tables = self.rows(
            "SELECT relname FROM pg_class JOIN pg_namespace n ON n.oid = relnamespace "
            "WHERE n.nspname = ? AND relname IN ('ledger_version', 'events')",
            self.server.schema_name,
        )
        if tables == [("events",)]:
            raise LedgerError(f"the tables of {self.name} are not a gpuwarden ledger", "Choose another schema_name.")
        found = int(self.rows("SELECT version FROM ledger_version")[0][0]) if tables else 0
        if found > VERSION:
            raise LedgerError(
                f"the ledger {self.name} is of version {found}; this gpuwarden reads up to {VERSION}",
                "Update gpuwarden. The ledger was not touched.",
            )
        return found

    def _create(self) -> None:
        if not self.rows("SELECT 1 FROM pg_namespace WHERE nspname = ?", self.server.schema_name):
            self._session().execute(f"CREATE SCHEMA {self.server.schema_name}".encode())
        self._session().execute(files("gpuwarden.ledger").joinpath("postgresql.sql").read_bytes())
        if self._head.read() is None and traces(self._head.path.parent):
            self._head.write(Head(0, GENESIS, lost=True))

    def _ask(self, sql: str, *values: object) -> Cursor:
        """Execute a statement, in a new session where the server ended the present one while nothing was asked."""
        session = self._session()
        try:
            return session.execute(sql.encode(), values)
        except Exception:
            if not session.closed or self._inside:
                raise
        return self._session().execute(sql.encode(), values)

    def _session(self) -> Connection:
        """Return the session; a new one where it was lost. Raises `LedgerError` within a transaction."""
        if self.connection.closed:
            if self._inside:
                raise LedgerError(f"the connection to the ledger {self.name} was lost; nothing of this was recorded")
            self.connection = connect(self.server)
        return self.connection

    def _check_writable(self) -> None:
        if self.readable_only is not None:
            raise LedgerError(
                f"the ledger {self.name} can't be written: {self.readable_only}",
                ("Check the table [ledger] of your policy; nothing was launched.", do(Action.DOCTOR)),
            )
        lost = sorted(name for name, taken in self.locks.items() if taken is not self.connection)
        if lost:
            raise LedgerError(
                f"the connection to the ledger {self.name} was lost while this process worked on {', '.join(lost)}; "
                "nothing more was recorded, since another process may be working on it",
                do(Action.RETRY),
            )

    def _number(self, name: str) -> int:
        """Return the number of an advisory lock, which all ledgers of a database share."""
        digest = hashlib.sha256(f"gpuwarden/{self.server.schema_name}/{name}".encode()).digest()
        return int.from_bytes(digest[:8], "big", signed=True)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        psycopg = _driver()
        try:
            yield
        except psycopg.Error as error:
            raise LedgerError(*explain_postgresql(self.name, error)) from error


class AdvisoryLock:
    """A lock that a session has on its server."""

    def __init__(self, server: PostgresServer, name: str) -> None:
        self._server = server
        self._name = name

    def release(self) -> None:
        """Let others have it."""
        self._server.unlock(self._name)


def open_postgresql(server: LedgerServer, head: HeadFile) -> PostgresServer:
    """Open a ledger on a server. Raises `LedgerError` for what is not a ledger, is newer, or can't be reached."""
    opened = PostgresServer(server, head)
    try:
        opened.prepare()
    except BaseException:
        opened.close()
        raise
    return opened


def connect(server: LedgerServer) -> Connection:
    """Open a session. Nothing of its address comes from a variable: whoever starts a process sets those."""
    psycopg = _driver()
    from psycopg.types.string import TextLoader

    options = {**_SESSION, "search_path": f"{server.schema_name},pg_temp"}
    values: dict[str, str | int] = {
        "host": server.host,
        "port": server.port,
        "dbname": server.database,
        "user": server.user,
        "client_encoding": "UTF8",
        "application_name": "gpuwarden",
        "connect_timeout": 10,
        "keepalives_idle": 30,  # a server that is gone is noticed within a minute, too
        "keepalives_interval": 10,
        "keepalives_count": 3,
        "tcp_user_timeout": 30_000,
        "gssencmode": "disable",  # it would go before TLS, with an authority that a variable names (KRB5_CONFIG)
        "options": " ".join(f"-c {name}={value}" for name, value in options.items()),
    }
    if server.on_this_machine:
        values["sslmode"] = "disable"
    else:
        authority = str(Path(server.ca_file).expanduser()) if server.ca_file else "system"
        values |= {"sslmode": "verify-full", "sslrootcert": authority}
    if server.password_file:
        values["password"] = _password(Path(server.password_file).expanduser())
    with _without_variables():
        session: Connection = psycopg.Connection.connect(**values, autocommit=True)
    session.adapters.register_loader("json", TextLoader)
    # An intent must be on disk before the call that it announces, whatever the server's default is.
    session.execute(
        "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
    )
    return session


@contextlib.contextmanager
def _without_variables() -> Iterator[None]:
    """Hide the variables that libpq reads."""
    with _VARIABLES:
        hidden = {name: os.environ.pop(name) for name in [*os.environ] if name.startswith("PG")}
        try:
            yield
        finally:
            os.environ.update(hidden)


def _password(file: Path) -> str:
    """Return the first line of a file that only its owner may read."""
    try:
        if os.name == "posix" and file.stat().st_mode & 0o077:
            raise LedgerError(f"others may read the password of the ledger in {file}", f"chmod 600 {file}")
        return file.read_text("utf-8").splitlines()[0]
    except (OSError, ValueError, IndexError) as error:
        raise LedgerError(
            f"the password of the ledger can't be read from {file} ({line(type(error).__name__)})",
            "Write it there as the first line, or leave password_file out to use ~/.pgpass.",
        ) from None


def _driver() -> ModuleType:
    """Return psycopg, which is imported where it is needed only."""
    try:
        import psycopg
    except ImportError as error:
        raise NotSupported(
            "the ledger is on a PostgreSQL server, and psycopg is not installed here",
            "Install it: pip install 'gpuwarden[postgresql]'.",
        ) from error
    return psycopg
