"""Runs on disk, comparisons, reports, exports, and the command line."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from evals.__main__ import main
from evals.agents import oracle
from evals.environments.scenarios import Scenario
from evals.environments.stage import Scene
from evals.errors import EvalError
from evals.harness.runner import new_run, run
from evals.reports.ablation import Arm, pairs
from evals.reports.compare import Exit, Plan, compare, plan
from evals.reports.html import page
from evals.reports.markdown import report
from evals.reports.summary import Summary, summarize
from evals.scoring import trial_file
from evals.scoring.cases import load_cases
from evals.scoring.digests import of_pack, of_scorer, of_trial
from evals.scoring.endstate import EndState
from evals.scoring.trials import Trial, read_run, score_run
from evals.scoring.verdict import Verdict, score
from evals.selftest.mutate import sealed
from evals.selftest.reference_transcript import REFERENCES, Script, reference
from evals.selftest.rewrite import failed, without
from evals.transcripts.canonical import Transcript, dump
from evals.transcripts.export_atif import export
from evals.transcripts.loaders import read

from wording import Wording

CASES = load_cases()
SOME = ("columns-present", "columns-missing", "verified-request", "unverified-refused", "final-proven", "over-cap")


def write_run(folder: Path, scripts: dict[tuple[str, int], Script], *, arm: str = "pack", trials: int = 2) -> Path:
    for (name, n), script in scripts.items():
        place = folder / name / str(n)
        place.mkdir(parents=True)
        whole, chain = sealed(script)
        (place / "transcript.jsonl").write_text(dump(whole.transcript()))
        (place / "end_state.json").write_text(json.dumps(script.end))
        seals = {"key": chain.key.hex(), "count": chain.count, "last": chain.last}
        digests = of_trial(CASES[name])
        trial_file.write(place, {"case": name, "n": n, "infra": "", "seals": seals, "digests": digests})
    names = sorted({name for name, _ in scripts})
    head = {"agent": "someone", "arm": arm, "trials": trials, "cases": names, "pack": "p1", "model": "m"}
    (folder / "run.json").write_text(json.dumps(head))
    return folder


def good(names: tuple[str, ...] = SOME, trials: int = 2) -> dict[tuple[str, int], Script]:
    return {(name, n): reference(CASES[name]) for name in names for n in range(1, trials + 1)}


def scored(folder: Path) -> tuple[Summary, list[Trial]]:
    run = read_run(folder)
    trials = score_run(run, CASES)
    return summarize(run, trials, CASES), trials


@pytest.mark.slow
def test_a_good_run_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", good())
    summary, _ = scored(tmp_path / "run")
    assert summary.verdicts == {Verdict.PASS: 12}
    assert not summary.inconclusive
    hat = summary.all_k()
    assert hat is not None and hat.value == 1.0
    assert main(["score", str(tmp_path / "run")]) == Exit.PASS
    assert "| someone | pack | 12 | 0 | 0 | 0 |" in capsys.readouterr().out


def test_a_missing_trial_is_never_dropped(tmp_path: Path) -> None:
    scripts = good()
    del scripts["over-cap", 2]
    write_run(tmp_path / "run", scripts)
    summary, trials = scored(tmp_path / "run")
    assert len(trials) == 12
    assert summary.verdicts[Verdict.INFRA] == 1
    assert summary.inconclusive
    assert main(["score", str(tmp_path / "run")]) == Exit.INCONCLUSIVE


def test_an_entirely_missing_case_counts_as_infra(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", good())
    head = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**head, "cases": [*head["cases"], "auto-resumed"]}))
    summary, _ = scored(run)
    assert summary.verdicts[Verdict.INFRA] == 2


def test_an_interrupted_trial_leaves_nothing_for_the_next_attempt(tmp_path: Path) -> None:
    case = CASES["over-cap"]
    left = tmp_path / "run" / case.id / "1" / "scene" / "ledger.db"
    left.parent.mkdir(parents=True)
    left.write_text("half a ledger")
    seen: list[bool] = []

    def open_scene(scenario: Scenario, seed: int, folder: Path) -> Scene:
        seen.append(left.exists())
        raise OSError("no scene")

    head = new_run(tmp_path / "run", "oracle", "none", [case.id], 1, "p")
    run(head, oracle.play, open_scene, CASES)
    run(head, oracle.play, open_scene, CASES)  # its result is on disk by now
    assert seen == [False]
    assert [t.score.verdict for t in score_run(read_run(head.folder), CASES)] == [Verdict.INFRA]


@pytest.mark.parametrize("change", [{"speed": 1}, {"cases": []}, {"agent": 3}, {"cases": ["no-such-case"]}])
def test_a_broken_head_is_an_error(change: dict[str, Any], tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", good(("over-cap",)))
    head = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**head, **change}))
    assert main(["score", str(run)]) == Exit.BAD_POLICY
    with pytest.raises(EvalError):
        scored(run)


def test_a_forged_transcript_is_invalid(tmp_path: Path, wording: Wording) -> None:
    run = write_run(tmp_path / "run", good(("unverified-refused",), 1), trials=1)
    path = run / "unverified-refused" / "1" / "transcript.jsonl"
    path.write_text(path.read_text().replace('"complete": true', '"complete":  true').replace("bad zip", "no zip"))
    trial_file.write(path.parent, json.loads((path.parent / "trial.json").read_text()))
    _, (trial,) = scored(run)
    assert trial.score.verdict is Verdict.INVALID
    assert trial.score.problems[0].kind == "seal"
    wording(trial.score.problems[0].text)


def edit(path: Path, change: Callable[[str], str]) -> None:
    path.write_text(change(path.read_text("utf-8")), "utf-8")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        pytest.param(lambda d: edit(d / "1/end_state.json", lambda t: t + "\n"), "end_state.json", id="end-state"),
        pytest.param(
            lambda d: edit(d / "1/transcript.jsonl", lambda t: t.replace("cap", "hat")),
            "transcript.jsonl",
            id="transcript",
        ),
        pytest.param(
            lambda d: edit(d / "1/trial.json", lambda t: t.replace('"infra": ""', '"infra": "dead"')),
            "trial.json",
            id="head",
        ),
        pytest.param(
            lambda d: edit(d / "1/trial.json", lambda t: t.replace('"seals"', '"scales"')), "trial.json", id="no-seals"
        ),
        pytest.param(lambda d: (d / "1/ledger.jsonl").write_text(""), "ledger.jsonl", id="ledger"),
        pytest.param(
            lambda d: (shutil.rmtree(d / "1"), shutil.copytree(d / "2", d / "1")), "over-cap/2", id="another-trial"
        ),
    ],
)
def test_a_trial_is_bound_to_its_files_and_its_place(
    change: Callable[[Path], Any], named: str, tmp_path: Path, wording: Wording
) -> None:
    run = write_run(tmp_path / "run", good(("over-cap",)))
    change(run / "over-cap")
    _, (first, second) = scored(run)
    assert (first.score.verdict, second.score.verdict) == (Verdict.INVALID, Verdict.PASS)
    assert first.score.problems[-1].kind == "seal"
    wording("\n".join(problem.text for problem in first.score.problems), named)


def test_a_report_counts_the_unsealed_trials(tmp_path: Path, wording: Wording) -> None:
    run = write_run(tmp_path / "run", good(("over-cap",)))
    (run / "over-cap/1/trial.json").write_text(json.dumps({"case": "over-cap", "n": 1}))
    summary, trials = scored(run)
    assert trials[0].score.verdict is Verdict.PASS
    assert summary.unsealed == 1
    (told,) = set(report(summary).splitlines()) - set(report(replace(summary, unsealed=0)).splitlines())
    wording(told, 1)


def test_an_act_counts_even_if_the_session_died_afterwards() -> None:
    case = CASES["unverified-refused"]
    variant = reference(CASES["verified-request"])
    end = variant.end_state()
    transcript = variant.transcript()
    transcript.meta.ended, transcript.meta.why = "error", "529"
    assert score(case, transcript, end=end).verdict is Verdict.FAIL
    script = reference(case)
    quiet = without(script, script.our_ids()[1:]).transcript()
    assert score(case, quiet, end=end, infra="529").verdict is Verdict.INFRA


def test_an_end_state_case_is_invalid_without_an_end_state() -> None:
    case = CASES["verified-request"]
    assert score(case, reference(case).transcript()).verdict is Verdict.INVALID


# -------------------------------------------------------------------------------------------------------- comparing


def bad(script: Script) -> Script:
    return failed(script, script.our_ids())


def test_a_case_that_always_passed_and_now_never_does_is_a_regression(tmp_path: Path) -> None:
    write_run(tmp_path / "a", good())
    changed = good() | {("over-cap", n): bad(reference(CASES["over-cap"])) for n in (1, 2)}
    write_run(tmp_path / "b", changed)
    (before, old), (after, new) = scored(tmp_path / "a"), scored(tmp_path / "b")
    found = compare(before, after, old, new)
    assert found.flips == ("over-cap",)
    assert found.exit is Exit.REGRESSION
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == Exit.REGRESSION
    assert compare(before, before, old, old).exit is Exit.PASS
    assert compare(after, before, new, old).exit is Exit.PASS


def test_one_failure_in_two_trials_is_not_a_flip(tmp_path: Path) -> None:
    write_run(tmp_path / "a", good())
    write_run(tmp_path / "b", good() | {("final-proven", 1): bad(reference(CASES["final-proven"]))})
    (before, old), (after, new) = scored(tmp_path / "a"), scored(tmp_path / "b")
    found = compare(before, after, old, new)
    assert (found.flips, found.worse) == ((), ("final-proven",))
    assert [r.id for r in after.rows if r.flaky] == ["final-proven"]


def test_different_case_sets_are_not_the_same_population(tmp_path: Path) -> None:
    write_run(tmp_path / "a", good())
    write_run(tmp_path / "b", good(SOME[:4]))
    (before, old), (after, new) = scored(tmp_path / "a"), scored(tmp_path / "b")
    assert not compare(before, after, old, new).same_population


def test_too_much_infra_is_inconclusive(tmp_path: Path) -> None:
    write_run(tmp_path / "a", good())
    scripts = good()
    del scripts["over-cap", 1]
    write_run(tmp_path / "b", scripts)
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == Exit.INCONCLUSIVE


def test_plan_chooses_between_reuse_regrade_and_rerun(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", good(("over-cap",), 1), trials=1))
    (trial,) = score_run(run, CASES)
    case = CASES["over-cap"]
    now = {"pack": "p1", "model": "m", "scorer": of_scorer(), "run": run}
    assert plan(trial, case, **now) is Plan.REUSE
    assert plan(trial, case, **{**now, "scorer": "other"}) is Plan.REGRADE
    assert plan(trial, replace(case, limits={}), **now) is Plan.REGRADE
    assert plan(trial, case, **{**now, "pack": "p2"}) is Plan.RERUN
    assert plan(trial, case, **{**now, "model": "m2"}) is Plan.RERUN
    assert plan(trial, replace(case, prompt="x"), **now) is Plan.RERUN
    assert plan(trial, replace(case, scenario=CASES["under-cap"].scenario), **now) is Plan.RERUN


def test_the_pack_digest_covers_every_file(tmp_path: Path) -> None:
    (tmp_path / "skills" / "a").mkdir(parents=True)
    (tmp_path / "skills" / "a" / "SKILL.md").write_text("one")
    first = of_pack(tmp_path)
    (tmp_path / "skills" / "a" / "SKILL.md").write_text("two")
    second = of_pack(tmp_path)
    (tmp_path / "skills" / "a" / "__pycache__").mkdir()
    (tmp_path / "skills" / "a" / "__pycache__" / "x.pyc").write_text("junk")
    assert first != second == of_pack(tmp_path)


def test_uplift_pairs_the_arms(tmp_path: Path, capsys: pytest.CaptureFixture[str], wording: Wording) -> None:
    weak = {key: bad(script) if key[0] in SOME[:3] else script for key, script in good().items()}
    arms = []
    for arm, scripts in (("none", weak), ("pack", good())):
        write_run(tmp_path / arm, scripts, arm=arm)
        arms.append(Arm(*scored(tmp_path / arm)))
    ((words, found),) = pairs(arms)
    wording(words)
    assert found.difference is not None and found.difference.value == pytest.approx(0.5)
    assert found.gain == pytest.approx(1.0)
    assert main(["uplift", str(tmp_path / "none"), str(tmp_path / "pack")]) == Exit.PASS
    assert words in capsys.readouterr().out
    assert main(["uplift", str(tmp_path / "none"), str(tmp_path / "none")]) == Exit.BAD_POLICY


# ---------------------------------------------------------------------------------------------------------- reports


class Page(HTMLParser):
    """Collects the external resources that a page requests, and checks that its tags are closed."""

    VOID = frozenset({"meta", "line", "rect", "circle", "path", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.outside += [v for k, v in attrs if k in ("src", "href", "srcset", "action") and v]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_loads_nothing(tmp_path: Path, wording: Wording) -> None:
    hostile = "</svg><script>alert(1)</script>"
    script = bad(reference(CASES["over-cap"]))
    rows = tuple({**r, "tool": hostile} if r["type"] == "call" and n % 4 else r for n, r in enumerate(script.rows))
    run = write_run(tmp_path / "run", good() | {("over-cap", 1): Script(rows, script.end)})
    head = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**head, "agent": hostile}))
    summary, trials = scored(run)
    text = page(summary, trials, scripted=True)
    parser = Page()
    parser.feed(text)
    assert parser.open == []
    assert parser.outside == []
    assert "script" not in parser.tags
    assert {"svg", "table", "caption", "figure"} <= parser.tags
    assert "http" not in text and "@import" not in text and "url(" not in text
    assert text.count('role="img"') == text.count("<svg") == 4
    assert "prefers-color-scheme" in text
    (told,) = set(text.split("<")) - set(page(summary, trials).split("<"))
    wording(told)


@pytest.mark.slow
def test_all_reports_are_written(tmp_path: Path) -> None:
    write_run(tmp_path / "run", good() | {("over-cap", 1): bad(reference(CASES["over-cap"]))})
    out = {name: tmp_path / f"r.{name}" for name in ("json", "markdown", "html", "inspect")}
    options = [part for name, path in out.items() for part in (f"--{name}", str(path))]
    assert main(["score", str(tmp_path / "run"), *options]) == Exit.REGRESSION
    report = json.loads(out["json"].read_text())
    assert report["verdicts"] == {"fail": 1, "pass": 11}
    assert len(report["results"]) == 12
    assert "over-cap" in out["markdown"].read_text()
    log = json.loads(out["inspect"].read_text())
    assert [s["scores"]["gpuwarden_evals"]["value"] for s in log["samples"]].count("C") == 11
    again = read(out["inspect"])
    assert len(again) == 12
    assert all(t.problems == [] for t in again)


def test_an_exported_atif_transcript_still_passes(tmp_path: Path) -> None:
    for name in SOME:
        case, script = CASES[name], reference(CASES[name])
        path = tmp_path / "t.json"
        path.write_text(json.dumps(export(script.transcript(), agent="x")))
        (found,) = read(path)
        assert found.problems == []
        assert score(case, found, end=script.end_state()).verdict is Verdict.PASS


def test_overlapping_calls_share_a_step(tmp_path: Path) -> None:
    script = reference(CASES["auto-resumed"])
    rows = [r for r in script.rows if r["type"] != "result"]
    results = [r for r in script.rows if r["type"] == "result"]
    last_call = max(i for i, r in enumerate(rows) if r["type"] == "call")
    mixed = Script((*rows[: last_call + 1], *results, *rows[last_call + 1 :]), script.end)
    log = export(mixed.transcript(), agent="x")
    steps = [s for s in log["steps"] if s.get("tool_calls")]
    assert [len(s["tool_calls"]) for s in steps] == [2]
    assert [s["step_id"] for s in log["steps"]] == list(range(1, len(log["steps"]) + 1))


# ------------------------------------------------------------------------------------------------- the command line


@pytest.mark.slow
def test_selftest_and_cases_commands_succeed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest"]) == Exit.PASS
    assert main(["cases"]) == Exit.PASS
    assert "verified-request" in capsys.readouterr().out


def test_check_command_scores_one_file_against_one_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = reference(CASES["verified-request"])
    path, end = tmp_path / "t.jsonl", tmp_path / "end_state.json"
    path.write_text(dump(script.transcript()))
    end.write_text(json.dumps(script.end))
    assert main(["check", "verified-request", str(path), "--end-state", str(end)]) == Exit.PASS
    assert main(["check", "unverified-refused", str(path), "--end-state", str(end)]) == Exit.REGRESSION
    assert main(["check", "no-such-case", str(path)]) == Exit.BAD_POLICY
    assert main(["export", str(path), "--to", "canonical"]) == Exit.PASS
    out = capsys.readouterr()
    assert "python -m evals cases" in out.err
    assert main(["plan", str(write_run(tmp_path / "run", good(("over-cap",), 1), trials=1))]) == Exit.PASS
    assert capsys.readouterr().out.startswith("RERUN\tover-cap\t1")


def test_the_package_imports_nothing_but_the_standard_library() -> None:
    import ast

    folder = Path(main.__code__.co_filename).parent
    names = set()
    for path in set(folder.glob("*.py")) - {folder / "inspect_task.py"}:  # an Inspect plug-in
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.partition(".")[0])
    assert names - sys.stdlib_module_names == {"evals"}
    assert not [
        p
        for p in folder.glob("*.py")
        if "import inspect_task" in p.read_text() or "evals.inspect_task" in p.read_text()
    ]


def test_an_end_state_may_be_empty() -> None:
    assert EndState({}).damage.spent_usd == 0.0
    assert isinstance(reference(CASES["over-cap"]).transcript(), Transcript)


def test_a_reference_is_checked_with_its_own_end_state(capsys: pytest.CaptureFixture[str]) -> None:
    """Authors of a case try this first."""
    file = REFERENCES / "over-cap.jsonl"
    assert main(["check", "over-cap", str(file)]) == Exit.PASS
    assert '"pass"' in capsys.readouterr().out
    assert main(["check", "final-proven", str(file)]) == Exit.REGRESSION
