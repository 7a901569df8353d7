"""Installing the guard leaves other hooks intact, and the installed hook answers in each client's format."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from doors import environment
from gpuwarden import running_servers
from gpuwarden.config import load_config
from gpuwarden.core.errors import BadRequest
from gpuwarden.interfaces.cli import main
from gpuwarden.interfaces.hooks import codex_trust
from gpuwarden.interfaces.hooks.guard import __main__ as guard
from gpuwarden.interfaces.hooks.install import TIMEOUT_S, hooks, plugin_hooks
from wording import Wording


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("CLAUDE_CONFIG_DIR", "CODEX_HOME"):
        monkeypatch.delenv(name, raising=False)
    values = environment(tmp_path / "gw", HOME=str(tmp_path))
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return values


THEIRS: dict[str, Any] = {
    "model": "x",
    "hooks": {"PreToolUse": [{"matcher": "Bash", "hooks": [{"type": "command", "command": "mine.sh"}]}], "Stop": []},
}


def test_install_keeps_other_hooks_and_uninstall_restores_the_bytes(tmp_path: Path, env: dict[str, str]) -> None:
    file = tmp_path / ".claude" / "settings.json"
    file.parent.mkdir()
    before = json.dumps(THEIRS, indent=7) + "\n\n"
    file.write_text(before)
    config = load_config(env)
    for _ in range(2):
        found = hooks("install", (), config, env).clients
        assert found.keys() == {"claude", "codex", "gemini", "cursor"}
        assert [name for name, state in found.items() if state == "installed"] == ["claude"], "the others are not here"
    table = json.loads(file.read_text())
    assert table["hooks"]["PreToolUse"][0] == THEIRS["hooks"]["PreToolUse"][0]
    assert len(table["hooks"]["PreToolUse"]) == 2 and table["model"] == "x"
    assert hooks("uninstall", (), config, env).clients["claude"] == "absent"
    assert file.read_text() == before and [p.name for p in file.parent.iterdir()] == ["settings.json"]


def test_uninstall_keeps_later_changes(tmp_path: Path, env: dict[str, str]) -> None:
    file = tmp_path / ".cursor" / "hooks.json"
    config = load_config(env)
    hooks("install", ("cursor",), config, env)
    table = json.loads(file.read_text())
    assert table["version"] == 1 and len(table["hooks"]["beforeShellExecution"]) == 1
    table["hooks"]["stop"] = [{"command": "mine.sh"}]
    file.write_text(json.dumps(table))
    hooks("uninstall", ("cursor",), config, env)
    assert json.loads(file.read_text())["hooks"]["stop"] == [{"command": "mine.sh"}]
    hooks("install", ("codex",), config, env)
    hooks("uninstall", ("codex",), config, env)
    assert not (tmp_path / ".codex" / "hooks.json").exists()


def test_uninstall_keeps_a_foreign_hook_in_our_group(tmp_path: Path, env: dict[str, str]) -> None:
    file, config = tmp_path / ".claude" / "settings.json", load_config(env)
    hooks("install", ("claude",), config, env)
    table = json.loads(file.read_text())
    table["hooks"]["PreToolUse"][0]["hooks"].append({"type": "command", "command": "mine.sh"})
    file.write_text(json.dumps(table))
    hooks("uninstall", ("claude",), config, env)
    assert [h["command"] for h in json.loads(file.read_text())["hooks"]["PreToolUse"][0]["hooks"]] == ["mine.sh"]


@pytest.mark.parametrize("event", ["Elicitation", "ElicitationResult"])
@pytest.mark.parametrize(
    "name",
    [
        ".claude/settings.json",
        "project/.claude/settings.local.json",
        ".claude/plugins/cache/market/theirs/1.0/hooks/hooks.json",
    ],
)
def test_status_names_hooks_that_answer_forms(
    tmp_path: Path, env: dict[str, str], monkeypatch: pytest.MonkeyPatch, name: str, event: str
) -> None:
    file, project = tmp_path / name, tmp_path / "project"
    (tmp_path / ".claude").mkdir()
    file.parent.mkdir(parents=True, exist_ok=True)
    project.mkdir(exist_ok=True)
    monkeypatch.chdir(project)
    table = {"hooks": {event: [{"hooks": [{"type": "command", "command": "yes.sh"}]}]}}
    for text, found in ((json.dumps({"hooks": {event: []}}), []), ("[", []), (json.dumps(table), [str(file)])):
        if text != "[" or name != ".claude/settings.json":  # invalid JSON in a client's own settings is an error
            file.write_text(text)
            reply = hooks("status", (), load_config(env), env)
            assert reply.answering == found and (str(file) in reply.message) is bool(found)


@pytest.mark.parametrize("text", ["{ // comment\n}", "[]", '{"hooks": []}', '{"hooks": {"PreToolUse": {}}}'])
def test_unsupported_settings_stay_untouched(tmp_path: Path, env: dict[str, str], text: str) -> None:
    file = tmp_path / ".claude" / "settings.json"
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(BadRequest):
        hooks("install", (), load_config(env), env)
    assert file.read_text() == text


@pytest.mark.parametrize("client", ["claude", "codex", "gemini", "cursor"])
def test_installed_hook_answers_in_the_client_format(
    tmp_path: Path, env: dict[str, str], client: str, wording: Wording
) -> None:
    file = tmp_path / f".{client}" / ("settings.json" if client in {"claude", "gemini"} else "hooks.json")
    assert main.run(["hooks", "install", "--client", client, "--json"]) == 0
    entry = next(iter(json.loads(file.read_text())["hooks"].values()))[0]
    argv = ["sh", "-c", entry.get("command") or entry["hooks"][0]["command"]]

    def ask(command: str) -> subprocess.CompletedProcess[str]:
        event = {"command": command, "cwd": "/"} if client == "cursor" else {
            "hook_event_name": "BeforeTool" if client == "gemini" else "PreToolUse",
            "tool_name": "run_shell_command" if client == "gemini" else "Bash",
            "tool_input": {"command": command}, "cwd": "/",
        }  # fmt: skip
        return subprocess.run(argv, input=json.dumps(event), capture_output=True, text=True, timeout=300)

    stopped, passed = ask("vastai destroy instance 1"), ask("vastai show instances")
    wording(json.loads(stopped.stdout)["agent_message"] if client == "cursor" else stopped.stderr)
    if client == "cursor":
        assert json.loads(stopped.stdout)["permission"] == "deny" and json.loads(passed.stdout) == {}
        assert (stopped.returncode, passed.returncode) == (0, 0)
    else:
        assert (stopped.returncode, passed.returncode) == (2, 0) and "teardown_request" in stopped.stderr
        assert passed.stdout == passed.stderr == ""
    assert (ask("bash").returncode == 2) is (client == "codex")
    assert ask(f"rm -rf {tmp_path}/gw").returncode == (0 if client == "cursor" else 2)

    argv[2] = argv[2].replace(sys.executable, "/no/such/python")
    lost = ask("ls")
    assert lost.returncode == 2 and "gpuwarden hooks install" in lost.stderr, "a guard that is gone lets nothing pass"


def test_a_hook_of_an_older_install_is_stale(tmp_path: Path, env: dict[str, str]) -> None:
    assert main.run(["hooks", "install", "--client", "claude", "--json"]) == 0
    file = tmp_path / ".claude" / "settings.json"
    table = json.loads(file.read_text())
    hook = table["hooks"]["PreToolUse"][0]["hooks"][0]
    hook["command"] = hook["command"].partition(" ||")[0]
    file.write_text(json.dumps(table))
    assert hooks("status", (), load_config(env), env).clients["claude"] == "stale"
    assert hooks("install", (), load_config(env), env).clients["claude"] == "installed"


def test_status_explains_what_the_guard_cannot_stop(
    env: dict[str, str], capsys: pytest.CaptureFixture[str], wording: Wording
) -> None:
    assert main.run(["hooks", "status", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    (state,) = set(body["clients"].values())
    assert state not in {"installed", "absent", "stale", "untrusted"}
    wording(f"{state}\n{body['message']}")


@pytest.mark.parametrize("code", [1, 3, 126, 127, 137])
@pytest.mark.parametrize("client", ["claude", "cursor"])
def test_failing_guard_blocks_every_call(tmp_path: Path, env: dict[str, str], client: str, code: int) -> None:
    assert main.run(["hooks", "install", "--client", client, "--json"]) == 0
    file = tmp_path / f".{client}" / ("settings.json" if client == "claude" else "hooks.json")
    entry = next(iter(json.loads(file.read_text())["hooks"].values()))[0]
    broken = tmp_path / "python"
    broken.write_text(f"#!/bin/sh\nexit {code}\n")
    broken.chmod(0o755)
    command = (entry.get("command") or entry["hooks"][0]["command"]).replace(sys.executable, str(broken))
    done = subprocess.run(["sh", "-c", command], input="{}", capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "gpuwarden hooks install" in done.stderr


def test_a_guard_that_cannot_start_is_not_installed(
    tmp_path: Path, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such module >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(BadRequest, match="no such module"):
        hooks("install", ("claude",), load_config(env), env)
    assert not (tmp_path / ".claude" / "settings.json").exists()


def test_copied_guard_installation_is_replaced(tmp_path: Path, env: dict[str, str]) -> None:
    config = load_config(env)
    folder = config.home / "hooks"
    folder.mkdir(parents=True)
    (folder / "guard.py").touch()
    old = {"type": "command", "command": f"python -I {folder}/guard.py claude {folder}/guard.json", "timeout": 10}
    file = tmp_path / ".claude" / "settings.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"hooks": {"PreToolUse": [{"matcher": "Bash", "hooks": [old]}]}}))
    assert hooks("status", (), config, env).clients["claude"] == "stale"
    assert hooks("install", (), config, env).clients["claude"] == "installed"
    assert len(json.loads(file.read_text())["hooks"]["PreToolUse"]) == 1 and not (folder / "guard.py").exists()
    assert folder.stat().st_mode & 0o077 == 0 and (folder / "guard.json").stat().st_mode & 0o077 == 0


def test_patterns_that_changed_since_the_install_are_stale(
    tmp_path: Path, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(env)
    assert hooks("install", ("claude",), config, env).clients["claude"] == "installed"
    monkeypatch.setattr("gpuwarden.interfaces.hooks.guard.declared.table", dict)
    assert hooks("status", ("claude",), config, env).clients["claude"] == "stale"


def test_cursor_hooks_cover_every_event_and_fail_closed(tmp_path: Path, env: dict[str, str]) -> None:
    hooks("install", ("cursor",), load_config(env), env)
    events = json.loads((tmp_path / ".cursor" / "hooks.json").read_text())["hooks"]
    assert events.keys() == {"beforeShellExecution", "beforeMCPExecution", "preToolUse"}
    assert all(entry["failClosed"] is True for entries in events.values() for entry in entries)


def test_gemini_hook_timeout_is_in_milliseconds(tmp_path: Path, env: dict[str, str]) -> None:
    hooks("install", ("gemini",), load_config(env), env)
    (group,) = json.loads((tmp_path / ".gemini" / "settings.json").read_text())["hooks"]["BeforeTool"]
    assert group["hooks"][0]["timeout"] == 60_000


# --------------------------------------------------------------------------------------------------- a plugin's guard


def plugins_guard(env: dict[str, str], *words: str, call: object = None) -> subprocess.CompletedProcess[str]:
    """Run the guard as a plugin's hook does, without a file argument."""
    argv = [sys.executable, "-E", "-P", "-m", "gpuwarden.interfaces.hooks.guard", "claude", *words]
    return subprocess.run(argv, input=json.dumps(call), env=env, capture_output=True, text=True, timeout=300)


def bash(command: str) -> dict[str, Any]:
    return {"tool_name": "Bash", "tool_input": {"command": command}, "cwd": "/"}


@pytest.mark.slow
def test_plugin_guard_writes_its_file_on_the_first_call(tmp_path: Path, env: dict[str, str]) -> None:
    file = tmp_path / "gw" / "hooks" / "guard.json"
    assert plugins_guard(env, call=bash("ls")).returncode == 0 and file.stat().st_mode & 0o077 == 0
    stopped = plugins_guard(env, call=bash("vastai destroy instance 1"))
    assert stopped.returncode == 2 and "teardown_request" in stopped.stderr
    assert plugins_guard(env, call=bash(f"rm -rf {tmp_path}/gw")).returncode == 2, "it knows where the ledger is"


@pytest.mark.slow
@pytest.mark.attack("guard", "changes the plugin's copy of the guard, or which ledger the account's servers used")
def test_plugin_guard_protects_its_folder_and_the_server_list(tmp_path: Path, env: dict[str, str]) -> None:
    cache = f"{tmp_path}/.claude/plugins/cache"
    for path in (f"{cache}/gpuwarden-marketplace/gpuwarden/0.1.0/hooks/hooks.json", running_servers.folder() / "x"):
        assert plugins_guard(env, call=bash(f"echo '{{}}' > {path}")).returncode == 2
        assert plugins_guard(env, call=bash(f"rm -rf {Path(path).parent}")).returncode == 2
    assert plugins_guard(env, call=bash(f"echo '{{}}' > {cache}/other/plugin.json")).returncode == 0


@pytest.mark.slow
def test_session_start_rewrites_the_guard_file(tmp_path: Path, env: dict[str, str]) -> None:
    file = tmp_path / "gw" / "hooks" / "guard.json"
    assert plugins_guard(env, "--place").returncode == 0
    file.write_text("{}")
    assert plugins_guard(env, call=bash("ls")).returncode == 2, "what can't be read lets nothing pass"
    assert plugins_guard(env, "--place").returncode == 0 and plugins_guard(env, call=bash("ls")).returncode == 0


def test_plugin_guard_is_unconfirmed_without_asking_codex(tmp_path: Path, env: dict[str, str]) -> None:
    plugin = tmp_path / ".codex/plugins/cache/gpuwarden/gpuwarden/0.1.0"
    (plugin / "clients").mkdir(parents=True)
    (plugin / "clients/codex-hooks.json").write_text(json.dumps(plugin_hooks("codex")))
    config = tmp_path / ".codex/config.toml"
    enabled = '[plugins."gpuwarden@gpuwarden"]\nenabled = true\n'

    def status() -> str:
        return hooks("status", ("codex",), load_config(env), {**env, "PATH": "/usr/bin:/bin"}).clients["codex"]

    assert status() == "absent"
    config.write_text(enabled)
    assert status() == "unconfirmed"


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", ["exit 1", 'echo \'{"id": 1, "result": {"data": []}}\'', "echo '[]'", "yes", "sleep 600; true"]
)
def test_codex_without_a_valid_answer_leaves_trust_unconfirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    codex = tmp_path / "codex"
    codex.write_text(f"#!/bin/sh\n{script}\n")
    codex.chmod(0o700)
    monkeypatch.setattr("gpuwarden.interfaces.hooks.codex_trust.PATIENCE_S", 0.5)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    assert codex_trust.state_of({"PATH": path}, lambda _: True) == "unconfirmed"


@pytest.mark.parametrize("client", ["claude", "codex", "gemini"])
def test_plugin_hook_fails_closed_without_uv(tmp_path: Path, client: str, wording: Wording) -> None:
    table = plugin_hooks(client)["hooks"]
    command = table["BeforeTool" if client == "gemini" else "PreToolUse"][0]["hooks"][0]["command"]
    command = command.replace("${extensionPath}", "/somewhere")  # Gemini replaces it before a shell sees it
    done = subprocess.run(["/bin/sh", "-c", command], env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 2
    wording(done.stderr.splitlines()[-1])
    first = table["SessionStart"][0]["hooks"][0]["command"]
    assert "exit 2" not in first, "a session may begin without it"
    assert "--no-sync" in command and "--no-sync" not in first, "a call that waits for a download would be late"


def test_guard_ends_itself_before_the_client_timeout() -> None:
    assert guard.MOST_FIRST_S + guard.MOST_S < TIMEOUT_S
