"""Every event is declared, and a first-schema ledger folds to the same records as when it was new."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import pkgutil
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from fakes import FakeClock
from gpuwarden.core.errors import LedgerError
from gpuwarden.core.policy import Policy
from gpuwarden.core.reasons import Code
from gpuwarden.core.states import Job
from gpuwarden.ledger import events as ledger_events
from gpuwarden.ledger.events import (
    BODIES,
    AlertBody,
    ApprovalGranted,
    ArtifactsPulled,
    Body,
    CancelRequested,
    FanOutAccepted,
    JobSubmitting,
    LeaseEnded,
    ReceiptIssued,
    Unrecognized,
    VerbSent,
    decode,
    kinds_of,
)
from gpuwarden.ledger.migrate import VERSION
from gpuwarden.ledger.store import Ledger
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.leases.budgets import spending_approved, spent_today
from gpuwarden.lifecycle.leases.meter import confirmed_end, lease_now
from gpuwarden.lifecycle.monitoring.alert_conditions import billed_today
from gpuwarden.lifecycle.notify import Alert
from gpuwarden.lifecycle.records import LeaseRecord, job_ids, lease_ids, read_job, read_lease, read_teardown, story
from paths import FIXTURES, ROOT
from wording import Wording

PACKAGE = ROOT / "server" / "gpuwarden"
NEW = {"running_since", "supervisor", "next_steps"}


@pytest.fixture(scope="module")
def read_then() -> dict[str, Any]:
    """The records that were read by the same code that wrote the first-schema ledger."""
    found: dict[str, Any] = json.loads((FIXTURES / "ledger_v1.records.json").read_text("utf-8"))
    return found


@pytest.fixture
def first_schema(tmp_path: Path) -> Path:
    path = tmp_path / "home" / "ledger.db"
    path.parent.mkdir()
    db = sqlite3.connect(path)
    db.execute("PRAGMA journal_mode = WAL")
    db.executescript((FIXTURES / "ledger_v1.sql").read_text("utf-8"))
    db.close()
    return path


def plain(value: Any) -> Any:
    """Return a record as JSON data."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def as_then(lease: LeaseRecord) -> dict[str, Any]:
    """Return a lease with the fields that its record had at that time."""
    record = plain(lease) | {"instance": plain(lease.instance)}
    return {name: value for name, value in record.items() if name not in ("answers", "cost", "estimated")}


def without_new(value: Any) -> Any:
    """Return JSON data as in the first schema: without empty fields added since, and with each fix as a sentence."""
    if isinstance(value, list):
        return [without_new(v) for v in value]
    if not isinstance(value, dict):
        return value
    kept = {k: without_new(v) for k, v in value.items() if k not in NEW or v not in (None, [])}
    if isinstance(kept.get("fix"), list):
        kept["fix"] = " ".join(step["parameters"]["text"] for step in kept["fix"])
    return kept


@pytest.mark.anyio
async def test_a_ledger_of_the_first_schema_folds_to_the_same_records(
    first_schema: Path, read_then: dict[str, Any]
) -> None:
    clock = FakeClock(read_then["now"])
    ctx = Context(Ledger(first_schema, clock), Policy(), clock, first_schema.parent, env={})
    ledger, jobs, leases = ctx.ledger, job_ids(ctx.ledger), lease_ids(ctx.ledger)
    tickets = [s.removeprefix("teardown/") for s in ledger.subjects("teardown")]
    receipts = [e.subject.removeprefix("receipt/") for e in ledger.events(kind=ReceiptIssued)]
    pulls = {job: ledger.last(f"job/{job}", ArtifactsPulled) for job in jobs}
    now = {
        "now": clock.now(),
        "events": ledger.count(),
        "jobs": {j: plain(read_job(ledger, j)) for j in jobs},
        "leases": {name: as_then(read_lease(ledger, name)) for name in leases},
        "teardowns": {t: plain(read_teardown(ledger, t)) for t in tickets},
        "spent": {name: lease_now(ctx, name).cost for name in leases},
        "price": {name: read_lease(ledger, name).price for name in leases},
        "believed": {name: confirmed_end(ctx, name) for name in leases},
        "spent_today": spent_today(ctx, pretend=True),
        "billed_today": await billed_today(ctx, pretend=True),
        "spending_approved": {r: spending_approved(ctx, r) for r in receipts},
        "alerts": [plain(Alert.read(e)) for e in ledger.events(kind=AlertBody)],
        "subjects": {machine: ledger.subjects(machine) for machine in ("job", "lease", "teardown")},
        "story": {j: [e.seq for e in story(ledger, j)] for j in jobs},
        "pulled": {j: pull.data.digest for j, pull in pulls.items() if pull is not None},
    }
    now = json.loads(json.dumps(now))
    later = ("declared", "reason", "pausing", "resume_requested", "resumed", "dropped", "limit_s", "person", "array")
    later += ("choices", "choice", "given_up", "given_up_generation")
    for records, field in (*(("jobs", field) for field in later), ("leases", "account")):
        assert not any(record.pop(field) for record in now[records].values())  # a first-schema ledger can't contain it
    now = without_new(now)
    assert now.keys() == read_then.keys()
    for name, value in now.items():
        if name in {"spent_today", "billed_today"}:
            assert value >= read_then[name] - 1e-9, name
        elif name == "spent":  # the old cost ends at the last answer; the new one includes the time since
            for lease, cost in value.items():
                then = read_then[name][lease]
                final = (now["leases"][lease]["instance"] or {}).get(
                    "meter"
                ) is False  # the final bill of a machine that is off
                assert then is None or (cost == then if final else cost >= then), lease
        else:
            assert value == read_then[name], name


def test_migration_preserves_every_event(first_schema: Path) -> None:
    db = sqlite3.connect(first_schema)
    sql = "SELECT seq, at, subject, kind, state, token, actor, body FROM events ORDER BY seq"
    before = db.execute(sql).fetchall()
    db.close()
    Ledger(first_schema, FakeClock()).close()
    db = sqlite3.connect(first_schema)
    assert db.execute(sql).fetchall() == before and len(before) > 300
    assert db.execute("PRAGMA user_version").fetchone()[0] == VERSION
    tables = {row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    db.close()
    assert tables == {"events", "current", "alerts"}


def test_the_guard_sees_a_paused_job_in_a_ledger_from_before_pausing(tmp_path: Path) -> None:
    file = tmp_path / "ledger.db"
    Ledger(file, FakeClock()).close()
    db = sqlite3.connect(file)
    (made,) = db.execute("SELECT sql FROM sqlite_master WHERE name = 'live_runs'").fetchone()
    db.execute("DROP VIEW live_runs")
    db.execute(made.replace("'paused', ", ""))
    db.execute("PRAGMA user_version = 2")
    db.close()
    Ledger(file, FakeClock()).close()
    db = sqlite3.connect(file)
    assert db.execute("PRAGMA user_version").fetchone()[0] == VERSION
    assert db.execute("SELECT sql FROM sqlite_master WHERE name = 'live_runs'").fetchone()[0] == made
    db.close()


def test_a_failed_migration_leaves_the_old_ledger_unchanged(
    first_schema: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: object) -> str:
        raise OSError("no more")

    before = first_schema.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("gpuwarden.ledger.migrate.link", dies)
        with pytest.raises(LedgerError):
            Ledger(first_schema, FakeClock())
    db = sqlite3.connect(first_schema)
    assert db.execute("PRAGMA user_version").fetchone()[0] == 1
    assert db.execute("SELECT count(*) FROM events").fetchone()[0] > 300
    db.close()
    assert first_schema.read_bytes() == before
    assert Ledger(first_schema, FakeClock()).count() > 300


def test_every_stored_event_reads_and_writes_back_unchanged(first_schema: Path) -> None:
    ledger = Ledger(first_schema, FakeClock())
    kinds = set()
    for event in ledger.events():
        kinds.add(event.kind)
        if event.version == type(event.data).VERSION:
            assert without_new(event.data.stored()) == event.body, event
    assert kinds <= BODIES.keys() and len(kinds) > 45


def test_an_older_event_version_is_upgraded_when_read(first_schema: Path) -> None:
    ledger = Ledger(first_schema, FakeClock())
    sent = ledger.events(kind=VerbSent)
    assert {e.version for e in sent} == {1} and "answer" in sent[0].body
    assert all(e.data.taken == (e.body["answer"] == "taken") for e in sent)
    assert {e.data.taken for e in sent} == {True, False}
    assert all(e.data.why == e.body["answer"] for e in sent if not e.data.taken)


def test_fields_stored_under_an_earlier_name_are_read() -> None:
    granted = decode("approval.granted", 1, {"channel": "standing_order", "end_when_proven": "stop"})
    assert isinstance(granted, ApprovalGranted)
    assert (granted.channel, granted.auto_teardown) == ("automatic_teardown", "stop")
    spec = {"platform": "runpod", "command": ["true"], "outputs": ["out"], "keep": "s3://runs/a"}
    plan = {"base": {"platform": "local", "script": "print()"}, "search": {"space": {"lr": "1..9"}, "trials": 2}}
    receipt = {"spec_digest": "d", "facts_digest": "f", "expires_at": 1.0, "keep": "s3://runs/a", "spec": spec}
    issued = decode("receipt.issued", 1, receipt | {"roster": plan})
    assert isinstance(issued, ReceiptIssued) and issued.spec is not None and issued.plan is not None
    assert issued.artifact_store == issued.spec.artifact_store == "s3://runs/a"
    assert issued.plan.base.platform == "local"
    began = decode("fanout.accepted", 1, {"roster": plan, "receipt": "r", "folder": "/f"})
    assert isinstance(began, FanOutAccepted) and began.plan.base.platform == "local"
    order = {"after_s": 900.0, "by": {"command": ["poweroff"]}}
    place = {"platform": "runpod", "run_root": "/r", "self_stop": ["true"], "park": order}
    launched = decode("job.submitting", 1, {"place": place})
    assert isinstance(launched, JobSubmitting) and launched.place is not None
    assert launched.place.self_stop_command == ("true",) and launched.place.self_stop_order is not None
    unknown = decode("job.unknown", 1, {"reason": {"code": "parked"}})
    assert unknown.reason_code is Code.SELF_STOPPED


def test_a_newer_event_version_is_refused(tmp_path: Path, wording: Wording) -> None:
    ledger = Ledger(tmp_path / "ledger.db", FakeClock())
    event = ledger.append("lease/l1", "verb.sent", {"verb": "stop", "taken": True}, version=9)
    with pytest.raises(LedgerError) as refused:
        _ = event.data
    wording(refused, "lease/l1")
    with pytest.raises(ValueError, match="9"):
        decode("verb.sent", 9, {})


def test_an_unknown_kind_is_kept_and_changes_nothing(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db", FakeClock())
    ledger.append("job/j1", "job.painted", {"colour": "red"})
    (event,) = ledger.events("job/j1")
    assert event.data.stored() == {} and event.as_dict()["body"] == {"colour": "red"}


def test_bodies_are_frozen_and_store_only_given_fields(tmp_path: Path) -> None:
    event = Ledger(tmp_path / "ledger.db", FakeClock()).add("job/j1", CancelRequested(from_state=Job.RUNNING))
    assert event.body == {"from": "running"} and event.data.from_state is Job.RUNNING
    with pytest.raises(ValueError, match="frozen"):
        event.data.why = "x"  # type: ignore[misc]


def test_a_base_class_stands_for_all_its_events(tmp_path: Path) -> None:
    assert kinds_of(LeaseEnded) == {"lease.stopped", "lease.gone"}
    assert kinds_of(AlertBody) == {"alert.raised", "alert.cleared"}


def modules() -> list[Path]:
    return [file for file in PACKAGE.rglob("*.py") if "ledger" not in file.relative_to(PACKAGE).parts]


@pytest.mark.slow
def test_every_event_type_can_be_read_back() -> None:
    """If the package did not import a type's module, its events would be read back as `Unrecognized`."""
    for module in pkgutil.iter_modules(ledger_events.__path__, f"{ledger_events.__name__}."):
        importlib.import_module(module.name)

    def below(body: type[Body]) -> set[type[Body]]:
        return {body}.union(*(below(one) for one in body.__subclasses__()))

    stored = {body for body in below(Body) if "event" in body.model_fields and body.__module__.startswith("gpuwarden.")}
    assert stored == set(BODIES.values())
    bases = {body for body in below(Body) - stored if body.__module__.startswith("gpuwarden.")}
    assert {body for body in bases if not body.__subclasses__()} == {Unrecognized}
    assert {body.__name__ for body in stored} <= set(vars(ledger_events))


@pytest.mark.slow
def test_bodies_and_kinds_are_named_only_in_the_ledger_package() -> None:
    """Docstrings may name a kind, because they are not code."""
    wrong = []
    for file in modules():
        tree = ast.parse(file.read_text("utf-8"))
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
                wrong += [f"{file.name}:{node.lineno} {kind}" for kind in BODIES if kind in node.value]
        wrong += [f"{file.name}: {text}" for text in re.findall(r"\.body(?:\[|\.get\().*", file.read_text("utf-8"))]
    assert wrong == []


@pytest.mark.parametrize(("expires_at", "now", "holds"), [(10.0, 10.0, True), (10.0, 10.1, False), (None, 0.0, False)])
def test_an_approval_holds_until_its_expiry_and_never_without_an_expiry(
    expires_at: float | None, now: float, holds: bool
) -> None:
    assert ApprovalGranted(expires_at=expires_at).holds_at(now) is holds
