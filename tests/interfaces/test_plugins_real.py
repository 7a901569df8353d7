"""The real clients install this repository as a plugin and start its server from it, with the guard and the variables.

They install it with the README's commands from a git repository, or from a folder. Only files in git are present, all
homes are empty, no account is logged in, and uv installs the packages from the lock file.
"""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from evals.agents import claude

from client_kit import (
    CODEX,
    DONE,
    SKILLS,
    archived,
    arrived,
    ask_claude,
    ask_codex,
    ask_gemini,
    codex_model,
    codex_server,
    documented,
    gemini_model,
    patient,
    tools_of,
    trust,
    with_hub,
    with_uv,
)
from doors import accept
from gpuwarden import __version__
from gpuwarden.config import load_config
from gpuwarden.interfaces.hooks.install import hooks
from gpuwarden.interfaces.launch import from_folder
from gpuwarden.interfaces.manifests import RUNTIME
from gpuwarden.interfaces.setup.clients import client_files, plugin_folder
from gpuwarden.interfaces.variables import variables
from gpuwarden.policy_record import read_record
from model_server import SHELL, Asked, Step, Use, model, plan
from real_agents import KEY, clean, need_agent, said

pytestmark = pytest.mark.prove
MARKETPLACE = "gpuwarden@gpuwarden-marketplace"
DESTROY = Use(SHELL, {"command": "./vastai destroy instance 4"})
TOOLS = 10


@pytest.fixture(name="work")
def work_fixture(tmp_path: Path) -> Path:
    """A folder with a program that stands in for the one that destroys machines."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "vastai").write_text('#!/bin/sh\necho "$@" >> ended.txt\n')
    (work / "vastai").chmod(0o755)
    return work


@pytest.fixture(name="house")
def house_fixture(tmp_path: Path, uv_cache: Path) -> Iterator[dict[str, str]]:
    """The environment of a client in an empty home. Variables name the paths of the ledger and the policy.

    uv must not touch the user's environment for other projects.
    """
    (tmp_path / "strict.toml").write_text('platforms = ["local"]\n')
    accept(tmp_path / "gw", tmp_path / "strict.toml")
    own = {"GPUWARDEN_HOME": str(tmp_path / "gw"), "GPUWARDEN_POLICY": str(tmp_path / "strict.toml")}
    folders = {f"XDG_{n}_HOME": str(tmp_path / n.lower()) for n in ("DATA", "CONFIG", "STATE", "CACHE")}
    others = {"UV_PROJECT_ENVIRONMENT": str(tmp_path / "other projects")}
    yield with_uv(tmp_path / "bin", uv_cache, clean(tmp_path / "home", **own, **folders, **others))
    assert not (tmp_path / "other projects").exists()


def install(client: str, hub: Path, env: dict[str, str], work: Path) -> None:
    """Install with the README's commands, and check the files that the client keeps."""
    env = with_hub(Path(env["PATH"].partition(os.pathsep)[0]), hub, env)
    for words in documented(client):
        extra = ["--consent", "--skip-settings"] if client == "gemini" else []
        said([*words, *extra], env | {"GEMINI_CLI_TRUST_WORKSPACE": "true"}, work, stdin="y\n")
    if client != "gemini":  # it reads only a repository's root, or a release's archive
        no_tests(client, env)


def no_tests(client: str, env: dict[str, str]) -> None:
    """Assert that the client keeps the files that the server needs, and no tests."""
    folder = plugin_folder(client_files(env)[client])
    assert folder is not None
    assert all((folder / name).exists() and not (folder / name).is_symlink() for name in RUNTIME)
    assert not any((folder / name).exists() for name in ("tests", "evals", "tools", "bench"))


def install_in_claude(checkout: Path, env: dict[str, str], work: Path) -> None:
    said(["claude", "plugin", "marketplace", "add", str(checkout)], env, work)
    said(["claude", "plugin", "install", MARKETPLACE], env, work)
    assert f"Version: {__version__}" in said(["claude", "plugin", "list"], env, work)


def install_in_codex(checkout: Path, env: dict[str, str], work: Path) -> None:
    said(["codex", "plugin", "marketplace", "add", str(checkout)], env, work)
    said(["codex", "plugin", "add", "gpuwarden@gpuwarden"], env, work)
    listed = said(["codex", "plugin", "list"], env, work)
    assert "installed, enabled" in listed and __version__ in listed


def install_in_gemini(checkout: Path, env: dict[str, str], work: Path) -> None:
    words = ["gemini", "extensions", "install", str(checkout), "--consent", "--skip-settings"]
    said(words, env | {"GEMINI_CLI_TRUST_WORKSPACE": "true"}, work, stdin="y\n")


# ------------------------------------------------------------------------------------------ the server and its guard


def test_claude_starts_the_plugins_server_and_its_guard(
    hub: Path,
    house: dict[str, str],
    work: Path,
) -> None:
    need_agent("claude")
    with model(plan(Use("list_instances", {}), DESTROY, DONE)) as server:
        env = house | {"ANTHROPIC_API_KEY": KEY, "ANTHROPIC_BASE_URL": server.url} | claude.WAITS
        install("claude", hub, env, work)
        rows = ask_claude(env, work, "--allowedTools", "mcp__plugin_gpuwarden_gpuwarden,Bash")
    init = next(row for row in rows if row.get("subtype") == "init")
    assert [(s["name"], s["status"]) for s in init["mcp_servers"]] == [("plugin:gpuwarden:gpuwarden", "connected")]
    assert {f"gpuwarden:{name}" for name in SKILLS} <= set(init["skills"])
    assert sum(name.startswith("mcp__plugin_gpuwarden_gpuwarden__") for name in init["tools"]) == TOOLS
    machines, stopped = server.results
    assert json.loads(machines)["ok"] is True and "teardown_request" in stopped, stopped
    assert not (work / "ended.txt").exists() and server.faults == []


@CODEX
def test_codex_starts_the_plugins_server(checkout: Path, house: dict[str, str], work: Path, of: str) -> None:
    need_agent("codex")
    with model(patient) as server:
        env = house | {"OPENAI_API_KEY": KEY}
        install_in_codex(checkout, env, work)
        codex_model(Path(env["HOME"]), server)
        ask_codex(env, work, of)
    words = server.asked[0].words
    assert all(f"gpuwarden:{name}" in words for name in SKILLS), words[-3000:]
    assert server.faults == [] and json.loads(server.results[-1])["ok"] is True, server.results


def status(env: dict[str, str]) -> str:
    return hooks("status", ("codex",), load_config(env), env).clients["codex"]


def test_codex_runs_the_plugin_guard_once_trusted(
    checkout: Path,
    house: dict[str, str],
    work: Path,
) -> None:
    need_agent("codex")
    with model(plan(DESTROY, DONE)) as server:
        env = house | {"OPENAI_API_KEY": KEY}
        install_in_codex(checkout, env, work)
        codex_model(Path(env["HOME"]), server)
        assert status(env) == "untrusted"
        assert trust(env, work) == ["trusted", "trusted"]
        assert status(env) not in {"untrusted", "unconfirmed", "absent"}
        ask_codex(env, work, "")
        folder = plugin_folder(client_files(env)["codex"])
        assert folder is not None
        (folder / "README.md").write_text("changed")
        assert status(env) == "untrusted", "Codex withdraws its trust if a file of the plugin changes"
    assert "teardown_request" in server.results[0] and not (work / "ended.txt").exists(), server.asked[-1].body[
        "input"
    ][-1:]


def test_codex_keeps_a_working_server_without_test_files(hub: Path, house: dict[str, str], work: Path) -> None:
    need_agent("codex")
    install("codex", hub, house, work)
    folder = plugin_folder(client_files(house)["codex"])
    assert tools_of(from_folder("codex", str(folder)), house) == TOOLS


def test_gemini_starts_the_extensions_server_and_its_guard(hub: Path, house: dict[str, str], work: Path) -> None:
    need_agent("gemini")
    offered: set[str] = set()

    def mind(asked: Asked) -> Step:
        offered.update(name for name in asked.offered if name.startswith("mcp_gpuwarden_"))
        return [Use("list_instances", {}), DESTROY, DONE][len(asked.results)]

    with model(mind) as server:
        env = house | {"GEMINI_API_KEY": KEY, "GOOGLE_GEMINI_BASE_URL": server.url}
        gemini_model(Path(env["HOME"]))
        install("gemini", hub, env, work)
        ask_gemini(env, work)
    assert "teardown_request" in server.results[1] and not (work / "ended.txt").exists(), server.results
    assert len(offered) == TOOLS and server.faults == [], offered
    assert '\\"ok\\":true' in server.results[0].replace(" ", "") or '"ok": true' in server.results[0], server.results


# ------------------------------------------------------------------------------------------- variables that arrive


def given() -> dict[str, str]:
    """Return a value for each variable that a client must pass on, except for those that are set already."""
    set_already = ("GPUWARDEN_", "XDG_", "HF_", "HTTPS_PROXY", "NO_PROXY")
    return {v.name: f"given {v.name}" for v in variables() if not v.name.startswith(set_already)} | {
        "HF_TOKEN": "given", "GPUWARDEN_CAPS_PER_JOB_USD": "0.5", "GPUWARDEN_WEBHOOK_SECRET": "given",
    }  # fmt: skip


def servers(house: dict[str, str]) -> list[tuple[Path, dict[str, str]]]:
    return arrived(Path(house["PATH"].partition(os.pathsep)[0]))


def missing(env: dict[str, str], found: dict[str, str]) -> dict[str, Any]:
    wanted = given() | {n: env[n] for n in ("GPUWARDEN_HOME", "GPUWARDEN_POLICY", "XDG_STATE_HOME", "XDG_DATA_HOME")}
    return {name: found.get(name) for name, value in wanted.items() if found.get(name) != value}


def test_claude_passes_every_variable(checkout: Path, house: dict[str, str], work: Path) -> None:
    need_agent("claude")
    install_in_claude(checkout, house, work)
    assert "Connected" in said(["claude", "mcp", "list"], house | given(), work)
    ((place, found),) = servers(house)
    assert missing(house, found) == {} and place == work, "and the server runs in the project"


def test_codex_passes_exactly_the_named_variables(
    checkout: Path,
    house: dict[str, str],
    work: Path,
) -> None:
    need_agent("codex")
    install_in_codex(checkout, house, work)
    with codex_server(house | given() | {"OTHER_SECRET": "x", "OTHER": "x"}, work) as ask:
        (listed,) = ask("mcpServerStatus/list", {})["data"]
        assert len(listed["tools"]) == TOOLS, listed
        assert "Codex's server" not in str(listed)
    ((place, found),) = servers(house)
    assert missing(house, found) == {} and not {"OTHER_SECRET", "OTHER"} & found.keys()
    assert place.is_relative_to(Path(house["HOME"]) / ".codex" / "plugins")


def test_gemini_passes_every_variable_even_if_secret(
    hub: Path,
    house: dict[str, str],
    work: Path,
    tmp_path: Path,
) -> None:
    need_agent("gemini")
    env = house | {"GEMINI_CLI_TRUST_WORKSPACE": "true"}
    install_in_gemini(archived(hub, tmp_path / "a release"), env, work)
    no_tests("gemini", env)
    said(["gemini", "mcp", "list"], env | given() | {"OTHER_SECRET": "x"}, work)
    place, found = next((p, e) for p, e in servers(house) if "GPUWARDEN_WEBHOOK_SECRET" in e)
    assert missing(house, found) == {} and "OTHER_SECRET" not in found and place == work


def test_strict_policy_stays_active_without_codex_variables(
    checkout: Path,
    house: dict[str, str],
    work: Path,
    tmp_path: Path,
) -> None:
    """The user's own entry names no variables, so none arrives. The policy stays active, and the reply explains why."""
    need_agent("codex")
    need_agent("claude")
    with model(
        plan(Use("list_instances", {}), DONE)
    ) as server:  # listing the servers may end one before its ledger opens
        env = house | {"ANTHROPIC_API_KEY": KEY, "ANTHROPIC_BASE_URL": server.url} | claude.WAITS
        install_in_claude(checkout, env, work)
        ask_claude(env, work, "--allowedTools", "mcp__plugin_gpuwarden_gpuwarden")
    uv = ["run", "--project", str(checkout), "--frozen", "--no-dev", "gpuwarden", "mcp"]
    own = 'env_vars = ["XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"]\nstartup_timeout_sec = 120\n'
    text = f"[mcp_servers.gpuwarden]\ncommand = {json.dumps('uv')}\nargs = {json.dumps(uv)}\n{own}"
    (Path(house["HOME"]) / ".codex" / "config.toml").write_text(text)
    with model(patient) as server:
        env = house | {"OPENAI_API_KEY": KEY}
        codex_model(Path(env["HOME"]), server)
        ask_codex(env, work, "a-model-without-scripts")
    warnings = " ".join(json.loads(server.results[-1])["warnings"])
    account = Path(pwd.getpwuid(os.getuid()).pw_dir)
    if read_record(account / ".local/share/gpuwarden"):  # the account that runs the tests has a ledger
        assert str(account) in warnings, warnings
    else:
        assert "GPUWARDEN_HOME" in warnings and "gpuwarden setup" in warnings, warnings
        assert str(tmp_path / "strict.toml") in warnings
