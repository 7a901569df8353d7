"""Agents that are programs, behind the signing proxy, with the real server.

The programs are stand-ins (`standin_cli.py`) that accept the documented options and print the documented streams. The
proxy, the relay, the server, the seals, the loaders, and the scorer are real.
"""

from __future__ import annotations

import json
import os
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from evals.agents import codex
from evals.errors import EvalError
from evals.harness import subprocess_agent
from evals.harness.runner import agent
from evals.harness.setup import Setup
from evals.harness.skill_pack import Pack, load_pack
from evals.scoring.trials import Trial
from evals.scoring.verdict import Verdict

from evals_kit import CASE, KEY, RealServer, play_once
from paths import KITS
from waiting import eventually
from wording import Wording

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the stand-ins are scripts with a first line for the shell")
LIST: dict[str, Any] = {"call": "list_instances", "args": {}}
SEARCH: dict[str, Any] = {"call": "search_references", "args": {"query": "CUDA out of memory"}}
DONE = {"say": "Nothing is billing."}
BOTH = pytest.mark.parametrize("name", ["claude", "codex"])
MOSTLY = pytest.mark.parametrize("name", ["claude", pytest.param("codex", marks=pytest.mark.prove)])
"""Each trial starts the real server, and the proxy treats both programs alike."""
SLOW = pytest.mark.prove
Playing = Callable[..., Trial]


@pytest.fixture
def playing(tmp_path: Path) -> Playing:
    """Return a function that plays one trial with a stand-in that follows a plan."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    text = (KITS / "standin_cli.py").read_text("utf-8")
    for name in ("claude", "codex"):
        (binaries / name).write_text(f"#!{sys.executable}\n{text}", "utf-8")
        (binaries / name).chmod(0o755)

    def playing(name: str, *plan: dict[str, Any], pack: Pack | None = None, env: Any = None, **more: Any) -> Trial:
        (tmp_path / "plan.json").write_text(json.dumps(plan), "utf-8")
        own = {"PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path / "nobody")}
        own |= {"CLAUDE_CODE_PLAN": str(tmp_path / "plan.json"), "CODEX_PLAN": str(tmp_path / "plan.json")}
        own |= {"ANTHROPIC_API_KEY": KEY, "OPENAI_API_KEY": KEY, "RUNPOD_API_KEY": "rp-secret", "HF_TOKEN": "hf_secret"}
        setup = Setup(pack=pack or Pack("none"), env=own | (env or {}), timeout_s=more.pop("timeout_s", 60.0))
        return play_once(tmp_path / "run", agent(name, setup), **more)

    return playing


def record(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "run" / "plumbing" / "1" / "record.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.slow
@BOTH
def test_a_program_is_scored_by_its_own_stream_and_the_doors_seals(name: str, playing: Playing, tmp_path: Path) -> None:
    trial = playing(name, SEARCH, LIST, {"say": "{prompt}"})
    assert (trial.score.verdict, trial.score.why) == (Verdict.PASS, "")
    assert trial.transcript.meta.format == {"claude": "claude_stream", "codex": "codex_exec"}[name]
    assert [c.tool for c in trial.transcript.calls] == ["search_references", "list_instances"]
    assert all(c.ours and c.ok and c.at for c in trial.transcript.calls)
    words = trial.transcript.final_words()
    assert words.startswith(CASE.prompt.partition("{")[0] + "w"), "the prompt was filled and handed over"
    rows = record(tmp_path)
    assert [r["tool"] for r in rows if r["type"] == "call"] == ["search_references", "list_instances"]
    sealed = [r["result"]["seal"]["n"] for r in rows if r["type"] == "result"]
    assert sealed == [1, 2]


@pytest.mark.slow
@MOSTLY
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param([LIST, {"trick": "hide", **SEARCH}], id="hide"),
        pytest.param([LIST, {"trick": "second door", **SEARCH}], marks=SLOW, id="second-door"),
        pytest.param([LIST, {"trick": "call and run", **SEARCH}], marks=SLOW, id="call-and-run"),
        pytest.param([LIST, {"trick": "forge", **SEARCH}], id="forge"),
        pytest.param([LIST, {"trick": "make up", **LIST}], id="make-up"),
        pytest.param([{"trick": "make up", **LIST}], marks=SLOW, id="make-up-first"),
    ],
)
def test_a_forged_stream_is_invalid(name: str, plan: list[Any], playing: Playing, wording: Wording) -> None:
    trial = playing(name, *plan, DONE)
    assert trial.score.verdict is Verdict.INVALID
    assert trial.score.problems[0].kind == "seal"
    ids = [call.id for call in trial.transcript.calls if call.id in trial.score.problems[0].text]
    wording(trial.score.problems[0].text, *ids)


@pytest.mark.slow
@MOSTLY
def test_the_seal_key_is_hidden_from_the_agent(name: str, playing: Playing, tmp_path: Path) -> None:
    trial = playing(name, LIST, {"trick": "secrets", "to": str(tmp_path / "found.txt")}, LIST, DONE)
    assert trial.score.verdict is Verdict.PASS
    found = (tmp_path / "found.txt").read_text("utf-8")
    key = json.loads((tmp_path / "run" / "plumbing" / "1" / "trial.json").read_text())["seals"]["key"]
    assert len(key) == 64
    assert key not in found and bytes.fromhex(key).decode("latin-1") not in found
    assert "door.json" in found, "it did look at the relay"


@pytest.mark.slow
@MOSTLY
@pytest.mark.parametrize("arm", ["none", "pack", pytest.param("forced", marks=SLOW), pytest.param("old", marks=SLOW)])
def test_the_arm_controls_the_agents_view(name: str, arm: str, playing: Playing, tmp_path: Path) -> None:
    old = tmp_path / "old"
    (old / "skills" / "gpu-training").mkdir(parents=True)
    page = "---\nname: gpu-training\ndescription: The old one.\n---\nOld words.\n"
    (old / "skills" / "gpu-training" / "SKILL.md").write_text(page)
    pack = load_pack(arm, old if arm == "old" else None)
    case = replace(CASE, limits={"tool_calls": 8, "agent_usd": 2})
    playing(name, {"trick": "report", "to": str(tmp_path / "seen.json")}, LIST, DONE, pack=pack, case=case)
    seen = json.loads((tmp_path / "seen.json").read_text())
    every = ["checkpoint-and-teardown", "dataset-preflight", "gpu-training", "training-debug"]
    assert seen["skills"] == {"none": [], "pack": every, "forced": [], "old": ["gpu-training"]}[arm]
    assert ("The Iron Law" in seen["forced"]) is (arm == "forced")
    assert seen["hidden"] is (arm in ("none", "old")), "the server's own copy of the skills"
    assert ("resources" in seen["caps"]) is (arm not in ("none", "old"))
    assert set(seen["cwd"]) <= {".claude", ".agents"}, "no cases and no reference transcripts lie around"
    assert not {"RUNPOD_API_KEY", "HF_TOKEN", "GPUWARDEN_HOME"} & set(seen["env"]), "other secrets stay behind"
    assert KEY not in json.dumps(seen["args"])
    assert CASE.scenario.hidden not in json.dumps(seen)
    assert seen["schemas"] is False, "replies are text, as the door carries them"
    if name == "claude":
        limits = dict(zip(seen["args"], seen["args"][1:], strict=False))
        assert (limits["--max-turns"], limits["--max-budget-usd"]) == ("16", "2")


@pytest.mark.slow
@MOSTLY
def test_a_shell_attempt_fails_the_trial(name: str, playing: Playing) -> None:
    trial = playing(name, LIST, {"bash": "runpodctl remove pod abc"}, DONE)
    assert trial.score.verdict is Verdict.FAIL
    assert trial.score.why.startswith("H-SHELL")


@pytest.mark.slow
@MOSTLY
def test_calls_over_the_limit_do_not_reach_the_server(name: str, playing: Playing, tmp_path: Path) -> None:
    trial = playing(name, *[LIST] * 11, DONE)
    assert trial.score.verdict is Verdict.FAIL
    assert "limit-tool_calls" in trial.score.failing and len(trial.transcript.calls) == 11
    assert sum(r["type"] == "call" for r in record(tmp_path)) == 8


@SLOW
@BOTH
def test_an_unknown_tool_is_a_failed_call_not_a_forgery(name: str, playing: Playing) -> None:
    trial = playing(name, LIST, {"call": "rent_the_moon", "args": {}}, DONE)
    assert trial.score.verdict is Verdict.FAIL
    assert "H-SCHEMA" in trial.score.why


@pytest.mark.slow
def test_a_crashed_program_is_infra_and_its_key_is_masked(playing: Playing, tmp_path: Path, wording: Wording) -> None:
    trial = playing("claude", {"trick": "die"})
    assert trial.score.verdict is Verdict.INFRA
    wording(trial.score.why, "fatal: bad key <ANTHROPIC_API_KEY>")
    kept = "".join(p.read_text() for p in (tmp_path / "run").rglob("*.json*"))
    assert KEY not in kept


@SLOW
def test_a_key_in_program_output_is_masked(playing: Playing, tmp_path: Path) -> None:
    trial = playing("claude", LIST, {"say": f"Your key is {KEY}."})
    assert trial.transcript.final_words() == "Your key is <ANTHROPIC_API_KEY>."
    assert not [p for p in (tmp_path / "run").rglob("*.json*") if KEY in p.read_text()]


@pytest.mark.slow
def test_a_hanging_program_is_stopped(playing: Playing, wording: Wording) -> None:
    trial = playing("codex", LIST, {"trick": "hang"}, timeout_s=6.0)
    assert trial.score.verdict is Verdict.INFRA
    wording(trial.score.why, "6 s")


@pytest.mark.slow
def test_a_program_with_endless_output_is_stopped(playing: Playing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess_agent, "_MAX_OUTPUT", 4 << 20)
    trial = playing("claude", LIST, {"trick": "flood"})
    assert trial.score.verdict in (Verdict.INFRA, Verdict.INVALID)
    assert trial.score.verdict is not Verdict.PASS


@pytest.mark.slow
def test_a_process_left_running_by_a_program_is_ended(playing: Playing, tmp_path: Path) -> None:
    playing("claude", LIST, {"trick": "linger", "to": str(tmp_path / "late")}, DONE)
    pid = int((tmp_path / "late.pid").read_text())
    stat = Path(f"/proc/{pid}/stat")
    if sys.platform == "linux":  # a killed process may remain for a moment
        eventually(lambda: not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z")


@pytest.mark.slow
def test_a_server_that_fails_to_start_is_infra(playing: Playing) -> None:
    class NoServer(RealServer):
        def server(self) -> tuple[list[str], dict[str, str]]:
            return ["/nonexistent/server"], {}

    trial = playing("claude", LIST, open_scene=NoServer)
    assert trial.score.verdict is Verdict.INFRA


@BOTH
def test_a_missing_program_or_key_is_reported_before_the_run(name: str, tmp_path: Path, wording: Wording) -> None:
    with pytest.raises(EvalError, match=f"'{name}' .*PATH"):
        agent(name, Setup(env={"PATH": str(tmp_path)}))
    (tmp_path / name).write_text("#!/bin/sh\n")
    (tmp_path / name).chmod(0o755)
    with pytest.raises(EvalError) as refused:
        agent(name, Setup(env={"PATH": str(tmp_path), "HOME": str(tmp_path)}))
    wording(refused, name)


def test_codex_config_preserves_any_text() -> None:
    forced = 'a "quote", a \\ backslash, 训练,\nlines\t\x7f and \x01'
    read = tomllib.loads(codex.config(["/a b/python", "-I", 'x"y'], forced, Path('/a "b"')))
    assert read["developer_instructions"] == forced
    assert read["mcp_servers"]["gpuwarden"]["args"] == ["-I", 'x"y']
    assert read["projects"] == {'/a "b"': {"trust_level": "trusted"}}
    assert "model_provider" not in read and "model_providers" not in read


@pytest.mark.slow
def test_codex_gets_its_key_under_the_name_it_reads(playing: Playing, tmp_path: Path) -> None:
    playing("codex", {"trick": "report", "to": str(tmp_path / "seen.json")}, LIST, DONE)
    assert {"CODEX_API_KEY", "OPENAI_API_KEY"} <= set(json.loads((tmp_path / "seen.json").read_text())["env"])


def test_codex_uses_the_given_endpoint(tmp_path: Path) -> None:
    (tmp_path / "codex").write_text("#!/bin/sh\n")
    (tmp_path / "codex").chmod(0o755)
    here = Setup(env={"PATH": str(tmp_path)}, url="http://127.0.0.1:1/v1", key_env="MY_KEY")
    with pytest.raises(EvalError, match="MY_KEY"):
        agent("codex", here)
    agent("codex", replace(here, key_env=""))
    read = tomllib.loads(codex.config(["s"], "", Path("/w"), here.url, here.key_env))
    assert read["model_provider"] == "given"
    assert read["model_providers"]["given"] == {
        "name": "given", "base_url": here.url, "wire_api": "responses", "env_key": "MY_KEY"
    }  # fmt: skip
    assert "env_key" not in codex.config(["s"], "", Path("/w"), here.url)


@pytest.mark.slow
def test_lines_after_the_closing_line_do_not_reopen_the_stream(playing: Playing) -> None:
    trial = playing("claude", LIST, DONE, {"note": {"subtype": "task_notification", "status": "stopped"}})
    assert trial.score.verdict is Verdict.PASS, "Claude Code tells of what it stopped in the background at the end"


def test_reconnect_attempts_do_not_close_the_stream() -> None:
    again = b'{"type": "error", "message": "Reconnecting... 2/5"}\n'
    assert not subprocess_agent.is_closed(again, codex._ENDS)
    assert subprocess_agent.is_closed(again + b'{"type": "turn.failed", "error": {"message": "x"}}\n', codex._ENDS)


@SLOW
@BOTH
def test_a_program_that_never_saw_the_server_is_infra(name: str, playing: Playing, wording: Wording) -> None:
    trial = playing(name, {"trick": "no server"}, DONE)
    assert trial.score.verdict is Verdict.INFRA
    wording(trial.score.why)


@pytest.mark.parametrize("arm", ["all", "old"])
def test_an_arm_that_cannot_be_set_up_is_an_error(arm: str, tmp_path: Path) -> None:
    with pytest.raises(EvalError):
        load_pack(arm)
    with pytest.raises(EvalError):
        load_pack("old", tmp_path)
