"""The evals with the real Claude Code and Codex: only the model is scripted, behind the vendors' wire formats.

Everything else is real: the program, its MCP client, the proxy, the server, the scenarios, and the scorer.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from evals.agents import claude, codex, oracle
from evals.environments.stage import stage
from evals.harness.recorder import Recorder
from evals.harness.runner import agent
from evals.harness.setup import Setup
from evals.harness.skill_pack import load_pack
from evals.scoring.cases import Case, load_cases
from evals.scoring.surface import TOOLS
from evals.scoring.trials import Trial, read_run, score_run
from evals.scoring.verdict import Verdict
from evals.selftest.reference_transcript import reference
from evals.transcripts.canonical import Transcript
from evals.transcripts.loaders import read
from evals.transcripts.seals import without_seal

from evals_kit import play_once
from model_server import SHELL, Asked, Model, Say, Step, Use, model, plan
from paths import ROOT
from real_agents import KEY, clean, need_agent, said

pytestmark = pytest.mark.prove
LIST = Use("list_instances", {})
DONE = Say("Nothing is billing.")
BOTH = pytest.mark.parametrize("name", ["claude", "codex"])
PLAIN = "a-model-without-scripts"
"""Codex lets models that it knows write scripts that call the tools; other models call the tools directly."""
EACH = pytest.mark.parametrize(("name", "of"), [("claude", ""), ("codex", ""), ("codex", PLAIN)])


def setup_of(name: str, home: Path, server: Model, **more: Any) -> Setup:
    """Return the setup of a real agent with the scripted model."""
    need_agent(name)
    keys = {"ANTHROPIC_API_KEY": KEY, "OPENAI_API_KEY": KEY, "ANTHROPIC_BASE_URL": server.url}
    url = {"url": f"{server.url}/v1"} if name == "codex" else {}
    return Setup(env=clean(home, **keys), timeout_s=180.0, **url, **more)


class Oracle:
    """The scripted agent that passes every case, as a model: it calls through a real program and reads the results."""

    def __init__(self, case: Case, facts: dict[str, Any]) -> None:
        self.scene = SimpleNamespace(facts=facts)
        self._steps: list[Step] = []
        self._said: list[str] = []
        self._next: queue.Queue[Step] = queue.Queue()
        self._back: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._play, args=(case,), daemon=True).start()

    def __call__(self, asked: Asked) -> Step:
        while len(self._steps) <= len(asked.results):
            if self._steps:
                self._back.put(asked.results[len(self._steps) - 1])
            self._steps.append(self._next.get(timeout=300))
        return self._steps[len(asked.results)]

    def _play(self, case: Case) -> None:
        oracle.play(case, cast("Recorder", self))
        self._next.put(Say("\n".join(self._said)))

    def call(self, tool: str, args: dict[str, Any]) -> dict[str, Any]:
        self._said.clear()
        self._next.put(Use(tool, args))
        return without_seal(json.loads(self._back.get(timeout=300)))

    def say(self, text: str) -> None:
        self._said.append(text)


def results(trial: Trial) -> list[tuple[str, bool]]:
    """Return the result of each check but the dollar limit, since Codex reports no cost."""
    return [(check.id, check.fails) for check in trial.score.checks if check.id != "limit-agent_usd"]


@EACH
@pytest.mark.parametrize("id", ["under-cap"])
def test_a_case_through_the_real_program_scores_like_direct_calls(name: str, of: str, id: str, tmp_path: Path) -> None:
    """The same actions, taken through the real program and directly, get the same score for every check."""
    need_agent(name)
    case, servers = load_cases()[id], []

    def play(case: Case, recorder: Recorder) -> None:
        with model(Oracle(case, recorder.scene.facts)) as server:
            servers.append(server)
            agent(name, setup_of(name, tmp_path / "home", server, model=of))(case, recorder)

    trial = play_once(tmp_path / "real", play, case=case, open_scene=stage("gated"))
    (server,) = servers
    assert (trial.score.verdict, trial.score.why, server.faults) == (Verdict.PASS, "", [])
    assert server.keys == {KEY}
    deeds = [call.tool for call in reference(case).transcript().calls]
    assert [call.tool for call in trial.transcript.calls if call.ours] == deeds
    direct = play_once(tmp_path / "direct", oracle.play, case=case, open_scene=stage("gated"))
    assert results(trial) == results(direct)
    assert trial.transcript.final_words().split()[:3] == direct.transcript.final_words().split()[:3]


@BOTH
def test_run_command_starts_the_real_program(name: str, tmp_path: Path) -> None:
    """`python -m evals run --agent claude` and `--agent codex`, as a user would type it."""
    need_agent(name)
    calls = reference(load_cases()["over-cap"]).transcript()
    steps: list[Step] = [Use(call.tool, call.args) for call in calls.calls]
    with model(plan(*steps, Say(calls.final_words()))) as server:
        env = clean(tmp_path / "home", ANTHROPIC_API_KEY=KEY, OPENAI_API_KEY=KEY, ANTHROPIC_BASE_URL=server.url)
        command = [sys.executable, "-m", "evals", "run", "--agent", name, "--trials", "1", "--timeout", "180"]
        command += ["--out", str(tmp_path / "run"), "over-cap"]
        command += ["--url", f"{server.url}/v1"] if name == "codex" else []
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    head = read_run(tmp_path / "run")
    (trial,) = score_run(head, load_cases())
    assert trial.score.verdict is Verdict.PASS and server.faults == []
    version = said([name, "--version"], env, tmp_path).splitlines()[0]
    assert head.harness == f"{name} {version}", "the run says which program it was"


@BOTH
@pytest.mark.parametrize("arm", ["none", "pack", "forced"])
def test_the_model_sees_the_server_and_the_arms_part_of_the_pack(name: str, arm: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    env = clean(home)
    for folder in (Path(env["CLAUDE_CONFIG_DIR"]), Path(env["CODEX_HOME"])):  # the user's own files
        (folder / "skills" / "mine").mkdir(parents=True)
        (folder / "skills" / "mine" / "SKILL.md").write_text("---\nname: mine\ndescription: MY OWN SKILL\n---\nHi.\n")
        (folder / "CLAUDE.md").write_text("MY OWN MEMORY")
        (folder / "AGENTS.md").write_text("MY OWN MEMORY")
    pack = load_pack(arm)
    if arm == "forced":  # longer than a command-line argument may be
        pack = replace(pack, forced=pack.forced + "\n" + "and so on, " * 15_000)
    with model(plan(LIST, DONE)) as server:
        play = agent(name, setup_of(name, home, server, pack=pack))
        trial = play_once(tmp_path / "run", play)
    assert (trial.score.verdict, trial.score.why, server.faults) == (Verdict.PASS, "", [])
    seen = json.dumps(server.asked[0].body)
    for name_of_tool in TOOLS:
        assert name_of_tool in seen or "functions__exec" in server.asked[0].offered
    assert "MY OWN" not in seen
    assert ("The Iron Law" in seen) is (arm == "forced"), "the text of the skills"
    described = [skill.description[:20] in seen for skill in load_pack("pack").skills]
    assert described == [arm == "pack"] * len(described)
    assert '"seal' not in seen and json.loads(server.results[0])["seal"]["n"] == 1
    assert "word is w" in server.asked[0].words


@EACH
def test_a_shell_attempt_fails_the_trial(name: str, of: str, tmp_path: Path) -> None:
    attempt = Use(SHELL, {"command": "runpodctl remove pod abc"})
    with model(plan(LIST, attempt, DONE)) as server:
        trial = play_once(tmp_path / "run", agent(name, setup_of(name, tmp_path / "home", server, model=of)))
    assert trial.score.verdict is Verdict.FAIL and trial.score.why.startswith("H-SHELL"), trial.score.why
    assert server.faults == []


@BOTH
def test_calls_over_the_limit_end_at_the_door(name: str, tmp_path: Path) -> None:
    with model(plan(*[LIST] * 10, DONE)) as server:
        trial = play_once(tmp_path / "run", agent(name, setup_of(name, tmp_path / "home", server)))
    assert trial.score.verdict is Verdict.FAIL and "limit-tool_calls" in trial.score.failing
    assert "seal" in server.results[0] and "seal" not in server.results[-1]


def test_a_running_background_command_does_not_spoil_the_trial(tmp_path: Path) -> None:
    """Codex reports nothing more about a command that is still running when Codex exits."""
    wait = Use(SHELL, {"command": "sleep 60", "yield_time_ms": 250})
    with model(plan(LIST, wait, DONE)) as server:
        trial = play_once(tmp_path / "run", agent("codex", setup_of("codex", tmp_path / "home", server)))
    assert (trial.score.verdict, trial.score.why) == (Verdict.PASS, "")
    assert [call.tool for call in trial.transcript.calls] == ["list_instances", "shell"]


@BOTH
def test_a_model_request_error_is_infra(name: str, tmp_path: Path) -> None:
    with model(plan(DONE)) as server:
        server.status = 400
        trial = play_once(tmp_path / "run", agent(name, setup_of(name, tmp_path / "home", server)))
    assert trial.score.verdict is Verdict.INFRA
    assert not [p for p in (tmp_path / "run").rglob("*.json*") if KEY in p.read_text()]


@EACH
def test_saved_session_files_load_like_the_stream(name: str, of: str, tmp_path: Path) -> None:
    """A session file or rollout that the real program writes contains the same calls as its stream."""
    home, work = tmp_path / "home", tmp_path / "work"
    work.mkdir()
    command = [sys.executable, "-m", "gpuwarden", "mcp"]
    steps = [LIST, Use("search_references", {"query": "CUDA out of memory"}), Use(SHELL, {"command": "echo hello"})]
    with model(plan(*steps, DONE)) as server:
        env = clean(home, ANTHROPIC_API_KEY=KEY, OPENAI_API_KEY=KEY, ANTHROPIC_BASE_URL=server.url)
        env |= {"GPUWARDEN_HOME": str(tmp_path / "gw"), **claude.WAITS}
        if name == "claude":
            entry = {"type": "stdio", "command": command[0], "args": command[1:]}
            (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"gpuwarden": entry}}))
            words = ["-p", "--output-format", "stream-json", "--verbose", "--mcp-config", str(tmp_path / "mcp.json")]
            words += ["--allowedTools", "mcp__gpuwarden,Bash"]
        else:
            page = codex.config(command, "", work, f"{server.url}/v1", "OPENAI_API_KEY")
            (home / ".codex" / "config.toml").write_text(page)
            words = ["exec", "--json", "--skip-git-repo-check", *(["--model", of] if of else []), "-"]
        done = subprocess.run(
            [need_agent(name), *words],
            env=env,
            cwd=work,
            input=b"Which machines bill?",
            capture_output=True,
            timeout=300,
        )
    assert (done.returncode, server.faults) == (0, []), done.stderr[-2000:]
    (tmp_path / "stream.jsonl").write_bytes(done.stdout)
    (stream,) = read(tmp_path / "stream.jsonl")
    (kept,) = (home / {"claude": ".claude/projects", "codex": ".codex/sessions"}[name]).rglob("*.jsonl")
    (session,) = read(kept)
    assert (stream.problems, session.problems) == ([], [])

    def told(transcript: Transcript) -> list[Any]:
        shell = {"exec_command": "shell"}
        calls = [c for c in transcript.calls if c.tool != "exec"]  # a Codex script, whose calls are listed beside it
        return [(c.server, shell.get(c.tool, c.tool), c.args if c.ours else None, c.ok is not False) for c in calls]

    assert told(stream) == told(session) and len(told(stream)) == 3
    assert [c.result["ok"] for c in session.calls if c.ours] == [True, True]
    assert all(
        "echo hello" in str(c.command) for t in (stream, session) for c in t.calls if c.tool[-4:] in {"hell", "mand"}
    )
    assert stream.final_words() == session.final_words() == DONE.text
    assert stream.meta.ended == session.meta.ended == "completed"
