"""The real clients accept this repository's manifests unchanged, and the installed guard stops their commands.

Their models are scripted, but each client's handling of the files, the server, and the hook is real.
"""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from client_kit import CODEX, DONE, ask_claude, ask_codex, ask_gemini, codex_model, gemini_model, trust
from doors import accept
from model_server import SHELL, Use, model, plan
from real_agents import KEY, clean, need_agent, said


def broken(checkout: Path, tmp_path: Path, name: str) -> Path:
    """Return a copy of the checkout in which one file is invalid."""
    copy = tmp_path / "broken"
    shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns("tests", "server", "evals"), symlinks=True)
    (copy / name).write_text('{"name": 7}\n')
    return copy


# ------------------------------------------------------------------------------------------------ accepted manifests


@pytest.mark.slow
def test_claude_validates_the_plugin(checkout: Path, tmp_path: Path) -> None:
    env = clean(tmp_path / "home")
    for path in (checkout, checkout / "plugin"):
        assert "Validation passed" in said(["claude", "plugin", "validate", "--strict", str(path)], env, tmp_path)
    bad = broken(checkout, tmp_path, "plugin/.claude-plugin/plugin.json") / "plugin"
    assert "Validation passed" not in said(["claude", "plugin", "validate", str(bad)], env, tmp_path, rc=1)


@pytest.mark.slow
def test_gemini_validates_the_extension(checkout: Path, tmp_path: Path) -> None:
    env = clean(tmp_path / "home")
    done = said(["gemini", "extensions", "validate", str(checkout)], env, tmp_path)
    assert "successfully validated" in done
    bad = broken(checkout, tmp_path, "gemini-extension.json")
    said(["gemini", "extensions", "validate", str(bad)], env, tmp_path, rc=1)


# -------------------------------------------------------------------------------------------------- the guard's hook


def guarded(home: Path, work: Path, env: dict[str, str], client: str) -> str:
    """Install the guard as a user does, and return the reported state."""
    work.mkdir(exist_ok=True)
    (work / "vastai").write_text('#!/bin/sh\necho "$@" >> ended.txt\n')  # would destroy a machine
    (work / "vastai").chmod(stat.S_IRWXU)
    return state(env, client, "install")


def state(env: dict[str, str], client: str, action: str = "status") -> str:
    command = [sys.executable, "-m", "gpuwarden", "hooks", action, "--client", client, "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=True)
    return str(json.loads(done.stdout)["clients"][client])


def house(home: Path, **more: str) -> dict[str, str]:
    home.mkdir()
    (home / "policy.toml").touch()
    accept(home / "gw", home / "policy.toml")
    return clean(home, GPUWARDEN_HOME=str(home / "gw"), GPUWARDEN_POLICY=str(home / "policy.toml"), **more)


DESTROY = Use(SHELL, {"command": "./vastai destroy instance 4"})
HARMLESS = Use(SHELL, {"command": "echo harmless > passed.txt"})


@pytest.mark.prove
def test_guard_stops_claude_with_a_reason(tmp_path: Path) -> None:
    need_agent("claude")
    home, work = tmp_path / "home", tmp_path / "work"
    profile = Use("Write", {"file_path": str(home / "profiles" / "mine.md"), "content": "---\n"})
    unhook = Use(SHELL, {"command": f"echo '{{}}' > {home}/.claude/settings.json"})
    with model(plan(DESTROY, HARMLESS, profile, unhook, DONE)) as server:
        env = house(home, ANTHROPIC_API_KEY=KEY, ANTHROPIC_BASE_URL=server.url)
        assert guarded(home, work, env, "claude") == "installed"
        ask_claude(env, work, "--allowedTools", "Bash,Write")
    stopped, _, edit, out = server.results
    assert "`vastai destroy`" in stopped and "teardown_request" in stopped
    assert not (work / "ended.txt").exists() and (work / "passed.txt").read_text() == "harmless\n"
    assert "gpuwarden" in edit and not (home / "profiles").exists()
    assert "gpuwarden" in out
    assert "gpuwarden.interfaces.hooks.guard" in (home / ".claude" / "settings.json").read_text()
    assert server.faults == []


@pytest.mark.prove
@CODEX
def test_guard_stops_codex_once_the_hook_is_trusted(of: str, tmp_path: Path) -> None:
    need_agent("codex")
    home, work = tmp_path / "home", tmp_path / "work"
    with model(plan(DESTROY, HARMLESS, Use(SHELL, {"command": "bash"}), DONE)) as server:
        env = house(home, OPENAI_API_KEY=KEY)
        codex_model(home, server)
        assert guarded(home, work, env, "codex") == "untrusted"
        assert trust(env, work) == ["trusted"]
        assert state(env, "codex") == "installed", "what Codex says of the hook is what we say"
        ask_codex(env, work, of)
    stopped, _, typing = server.results
    assert "`vastai destroy`" in stopped and "teardown_request" in stopped
    assert not (work / "ended.txt").exists() and (work / "passed.txt").read_text() == "harmless\n"
    assert "gpuwarden" in typing
    assert server.faults == []


@pytest.mark.prove
def test_codex_does_not_run_an_untrusted_hook(tmp_path: Path) -> None:
    """This is why `hooks status` distinguishes `untrusted` from `installed`."""
    need_agent("codex")
    home, work = tmp_path / "home", tmp_path / "work"
    with model(plan(DESTROY, DONE)) as server:
        env = house(home, OPENAI_API_KEY=KEY)
        codex_model(home, server)
        assert guarded(home, work, env, "codex") == "untrusted"
        ask_codex(env, work, "")
    assert (work / "ended.txt").read_text() == "destroy instance 4\n"


@pytest.mark.prove
def test_guard_stops_gemini_with_a_reason(tmp_path: Path) -> None:
    need_agent("gemini")
    home, work = tmp_path / "home", tmp_path / "work"
    with model(plan(DESTROY, HARMLESS, DONE)) as server:
        env = house(home, GEMINI_API_KEY=KEY, GOOGLE_GEMINI_BASE_URL=server.url)
        gemini_model(home)
        assert guarded(home, work, env, "gemini") == "installed"
        ask_gemini(env, work)
    stopped, passed = server.results
    assert "`vastai destroy`" in stopped and "teardown_request" in stopped, stopped
    assert not (work / "ended.txt").exists() and (work / "passed.txt").read_text() == "harmless\n", passed
    assert server.faults == []
