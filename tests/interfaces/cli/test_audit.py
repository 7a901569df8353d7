"""The exported ledger: each event names its author, and the hash chain reveals any change."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli_kit import Cli
from fakes import FakeClock
from gpuwarden.core.errors import BadRequest
from gpuwarden.core.states import Job
from gpuwarden.ledger.chain import Break, Head
from gpuwarden.ledger.export import check_lines, export_lines
from gpuwarden.ledger.store import Ledger
from gpuwarden.people import acting_as
from wording import Wording


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    made = Ledger(tmp_path / "ledger.db", FakeClock(), "http/root")
    made.append("job/j1", "job.accepted", {"name": "größe\u2028 \x00", "n": [1, 2.5, None, 1e-7]}, state=Job.ACCEPTED)
    for person in ("alice", "bob"):
        with acting_as(person):
            made.append("job/j1", "note", {"by": person}, token=person)
    return made


def lines(ledger: Ledger, after: int = 0) -> list[str]:
    with ledger.snapshot() as query:
        return list(export_lines(query, after))


def test_export_has_every_event_with_its_user_and_an_intact_chain(ledger: Ledger) -> None:
    told = [json.loads(line) for line in lines(ledger)]
    assert [(row["seq"], row["interface"], row["person"]) for row in told] == [
        (1, "http", "root"), (2, "http", "alice"), (3, "http", "bob"),
    ]  # fmt: skip
    assert [row["body"] for row in told] == [e.body for e in ledger.events()] and told[1]["token"] == "alice"
    last, broken = check_lines(lines(ledger))
    assert broken is None and last == Head(3, told[-1]["hash"]) and ledger.has(last)
    assert check_lines(lines(ledger, after=1)) == (last, None), "a later part is checked from its second event on"
    assert not any("\n" in line for line in lines(ledger))


@pytest.mark.attack("ledger", "changes an exported audit log")
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda rows: rows[1].update(actor="http/mallory"), (2, "changed")),
        (lambda rows: rows[1]["body"].update(by="mallory"), (2, "changed")),
        (lambda rows: rows[0].update(at=1.0), (1, "changed")),
        (lambda rows: rows[0].update(text='{"name": "x"}'), (1, "changed")),
        (lambda rows: rows[1].update(person="mallory"), (2, "changed")),
        (lambda rows: rows[1].update(interface="cli"), (2, "changed")),
        (lambda rows: rows[1].update(text=json.dumps(rows[1]["body"]), body={"by": "mallory"}), (2, "changed")),
        (lambda rows: rows[1].update(approved_by="alice"), (2, "changed")),
        (lambda rows: rows.pop(1), (2, "missing")),
        (lambda rows: rows.insert(0, rows.pop(2)), (4, "missing")),
    ],
)
def test_changed_export_is_detected(
    ledger: Ledger, change: Callable[[list[dict[str, Any]]], object], expected: tuple[int, str]
) -> None:
    rows = [json.loads(line) for line in lines(ledger)]
    change(rows)
    _, broken = check_lines(json.dumps(row) for row in rows)
    assert isinstance(broken, Break) and (broken.seq, broken.code) == expected


@pytest.mark.attack("ledger", "gives a field of an exported event twice, so that readers differ in what it says")
def test_duplicate_field_is_refused(ledger: Ledger) -> None:
    first, second, *_ = lines(ledger)
    with pytest.raises(BadRequest, match="line 2"):
        check_lines([first, second.replace('"seq"', '"actor": "http/mallory", "seq"')])


@pytest.mark.attack("ledger", "cuts the front off an exported audit log, and forges what is its first line then")
def test_export_without_its_beginning_is_incomplete(run: Cli, home: Path, tmp_path: Path, wording: Wording) -> None:
    file, ledger = tmp_path / "audit.jsonl", Ledger(home / "ledger.db", FakeClock())
    for name in ("one", "two", "three"):
        ledger.append("job/j1", name)
    run("audit", "export", str(file))
    file.write_text("".join(file.read_text().splitlines(keepends=True)[1:]).replace('"two"', '"forged"'))
    code, body = run("audit", "check", str(file))
    assert code == 1 and body["code"] == "incomplete"
    wording(body["message"], file, json.loads(file.read_text().splitlines()[-1])["hash"])
    file.write_text("")
    assert run("audit", "check", str(file))[0] == 0


@pytest.mark.parametrize("junk", ["", "x", "[]", "{}", '{"seq": 1}', '"\ud800"', "[" * 100_000])
def test_invalid_export_line_is_refused(junk: str) -> None:
    with pytest.raises(BadRequest, match="line 1"):
        check_lines([junk])


def test_text_stored_in_another_form_is_exported_unchanged() -> None:
    row = (1, 0.5, "job/j1", "note", 1, None, None, "cli", '{"a":1}', "x")
    (line,) = export_lines(lambda _: iter([row]))
    assert json.loads(line)["text"] == '{"a":1}' and json.loads(line)["body"] == {"a": 1}


def test_commands_write_append_to_and_check_a_private_file(
    run: Cli, home: Path, tmp_path: Path, wording: Wording
) -> None:
    file = tmp_path / "audit.jsonl"
    ledger = Ledger(home / "ledger.db", FakeClock())
    ledger.append("job/j1", "note")
    code, body = run("audit", "export", str(file))
    first = file.read_text()
    assert code == 0 and len(first.splitlines()) == 1 and stat.S_IMODE(file.stat().st_mode) == 0o600
    assert run("audit", "export", str(file))[1]["code"] == "bad_request" and file.read_text() == first
    ledger.append("job/j1", "note")
    assert run("audit", "export", str(file), "--append")[0] == 0
    assert file.read_text().startswith(first) and len(file.read_text().splitlines()) == 2
    code, body = run("audit", "check", str(file))
    assert code == 0
    wording(body["message"], file, json.loads(file.read_text().splitlines()[-1])["hash"])
    file.write_text(first.replace("job/j1", "job/j2"))
    assert run("audit", "check", str(file))[1]["code"] == "broken"
    assert run("audit", "export", str(file), "--append")[1]["code"] == "conflict"
