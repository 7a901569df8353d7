"""`python -m evals run` with the machinery for real agents, in a scenario behind the real server."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from evals.__main__ import main
from evals.reports import ablation
from evals.reports.compare import Exit
from evals.scoring.cases import load_cases
from evals.selftest.reference_transcript import reference

from chat_server import chat, completion
from evals_kit import KEY
from paths import KITS
from wording import Wording

CASE = "over-cap"
FIRST = reference(load_cases()[CASE]).transcript().calls[0]
WORDS = reference(load_cases()[CASE]).transcript().says[-1].text


def head(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return found


@pytest.mark.prove
@pytest.mark.skipif(os.name != "posix", reason="the scenarios need a POSIX system")
def test_run_command_supports_an_endpoint_and_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("evals.__main__.hide_memory", lambda: None)  # this process also runs other tests
    answers = [completion(None, (FIRST.tool, FIRST.args)), completion(WORDS)]
    with chat(lambda n, _: answers[n % 2]) as server:
        options = ["--model", "tiny", "--url", server.url, "--key-env", "", "--arm", "pack"]
        done = main(["run", CASE, "--agent", "endpoint", *options, "--out", str(tmp_path / "pack"), "-v"])
    assert done == Exit.PASS, capsys.readouterr()
    about = head(tmp_path / "pack")
    assert (about["arm"], about["model"], about["harness"]) == ("pack", "tiny", "evals")

    (tmp_path / "claude").write_text(f"#!{sys.executable}\n{(KITS / 'standin_cli.py').read_text()}")
    (tmp_path / "claude").chmod(0o755)
    plan = [{"call": FIRST.tool, "args": FIRST.args}, {"say": WORDS}]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CLAUDE_CODE_PLAN", str(tmp_path / "plan.json"))
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    assert main(["run", CASE, "--agent", "claude", "--out", str(tmp_path / "none"), "-v"]) == Exit.PASS
    about = head(tmp_path / "none")
    assert (about["arm"], about["model"], about["harness"]) == ("none", "", "claude 1.2.3 (a stand-in)")
    assert main(["uplift", str(tmp_path / "none"), str(tmp_path / "pack")]) == Exit.PASS
    assert ablation._PAIRS[0][2] in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["--agent", "claude"], id="claude"),
        pytest.param(["--agent", "codex"], id="codex"),
        pytest.param(["--agent", "endpoint"], id="no-model"),
        pytest.param(["--agent", "endpoint", "--model", "m"], id="no-key"),
        pytest.param(["--agent", "endpoint", "--model", "m", "--arm", "old"], id="no-old-pack"),
        pytest.param(
            ["--agent", "endpoint", "--model", "m", "--arm", "pack", "--pack", "/nonexistent"], id="no-skills"
        ),
        pytest.param(["--agent", "endpoint", "--model", "m", "--stage", "raw"], id="no-server"),
    ],
)
def test_a_real_agents_missing_setup_is_reported_before_the_run(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    wording: Wording,
) -> None:
    monkeypatch.setattr("evals.__main__.hide_memory", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert main(["run", CASE, *words, "--out", str(tmp_path / "run")]) == Exit.BAD_POLICY
    wording(capsys.readouterr().err)
    assert not (tmp_path / "run").exists()
