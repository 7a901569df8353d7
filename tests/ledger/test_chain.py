"""A changed, truncated, emptied or lost ledger is detected, and a ledger that can't be written is still readable."""

from __future__ import annotations

import json
import re
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
from gpuwarden.ledger.events import CreateIntent, LeaseNone, MachineIdentified
from gpuwarden.ledger.store import Ledger
from paths import FIXTURES
from wording import Wording


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with a ledger of ten events."""
    folder = tmp_path / "home"
    folder.mkdir()
    ledger = opened(folder)
    for n in range(5):
        ledger.add(f"lease/j{n}-i1", CreateIntent(job=f"j{n}", platform="vastai", generation=1), token=f"j{n}-i1")
        ledger.add(f"job/j{n}", MachineIdentified(machine=f"boot-{n}/é"))
    ledger.close()
    return folder


def opened(home: Path) -> Ledger:
    return Ledger(home / "ledger.db", FakeClock())


def forge(home: Path, *statements: str) -> None:
    """Change a ledger as its owner can: drop the triggers that forbid changes, and restore them afterwards."""
    db = sqlite3.connect(home / "ledger.db")
    names = ("events_never_change", "events_never_vanish", "events_are_new", "events_move", "events_of_leases")
    made = [db.execute("SELECT sql FROM sqlite_master WHERE name = ?", (name,)).fetchone()[0] for name in names]
    for name in names:
        db.execute(f"DROP TRIGGER {name}")
    for statement in (*statements, *made):
        db.execute(statement)
    db.commit()
    db.close()


def test_an_intact_chain_has_no_break(home: Path) -> None:
    found = audit(opened(home))
    assert found.broken is None and found.differs == ()
    assert opened(home).trouble() is None


@pytest.mark.attack("ledger", "changes a column of an event")
@pytest.mark.parametrize("column", ["at", "subject", "kind", "version", "state", "token", "actor", "body", "hash"])
def test_a_changed_column_is_reported_with_its_event(home: Path, column: str) -> None:
    values = {"at": "at + 1", "version": "version + 1", "body": "'{}'", "hash": f"'{'0' * 64}'"}
    forge(home, f"UPDATE events SET {column} = {values.get(column, repr('job/x'))} WHERE seq = 4")
    broken = audit(opened(home)).broken
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
def test_a_removed_or_moved_event_is_reported(home: Path, statement: str, expected: Break) -> None:
    forge(home, statement)
    assert audit(opened(home)).broken == expected


@pytest.mark.attack("ledger", "inserts an event")
def test_an_inserted_event_breaks_the_chain(home: Path) -> None:
    forge(
        home,
        "UPDATE events SET seq = -seq WHERE seq > 6",
        "UPDATE events SET seq = 1 - seq WHERE seq < 0",
        "INSERT INTO events SELECT 7, at, subject, kind, 1, state, NULL, actor, body, hash FROM events WHERE seq = 6",
    )
    broken = audit(opened(home)).broken
    assert broken is not None and broken.seq == 7


def test_a_state_inconsistent_with_the_events_is_found(home: Path) -> None:
    forge(home, "UPDATE current SET state = 'stopped' WHERE subject = 'lease/j1-i1'")
    assert audit(opened(home)).differs == ("current",)


@pytest.mark.attack("ledger", "cuts events off at the end")
def test_the_head_reveals_events_cut_off_at_the_end(home: Path) -> None:
    forge(home, "DELETE FROM events WHERE seq > 7")
    assert audit(opened(home)).broken is None
    trouble = opened(home).trouble()
    assert trouble is not None and (trouble.code, trouble.incomplete) == ("truncated", True)
    assert trouble.parameters == {"recorded": "10", "found": "7"}


@pytest.mark.attack("ledger", "cuts events off and lets new ones be added")
def test_events_added_to_a_truncated_ledger_do_not_hide_the_cut(home: Path) -> None:
    forge(home, "DELETE FROM events WHERE seq > 7")
    ledger = opened(home)
    for n in range(20):
        ledger.add("job/j9", MachineIdentified(machine=f"boot-{n}"))
    for again in (ledger, opened(home)):
        trouble = again.trouble()
        assert trouble is not None and trouble.code == "replaced"


@pytest.mark.attack(
    "ledger", "restores an old backup under a process that runs, and lets it record enough to hide that"
)
def test_later_events_do_not_hide_a_restored_backup(home: Path) -> None:
    ledger = opened(home)
    forge(home, "DELETE FROM events WHERE seq > 7")
    for n in range(5):
        ledger.add("job/j9", MachineIdentified(machine=f"boot-{n}"))
        found = ledger.trouble()
        assert found is not None and found.incomplete, n
    for again in (opened(home), opened(home)):  # later processes detect it too
        found = again.trouble()
        assert found is not None and found.code == "replaced"
        again.add("job/j9", MachineIdentified(machine="z"))


@pytest.mark.attack("ledger", "puts an older copy in the ledger's place")
def test_a_ledger_replaced_by_an_older_copy_is_detected(home: Path, tmp_path: Path) -> None:
    shutil.copy(home / "ledger.db", tmp_path / "copy.db")
    ledger = opened(home)
    ledger.add("job/j9", MachineIdentified(machine="boot"))
    ledger.close()
    shutil.copy(tmp_path / "copy.db", home / "ledger.db")
    trouble = opened(home).trouble()
    assert trouble is not None and trouble.code == "truncated"


@pytest.mark.attack("ledger", "removes the ledger while it is open")
def test_a_ledger_removed_while_open_accepts_no_more_events(home: Path, wording: Wording) -> None:
    ledger = opened(home)
    for name in ("ledger.db", "ledger.db-wal", "ledger.db-shm"):
        (home / name).unlink(missing_ok=True)
    trouble = ledger.trouble()
    assert trouble is not None and trouble.code == "moved"
    with pytest.raises(LedgerError) as refused:
        ledger.add("job/j9", MachineIdentified(machine="boot"))
    wording(refused)


def test_the_head_may_be_outdated_torn_or_absent(home: Path) -> None:
    file = HeadFile(home / "ledger.db")
    head = file.read()
    assert head is not None and head.seq == 10
    with opened(home).snapshot() as query:
        ((before,),) = query("SELECT hash FROM events WHERE seq = 8")
    file.write(Head(8, before))  # as if killed after a commit and before the head was written
    assert opened(home).trouble() is None
    file.path.write_bytes(b"\0" * 96)
    assert opened(home).trouble() is None and file.read() == head
    file.path.unlink()
    assert opened(home).trouble() is None and file.read() == head


@pytest.mark.attack("ledger", "removes the ledger and lets a new one begin")
def test_a_new_ledger_next_to_traces_of_jobs_warns_until_the_user_decides(home: Path) -> None:
    for name in ("ledger.db", "ledger.db-wal", "ledger.db-shm", "ledger.head"):
        (home / name).unlink(missing_ok=True)
    assert opened(home).trouble() is None, "an empty home is no loss"
    (home / "ledger.db").unlink()
    (home / "pulls").mkdir()
    (home / "pulls" / "j1.json").touch()
    ledger = opened(home)
    ledger.add("job/j9", MachineIdentified(machine="boot"))
    for again in (ledger, opened(home)):
        trouble = again.trouble()
        assert trouble is not None and trouble.code == "lost" and trouble.parameters["beside"] == "pulls"
    (home / "ledger.head").unlink()
    assert opened(home).trouble() is None


def test_a_rolled_back_event_is_neither_read_nor_chained(home: Path) -> None:
    ledger = opened(home)
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
def test_concurrent_writers_make_one_chain(home: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom gpuwarden.core.clock import SystemClock\n"
        "from gpuwarden.ledger.events import MachineIdentified\nfrom gpuwarden.ledger.store import Ledger\n"
        "ledger = Ledger(Path(sys.argv[1]), SystemClock())\n"
        "for n in range(40): ledger.add('job/j1', MachineIdentified(machine=sys.argv[2]))\n"
    )
    argv = [sys.executable, "-c", code, str(home / "ledger.db")]
    racers = [subprocess.Popen([*argv, str(n)]) for n in range(3)]
    assert [r.wait(120) for r in racers] == [0, 0, 0]
    ledger = opened(home)
    assert ledger.count() == 130 and audit(ledger).broken is None and ledger.trouble() is None


# ------------------------------------------------------------------------------------------------- on the command line


@pytest.mark.slow
def test_doctor_names_the_first_broken_event(home: Path, wording: Wording) -> None:
    body = answer(gpuwarden(home, "doctor", "--ledger", "--json"))
    assert body["ok"] and body["events"] == 10
    wording(body["message"])
    forge(home, "UPDATE events SET at = 0 WHERE seq = 3")
    done = gpuwarden(home, "doctor", "--ledger", "--json")
    body = answer(done)
    assert done.returncode == 1 and (body["code"], body["first_broken"]) == ("ledger_damaged", 3)
    wording(body["message"], "create.intent", "lease/j1-i1", 3)
    wording(body["hint"])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["emptied", "cut"])
def test_instances_never_claims_nothing_bills_if_the_ledger_is_incomplete(
    home: Path, how: str, wording: Wording
) -> None:
    if how == "emptied":
        for name in ("ledger.db", "ledger.db-wal", "ledger.db-shm"):
            (home / name).unlink(missing_ok=True)
    else:
        forge(home, "DELETE FROM events", "DELETE FROM current")
    done = gpuwarden(home, "instances", "--json")
    body = answer(done)
    assert done.returncode == 1 and body["code"] == "ledger_incomplete"
    wording(body["message"])
    wording(body["hint"])
    wording(answer(gpuwarden(home, "check", "j1", "--json"))["hint"])
    checks = answer(gpuwarden(home, "doctor", "--json"))["checks"]
    assert not next(c["ok"] for c in checks if c["what"] == "ledger")


@pytest.mark.slow
@pytest.mark.parametrize("schema", [1, 2])
def test_machines_can_be_listed_on_a_full_disk(tmp_path: Path, schema: int, wording: Wording) -> None:
    """A file size limit of zero emulates the full disk."""
    home = tmp_path / "home"
    home.mkdir()
    db = sqlite3.connect(home / "ledger.db")
    db.execute("PRAGMA journal_mode = WAL")
    db.executescript((FIXTURES / "ledger_v1.sql").read_text("utf-8"))
    db.close()
    if schema == 2:
        opened(home).close()
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); "
    code += "from gpuwarden.interfaces.cli.main import run; sys.exit(run())"
    done = subprocess.run(
        [sys.executable, "-c", code, "instances", "--json"], env=environment(home), capture_output=True, text=True,
        timeout=300, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    body = json.loads(done.stdout)
    machines = [row for row in body["instances"] if row["ours"]]
    assert len(machines) >= 5 and all(row["billing"] is not False for row in machines), done.stdout + done.stderr
    (theirs,) = re.findall(r"\((.*)\)", body["message"])  # SQLite's message
    wording(body["message"], theirs)
    wording(body["hint"])
