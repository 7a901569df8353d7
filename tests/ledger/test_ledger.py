"""The ledger keeps its events, refuses those that must not happen twice, and explains why it can't work."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from fakes import FakeClock
from gpuwarden.core.errors import Conflict, LedgerError
from gpuwarden.core.states import Job, Lease, Teardown
from gpuwarden.interfaces.mcp.wording import in_calls
from gpuwarden.ledger.migrate import VERSION
from gpuwarden.ledger.store import Ledger
from gpuwarden.lifecycle.records import read_lease
from warm import warm
from wording import Wording

SETTING = """
import sys
from pathlib import Path
from gpuwarden.core.clock import SystemClock
from gpuwarden.ledger.store import Ledger
print(Ledger(Path(sys.argv[1]), SystemClock())._db.connection.execute("PRAGMA synchronous").fetchone()[0])
"""


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.db", FakeClock())


def test_events_can_be_neither_changed_nor_removed(ledger: Ledger) -> None:
    ledger.append("job/j1", "job.accepted", {"a": 1}, state=Job.ACCEPTED)
    db = sqlite3.connect(ledger.path)
    for statement in ("UPDATE events SET at = 0", "DELETE FROM events", "REPLACE INTO events SELECT * FROM events"):
        with pytest.raises(sqlite3.DatabaseError):
            db.execute(statement)
    db.close()
    assert [e.body for e in ledger.events()] == [{"a": 1}]


@pytest.mark.slow
def test_a_commit_waits_for_the_disk(tmp_path: Path) -> None:
    argv = [*warm(), "-c", SETTING, str(tmp_path / "ledger.db")]  # the tests' own process doesn't sync
    assert subprocess.check_output(argv, text=True) == "2\n"


def test_state_is_the_last_transition_and_illegal_transitions_leave_no_trace(ledger: Ledger, wording: Wording) -> None:
    ledger.append("job/j1", "job.accepted", state=Job.ACCEPTED)
    ledger.append("job/j1", "note")
    ledger.append("job/j1", "job.submitting", state=Job.SUBMITTING)
    assert ledger.state("job/j1") == Job.SUBMITTING
    with pytest.raises(Conflict) as refused:
        ledger.append("job/j1", "job.refused", state=Job.REFUSED)
    wording(refused, "job/j1", Job.SUBMITTING, Job.REFUSED)
    assert ledger.count() == 3
    assert ledger.subjects("job", Job.SUBMITTING) == ["job/j1"]
    assert ledger.subjects("lease") == []


def test_state_machines_start_only_in_their_initial_states(ledger: Ledger) -> None:
    with pytest.raises(Conflict):
        ledger.append("lease/l1", "lease.stopped", state=Lease.STOPPED)
    ledger.append("teardown/t1", "teardown.requested", state=Teardown.REQUESTED)
    with pytest.raises(Conflict):
        ledger.append("teardown/t1", "teardown.executing", state=Teardown.EXECUTING)


def test_a_token_is_used_once_per_kind(ledger: Ledger, wording: Wording) -> None:
    ledger.append("job/j1", "submit.intent", token="j1-a1")
    ledger.append("job/j1", "create.intent", token="j1-a1")
    with pytest.raises(Conflict) as refused:
        ledger.append("job/j2", "submit.intent", token="j1-a1")
    wording(refused, "submit.intent")
    used = ledger.used("submit.intent", "j1-a1")
    assert used is not None and used.subject == "job/j1"


def test_a_transaction_is_all_or_nothing(ledger: Ledger) -> None:
    with pytest.raises(Conflict), ledger.transaction():
        ledger.append("job/j1", "job.accepted", state=Job.ACCEPTED)
        ledger.append("job/j1", "x", token="t")
        ledger.append("job/j1", "x", token="t")
    assert ledger.count() == 0


def test_a_transition_conflicting_with_another_process_is_refused(ledger: Ledger) -> None:
    other = Ledger(ledger.path, FakeClock())
    ledger.append("job/j1", "job.accepted", state=Job.ACCEPTED)
    other.append("job/j1", "job.canceled", state=Job.CANCELED)
    with pytest.raises(Conflict):
        ledger.append("job/j1", "job.provisioning", state=Job.PROVISIONING)


RACER = """
import sys
from pathlib import Path
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import Conflict
from gpuwarden.ledger.store import Ledger
ledger = Ledger(Path(sys.argv[1]), SystemClock())
won = 0
for n in range(50):
    try:
        ledger.append("job/j%d" % n, "submit.intent", token="t%d" % n)
        won += 1
    except Conflict:
        pass
print(won)
"""


@pytest.mark.slow
def test_racing_processes_use_each_token_exactly_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "ledger.db"
    path.parent.mkdir()
    argv = [sys.executable, "-c", RACER, str(path)]
    racers = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert sum(int(r.communicate(timeout=300)[0]) for r in racers) == 50


@pytest.mark.parametrize(
    "junk", [b"not a database at all, only some words " * 40, os.urandom(8192)], ids=["text", "dice"]
)
def test_a_damaged_file_is_reported_and_not_modified(tmp_path: Path, junk: bytes) -> None:
    path = tmp_path / "ledger.db"
    path.write_bytes(junk)
    with pytest.raises(LedgerError) as error:
        Ledger(path, FakeClock())
    assert path.read_bytes() == junk
    assert isinstance(error.value.__cause__, sqlite3.DatabaseError)
    assert in_calls(error.value.next_steps)


def test_an_overwritten_page_is_detected(ledger: Ledger) -> None:
    for n in range(200):
        ledger.append(f"job/j{n}", "note", {"text": "x" * 300})
    ledger.close()
    with ledger.path.open("r+b") as f:
        f.seek(4096)
        f.write(os.urandom(40_000))
    with pytest.raises(LedgerError):
        Ledger(ledger.path, FakeClock()).events()


@pytest.mark.parametrize(
    ("before", "after"),
    [(b'{"platform"', b'{"pl;tform;'), (b'"platform"', b'"platf\xffrm"'), (b'"platform"', b'"platfurm"')],
    ids=["no JSON", "no text", "another key"],
)
def test_an_overwritten_word_is_reported_as_damage(
    ledger: Ledger, before: bytes, after: bytes, wording: Wording
) -> None:
    """SQLite can't detect the damage, because its pages have no checksums."""
    ledger.append("lease/j1-i1", "create.intent", {"platform": "local", "job": "j1"}, state="unverified")
    ledger.close()
    raw = ledger.path.read_bytes()
    assert raw.count(before) == 1
    ledger.path.write_bytes(raw.replace(before, after))
    with pytest.raises(LedgerError) as error:
        read_lease(Ledger(ledger.path, FakeClock()), "j1-i1")
    wording(in_calls(error.value.next_steps))


def test_a_newer_ledger_is_left_alone(ledger: Ledger, wording: Wording) -> None:
    ledger.close()
    db = sqlite3.connect(ledger.path)
    db.execute(f"PRAGMA user_version = {VERSION + 1}")
    db.close()
    with pytest.raises(LedgerError) as error:
        Ledger(ledger.path, FakeClock())
    wording(error, ledger.path, VERSION + 1, VERSION)
    wording(in_calls(error.value.next_steps), "GPUWARDEN_HOME")


def test_another_programs_database_is_left_alone(tmp_path: Path, wording: Wording) -> None:
    path = tmp_path / "other.db"
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE t (x)")
    db.close()
    with pytest.raises(LedgerError) as refused:
        Ledger(path, FakeClock())
    wording(refused, path)


def test_a_folder_creation_failure_raises_ledger_error(tmp_path: Path, wording: Wording) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(LedgerError) as refused:
        Ledger(tmp_path / "file" / "ledger.db", FakeClock())
    wording(refused)
