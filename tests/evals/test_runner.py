"""The runner and the scripted agents, on a stage that answers from the reference transcript with fresh ids.

The real stages start the real server. These tests cover the layer between: recording, sealing, limits, and which side
is to blame for a crash.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from evals.agents.oracle import play as oracle
from evals.environments.scenarios import Scenario
from evals.environments.stage import stage, stages
from evals.errors import EvalError
from evals.harness.recorder import Recorder
from evals.harness.runner import agent, agents, new_run, run
from evals.reports.summary import summarize
from evals.scoring.cases import Case, load_cases
from evals.scoring.trials import read_run, score_run
from evals.scoring.verdict import Verdict
from evals.selftest.reference_transcript import reference

CASES = load_cases()


class Replay:
    """A scene that gives the reference transcript's replies in order, with other ids."""

    def __init__(self, scenario: Scenario, seed: int, folder: Path) -> None:
        case = next(c for c in CASES.values() if c.scenario == scenario)
        self.seed = seed
        self.calls = iter(reference(case).transcript().calls)
        self.script = reference(case)
        self.facts = self.fresh(self.script.end.get("facts", {}))
        self.closed = False

    def fresh(self, value: Any) -> Any:
        text = json.dumps(value)
        for job in {j["job"] for j in self.script.end["views"]["jobs"]}:
            text = text.replace(job, f"{job[:4]}{self.seed}")
        return json.loads(text.replace('"rcpt-', f'"rcpt-{self.seed}-'))

    def call(self, tool: str, args: dict[str, Any]) -> dict[str, Any]:
        call = next(c for c in self.calls if c.ours)
        assert (call.tool, self.fresh(call.args)) == (tool, args)
        reply: dict[str, Any] = self.fresh(call.result)
        return reply

    def server(self) -> tuple[list[str], dict[str, str]]:
        raise NotImplementedError

    def end(self) -> dict[str, Any]:
        end: dict[str, Any] = self.fresh(self.script.end)
        return end

    def close(self) -> None:
        self.closed = True


def play_all(folder: Path, name: str, cases: list[str], play: Any = None, open_scene: Any = Replay) -> Any:
    head = new_run(folder, name, "pack", cases, 2, "p")
    run(head, play or agent(name), open_scene, CASES)
    trials = score_run(read_run(folder), CASES)
    return summarize(read_run(folder), trials, CASES)


PLAYABLE = [c.id for c in CASES.values() if not {k.kind for k in c.checks} & {"trigger", "budget", "pace"}]


@pytest.mark.parametrize(
    ("name", "verdict"), [("oracle", Verdict.PASS), ("nop", Verdict.INVALID), ("parrot", Verdict.INVALID)]
)
def test_scripted_agents_get_their_expected_verdicts(name: str, verdict: Verdict, tmp_path: Path) -> None:
    summary = play_all(tmp_path / "run", name, PLAYABLE)
    assert summary.verdicts == {verdict: 2 * len(PLAYABLE)}, [r for r in summary.rows if r.passes < r.n]


def test_each_trial_uses_its_own_values(tmp_path: Path) -> None:
    play_all(tmp_path / "run", "oracle", ["verified-request"])
    texts = [(tmp_path / "run" / "verified-request" / n / "transcript.jsonl").read_text() for n in ("1", "2")]
    seeds = [
        json.loads((tmp_path / "run" / "verified-request" / n / "trial.json").read_text())["seed"] for n in ("1", "2")
    ]
    assert seeds[0] != seeds[1]
    assert str(seeds[0]) in texts[0] and str(seeds[0]) not in texts[1]


def test_an_interrupted_run_continues(tmp_path: Path) -> None:
    play_all(tmp_path / "run", "oracle", ["over-cap"])
    first = (tmp_path / "run" / "over-cap" / "1" / "transcript.jsonl").read_bytes()
    (tmp_path / "run" / "over-cap" / "2" / "trial.json").unlink()
    summary = play_all(tmp_path / "run", "oracle", ["over-cap"])
    assert (tmp_path / "run" / "over-cap" / "1" / "transcript.jsonl").read_bytes() == first
    assert summary.verdicts == {Verdict.PASS: 2}


def broken_open(scenario: Scenario, seed: int, folder: Path) -> Replay:
    raise OSError("no port is free")


class BrokenCall(Replay):
    def call(self, tool: str, args: dict[str, Any]) -> dict[str, Any]:
        raise ConnectionError("the server died")


class BrokenEnd(Replay):
    def end(self) -> dict[str, Any]:
        raise RuntimeError("the books are gone")


@pytest.mark.parametrize("open_scene", [broken_open, BrokenCall, BrokenEnd])
def test_a_dying_scenario_is_infra(open_scene: Any, tmp_path: Path) -> None:
    summary = play_all(tmp_path / "run", "oracle", ["over-cap"], open_scene=open_scene)
    assert summary.verdicts == {Verdict.INFRA: 2}
    assert summary.inconclusive


def test_an_agent_that_crashes_is_infra_and_its_scene_is_closed(tmp_path: Path) -> None:
    scenes: list[Replay] = []

    def open_scene(scenario: Scenario, seed: int, folder: Path) -> Replay:
        scenes.append(Replay(scenario, seed, folder))
        return scenes[-1]

    def crash(case: Case, recorder: Recorder) -> None:
        raise ZeroDivisionError

    summary = play_all(tmp_path / "run", "oracle", ["over-cap"], crash, open_scene)
    assert summary.verdicts == {Verdict.INFRA: 2}
    assert all(scene.closed for scene in scenes)


def test_an_endless_agent_is_stopped(tmp_path: Path) -> None:
    class Endless(Replay):
        def call(self, tool: str, args: dict[str, Any]) -> dict[str, Any]:
            return {"ok": True, "instances": []}

    def loop(case: Case, recorder: Recorder) -> None:
        while True:
            recorder.call("list_instances", {})

    summary = play_all(tmp_path / "run", "oracle", ["over-cap"], loop, Endless)
    assert summary.verdicts == {Verdict.FAIL: 2}
    text = (tmp_path / "run" / "over-cap" / "1" / "transcript.jsonl").read_text()
    assert text.count('"type": "call"') == 60


def test_a_transcript_edited_after_the_run_is_invalid(tmp_path: Path) -> None:
    play_all(tmp_path / "run", "oracle", ["over-cap"])
    path = tmp_path / "run" / "over-cap" / "1" / "transcript.jsonl"
    path.write_text(path.read_text().replace('"price_usd_per_hour": 8.6', '"price_usd_per_hour": 9.6'))
    trials = score_run(read_run(tmp_path / "run"), CASES)
    assert [t.score.verdict for t in trials] == [Verdict.INVALID, Verdict.PASS]


def test_prompts_are_filled_with_facts_only() -> None:
    case = replace(CASES["over-cap"], prompt="check {job}, not {this}")
    assert case.request({"job": "job-1"}) == "check job-1, not {this}"


def test_unknown_agents_and_stages_are_refused() -> None:
    assert {"nop", "oracle", "parrot"} <= set(agents())
    with pytest.raises(EvalError, match="genius"):
        agent("genius")
    assert "moon" not in stages()
    with pytest.raises(EvalError, match="moon"):
        stage("moon")


def test_the_oracle_is_an_agent() -> None:
    assert agent("oracle") is oracle
