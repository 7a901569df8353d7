"""A ledger on a PostgreSQL server can't be rewritten, gives a job to one process at a time, and survives lost lines."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from doors import answer, gpuwarden
from fakes import FakeClock
from gpuwarden.app import open_context
from gpuwarden.config import load_config
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import BadRequest, Conflict, LedgerError, NotSupported
from gpuwarden.core.policy import LedgerServer, Policy
from gpuwarden.core.states import Job
from gpuwarden.interfaces.hooks.guard.protected import live_runs
from gpuwarden.interfaces.mcp.wording import in_calls
from gpuwarden.ledger.audit import Audit, audit
from gpuwarden.ledger.events import JobUnknown, MachineSeen
from gpuwarden.ledger.migrate import VERSION
from gpuwarden.ledger.postgresql import PostgresServer
from gpuwarden.ledger.store import Ledger
from gpuwarden.lifecycle.context import Context
from paths import ROOT
from postgres_kit import OWNER, Homes, Server

pytestmark = pytest.mark.real("PostgreSQL")
SQL = ROOT / "server/gpuwarden/ledger/postgresql.sql"


@pytest.fixture
def served(postgres: Server) -> Iterator[Homes]:
    homes = Homes(postgres)
    yield homes
    for ledger in homes.opened:
        ledger.close()


@pytest.fixture
def ledger(served: Homes, tmp_path: Path) -> Ledger:
    return served.open(tmp_path / "ledger.db", FakeClock())


@pytest.fixture
def again(served: Homes, tmp_path: Path) -> Callable[[], Ledger]:
    """Open the same ledger once more, as another process would."""
    return lambda: served.open(tmp_path / "ledger.db", FakeClock())


def session(ledger: Ledger) -> PostgresServer:
    assert isinstance(ledger._db, PostgresServer)
    return ledger._db


def cut(served: Homes, ledger: Ledger) -> None:
    """Let the server drop a ledger's session, as a restart or a broken line does."""
    assert served.server
    served.server.sql(f"SELECT pg_terminate_backend({session(ledger).connection.info.backend_pid}, 5000)")


# ---------------------------------------------------------------------------------------------------- append-only


@pytest.mark.attack("ledger", "rewrites the tables of a PostgreSQL server")
@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE events SET at = 0",
        "UPDATE events SET at = 0 WHERE false",
        "DELETE FROM events",
        "TRUNCATE events",
        "TRUNCATE events, current, alerts CASCADE",
        "INSERT INTO events SELECT * FROM events ON CONFLICT (seq) DO UPDATE SET at = 0",
        "SET session_replication_role = replica; DELETE FROM events",
        "SET session_replication_role = replica; TRUNCATE events",
    ],
)
def test_events_can_be_neither_changed_nor_removed(
    ledger: Ledger, served: Homes, tmp_path: Path, statement: str
) -> None:
    import psycopg

    ledger.append("job/j1", "job.accepted", {"a": 1}, state=Job.ACCEPTED)
    schema = served.address(tmp_path / "ledger.db").schema_name
    assert served.server
    with pytest.raises(psycopg.errors.RaiseException, match="append-only"):
        served.server.sql(statement, database="gpuwarden", schema=schema)
    assert [e.body for e in ledger.events()] == [{"a": 1}] and audit(ledger).broken is None


@pytest.mark.attack("ledger", "uses the serving role's rights on a PostgreSQL server")
def test_a_serving_role_adds_events_and_can_do_nothing_else(served: Homes, tmp_path: Path) -> None:
    """The owner makes the tables with `psql`, as `docs/serving.md` says; gpuwarden serves under another role."""
    import psycopg

    path = tmp_path / "ledger.db"
    schema = served.address(path).schema_name
    assert served.server
    served.server.sql("DROP ROLE IF EXISTS serves", "CREATE ROLE serves LOGIN")
    served.server.sql(
        f"CREATE SCHEMA {schema} AUTHORIZATION {OWNER}",
        f"SET ROLE {OWNER}",
        SQL.read_text("utf-8"),
        f"GRANT USAGE ON SCHEMA {schema} TO serves",
        f"GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO serves",
        "GRANT INSERT ON events TO serves",
        database="gpuwarden",
        schema=schema,
    )
    address = served.address(path).model_copy(update={"user": "serves"})
    ledger = Ledger(path, FakeClock(), "cli", address)
    served.opened.append(ledger)
    ledger.append("job/j1", "job.accepted", state=Job.ACCEPTED)
    assert ledger.state("job/j1") == Job.ACCEPTED and audit(ledger) == Audit(None)
    for statement in (
        "UPDATE current SET state = 'stopped'",
        "DELETE FROM alerts",
        "ALTER TABLE events DISABLE TRIGGER ALL",
        "TRUNCATE events",
        "DROP TABLE events",
        "CREATE TABLE mine (x int)",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            session(ledger).connection.execute(statement.encode())
    served.server.sql("REVOKE INSERT ON events FROM serves", database="gpuwarden", schema=schema)
    reads = Ledger(path, FakeClock(), "cli", address)
    served.opened.append(reads)
    trouble = reads.trouble()
    assert reads.count() == 1 and trouble is not None and trouble.code == "read_only" and not trouble.incomplete
    with pytest.raises(LedgerError, match="may not add"):
        reads.add("job/j1", JobUnknown(why="x"))


# ---------------------------------------------------------------------------------------------------------- locks


@pytest.mark.anyio
async def test_one_process_at_a_time_works_on_a_job(served: Homes, tmp_path: Path) -> None:
    """Two machines: each has a home folder, and both have one ledger."""
    address = served.address(tmp_path / "ledger.db")
    ctxs = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        ledger = Ledger(tmp_path / name / "ledger.db", SystemClock(), "cli", address)
        served.opened.append(ledger)
        ctxs.append(Context(ledger, Policy(), SystemClock(), tmp_path / name, env={}))
    one, two = ctxs
    async with one.lock("j1"):
        with pytest.raises(Conflict, match="another process"):
            async with two.lock("j1", patience_s=0.05):
                pass
        with pytest.raises(Conflict, match="another process"):  # nor does another task of the same process
            async with one.lock("j1", patience_s=0.05):
                pass
        async with two.lock("j2", patience_s=0.05):
            pass
    async with two.lock("j1", patience_s=0.05):
        pass


HOLDER = """
import os, sys, time
from pathlib import Path
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.policy import LedgerServer
from gpuwarden.ledger.events import MachineSeen
from gpuwarden.ledger.store import Ledger
ledger = Ledger(Path(sys.argv[1]), SystemClock(), "cli", LedgerServer.model_validate_json(sys.argv[2]))
held = ledger.lock("j1")
with ledger.transaction():
    ledger.add("job/j1", MachineSeen(machine="of the dead"))
    print("inside", flush=True)
    time.sleep(600)
"""


def test_a_killed_process_loses_its_lock_and_what_it_had_not_committed(
    ledger: Ledger, served: Homes, tmp_path: Path
) -> None:
    argv = [sys.executable, "-c", HOLDER, str(ledger.path), served.address(ledger.path).model_dump_json()]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "inside\n"
        assert ledger.lock("j1") is None
        os.kill(process.pid, signal.SIGKILL)
    ledger.add("job/j1", MachineSeen(machine="of the living"))  # waits for the writers' lock, which dies as well
    held = ledger.lock("j1")
    assert held is not None
    held.release()
    assert [e.data.machine for e in ledger.events(kind=MachineSeen)] == ["of the living"]
    assert audit(ledger).broken is None


@pytest.mark.attack("ledger", "cuts the line of a process that has a job's lock on a PostgreSQL server")
def test_a_process_that_lost_its_lock_writes_nothing_before_it_gave_it_up(
    ledger: Ledger, again: Callable[[], Ledger], served: Homes
) -> None:
    held = ledger.lock("j1")
    assert held is not None
    cut(served, ledger)
    other = again()
    taken = other.lock("j1")
    assert taken is not None, "the server gave the lock to whoever asked next"
    assert ledger.count() == 0, "reading goes on"
    with pytest.raises(LedgerError, match="lost while this process worked on j1"):
        ledger.add("job/j1", MachineSeen(machine="late"))
    held.release()
    ledger.add("job/j2", MachineSeen(machine="later"))
    taken.release()
    assert ledger.lock("j1") is not None


# ------------------------------------------------------------------------------------------------------ lost lines


def test_a_session_that_was_cut_is_opened_again(ledger: Ledger, served: Homes) -> None:
    ledger.add("job/j1", MachineSeen(machine="a"))
    cut(served, ledger)
    assert ledger.count() == 1
    cut(served, ledger)
    ledger.add("job/j1", MachineSeen(machine="b"))
    assert ledger.count() == 2 and ledger.trouble() is None


def restore(served: Homes, tmp_path: Path, seq: int) -> None:
    """Bring a server's ledger back to an event, as a restored backup does."""
    assert served.server
    address = served.address(tmp_path / "ledger.db")
    served.server.sql(
        "SET session_replication_role = replica",
        "ALTER TABLE events DISABLE TRIGGER USER",
        f"DELETE FROM events WHERE seq > {seq}",
        "ALTER TABLE events ENABLE ALWAYS TRIGGER events_never_change",
        "ALTER TABLE events ENABLE ALWAYS TRIGGER events_never_vanish",
        "ALTER TABLE events ENABLE ALWAYS TRIGGER events_move",
        database=address.database,
        schema=address.schema_name,
    )


@pytest.mark.attack(
    "ledger", "restores an old backup under a process that runs, and lets it record enough to hide that"
)
def test_a_restored_backup_is_found_however_much_is_recorded_after_it(
    ledger: Ledger, again: Callable[[], Ledger], served: Homes, tmp_path: Path
) -> None:
    for n in range(5):
        ledger.add("job/j1", MachineSeen(machine=str(n)))
    restore(served, tmp_path, 3)
    for n in range(5):
        ledger.add("job/j2", MachineSeen(machine=str(n)))
        found = ledger.trouble()
        assert found is not None and found.incomplete, n
    for other in (again(), again()):  # a process that starts later knows it too, and so does the one after
        found = other.trouble()
        assert found is not None and found.code == "replaced"
        other.add("job/j3", MachineSeen(machine="z"))


@pytest.mark.attack("ledger", "gives the role another isolation, so that a writer that waited sees an old ledger")
@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_writers_that_wait_for_each_other_see_the_event_before(served: Homes, tmp_path: Path, isolation: str) -> None:
    assert served.server
    served.server.sql(f"ALTER ROLE {OWNER} SET default_transaction_isolation = '{isolation}'")
    try:
        one, two = (served.open(tmp_path / "ledger.db", FakeClock()) for _ in range(2))
        with one.transaction():
            one.add("job/j1", MachineSeen(machine="a"))
            writer = threading.Thread(target=lambda: two.add("job/j1", MachineSeen(machine="b")))
            writer.start()
            waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            while served.server.sql(waiting) == [(0,)]:
                pass
        writer.join()
    finally:
        served.server.sql(f"ALTER ROLE {OWNER} RESET default_transaction_isolation")
    assert one.count() == 2 and audit(one).broken is None


def test_a_cut_within_a_transaction_takes_all_of_it_back(ledger: Ledger, served: Homes) -> None:
    def record_two() -> None:
        with ledger.transaction():
            ledger.add("job/j1", MachineSeen(machine="a"))
            cut(served, ledger)
            for _ in range(2):  # whoever goes on in spite of the error records nothing either
                with pytest.raises(LedgerError):
                    ledger.add("job/j1", MachineSeen(machine="b"))

    with pytest.raises(LedgerError):
        record_two()
    assert ledger.count() == 0
    ledger.add("job/j1", MachineSeen(machine="c"))
    assert ledger.count() == 1 and audit(ledger).broken is None


@pytest.mark.slow
def test_a_server_that_is_killed_and_comes_back_has_every_event(tmp_path: Path, postgres: Server) -> None:
    homes = Homes(postgres)
    ledger = homes.open(tmp_path / "ledger.db", FakeClock())
    for n in range(20):
        ledger.add("job/j1", MachineSeen(machine=str(n)))
    postgres.stop()
    try:
        for work in (ledger.count, lambda: homes.open(tmp_path / "ledger.db", FakeClock())):
            with pytest.raises(LedgerError, match="can't be reached") as error:
                work()
            assert "billing" in in_calls(error.value.next_steps)
    finally:
        postgres.start()
    assert ledger.count() == 20 and ledger.trouble() is None and audit(ledger).broken is None
    ledger.close()


class Line:
    """A line to a server on a Unix socket. It breaks once the server has answered a COMMIT, and passes nothing on."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server, self.breaks = server, False
        folder.mkdir(mode=0o700)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(folder / ".s.PGSQL.5432"))
        self.listener.listen()
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.carry, args=(client,), daemon=True).start()

    def carry(self, client: socket.socket) -> None:
        server, last = socket.socket(socket.AF_UNIX), b""
        server.connect(str(self.server.folder / ".s.PGSQL.5432"))
        with client, server, contextlib.suppress(OSError):
            while True:
                for ready in select.select([client, server], [], [])[0]:
                    piece = ready.recv(65_536)
                    if not piece or (ready is server and self.breaks and b"COMMIT\0" in last):
                        self.breaks = False
                        return
                    last = piece if ready is client else last
                    (server if ready is client else client).sendall(piece)


@pytest.mark.attack("ledger", "cuts the line to a PostgreSQL server inside a commit")
def test_a_commit_whose_answer_is_lost_is_an_error_and_what_it_announced_can_not_happen_twice(
    postgres: Server, served: Homes, tmp_path: Path
) -> None:
    """Whoever gets the error makes no call; the next one finds the intent, as after a kill."""
    folder = Path(tempfile.mkdtemp(prefix="gw-line-"))  # a socket's path is short
    line = Line(postgres, folder / "s")
    address = served.address(tmp_path / "ledger.db").model_copy(update={"host": str(folder / "s")})
    ledger = Ledger(tmp_path / "ledger.db", FakeClock(), "cli", address)
    served.opened.append(ledger)
    ledger.append("job/j1", "job.accepted", state=Job.ACCEPTED)
    line.breaks = True
    with pytest.raises(LedgerError, match="can't be reached"):
        ledger.append("job/j1", "submit.intent", {"n": 1}, token="j1-a1")
    with pytest.raises(Conflict, match="only once"):
        ledger.append("job/j1", "submit.intent", {"n": 2}, token="j1-a1")
    assert [e.body for e in ledger.events(kind="submit.intent")] == [{"n": 1}]
    ledger.append("job/j1", "note")
    assert ledger.count() == 3 and ledger.trouble() is None and audit(ledger) == Audit(None)
    line.listener.close()
    shutil.rmtree(folder)


def test_the_guard_knows_the_run_folders_of_live_jobs(ledger: Ledger) -> None:
    home = ledger.path.parent
    ledger.append("job/j1", "job.accepted", state=Job.ACCEPTED)
    ledger.append("job/j1", "job.submitted", {"handle": {"run_dir": "/runs/j1"}}, state=Job.SUBMITTING)
    assert live_runs(str(home)) == ("/runs/j1",)
    ledger.append("job/j1", "job.observed", state=Job.RUNNING)
    ledger.append("job/j1", "job.observed", state=Job.SUCCEEDED)
    assert live_runs(str(home)) == ()


# -------------------------------------------------------------------------------------------- who says where it is


@pytest.mark.attack("policy", "names another PostgreSQL server, role or schema in libpq's variables")
def test_no_variable_leads_to_another_server(
    ledger: Ledger, again: Callable[[], Ledger], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ledger.add("job/j1", MachineSeen(machine="a"))
    given = {
        "PGHOST": "192.0.2.1", "PGHOSTADDR": "192.0.2.1", "PGPORT": "1", "PGUSER": "postgres", "PGDATABASE": "postgres",
        "PGSERVICE": "evil", "PGOPTIONS": "-c search_path=public", "PGSSLMODE": "require", "PGPASSWORD": "x",
    }  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert again().count() == 1
    assert {name: os.environ[name] for name in given} == given, "they are the process's own"


def settings(tmp_path: Path, **table: Any) -> dict[str, str]:
    """The environment of somebody whose policy file has a table [ledger]."""
    file = tmp_path / "policy.toml"
    rows = (f"{key} = {value if isinstance(value, int) else repr(str(value))}" for key, value in table.items())
    file.write_text("\n".join(["[ledger]", *rows, ""]))
    file.chmod(0o600)
    return {"GPUWARDEN_HOME": str(tmp_path / "home"), "GPUWARDEN_POLICY": str(file)}


def test_the_policy_file_alone_says_where_the_ledger_is(tmp_path: Path, served: Homes) -> None:
    assert served.server
    address = served.address(tmp_path / "x")
    env = settings(tmp_path, host=address.host, schema_name=address.schema_name)
    ctx = open_context("cli", env=env)
    served.opened.append(ctx.ledger)
    ctx.ledger.add("job/j1", MachineSeen(machine="a"))
    assert not (tmp_path / "home" / "ledger.db").exists()
    assert served.open(tmp_path / "x", FakeClock()).count() == 1
    config = load_config({**env, "GPUWARDEN_LEDGER_HOST": "db.example.org", "GPUWARDEN_LEDGER_USER": "postgres"})
    assert config.policy.ledger.host == address.host and config.policy.ledger.user == "gpuwarden"
    assert {(n.kind, n.about) for n in config.notices} >= {("file_only", "ledger.host"), ("file_only", "ledger.user")}


@pytest.mark.parametrize("host", ["a.example,b.example", "postgresql://u:p@h/db", "h user=postgres", "h'"])
def test_a_host_is_one_name(tmp_path: Path, host: str) -> None:
    with pytest.raises(BadRequest, match=r"ledger\.host"):
        load_config(settings(tmp_path, host=host.replace("'", "?")))


def test_the_password_comes_from_a_private_file_and_is_shown_nowhere(served: Homes, tmp_path: Path) -> None:
    assert served.server
    secret = f"sesame-{served.server.folder.name}"
    file = tmp_path / "password"
    file.write_text(f"{secret}\n")
    file.chmod(0o640)
    locked = LedgerServer(
        host=str(served.server.folder), database="locked", password_file=str(file), schema_name="kept"
    )
    with pytest.raises(LedgerError, match="others may read"):
        Ledger(tmp_path / "ledger.db", FakeClock(), "cli", locked)
    file.chmod(0o600)
    ledger = Ledger(tmp_path / "ledger.db", FakeClock(), "cli", locked)
    served.opened.append(ledger)
    shown = [ledger.name, repr(ledger._db.__dict__), repr(session(ledger).connection)]
    shown += [Path(f"/proc/{os.getpid()}/cmdline").read_text()] if Path("/proc/self/cmdline").exists() else []
    file.write_text("wrong\n")
    for broken in (locked, locked.model_copy(update={"password_file": str(tmp_path / "none")})):
        with pytest.raises(LedgerError) as error:
            Ledger(tmp_path / "ledger.db", FakeClock(), "cli", broken)
        shown += [str(error.value), in_calls(error.value.next_steps)]
    assert not [text for text in shown if secret in text or "wrong" in text.split()]


@pytest.mark.anyio
async def test_without_psycopg_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(NotSupported) as error:
        Ledger(tmp_path / "ledger.db", FakeClock(), "cli", LedgerServer(host="/nowhere"))
    assert "gpuwarden[postgresql]" in in_calls(error.value.next_steps)


def test_a_newer_ledger_and_foreign_tables_are_left_alone(served: Homes, tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    served.open(path, FakeClock()).append("job/j1", "note")
    schema = served.address(path).schema_name
    assert served.server
    served.server.sql(f"UPDATE ledger_version SET version = {VERSION + 1}", database="gpuwarden", schema=schema)
    with pytest.raises(LedgerError, match=f"version {VERSION + 1}"):
        served.open(path, FakeClock())
    served.server.sql("DROP TABLE ledger_version", database="gpuwarden", schema=schema)
    with pytest.raises(LedgerError, match="not a gpuwarden ledger"):
        served.open(path, FakeClock())


@pytest.mark.slow
def test_doctor_walks_the_chain_on_a_server(served: Homes, tmp_path: Path) -> None:
    address = served.address(tmp_path / "x")
    env = settings(tmp_path, host=address.host, schema_name=address.schema_name)
    ctx = open_context("cli", env=env)
    ctx.ledger.add("job/j1", MachineSeen(machine="a"))
    ctx.ledger.close()
    home = Path(env["GPUWARDEN_HOME"])
    body = answer(gpuwarden(home, "doctor", "--ledger", "--json", GPUWARDEN_POLICY=env["GPUWARDEN_POLICY"]))
    assert body["ok"] and body["events"] == 1 and "postgresql://" in body["path"]
