"""The rule that turns causes into a verdict, and the next steps for each cause."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from gpuwarden.checkpoints.file_model import Anatomy, Broken, Doubtful
from gpuwarden.checkpoints.findings import Entry, Judgement
from gpuwarden.checkpoints.verify import verify
from gpuwarden.core.evidence import Cause, gravest_first, known, verdict
from gpuwarden.core.guidance import Action, manual_text
from gpuwarden.core.models import Level, Report, Verdict
from gpuwarden.interfaces.results.copies import verified
from pickle_kit import name, text, zip_file

REFUTE = {Cause.RUNS_CODE, Cause.DAMAGE, Cause.CONTRADICTION, Cause.NOT_FINITE, Cause.NO_RESUME}


@pytest.mark.parametrize("cause", Cause)
def test_only_positive_evidence_refutes(cause: Cause) -> None:
    assert cause.refutes == (cause in REFUTE)
    assert verdict([cause]) == ("refuted" if cause in REFUTE else "unknown")
    entry = Entry("a")
    with pytest.raises(ValueError, match=str(cause)):
        (entry.doubt if cause.refutes else entry.refute)("wrong way", cause)


def test_no_cause_means_proven_and_the_gravest_cause_decides() -> None:
    assert verdict([]) == "proven"
    assert verdict([Cause.LIMIT, Cause.DAMAGE, Cause.UNREAD]) == "refuted"
    assert gravest_first([Cause.LIMIT, Cause.DAMAGE, Cause.LIMIT, Cause.RUNS_CODE]) == (
        Cause.RUNS_CODE, Cause.DAMAGE, Cause.LIMIT,
    )  # fmt: skip


def test_a_finding_without_a_cause_gets_its_default_cause() -> None:
    assert Entry("a", problems=["x"]).why == (Cause.DAMAGE,)
    assert Entry("a", doubts=["x"]).why == (Cause.UNREAD,)
    assert Judgement("sharded", "", problems=["x"]).why == (Cause.CONTRADICTION,)
    both = Entry("a", problems=["x"])
    both.doubt("y", Cause.LIMIT)
    assert both.why == (Cause.DAMAGE, Cause.LIMIT) and both.verdict == "refuted"
    other = Anatomy("x")
    other.adopt(both)
    assert other.why == both.why


def test_reader_errors_carry_their_cause() -> None:
    assert Broken("x").cause is Cause.DAMAGE and Doubtful("x").cause is Cause.UNREAD
    assert Doubtful("x", Cause.LIMIT).cause is Cause.LIMIT


def test_unknown_causes_from_another_machine_are_dropped() -> None:
    assert known(["damage", "Damage", "unheard of", 3, "limit"]) == [Cause.DAMAGE, Cause.LIMIT]


def hints(report: Report) -> tuple[list[Action], str]:
    steps = verified(report).next
    return [s.action for s in steps], manual_text(steps)


def of(*causes: Cause, job: str = "") -> Report:
    return Report(path="x", level=Level.LOAD, verdict=Verdict(verdict(causes)), files=(), causes=causes, job=job)


def test_only_damage_suggests_another_pull() -> None:
    for cause in Cause:
        actions, said = hints(of(cause, job="j1"))
        assert (Action.PULL in actions) == (cause is Cause.DAMAGE) and said, cause
    assert Action.PULL not in hints(of(Cause.DAMAGE))[0], "a path without a job can't be pulled"


def test_every_cause_has_its_own_next_step() -> None:
    said = [hints(of(cause))[1] for cause in Cause]
    assert len(set(said)) == len(Cause)
    assert hints(of()) == ([], "")


def test_doubts_add_no_hints_to_a_refutation() -> None:
    assert hints(of(Cause.RUNS_CODE, Cause.LIMIT)) == hints(of(Cause.RUNS_CODE))


def safetensors(path: Path, data: bytes) -> Path:
    head = json.dumps({"w": {"dtype": "F32", "shape": [len(data) // 4], "data_offsets": [0, len(data)]}}).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)
    return path


def test_each_fault_gives_its_file_the_matching_cause(tmp_path: Path) -> None:
    runs = zip_file(tmp_path / "runs.pt", b"\x80\x02" + name("os", "system") + text("true") + b"\x85R.")
    needs = zip_file(tmp_path / "needs.pt", b"\x80\x02" + name("somebody", "Thing") + b")\x81.")
    nan = safetensors(tmp_path / "nan.safetensors", struct.pack("<f", float("nan")) * 4)
    cut = safetensors(tmp_path / "cut.safetensors", bytes(64))
    cut.write_bytes(cut.read_bytes()[:-4])
    unread = tmp_path / "thing.xyz"
    unread.write_bytes(b"of no format")
    for path, cause in (
        (runs, Cause.RUNS_CODE), (needs, Cause.NEEDS_CODE), (nan, Cause.NOT_FINITE), (cut, Cause.DAMAGE),
        (unread, Cause.UNREAD),
    ):  # fmt: skip
        report = verify(path, Level.CONTENT)
        assert report.causes == (cause,) and report.files[0].causes == (cause,), path.name
    assert set(verify(tmp_path, Level.CONTENT).causes) >= {Cause.RUNS_CODE, Cause.NEEDS_CODE, Cause.DAMAGE}
