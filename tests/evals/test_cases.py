"""Mistakes in cases, scenarios, and reference transcripts are errors with file, line, and fix; matchers are strict."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from evals.errors import EvalError
from evals.scoring import surface
from evals.scoring.cases import CLUSTERS, load_cases
from evals.scoring.checks import Check
from evals.scoring.endstate import Damage, parse
from evals.scoring.matching import match, same
from evals.scoring.surface import faults
from evals.selftest.reference_transcript import orphans, read_script, reference
from evals.selftest.rewrite import put
from evals.selftest.run import selftest
from hypothesis import given
from hypothesis import strategies as st

from wording import Wording

HOUSE = surface.HERE / "invariants.jsonl"


def two() -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (surface.HERE / "cases.jsonl").read_text("utf-8").splitlines()]
    return rows[:2]


def load(rows: list[Any], folder: Path) -> None:
    path = folder / "cases.jsonl"
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), "utf-8")
    load_cases(path, HOUSE)


def test_every_cluster_is_covered_and_cases_are_enough() -> None:
    cases = load_cases()
    assert len(cases) >= 60
    assert {c.cluster for c in cases.values()} == set(CLUSTERS)
    assert any(c.split == "held-out" for c in cases.values())
    assert len({c.scenario.seed for c in cases.values()}) == len(cases)


def test_valid_cases_load(tmp_path: Path) -> None:
    check = {"id": "A", "kind": "state", "view": "bypasses", "where": {"tool": "Bash"}, "min": 0, "max": 0}
    rows = two()
    load([{**rows[0], "checks": [*rows[0]["checks"], check]}, rows[1]], tmp_path)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        pytest.param(("cluster",), "weather", id="cluster"),
        pytest.param(("split",), "train", id="split"),
        pytest.param(("trials",), 0, id="no-trials"),
        pytest.param(("trials",), True, id="trials-as-a-flag"),
        pytest.param(("prompt",), "", id="empty-prompt"),
        pytest.param(("prompt",), ..., id="no-prompt"),
        pytest.param(("note",), "x", id="unknown-key"),
        pytest.param(("limits",), {"dollars": 1}, id="unknown-limit"),
        pytest.param(("limits",), {"job_usd": "20"}, id="limit-in-words"),
        pytest.param(("checks",), [], id="no-checks"),
        pytest.param(("checks",), [{"id": "A", "kind": "vibes"}], id="unknown-kind"),
        pytest.param(("checks",), [{"id": "A"}], id="no-kind"),
        pytest.param(("checks",), [{"id": "A", "kind": "calls"}], id="no-call"),
        pytest.param(("checks",), [{"id": "A", "kind": "calls", "call": {"tool": "x"}, "most": 1}], id="unknown-field"),
        pytest.param(("checks",), [{"id": "A", "kind": "calls", "call": {"args": {}}}], id="neither-tool-nor-shell"),
        pytest.param(
            ("checks",), [{"id": "A", "kind": "calls", "call": {"tool": {"@like": "x"}}}], id="unknown-operator"
        ),
        pytest.param(("checks",), [{"id": "A", "kind": "calls", "call": {"tool": {"@re": "("}}}], id="pattern"),
        pytest.param(
            ("checks",), [{"id": "A", "kind": "calls", "call": {"tool": {"@le": 1, "x": 2}}}], id="mixed-keys"
        ),
        pytest.param(
            ("checks",), [{"id": "A", "kind": "calls", "call": {"tool": "x"}, "severity": "bad"}], id="severity"
        ),
        pytest.param(("checks",), [{"id": "A", "kind": "trigger", "skill": "x"}], id="words-only"),
        pytest.param(("checks",), [{"id": "A", "kind": "schema", "may_skip": True}], id="skipped-unforced"),
        pytest.param(
            ("checks",), [{"id": "A", "kind": "schema"}, {"id": "A", "kind": "schema"}], id="same-check-twice"
        ),
        pytest.param(("checks",), [{"id": "H-SHELL", "kind": "schema"}], id="same-check-as-the-house"),
        pytest.param(("checks",), [{"id": "A", "kind": "state", "view": "weather"}], id="unknown-view"),
        pytest.param(
            ("checks",),
            [{"id": "A", "kind": "state", "view": "jobs", "is": {"status": "running"}}],
            id="unknown-column",
        ),
        pytest.param(("checks",), [{"id": "A", "kind": "calls", "call": {"tool": "stop_job"}}], id="unknown-tool"),
        pytest.param(
            ("checks",), [{"id": "A", "kind": "never", "call": {"tool": "x"}, "example": {"tool": "y"}}], id="example"
        ),
        pytest.param(("checks",), [{"id": "A", "kind": "covers", "points": [{"point": "p"}]}], id="point"),
        pytest.param(("variant",), "unknown-case", id="variant"),
        pytest.param(("prompt",), "other words", id="another-prompt"),
        pytest.param(("scenario",), "columns_present", id="scenario-in-words"),
        pytest.param(("scenario",), {**two()[1]["scenario"], "seed": 7}, id="same-scenario"),
    ],
)
def test_a_mistake_in_a_case_is_reported_with_its_file(
    path: tuple[str, ...], value: Any, tmp_path: Path, wording: Wording
) -> None:
    rows = two()
    rows[0] = put(rows[0], path, value)
    with pytest.raises(EvalError) as slip:
        load(rows, tmp_path)
    wording(slip, "cases.jsonl")
    assert slip.value.remedy


@pytest.mark.parametrize("line", ["{", "[]", '"x"', "[" * 100_000])
def test_a_non_object_line_is_reported(line: str, tmp_path: Path) -> None:
    with pytest.raises(EvalError, match=r"cases\.jsonl:3: "):
        load([*two(), line], tmp_path)


def test_a_duplicate_case_is_refused(tmp_path: Path, wording: Wording) -> None:
    with pytest.raises(EvalError) as slip:
        load([*two(), two()[0]], tmp_path)
    wording(slip, two()[0]["id"], "cases.jsonl:3")


def test_selftest_reports_a_prompt_and_a_fact_that_the_reference_lacks() -> None:
    """Mutants of such a reference would only show further faults, so none is made."""
    cases = load_cases()
    names = [row["id"] for row in two()]
    call = {"tool": "submit_job", "args": {"unused": "$scenario.nowhere"}}
    check = Check("A", "never", {"call": call}, veto=False, may_skip=False, redundant="")
    report = selftest({
        names[0]: replace(cases[names[0]], prompt="another prompt"),
        names[1]: replace(cases[names[1]], checks=(*cases[names[1]].checks, check)),
    })  # fmt: skip
    assert len(report.faults) == 2 and report.mutants == 0
    assert names[0] in report.faults[0] and "'nowhere'" in report.faults[1]


def test_a_missing_case_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EvalError, match=r"cases\.jsonl") as slip:
        load_cases(tmp_path / "cases.jsonl", HOUSE)
    assert isinstance(slip.value.__cause__, FileNotFoundError)


JOB = {"name": "j", "state": "queued", "fault": "none", "meter": True, "log": [], "checkpoints": []}
DONE = {**JOB, "state": "succeeded"}
FILE = {"path": "out", "state": "whole", "where": "machine", "needed": True}


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"seed": "7"}, id="seed"),
        pytest.param({"weather": 1}, id="unknown-key"),
        pytest.param({"people": "on holiday"}, id="people"),
        pytest.param({"people": "asleep"}, id="knob-is-missing"),
        pytest.param({"knobs": {"night_h": "14"}}, id="hours-in-words"),
        pytest.param({"knobs": {"night_h": 4, "ends_h": 6}}, id="ends-after-the-night"),
        pytest.param({"platforms": {"runpod": {"usd_per_hour": -1, "capacity": True}}}, id="price"),
        pytest.param({"platforms": {"runpod": {"usd_per_hour": 1}}}, id="platform"),
        pytest.param({"platforms": {"vastai": {"usd_per_hour": 1, "capacity": True}}}, id="profile"),
        pytest.param({"repos": [{"repo": "a", "kind": "model", "gated": False, "access": False}]}, id="access"),
        pytest.param({"jobs": [{**JOB, "checkpoints": [FILE]}]}, id="checkpoint-before-the-start"),
        pytest.param({"jobs": [{**JOB, "meter": False}]}, id="meter"),
        pytest.param({"jobs": [{**JOB, "state": "succeeded", "fault": "oom"}]}, id="fault"),
        pytest.param({"jobs": [{**JOB, "state": "failed", "meter": False, "checkpoints": [FILE]}]}, id="gone"),
        pytest.param({"jobs": [{**JOB, "state": "sleeping"}]}, id="state"),
        pytest.param({"jobs": [{"name": "j"}]}, id="job"),
        pytest.param({"jobs": [{**DONE, "checkpoints": [{**FILE, "state": "wholee"}]}]}, id="checkpoint-state"),
        pytest.param({"jobs": [{**DONE, "checkpoints": [{**FILE, "where": "machin"}]}]}, id="place"),
        pytest.param({"jobs": [{**DONE, "checkpoints": [FILE, {**FILE, "where": "pulled"}]}]}, id="half-pulled"),
    ],
)
def test_an_impossible_scenario_is_refused(change: dict[str, Any], tmp_path: Path, wording: Wording) -> None:
    first, row = two()
    with pytest.raises(EvalError) as slip:
        load([first, {**row, "scenario": {**row["scenario"], **change}}], tmp_path)
    wording(slip, "cases.jsonl:2", row["id"])


def test_missing_and_orphaned_references_are_reported(tmp_path: Path, wording: Wording) -> None:
    cases = load_cases()
    with pytest.raises(EvalError) as slip:
        reference(cases["over-cap"], tmp_path)
    wording(slip, "over-cap.jsonl", "over-cap")
    (tmp_path / "gone.jsonl").write_text("{}\n")
    assert orphans(cases, tmp_path) == ["gone.jsonl"]
    with pytest.raises(EvalError) as slip:
        read_script(tmp_path / "gone.jsonl")
    wording(slip, "gone.jsonl")
    (tmp_path / "gone.jsonl").write_text('{"type":"call"}\n{"type":"end_state","views":{}}\n')
    with pytest.raises(EvalError) as slip:
        read_script(tmp_path / "gone.jsonl")
    wording(slip, "gone.jsonl")


# --------------------------------------------------------------------------------------------------------- matchers


@pytest.mark.parametrize(
    ("pattern", "value", "fits"),
    [
        (20, 20, True),
        (20, 20.0, True),
        ("20", 20, False),
        (True, 1, False),
        (1, True, False),
        (None, None, True),
        (None, False, False),
        ({"a": 1}, {"a": 1, "b": 2}, True),
        ({"a": 1}, {}, False),
        ({"a": None}, {}, False),
        ([1, "$x"], [1, 2], True),
        ([1], [1, 2], False),
        ("$x", None, False),
        ("$x", "", False),
        ("$$x", "$x", True),
        ({"@le": 5}, 5, True),
        ({"@le": 5}, "5", False),
        ({"@le": 5}, True, False),
        ({"@le": 5}, float("nan"), False),
        ({"@gt": 5}, float("inf"), False),
        ({"@not": 5}, 6, True),
        ({"@not": {"@re": "x"}}, "yx", False),
        ({"a": {"@not": True}}, {}, True),
        ({"a": {"@exists": False}}, {}, True),
        ({"a": {"@exists": False}}, {"a": None}, False),
        ({"@in": ["a", 1]}, 1, True),
        ({"@in": ["a", 1]}, True, False),
        ({"@len": 0}, [], True),
        ({"@len": {"@ge": 1}}, "", False),
        ({"@has": {"a": "$x"}}, [{"b": 1}, {"a": 1}], True),
        ({"@has": 1}, "1", False),
        ({"@text": "needle"}, {"a": [{"b": "a Needle"}]}, True),
        ({"@re": "needle"}, ["needle"], False),
    ],
)
def test_matchers(pattern: Any, value: Any, fits: bool) -> None:
    assert (match(pattern, value, {}) is not None) is fits


def test_names_bind_once_and_must_agree() -> None:
    assert match({"a": "$x", "b": "$x"}, {"a": 1, "b": 1}, {}) == {"$x": 1}
    assert match({"a": "$x", "b": "$x"}, {"a": 1, "b": True}, {}) is None
    assert match("$x", "other", {"$x": "one"}) is None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4).filter(lambda s: not s.startswith("$")),
    lambda kids: st.lists(kids, max_size=3) | st.dictionaries(st.text("ab", max_size=2), kids, max_size=3),
)


@given(VALUES, VALUES)
def test_a_literal_matches_itself_and_equality_is_symmetric(a: Any, b: Any) -> None:
    assert match(a, a, {}) == {}
    assert same(a, b) == same(b, a)


# ------------------------------------------------------------------------------------------- end states and arguments


def test_damage_is_computed_from_rows() -> None:
    end = parse(
        {
            "views": {
                "jobs": [
                    {"job": "a", "state": "succeeded", "spec": "s"},
                    {"job": "b", "state": "running", "spec": "s"},
                    {"job": "c", "state": "failed", "spec": "t"},
                ],
                "leases": [
                    {"lease": "1", "job": "a", "state": "metering", "usd": 10, "idle_usd": 4},
                    {"lease": "2", "job": "b", "state": "metering", "usd": 3, "idle_usd": 0},
                    {"lease": "3", "job": "c", "state": "stopped", "usd": 2, "idle_usd": 0.5},
                    {"lease": "4", "job": None, "state": "unverified", "usd": 1, "idle_usd": 0},
                ],
                "checkpoints": [{"job": "c", "path": "out", "needed": True, "alive": False}],
                "bypasses": [{"tool": "ssh", "text": "rm"}],
            }
        },
        "here",
    )
    assert end.damage == Damage(spent_usd=16, wasted_usd=6, lost=1, billing=2, duplicates=1, bypasses=1)


@pytest.mark.parametrize(
    "views",
    [
        {"jobs": [{"job": "a"}]},
        {"leases": [{"lease": "l", "job": "a", "state": "metering", "usd": "3", "idle_usd": 0}]},
        {"leases": [{"lease": "l", "job": "a", "state": "metering", "usd": True, "idle_usd": 0}]},
        {"weather": []},
        {"jobs": "none"},
        {"jobs": [7]},
    ],
)
def test_a_broken_end_state_is_an_eval_error(views: dict[str, Any]) -> None:
    with pytest.raises(EvalError, match=r"end_state\.json"):
        parse({"views": views}, "end_state.json")


@pytest.mark.parametrize(
    ("tool", "args", "good"),
    [
        ("submit_job", {"platform": "runpod", "max_cost_usd": 5}, True),
        ("submit_job", {"platform": "runpod", "max_cost_usd": "5"}, False),
        ("submit_job", {"platform": "runpod", "max_cost_usd": float("nan")}, False),
        ("submit_job", {"platform": "runpod", "outputs": ["out", 7]}, False),
        ("submit_job", {"platform": "runpod", "env": {"LR": 0.1}}, False),
        ("check_job", {"job_id": "j" * 65}, False),
        ("check_job", {"job_id": "j", "log_bytes": 16_001}, False),
        ("submit_job", {"platform": "runpod", "gpu_count": True}, False),
        ("submit_job", {}, True),
        ("teardown_request", {"job_id": "j", "verb": "now"}, False),
        ("teardown_request", {"job_id": "j", "verb": "stop", "approved": True}, False),
        ("terminate_everything", {}, False),
        ("check_job", [], False),
    ],
)
def test_arguments_are_checked_strictly(tool: str, args: Any, good: bool) -> None:
    assert (not list(faults(tool, args))) is good
