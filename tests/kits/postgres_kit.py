"""A real PostgreSQL server on a Unix socket, and the two homes that a ledger can have."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.core.clock import Clock
from gpuwarden.core.policy import LedgerServer
from gpuwarden.ledger.store import Ledger
from real_parts import need

OWNER = "gpuwarden"
HERE = "GPUWARDEN_TEST_LEDGER"
"""Names the folder of a server's socket to whatever opens a ledger through `kept_ledger`."""


def address(socket: Path, path: Path) -> LedgerServer:
    """The ledger that belongs to a path: each has a schema for itself."""
    schema = "ledger_" + hashlib.sha256(str(path).encode()).hexdigest()[:16]
    return LedgerServer(host=str(socket), schema_name=schema)


def kept_at(path: Path) -> LedgerServer | None:
    """The server of a path's ledger, where the variable says that it is on one."""
    socket = os.environ.get(HERE)
    return address(Path(socket), path) if socket else None


def kept_ledger(path: Path, clock: Clock, actor: str = "cli") -> Ledger:
    """The ledger of a path, in a file or, where the variable says so, on a server."""
    return Ledger(path, clock, actor, kept_at(path))


def program(name: str) -> str | None:
    """Debian keeps the server's programs off the PATH."""
    newest = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(newest[-1]) if newest else shutil.which(name)


@dataclass
class Server:
    """A server that accepts everybody from this machine, and forgets everything when it is stopped."""

    folder: Path
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.log = self.folder / "log"
        if os.geteuid() == 0:  # initdb refuses to run as root
            shutil.chown(self.folder, "postgres", "postgres")
        self.run("initdb", "-D", str(self.folder / "data"), "-U", "postgres", "-A", "trust", "--no-sync",
                 "--locale=C", "--encoding=UTF8")  # fmt: skip
        rules = self.folder / "data" / "pg_hba.conf"
        rules.write_text("local locked all scram-sha-256\n" + rules.read_text())
        self.start()
        self.sql(
            f"CREATE ROLE {OWNER} LOGIN PASSWORD 'sesame-{self.folder.name}'",
            *(f"CREATE DATABASE {name} OWNER {OWNER}" for name in ("gpuwarden", "locked")),
        )

    def run(self, name: str, *arguments: str) -> None:
        found = program(name)
        assert found is not None
        drop = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"] if os.geteuid() == 0 else []
        done = subprocess.run(
            [*drop, found, *arguments], capture_output=True, text=True, cwd=self.folder, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def start(self) -> None:
        options = f"-k {self.folder} -c listen_addresses='' -c fsync=off -c max_connections=60"
        self.run("pg_ctl", "-D", str(self.folder / "data"), "-w", "-l", str(self.log), "-o", options, "start")

    def stop(self, how: str = "immediate") -> None:
        self.run("pg_ctl", "-D", str(self.folder / "data"), "-w", "-m", how, "stop")

    def sql(self, *statements: str, database: str = "postgres", schema: str = "public") -> list[Any]:
        """Run statements as the server's superuser; the rows of the last one."""
        import psycopg

        rows: list[Any] = []
        options = f"-c search_path={schema},pg_temp"
        with psycopg.connect(
            host=str(self.folder), user="postgres", dbname=database, options=options, autocommit=True
        ) as db:
            for statement in statements:
                done = db.execute(statement.encode())
                rows = done.fetchall() if done.description else []
        return rows


@dataclass(frozen=True)
class Homes:
    """Ledgers in one kind of home; `server` is None for SQLite files."""

    server: Server | None = None
    opened: list[Ledger] = field(default_factory=list)

    def address(self, path: Path) -> LedgerServer:
        return address(self.server.folder, path) if self.server else LedgerServer()

    def open(self, path: Path, clock: Clock, actor: str = "cli") -> Ledger:
        self.opened.append(Ledger(path, clock, actor, self.address(path)))
        return self.opened[-1]


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """A server for all tests of this process."""
    need("PostgreSQL's server (initdb)", program("initdb") is not None)
    need("psycopg", find_spec("psycopg") is not None)
    folder = Path(tempfile.mkdtemp(prefix="gw-pg-"))
    server = Server(folder)
    yield server
    server.stop()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.real("PostgreSQL"))])
def homes(request: pytest.FixtureRequest) -> Iterator[Homes]:
    """Both kinds of home, one after the other."""
    made = Homes(request.getfixturevalue("postgres") if request.param == "postgresql" else None)
    yield made
    for ledger in made.opened:  # psycopg warns of a session that nobody closed
        ledger.close()
