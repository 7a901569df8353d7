"""The real clients take this repository as it is checked out, run its server, and let its guard stop a command.

Their models are scripted; what a client does with the files, the server and the hook is its own.
"""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from evals.agents import claude

from gpuwarden import __version__
from gpuwarden.interfaces.manifests import ROOT
from model_server import SHELL, Asked, Model, Say, Step, Use, model, plan
from real_agents import KEY, clean, need_agent, said

SKILLS = ["checkpoint-and-teardown", "dataset-preflight", "gpu-training", "training-debug"]
DONE = Say("Nothing is billing.")
CODEX = pytest.mark.parametrize("of", ["", "a-model-without-scripts"])


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What git has of this repository, and nothing else."""
    root = tmp_path_factory.mktemp("checkout") / "gpuwarden"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is no checkout of git")
    for name in filter(None, listed.stdout.split("\0")):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    return root


def broken(checkout: Path, tmp_path: Path, name: str) -> Path:
    """The checkout with one file that says nonsense."""
    copy = tmp_path / "broken"
    shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns("tests", "server", "evals"))
    (copy / name).write_text('{"name": 7}\n')
    return copy


def with_uvx(tmp_path: Path, env: dict[str, str]) -> dict[str, str]:
    """Put a `uvx` first on the PATH that starts this checkout's server, since the package is not published here."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = f'#!/bin/sh\n[ "$1" = gpuwarden@{__version__} ] && shift && exec {sys.executable} -m gpuwarden "$@"\n'
    (folder / "uvx").write_text(script)
    (folder / "uvx").chmod(0o755)
    return env | {"PATH": f"{folder}:{env['PATH']}"}


def patient(asked: Asked) -> Step:
    """Ask for the machines as soon as the tool is there: Codex begins before a plugin's server has answered."""
    if (asked.results and '"ok":true' in asked.results[-1]) or len(asked.results) > 40:
        return DONE
    there = {"list_instances", "exec"} & {name.rpartition("__")[2] for name in asked.offered}
    return Use("list_instances", {}) if there and len(asked.results) % 2 else Use(SHELL, {"command": "sleep 0.5"})


def codex_model(home: Path, server: Model) -> None:
    """Tell Codex where its model is."""
    given = ['model_provider = "given"', "[analytics]", "enabled = false", "[model_providers.given]", 'name = "given"']
    given += [f'base_url = "{server.url}/v1"', 'wire_api = "responses"', 'env_key = "OPENAI_API_KEY"']
    file = home / ".codex" / "config.toml"
    before = file.read_text() if file.exists() else ""
    file.write_text("\n".join([*given[:1], before, *given[1:]]) + "\n")


def ask_claude(env: dict[str, str], work: Path, *words: str) -> list[dict[str, Any]]:
    options = ["-p", "--output-format", "stream-json", "--verbose", *words]
    out = said(["claude", *options], env, work, stdin="Which machines bill?")
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def ask_codex(env: dict[str, str], work: Path, of: str) -> None:
    model_of = ["--model", of] if of else []
    said(["codex", "exec", "--json", "--skip-git-repo-check", "--sandbox", "danger-full-access", *model_of, "-"],
         env, work, stdin="Which machines bill?")  # fmt: skip


# ---------------------------------------------------------------------------------------------------- what they take


@pytest.mark.slow
def test_claude_finds_no_fault(checkout: Path, tmp_path: Path) -> None:
    env = clean(tmp_path / "home")
    for path in (checkout, checkout / ".claude-plugin" / "plugin.json"):
        assert "Validation passed" in said(["claude", "plugin", "validate", "--strict", str(path)], env, tmp_path)
    bad = broken(checkout, tmp_path, ".claude-plugin/plugin.json") / ".claude-plugin" / "plugin.json"
    assert "Validation passed" not in said(["claude", "plugin", "validate", str(bad)], env, tmp_path, rc=1)


@pytest.mark.slow
def test_gemini_finds_no_fault(checkout: Path, tmp_path: Path) -> None:
    env = clean(tmp_path / "home")
    done = said(["gemini", "extensions", "validate", str(checkout)], env, tmp_path)
    assert "successfully validated" in done
    bad = broken(checkout, tmp_path, "gemini-extension.json")
    said(["gemini", "extensions", "validate", str(bad)], env, tmp_path, rc=1)


@pytest.mark.prove
def test_claude_installs_the_plugin_and_runs_its_server(checkout: Path, tmp_path: Path) -> None:
    need_agent("claude")
    work = tmp_path / "work"
    work.mkdir()
    with model(plan(Use("list_instances", {}), DONE)) as server:
        env = clean(tmp_path / "home", ANTHROPIC_API_KEY=KEY, ANTHROPIC_BASE_URL=server.url)
        env = with_uvx(tmp_path, env) | claude.WAITS
        said(["claude", "plugin", "marketplace", "add", str(checkout)], env, work)
        said(["claude", "plugin", "install", "gpuwarden@gpuwarden-marketplace"], env, work)
        assert f"Version: {__version__}" in said(["claude", "plugin", "list"], env, work)
        rows = ask_claude(env, work, "--allowedTools", "mcp__plugin_gpuwarden_gpuwarden")
    init = next(row for row in rows if row.get("subtype") == "init")
    assert [(s["name"], s["status"]) for s in init["mcp_servers"]] == [("plugin:gpuwarden:gpuwarden", "connected")]
    assert {f"gpuwarden:{name}" for name in SKILLS} <= set(init["skills"])
    assert server.faults == [] and json.loads(server.results[0])["ok"] is True


@pytest.mark.prove
@CODEX
def test_codex_installs_the_plugin_and_runs_its_server(checkout: Path, of: str, tmp_path: Path) -> None:
    need_agent("codex")
    home, work = tmp_path / "home", tmp_path / "work"
    work.mkdir()
    with model(patient) as server:
        env = with_uvx(tmp_path, clean(home, OPENAI_API_KEY=KEY))
        said(["codex", "plugin", "marketplace", "add", str(checkout)], env, work)
        said(["codex", "plugin", "add", "gpuwarden@gpuwarden"], env, work)
        listed = said(["codex", "plugin", "list"], env, work)
        assert "installed, enabled" in listed and __version__ in listed
        codex_model(home, server)
        ask_codex(env, work, of)
    words = server.asked[0].words
    assert all(f"gpuwarden:{name}" in words for name in SKILLS), words[-3000:]
    assert server.faults == [] and json.loads(server.results[-1])["ok"] is True, server.results


# -------------------------------------------------------------------------------------------------- the guard's hook


def guarded(home: Path, work: Path, env: dict[str, str], client: str) -> str:
    """Install the guard as a person does, and return the state that is told."""
    work.mkdir(exist_ok=True)
    (work / "vastai").write_text('#!/bin/sh\necho "$@" >> ended.txt\n')  # what would end a machine
    (work / "vastai").chmod(stat.S_IRWXU)
    return state(env, client, "install")


def state(env: dict[str, str], client: str, action: str = "status") -> str:
    command = [sys.executable, "-m", "gpuwarden", "hooks", action, "--client", client, "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    return str(json.loads(done.stdout)["clients"][client])


def house(home: Path, **more: str) -> dict[str, str]:
    home.mkdir()
    (home / "policy.toml").touch()
    return clean(home, GPUWARDEN_HOME=str(home / "gw"), GPUWARDEN_POLICY=str(home / "policy.toml"), **more)


DESTROY = Use(SHELL, {"command": "./vastai destroy instance 4"})
HARMLESS = Use(SHELL, {"command": "echo harmless > passed.txt"})


@pytest.mark.prove
def test_the_guard_stops_claude_and_says_why(tmp_path: Path) -> None:
    need_agent("claude")
    home, work = tmp_path / "home", tmp_path / "work"
    profile = Use("Write", {"file_path": str(home / "profiles" / "mine.md"), "content": "---\n"})
    unhook = Use(SHELL, {"command": f"echo '{{}}' > {home}/.claude/settings.json"})
    with model(plan(DESTROY, HARMLESS, profile, unhook, DONE)) as server:
        env = house(home, ANTHROPIC_API_KEY=KEY, ANTHROPIC_BASE_URL=server.url)
        assert guarded(home, work, env, "claude") == "installed"
        ask_claude(env, work, "--allowedTools", "Bash,Write")
    stopped, _, edit, out = server.results
    assert "`vastai destroy` ends or deletes what gpuwarden guards" in stopped and "teardown_request" in stopped
    assert not (work / "ended.txt").exists() and (work / "passed.txt").read_text() == "harmless\n"
    assert "a person changes it" in edit and not (home / "profiles").exists()
    assert (
        "names this guard" in out
        and "gpuwarden.interfaces.hooks.guard" in (home / ".claude" / "settings.json").read_text()
    )
    assert server.faults == []


@pytest.mark.prove
@CODEX
def test_the_guard_stops_codex_once_a_person_trusts_it(of: str, tmp_path: Path) -> None:
    need_agent("codex")
    home, work = tmp_path / "home", tmp_path / "work"
    with model(plan(DESTROY, HARMLESS, Use(SHELL, {"command": "bash"}), DONE)) as server:
        env = house(home, OPENAI_API_KEY=KEY)
        codex_model(home, server)
        assert guarded(home, work, env, "codex") == "untrusted"
        assert trust(env, work) == "trusted"
        assert state(env, "codex") == "installed", "what Codex says of the hook is what we say"
        ask_codex(env, work, of)
    stopped, _, typing = server.results
    assert "`vastai destroy` ends or deletes what gpuwarden guards" in stopped and "teardown_request" in stopped
    assert not (work / "ended.txt").exists() and (work / "passed.txt").read_text() == "harmless\n"
    assert "nobody reads what is typed" in typing
    assert server.faults == []


@pytest.mark.prove
def test_codex_runs_no_hook_that_nobody_trusted(tmp_path: Path) -> None:
    """Why `hooks status` tells the two apart."""
    need_agent("codex")
    home, work = tmp_path / "home", tmp_path / "work"
    with model(plan(DESTROY, DONE)) as server:
        env = house(home, OPENAI_API_KEY=KEY)
        codex_model(home, server)
        assert guarded(home, work, env, "codex") == "untrusted"
        ask_codex(env, work, "")
    assert (work / "ended.txt").read_text() == "destroy instance 4\n"


def trust(env: dict[str, str], work: Path) -> str:
    """Trust every hook that Codex lists, as its own `/hooks` page does; what it then says of ours."""
    app = subprocess.Popen(
        [need_agent("codex"), "app-server"], env=env, cwd=work, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert app.stdin is not None and app.stdout is not None
    numbers = iter(range(1, 100))

    def ask(method: str, params: dict[str, Any]) -> dict[str, Any]:
        id = next(numbers)
        app.stdin.write(json.dumps({"id": id, "method": method, "params": params}) + "\n")  # type: ignore[union-attr]
        app.stdin.flush()  # type: ignore[union-attr]
        return next(r["result"] for r in map(json.loads, app.stdout) if r.get("id") == id)  # type: ignore[arg-type]

    try:
        ask("initialize", {"clientInfo": {"name": "tests", "version": "1"}})
        (hook,) = ask("hooks/list", {"cwds": [str(work)]})["data"][0]["hooks"]
        assert hook["trustStatus"] == "untrusted"
        value = {hook["key"]: {"trusted_hash": hook["currentHash"]}}
        ask("config/batchWrite", {"edits": [{"keyPath": "hooks.state", "value": value, "mergeStrategy": "upsert"}]})
        (hook,) = ask("hooks/list", {"cwds": [str(work)]})["data"][0]["hooks"]
        return str(hook["trustStatus"])
    finally:
        app.kill()
        app.wait()
        app.stdin.close()
        app.stdout.close()
