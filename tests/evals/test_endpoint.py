"""The loop over an OpenAI-compatible endpoint: a scripted endpoint over real HTTP, with the real server behind it."""

from __future__ import annotations

import email.utils
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from evals.agents import endpoint
from evals.errors import EvalError
from evals.harness.chat import Endpoint
from evals.harness.recorder import AgentDied
from evals.harness.runner import agent
from evals.harness.setup import Setup
from evals.harness.skill_pack import Pack, load_pack
from evals.scoring.trials import Trial
from evals.scoring.verdict import Verdict

from chat_server import CUT, Answer, Chat, Script, chat, completion
from evals_kit import CASE, KEY, play_once
from gpuwarden.interfaces.mcp.server import INSTRUCTIONS
from paths import ROOT
from wording import Wording

LIST = ("list_instances", {})
SEARCH = ("search_references", {"query": "CUDA out of memory"})
Talk = Callable[..., tuple[Trial, Chat]]
WAITS: list[float] = []


@pytest.fixture
def talk(tmp_path: Path) -> Talk:
    """Return a function that plays one trial against scripted answers, the last of which repeats."""
    WAITS.clear()

    def talk(*answers: Answer | Script, pack: Pack | None = None, key: str = KEY) -> tuple[Trial, Chat]:
        def script(n: int, body: dict[str, Any]) -> Answer:
            answer = answers[min(n, len(answers) - 1)]
            return answer(n, body) if callable(answer) else answer

        with chat(script) as server:
            env = {"OPENAI_API_KEY": key, "HF_TOKEN": "hf_secret"}
            setup = Setup(model="tiny", url=server.url, env=env, pack=pack or Pack("none"), sleep=WAITS.append)
            return play_once(tmp_path / "run", agent("endpoint", setup)), server

    return talk


def last(server: Chat, role: str = "tool") -> list[dict[str, Any]]:
    return [m for m in server.asked[-1]["messages"] if m["role"] == role]


@pytest.mark.slow
def test_a_model_calls_the_server_and_answers(talk: Talk) -> None:
    trial, server = talk(completion("I look.", SEARCH), completion(None, LIST), completion("Nothing bills."))
    assert (trial.score.verdict, trial.score.why) == (Verdict.PASS, "")
    meta = trial.transcript.meta
    assert (meta.ended, meta.tokens, meta.turns, meta.model) == ("completed", 330, 3, "tiny-1")
    assert trial.transcript.final_words() == "Nothing bills."
    first = server.asked[0]
    assert first["model"] == "tiny"
    assert first["messages"][0]["content"].startswith(INSTRUCTIONS)
    assert first["messages"][1]["content"].startswith(CASE.prompt.partition("{")[0])
    assert {t["function"]["name"] for t in first["tools"]} == set(agent_surface())
    assert all(t["function"]["description"] for t in first["tools"])
    assert CASE.scenario.hidden not in json.dumps(server.asked)
    reply = json.loads(last(server)[0]["content"])
    assert reply["ok"] is True and "seal" not in reply, "the model sees what a user's model sees"
    assert server.seen[0]["Authorization"] == f"Bearer {KEY}"


def agent_surface() -> list[str]:
    from evals.scoring.surface import TOOLS

    return sorted(TOOLS)


@pytest.mark.slow
def test_all_calls_in_one_turn_are_answered_in_order(talk: Talk) -> None:
    trial, server = talk(completion(None, LIST, SEARCH, LIST), completion("Nothing bills."))
    assert trial.score.verdict is Verdict.PASS
    assert [m["tool_call_id"] for m in last(server)] == ["call_list_instances_0", "call_search_references_1",
                                                        "call_list_instances_2"]  # fmt: skip
    assert [c.tool for c in trial.transcript.calls] == ["list_instances", "search_references", "list_instances"]


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(("rent_the_moon", {}), id="unknown"),
        pytest.param(("list_instances", '{"a": '), id="half"),
        pytest.param(("list_instances", "[1]"), id="list"),
        pytest.param(("Skill", {"skill": "gpu-training"}), id="skill"),
    ],
)
def test_an_invalid_call_is_rejected_with_a_message_and_counted(call: Any, talk: Talk, wording: Wording) -> None:
    trial, server = talk(completion(None, call), completion(None, LIST), completion("Nothing bills."))
    assert trial.score.verdict is Verdict.FAIL, "it went on, and its schema check fails"
    assert "H-SCHEMA" in trial.score.why
    told = json.loads(last(server)[0]["content"])
    assert told["ok"] is False and told["code"] == "bad_request"
    wording(told["message"])


def test_empty_arguments_are_accepted(talk: Talk) -> None:
    trial, _ = talk(completion(None, ("list_instances", "")), completion("Nothing bills."))
    assert trial.score.verdict is Verdict.PASS


def test_a_model_that_never_stops_calling_is_stopped(talk: Talk) -> None:
    trial, server = talk(completion(None, LIST))
    assert trial.transcript.meta.ended == "limit"
    assert len(trial.transcript.calls) == 8
    assert len(server.asked) == 9


def test_an_endless_conversation_is_stopped(talk: Talk) -> None:
    trial, server = talk(completion(None, *[LIST] * 3))
    assert trial.transcript.meta.ended == "limit"
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("bad", "waited"),
    [
        ((429, {"Retry-After": "7"}, '{"error": {"message": "slow down"}}'), 7.0),
        ((429, {"Retry-After": "86400"}, "{}"), 60.0),
        ((429, {}, "{}"), None),
        ((500, {}, "oh"), None),
        ((503, {"Retry-After": "soon"}, "oh"), None),
        ((529, {}, "overloaded"), None),
        ((200, {}, '{"choices": [{"message": {"role": "assis'), None),
        ((200, {}, "<html>busy</html>"), None),
        ((200, {}, '{"choices": []}'), None),
        ((200, {}, '{"choices": [7]}'), None),
        ((200, {}, '[]'), None),
        (CUT, None),
    ],
)  # fmt: skip
def test_transient_errors_are_retried(bad: Answer, waited: float | None, talk: Talk) -> None:
    trial, server = talk(bad, completion(None, LIST), bad, completion("Nothing bills."))
    assert trial.score.verdict is Verdict.PASS
    assert len(server.asked) == 4
    assert len(WAITS) == 2
    assert [waited] * 2 == WAITS if waited else all(0.5 <= w <= 1 for w in WAITS)


def test_retry_after_accepts_a_date(monkeypatch: pytest.MonkeyPatch) -> None:
    from evals.harness.chat import retry_after

    monkeypatch.setattr("evals.harness.chat.time.time", lambda: 1_700_000_000.0)
    assert retry_after(email.utils.formatdate(1_700_000_030, usegmt=True)) == 30
    assert retry_after(None) is None and retry_after("soon") is None


def test_a_persistent_error_is_infra_after_six_attempts(talk: Talk, wording: Wording) -> None:
    trial, server = talk((500, {}, "oh"))
    assert trial.score.verdict is Verdict.INFRA
    wording(trial.score.why, "HTTP 500: oh")
    assert len(server.asked) == 6
    assert sorted(WAITS) == WAITS or max(WAITS) <= 30


@pytest.mark.parametrize("status", [400, 401, 403, 404, 301, 307])
def test_a_refusal_is_infra_at_once_and_masks_the_key(status: int, talk: Talk, tmp_path: Path) -> None:
    head = {"Location": "http://127.0.0.1:9/v1/chat/completions"} if status < 400 else {}
    trial, server = talk((status, head, f"Incorrect API key provided: {KEY}"))
    assert trial.score.verdict is Verdict.INFRA
    assert f"HTTP {status}" in trial.score.why and "<key>" in trial.score.why
    assert len(server.asked) == 1
    kept = "".join(p.read_text() for p in (tmp_path / "run").rglob("*.json*"))
    assert KEY not in kept and "hf_secret" not in kept


def test_calls_stay_on_record_when_the_endpoint_dies_afterwards(talk: Talk) -> None:
    trial, _ = talk(completion(None, LIST, *[LIST] * 7), (401, {}, ""))
    assert trial.score.verdict is Verdict.INFRA
    assert len(trial.transcript.calls) == 8, "what was done is on record"


def test_content_parts_are_joined_and_missing_usage_is_unknown(talk: Talk) -> None:
    odd = completion(None, LIST, usage=False)
    odd["choices"][0]["message"]["content"] = [{"type": "text", "text": "I "}, {"type": "text", "text": "look."}, 7]
    trial, _ = talk(odd, completion("Nothing bills.", usage=False))
    assert [s.text for s in trial.transcript.says if s.role == "assistant"] == ["I look.", "Nothing bills."]
    assert trial.transcript.meta.tokens is None, "what the endpoint does not say is not known"


@pytest.mark.parametrize("arm", ["none", "pack", "forced"])
def test_the_arm_controls_the_models_view(arm: str, talk: Talk) -> None:
    _, server = talk(completion(None, LIST), completion("Nothing bills."), pack=load_pack(arm))
    system = server.asked[0]["messages"][0]["content"]
    tools = [t["function"]["name"] for t in server.asked[0]["tools"]]
    assert (load_pack("forced").forced in system) is (arm == "forced")
    assert [skill.description in system for skill in load_pack("pack").skills] == [arm == "pack"] * 4
    assert ("Skill" in tools) is (arm == "pack")


def test_a_skill_is_read_when_the_model_asks_for_it(talk: Talk, wording: Wording) -> None:
    asks = [
        ("Skill", {"skill": "gpu-training"}),
        ("Skill", {"skill": "gpu-training", "file": "scripts/check_staleness.py"}),
        ("Skill", {"skill": "gpu-training", "file": "../../AGENTS.md"}),
        ("Skill", {"skill": "nonsense"}),
        ("Skill", "{"),
    ]
    trial, server = talk(
        completion(None, *asks), completion(None, LIST), completion("Nothing bills."), pack=load_pack("pack")
    )
    texts = [m["content"] for m in last(server)]
    page, script = (ROOT / "skills" / "gpu-training" / file for file in ("SKILL.md", "scripts/check_staleness.py"))
    assert texts[:2] == [page.read_text("utf-8"), script.read_text("utf-8")]
    wording("\n".join(texts[2:]), "../../AGENTS.md", "nonsense")
    assert trial.score.verdict is Verdict.PASS
    assert [(c.server, c.tool) for c in trial.transcript.calls[:5]] == [("", "Skill")] * 5
    assert [c.ok for c in trial.transcript.calls[:5]] == [True, True, False, False, False]


def test_a_skill_never_reads_outside_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "skills" / "one"
    folder.mkdir(parents=True)
    (folder / "SKILL.md").write_text("---\nname: one\ndescription: One.\n---\nText.\n")
    (tmp_path / "secret").write_text("secret")
    os.symlink(tmp_path / "secret", folder / "link")
    (skill,) = load_pack("pack", tmp_path).skills
    assert "Text." in skill.read("SKILL.md")
    for path in ("link", "../../secret", str(tmp_path / "secret"), "", "."):
        with pytest.raises(FileNotFoundError):
            skill.read(path)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"model": ""}, id="model"),
        pytest.param({"env": {}}, id="key"),
        pytest.param({"key_env": "MY_KEY"}, id="own-key"),
        pytest.param({"url": "ftp://x/v1"}, id="address"),
        pytest.param({"url": "http://api.example.org/v1"}, id="in-the-clear"),
    ],
)
def test_missing_settings_are_reported_before_the_run(change: dict[str, Any], wording: Wording) -> None:
    with pytest.raises(EvalError) as missing:
        endpoint.make(Setup(**{"model": "m", "env": {"OPENAI_API_KEY": KEY}, **change}))
    wording(missing)


def test_an_endpoint_without_a_key_variable_gets_no_key(tmp_path: Path) -> None:
    with chat(lambda n, _: completion(None, LIST) if n == 0 else completion("Nothing bills.")) as server:
        setup = Setup(model="m", url=server.url, key_env="", env={"OPENAI_API_KEY": KEY})
        trial = play_once(tmp_path / "run", agent("endpoint", setup))
    assert trial.score.verdict is Verdict.PASS
    assert "Authorization" not in server.seen[0]


def test_the_endpoint_repr_hides_the_key() -> None:
    loop = Endpoint("https://host.invalid/v1", "m", KEY, sleep=lambda _: None)
    assert KEY not in repr(loop)


def test_an_unreachable_endpoint_fails_after_six_attempts() -> None:
    waits: list[float] = []
    loop = Endpoint("http://127.0.0.1:9/v1", "m", KEY, sleep=waits.append)
    with pytest.raises(AgentDied, match="URLError"):
        loop.complete([], [])
    assert len(waits) == 5, "six tries"
