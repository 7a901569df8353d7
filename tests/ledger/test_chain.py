"""A ledger that was changed, cut, emptied or lost is found out, and one that can't be written can still be read."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from doors import answer, environment, gpuwarden
from fakes import FakeClock
from gpuwarden.core.errors import LedgerError
from gpuwarden.ledger.audit import audit
from gpuwarden.ledger.chain import Break, Head, HeadFile
from gpuwarden.ledger.events import CreateIntent, LeaseNone, MachineSeen
from gpuwarden.ledger.store import Ledger
from paths import FIXTURES
from postgres_kit import Homes


@pytest.fixture
def files() -> Homes:
    """SQLite files alone."""
    return Homes()


@pytest.fixture
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A ledger of ten events, in the homes that the test is for."""
    folder = tmp_path / "home"
    folder.mkdir()
    ledger = opened(request.getfixturevalue("homes" if "homes" in request.fixturenames else "files"), folder)
    for n in range(5):
        ledger.add(f"lease/j{n}-i1", CreateIntent(job=f"j{n}", platform="vastai", generation=1), token=f"j{n}-i1")
        ledger.add(f"job/j{n}", MachineSeen(machine=f"boot-{n}/é"))
    ledger.close()
    return folder


def opened(homes: Homes, home: Path) -> Ledger:
    return homes.open(home / "ledger.db", FakeClock())


def forge(homes: Homes, home: Path, *statements: str) -> None:
    """Change a ledger as its owner can: without the triggers that forbid it, and with them afterwards."""
    if homes.server:
        schema, switch = homes.address(home / "ledger.db").schema_name, "ALTER TABLE events {} TRIGGER ALL"
        homes.server.sql(switch.format("DISABLE"), *statements, switch.format("ENABLE"),
                         database="gpuwarden", schema=schema)  # fmt: skip
        return
    db = sqlite3.connect(home / "ledger.db")
    names = ("events_never_change", "events_never_vanish", "events_are_new", "events_move", "events_of_leases")
    made = [db.execute("SELECT sql FROM sqlite_master WHERE name = ?", (name,)).fetchone()[0] for name in names]
    for name in names:
        db.execute(f"DROP TRIGGER {name}")
    for statement in (*statements, *made):
        db.execute(statement)
    db.commit()
    db.close()


def test_a_whole_chain_has_no_break(homes: Homes, home: Path) -> None:
    found = audit(opened(homes, home))
    assert found.broken is None and found.differs == ()
    assert opened(homes, home).trouble() is None


@pytest.mark.attack("ledger", "changes a column of an event")
@pytest.mark.parametrize("column", ["at", "subject", "kind", "version", "state", "token", "actor", "body", "hash"])
def test_a_changed_column_is_named_with_its_event(homes: Homes, home: Path, column: str) -> None:
    values = {"at": "at + 1", "version": "version + 1", "body": "'{}'", "hash": f"'{'0' * 64}'"}
    forge(homes, home, f"UPDATE events SET {column} = {values.get(column, repr('job/x'))} WHERE seq = 4")
    broken = audit(opened(homes, home)).broken
    assert broken is not None and (broken.seq, broken.code) == (4, "changed")


@pytest.mark.attack("ledger", "removes or moves an event")
@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("DELETE FROM events WHERE seq = 1", Break(1, "missing")),
        ("DELETE FROM events WHERE seq = 6", Break(6, "missing")),
        ("UPDATE events SET seq = 60 WHERE seq = 6", Break(6, "missing")),
        ("UPDATE events SET seq = seq + 100 WHERE seq > 3", Break(4, "missing")),
    ],
)
def test_a_removed_or_moved_event_is_named(homes: Homes, home: Path, statement: str, expected: Break) -> None:
    forge(homes, home, statement)
    assert audit(opened(homes, home)).broken == expected


@pytest.mark.attack("ledger", "inserts an event")
def test_an_event_put_in_between_breaks_the_one_after_it(homes: Homes, home: Path) -> None:
    forge(
        homes,
        home,
        "UPDATE events SET seq = -seq WHERE seq > 6",
        "UPDATE events SET seq = 1 - seq WHERE seq < 0",
        "INSERT INTO events SELECT 7, at, subject, kind, 1, state, NULL, actor, body, hash FROM events WHERE seq = 6",
    )
    broken = audit(opened(homes, home)).broken
    assert broken is not None and broken.seq == 7


def test_a_state_that_does_not_follow_from_the_events_is_found(homes: Homes, home: Path) -> None:
    forge(homes, home, "UPDATE current SET state = 'stopped' WHERE subject = 'lease/j1-i1'")
    assert audit(opened(homes, home)).differs == ("current",)


@pytest.mark.attack("ledger", "cuts events off at the end")
def test_events_cut_off_at_the_end_leave_a_sound_chain_and_are_found_by_the_head(homes: Homes, home: Path) -> None:
    forge(homes, home, "DELETE FROM events WHERE seq > 7")
    assert audit(opened(homes, home)).broken is None
    trouble = opened(homes, home).trouble()
    assert trouble is not None and (trouble.code, trouble.incomplete) == ("truncated", True)
    assert trouble.parameters == {"recorded": "10", "found": "7"}


@pytest.mark.attack("ledger", "cuts events off and lets new ones be added")
def test_what_is_added_to_a_cut_ledger_does_not_hide_the_cut(homes: Homes, home: Path) -> None:
    forge(homes, home, "DELETE FROM events WHERE seq > 7")
    ledger = opened(homes, home)
    for n in range(20):
        ledger.add("job/j9", MachineSeen(machine=f"boot-{n}"))
    for again in (ledger, opened(homes, home)):
        trouble = again.trouble()
        assert trouble is not None and trouble.code == "replaced"


@pytest.mark.attack("ledger", "puts an older copy in the ledger's place")
def test_an_older_copy_put_in_its_place_is_found(files: Homes, home: Path, tmp_path: Path) -> None:
    shutil.copy(home / "ledger.db", tmp_path / "copy.db")
    ledger = opened(files, home)
    ledger.add("job/j9", MachineSeen(machine="boot"))
    ledger.close()
    shutil.copy(tmp_path / "copy.db", home / "ledger.db")
    trouble = opened(files, home).trouble()
    assert trouble is not None and trouble.code == "truncated"


@pytest.mark.attack("ledger", "removes the ledger while it is open")
def test_a_ledger_removed_while_it_is_open_takes_no_more_events(files: Homes, home: Path) -> None:
    ledger = opened(files, home)
    for name in ("ledger.db", "ledger.db-wal", "ledger.db-shm"):
        (home / name).unlink(missing_ok=True)
    trouble = ledger.trouble()
    assert trouble is not None and trouble.code == "moved"
    with pytest.raises(LedgerError, match="moved, removed or replaced"):
        ledger.add("job/j9", MachineSeen(machine="boot"))


def test_the_head_may_be_behind_torn_or_absent(homes: Homes, home: Path) -> None:
    file = HeadFile(home / "ledger.db")
    head = file.read()
    assert head is not None and head.seq == 10
    with opened(homes, home).snapshot() as query:
        ((before,),) = query("SELECT hash FROM events WHERE seq = 8")
    file.write(Head(8, before))  # killed after a commit and before the head
    assert opened(homes, home).trouble() is None
    file.path.write_bytes(b"\0" * 96)
    assert opened(homes, home).trouble() is None and file.read() == head
    file.path.unlink()
    assert opened(homes, home).trouble() is None and file.read() == head


@pytest.mark.attack("ledger", "removes the ledger and lets a new one begin")
def test_a_new_ledger_beside_the_traces_of_jobs_says_so_until_a_person_decides(files: Homes, home: Path) -> None:
    for name in ("ledger.db", "ledger.db-wal", "ledger.db-shm", "ledger.head"):
        (home / name).unlink(missing_ok=True)
    assert opened(files, home).trouble() is None, "an empty home is no loss"
    (home / "ledger.db").unlink()
    (home / "pulls").mkdir()
    (home / "pulls" / "j1.json").touch()
    ledger = opened(files, home)
    ledger.add("job/j9", MachineSeen(machine="boot"))
    for again in (ledger, opened(files, home)):
        trouble = again.trouble()
        assert trouble is not None and trouble.code == "lost" and trouble.parameters["beside"] == "pulls"
    (home / "ledger.head").unlink()
    assert opened(files, home).trouble() is None


def test_a_rolled_back_event_is_neither_read_nor_chained(homes: Homes, home: Path) -> None:
    ledger = opened(homes, home)
    with pytest.raises(RuntimeError), ledger.transaction():
        ledger.add("lease/j0-i1", LeaseNone(why="undone"))
        assert len(ledger.history("lease/j0-i1")) == 2
        raise RuntimeError
    assert len(ledger.history("lease/j0-i1")) == 1 and ledger.state("lease/j0-i1") == "unverified"
    ledger.add("lease/j0-i1", LeaseNone(why="done"))
    assert [e.data.why for e in ledger.history("lease/j0-i1")] == ["", "done"]
    head = HeadFile(ledger.path).read()
    assert head is not None and head.seq == ledger.count() == 11
    assert audit(ledger).broken is None


@pytest.mark.slow
def test_processes_that_write_at_the_same_time_make_one_chain(homes: Homes, home: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom gpuwarden.core.clock import SystemClock\n"
        "from gpuwarden.ledger.events import MachineSeen\nfrom gpuwarden.ledger.store import Ledger\n"
        "from gpuwarden.core.policy import LedgerServer\n"
        "ledger = Ledger(Path(sys.argv[1]), SystemClock(), 'cli', LedgerServer.model_validate_json(sys.argv[3]))\n"
        "for n in range(40): ledger.add('job/j1', MachineSeen(machine=sys.argv[2]))\n"
    )
    path, address = str(home / "ledger.db"), homes.address(home / "ledger.db").model_dump_json()
    racers = [subprocess.Popen([sys.executable, "-c", code, path, str(n), address]) for n in range(3)]
    assert [r.wait(120) for r in racers] == [0, 0, 0]
    ledger = opened(homes, home)
    assert ledger.count() == 130 and audit(ledger).broken is None and ledger.trouble() is None


# ------------------------------------------------------------------------------------------------- on the command line


@pytest.mark.slow
def test_doctor_names_the_first_broken_event(files: Homes, home: Path) -> None:
    body = answer(gpuwarden(home, "doctor", "--ledger", "--json"))
    assert body["ok"] and body["events"] == 10 and "whole" in body["message"]
    forge(files, home, "UPDATE events SET at = 0 WHERE seq = 3")
    done = gpuwarden(home, "doctor", "--ledger", "--json")
    body = answer(done)
    assert done.returncode == 1 and (body["code"], body["first_broken"]) == ("ledger_damaged", 3)
    assert "event 3 (create.intent of lease/j1-i1) was changed" in body["message"] and "console" in body["hint"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["emptied", "cut"])
def test_instances_never_says_that_nothing_bills_when_the_ledger_is_not_whole(
    files: Homes, home: Path, how: str
) -> None:
    if how == "emptied":
        for name in ("ledger.db", "ledger.db-wal", "ledger.db-shm"):
            (home / name).unlink(missing_ok=True)
    else:
        forge(files, home, "DELETE FROM events", "DELETE FROM current")
    done = gpuwarden(home, "instances", "--json")
    body = answer(done)
    assert done.returncode == 1 and body["code"] == "ledger_incomplete"
    assert "10 were recorded and 0 are there" in body["message"] and "billing." not in body["message"]
    assert "console" in body["hint"]
    assert "console" in answer(gpuwarden(home, "check", "j1", "--json"))["hint"]
    checks = answer(gpuwarden(home, "doctor", "--json"))["checks"]
    assert not next(c["ok"] for c in checks if c["what"] == "ledger")


@pytest.mark.parametrize("schema", [1, 2])
def test_on_a_full_disk_the_machines_can_be_looked_at(files: Homes, tmp_path: Path, schema: int) -> None:
    """A limit on the size of files stands for the disk: not one byte can be written."""
    home = tmp_path / "home"
    home.mkdir()
    db = sqlite3.connect(home / "ledger.db")
    db.execute("PRAGMA journal_mode = WAL")
    db.executescript((FIXTURES / "ledger_v1.sql").read_text("utf-8"))
    db.close()
    if schema == 2:
        opened(files, home).close()
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); "
    code += "from gpuwarden.interfaces.cli.main import run; sys.exit(run())"
    done = subprocess.run(
        [sys.executable, "-c", code, "instances", "--json"], env=environment(home), capture_output=True, text=True,
        timeout=300, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    body = json.loads(done.stdout)
    machines = [row for row in body["instances"] if row["ours"]]
    assert len(machines) >= 5 and all(row["billing"] is not False for row in machines), done.stdout + done.stderr
    assert "can't be written" in body["message"] and "disk space" in body["hint"]
