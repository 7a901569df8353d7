"""`gpuwarden setup` adds the server and the guard to clients' files, changes nothing else, and removes both again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_kit import Cli
from doors import accept, at_terminal, environment, gpuwarden
from gpuwarden import __version__
from gpuwarden.app import open_context
from gpuwarden.config import load_config
from gpuwarden.core.errors import BadRequest, Conflict, Refused
from gpuwarden.core.policy import hash_pin
from gpuwarden.interfaces.cli import approval, questions
from gpuwarden.interfaces.cli.demo import demo_spec
from gpuwarden.interfaces.hooks.install import hooks, replace_text
from gpuwarden.interfaces.http import running
from gpuwarden.interfaces.launch import CLIENT_NAMES, SOURCE, entry, own_command
from gpuwarden.interfaces.mcp import trial
from gpuwarden.interfaces.setup import changes, jsonc, use_case
from gpuwarden.interfaces.setup.clients import client_files
from gpuwarden.lifecycle.context import Context
from gpuwarden.policy_record import digest_of, read_record
from gpuwarden.providers._account import read_key
from terminal import Typed
from wording import Wording

PATH = ("mcpServers", "gpuwarden")
ENTRY = {"command": "gpuwarden", "args": ["mcp"], "env": {"HF_TOKEN": "${HF_TOKEN:-}"}}
COMMENTED = """// settings of mine
{
    // servers
    "mcpServers": {   // by name
        /* one */ "theirs": {"command": "x", "args": ["//no comment", "/* nor this */"]},
    },
    "theme": "\\"{dark}\\"", // trailing
    "list": [1, 2, [], {},],
}
"""

# ------------------------------------------------------------------------------------------- JSON as people write it


@pytest.mark.parametrize(
    "text",
    [
        "", "{}", "{ }", "{\n}", "{\n}\n", "// nothing yet\n", "{\r\n  \"a\": 1\r\n}\r\n", '{"a": 1}', "{\t\"a\": {}}",
        '{"mcpServers": {}}', '{"mcpServers": {\n  }}', '{\n  "mcpServers": {"x": {"command": "y"}}\n}\n', COMMENTED,
        '{"mcpServers": {"a": {"b": 1,},},}', '\ufeff{"a": 1}', '{ // first\n  "a": 1 // last\n}', '{/* x */}',
    ],
)  # fmt: skip
def test_entry_is_inserted_and_removed_again(text: str) -> None:
    at, insert = jsonc.inserted(text, PATH, ENTRY)
    after = text[:at] + insert + text[at:]
    before = jsonc.loads(text.lstrip("\ufeff"))
    servers = before.get("mcpServers", {})
    assert jsonc.loads(after) == before | {"mcpServers": {"gpuwarden": ENTRY, **servers}}
    assert jsonc.loads(jsonc.removed(after, PATH)) == before | {"mcpServers": servers}
    assert ("\r\n" in text) == ("\r\n" in insert) or not text.strip()
    for comment in ("// settings of mine", "// by name", "/* one */", "// trailing", "// first", "// last"):
        assert text.count(comment) == after.count(comment) == jsonc.removed(after, PATH).count(comment)


def test_inserted_entry_follows_the_existing_formatting() -> None:
    at, insert = jsonc.inserted(COMMENTED, PATH, {"command": "x"})
    rows = (COMMENTED[:at] + insert + COMMENTED[at:]).splitlines()
    assert rows[3:8] == [
        '    "mcpServers": {   // by name',
        '        "gpuwarden": {',
        '            "command": "x"',
        "        },",
        '        /* one */ "theirs": {"command": "x", "args": ["//no comment", "/* nor this */"]},',
    ]


@pytest.mark.parametrize(
    "text",
    ["[]", "7", '{"a" 1}', "{'a': 1}", '{"a": 1', '{"mcpServers": []}', '{"mcpServers": {"gpuwarden": 1}}', "{}{}",
     '{"a": "\n"}', "{" * 5000, '{"a":' * 3000 + "1" + "}" * 3000],
)  # fmt: skip
def test_what_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises((ValueError, RecursionError, IndexError)):
        jsonc.inserted(text, PATH, ENTRY)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@given(
    st.dictionaries(st.text(max_size=8), JSON, max_size=4),
    st.dictionaries(st.sampled_from(["a", "b", "c"]), JSON, max_size=3),
    st.sampled_from([None, 0, 2, 4, "\t"]),
    st.booleans(),
)
def test_other_settings_are_preserved(rest: dict[str, Any], servers: dict[str, Any], indent: Any, there: bool) -> None:
    table = rest | ({"mcpServers": servers} if there else {})
    text = json.dumps(table, indent=indent, ensure_ascii=False)
    at, insert = jsonc.inserted(text, PATH, ENTRY) if there or "mcpServers" not in rest else (0, "")
    after = text[:at] + insert + text[at:]
    assert json.loads(after) == table | {"mcpServers": {**table.get("mcpServers", {}), "gpuwarden": ENTRY}}
    without = json.loads(jsonc.removed(after, PATH))
    assert without == table | {"mcpServers": table.get("mcpServers", {})}


# ------------------------------------------------------------------------------------------------------- the command


async def rehearsed(*_: object) -> None:
    """Stand in for the rehearsal, which has its own tests."""


@pytest.fixture(name="env")
def env_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a user with one client of each kind."""
    for name in ("CLAUDE_CONFIG_DIR", "CODEX_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / ".config"))
    monkeypatch.setattr(trial, "rehearse", rehearsed)
    values = environment(tmp_path / "gw", HOME=str(tmp_path))
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    for folder in (".claude", ".codex", ".gemini", ".cursor", ".config/Code/User", ".config/zed"):
        (tmp_path / folder).mkdir(parents=True)
    return values


@pytest.fixture(name="run")
def run_cli(
    env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Cli:
    cli = Cli(tmp_path / "gw", monkeypatch, capsys)
    monkeypatch.setenv("HOME", str(tmp_path))
    return cli


def files_below(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and "gw" not in p.parts
    }


def undo(env: dict[str, str], *names: str) -> use_case.SetupReply:
    return use_case.take_back(names, load_config(env), env)


def test_nothing_is_written_without_a_terminal_or_yes_option(run: Cli, tmp_path: Path, wording: Wording) -> None:
    before = files_below(tmp_path)
    code, body = run("setup")
    assert code == 0 and set(body["clients"]) == set(CLIENT_NAMES)
    (state,) = set(body["clients"].values())
    wording(f"{state}\n{body['hint']}")
    assert set(body["guards"]) == {"claude", "codex", "gemini", "cursor"}
    assert {c["file"] for c in body["changes"]} >= {str(c.file) for c in client_files(os.environ).values()}
    assert files_below(tmp_path) == before


def test_every_client_gets_the_server_in_its_own_form(run: Cli, tmp_path: Path) -> None:
    code, body = run("setup", "--yes")
    assert code == 0 and set(body["clients"].values()) == {"added"}
    assert body["tried"] == dict.fromkeys(CLIENT_NAMES, "proven")
    assert body["guards"] == {
        "claude": "installed",
        "codex": "unconfirmed",
        "gemini": "installed",
        "cursor": "installed",
    }
    for client in client_files(os.environ).values():
        entry = client.parsed(client.file.read_text())[client.key]["gpuwarden"]
        assert [entry["command"], *entry["args"]] == [
            sys.executable,
            *["-P", "-m", "gpuwarden", "mcp", "--client"],
            client.name,
        ]
    codex = tomllib.loads((tmp_path / ".codex/config.toml").read_text())["mcp_servers"]["gpuwarden"]
    assert {"GPUWARDEN_HOME", "GPUWARDEN_POLICY", "RUNPOD_API_KEY", "MY_TOKEN"} <= set(codex["env_vars"]), (
        "and the policy's"
    )
    again = run("setup", "--yes")[1]
    assert set(again["clients"].values()) == {"is set up"} and again["changes"] == []


def test_variable_values_are_never_written(run: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "RUNPOD_API_KEY", "WANDB_API_KEY"):
        monkeypatch.setenv(name, f"secret-value-of-{name}")
    assert run("setup", "--yes")[0] == 0
    assert not [name for name, content in files_below(tmp_path).items() if b"secret-value" in content]


def test_reply_shows_only_the_added_lines(run: Cli, tmp_path: Path) -> None:
    (tmp_path / ".cursor/mcp.json").write_text('{"mcpServers": {"theirs": {"env": {"KEY": "their-secret-value"}}}}')
    assert "their-secret-value" not in json.dumps(run("setup", "cursor")[1])
    shown = run.shown("setup", "cursor")[1]
    assert "their-secret-value" not in shown and '+ "gpuwarden": {"type": "stdio"' in shown


THEIRS = {
    ".claude.json": '{\n  "numStartups": 7,\n  "mcpServers": {}\n}',
    ".codex/config.toml": '# mine\nmodel = "x"  # a comment\n\n[mcp_servers.theirs]\n[profiles.a]\nb = 1',
    ".gemini/settings.json": '{"security": {"auth": {}}}\n',
    ".cursor/mcp.json": '{"mcpServers": {"theirs": {"command": "x"}}}',
    ".config/Code/User/mcp.json": '{\n\t// my servers\n\t"servers": {\n\t\t"theirs": {"command": "x"},\n\t},\n}\n',
    ".config/zed/settings.json": COMMENTED,
}


@pytest.mark.parametrize("content", [{}, THEIRS], ids=["none", "theirs"])
def test_undo_restores_every_byte(run: Cli, env: dict[str, str], tmp_path: Path, content: dict[str, str]) -> None:
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    before = files_below(tmp_path)
    assert set(run("setup", "--yes")[1]["clients"].values()) == {"added"}
    assert all(b"gpuwarden" in files_below(tmp_path)[name] for name in THEIRS)
    reply = undo(env)
    assert set(reply.clients.values()) == {"removed"} and set(reply.guards.values()) == {"absent"}
    after = {n: c for n, c in files_below(tmp_path).items() if not n.startswith("state")}
    assert after == before


def test_undo_keeps_later_changes(run: Cli, env: dict[str, str], tmp_path: Path) -> None:
    for name, text in THEIRS.items():
        (tmp_path / name).write_text(text)
    run("setup", "--yes")
    for name in THEIRS:  # added meanwhile by a client or the user
        file = tmp_path / name
        text = file.read_text()
        file.write_text(f"{text}\n[added]\nx = 1\n" if name.endswith("toml") else text.replace("{", '{"added": 1, ', 1))
    assert set(undo(env).clients.values()) == {"removed"}
    for client in client_files(env).values():
        table = client.parsed(client.file.read_text())
        assert "added" in table and "gpuwarden" not in table.get(client.key, {})
        was = client.parsed(THEIRS[str(client.file.relative_to(tmp_path))])
        assert {k: v for k, v in table.items() if k not in {"added", "hooks"} and v} == {
            k: v for k, v in was.items() if v
        }


def test_undo_keeps_an_entry_that_the_user_changed(
    run: Cli, env: dict[str, str], tmp_path: Path, wording: Wording
) -> None:
    run("setup", "cursor", "--yes")
    file = tmp_path / ".cursor/mcp.json"
    file.write_text(file.read_text().replace('"mcp"', '"mcp", "--mine"'))
    kept = undo(env)
    assert kept.code == "failed"
    wording(kept.clients["cursor"])
    assert '"--mine"' in file.read_text()
    file.write_text(file.read_text().replace(', "--mine"', ""))
    assert undo(env).clients["cursor"] == "removed", "it can be undone later"


def test_undo_removes_nothing_that_setup_did_not_write(run: Cli, env: dict[str, str], tmp_path: Path) -> None:
    hooks("install", ("cursor",), load_config(env), env)
    before = (tmp_path / ".cursor/hooks.json").read_bytes()
    run("setup", "cursor", "--yes")
    assert undo(env).guards == {} and (tmp_path / ".cursor/hooks.json").read_bytes() == before
    assert undo(env).clients == {}


def test_forged_note_removes_no_other_entry(run: Cli, env: dict[str, str], tmp_path: Path) -> None:
    victim = tmp_path / ".cursor/mcp.json"
    text = '{"mcpServers": {"gpuwarden": {"command": "mine"}, "guard": {"command": "theirs"}}}'
    for piece in ('"guard": {"command": "theirs"}', text, '"gpuwarden": {"command": "x"}, '):
        victim.write_text(text)
        forged = changes.WrittenChange(file=str(victim), at=text.find(piece), text=piece, after=changes.digest(text))
        changes.write_note(changes.SetupRecord(clients={"cursor": forged}))
        assert (undo(env).clients["cursor"] == "removed") is (piece == text)
        assert json.loads(victim.read_text())["mcpServers"]["guard"] == {"command": "theirs"}


MINE = '{"mcpServers": {"gpuwarden": {"command": "mine"}}}'


@pytest.mark.parametrize("text", ["[]", "{'a': 1}", '{"mcpServers": 7}', MINE])
def test_entry_that_cannot_be_added_is_shown_for_pasting(run: Cli, tmp_path: Path, text: str) -> None:
    file = tmp_path / ".cursor/mcp.json"
    file.write_text(text)
    body = run("setup", "cursor", "--yes")[1]
    assert body["clients"]["cursor"] != "added" and file.read_text() == text and body["code"] == "failed"
    assert json.loads(body["paste"][str(file)])["mcpServers"]["gpuwarden"]["command"] == sys.executable


def test_unsupported_codex_tables_stay_unchanged(run: Cli, tmp_path: Path) -> None:
    file = tmp_path / ".codex/config.toml"
    file.write_text('mcp_servers = {theirs = {command = "x"}}\n')
    body = run("setup", "codex", "--yes")[1]
    assert body["clients"]["codex"] != "added" and file.read_text().count("\n") == 1
    assert "[mcp_servers.gpuwarden]" in body["paste"][str(file)]


def test_a_file_that_changes_meanwhile_is_not_overwritten(
    env: dict[str, str], tmp_path: Path, wording: Wording
) -> None:
    plan = use_case.make_plan(("cursor",), load_config(env), env, person=False)
    (tmp_path / ".cursor/mcp.json").write_text("{}")
    reply = use_case.carry_out(plan, load_config(env), env)
    assert not reply.ok and reply.guards["cursor"] == "installed"
    wording(reply.clients["cursor"])
    assert (tmp_path / ".cursor/mcp.json").read_text() == "{}"


def test_setup_preserves_links_and_file_modes(run: Cli, tmp_path: Path) -> None:
    real = tmp_path / "dotfiles.json"
    real.write_text("{}")
    real.chmod(0o600)
    (tmp_path / ".cursor/mcp.json").symlink_to(real)
    run("setup", "cursor", "--yes")
    assert (tmp_path / ".cursor/mcp.json").is_symlink() and "gpuwarden" in real.read_text()
    assert real.stat().st_mode & 0o777 == 0o600


def test_undo_removes_link_targets_and_folders_that_setup_made(run: Cli, env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "dot").mkdir()
    link = tmp_path / ".cursor/mcp.json"
    link.symlink_to(tmp_path / "dot/mcp.json")
    (tmp_path / ".config/zed").rmdir()
    assert run("setup", "cursor", "zed", "--yes")[0] == 0
    assert undo(env).clients == {"cursor": "removed", "zed": "removed"}
    assert link.is_symlink() and not (tmp_path / "dot/mcp.json").exists()
    assert not (tmp_path / ".config/zed").exists() and (tmp_path / ".cursor").exists()


@pytest.mark.slow
def test_project_modules_never_shadow_server_modules(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("open('taken', 'w').close()")
    start = own_command("setup", __version__)
    subprocess.run(
        [start["command"], *start["args"]], cwd=tmp_path, env=environment(tmp_path / "gw"), stdin=subprocess.DEVNULL,
        capture_output=True, check=True, timeout=100,
    )  # fmt: skip
    assert running.WATCH[:3] == (sys.executable, "-P", "-m") and not (tmp_path / "taken").exists()


def test_uvx_installation_gets_an_entry_that_uses_uvx(
    run: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    monkeypatch.setattr(sys, "prefix", "/home/me/.cache/uv/archive-v0/x")
    body = run("setup", "cursor", "--yes")[1]
    wording(body["guards"]["cursor"])
    assert not (tmp_path / ".cursor/hooks.json").exists()
    entry = json.loads((tmp_path / ".cursor/mcp.json").read_text())["mcpServers"]["gpuwarden"]
    source = SOURCE.format(version=__version__)
    assert [entry["command"], *entry["args"][:3]] == ["uvx", "--from", source, "gpuwarden"]


# -------------------------------------------------------------------------------------------- what an agent can do


@pytest.mark.attack("policy", "undoes the setup of the guard")
def test_undo_needs_a_terminal(run: Cli, tmp_path: Path) -> None:
    run("setup", "--yes")
    before = files_below(tmp_path)
    for more in ([], ["--yes"]):
        code, body = run("setup", "--undo", *more)
        assert (code, body["code"]) == (1, "refused") and files_below(tmp_path) == before


@pytest.mark.attack("policy", "replaces the guard by one that protects another ledger")
def test_setup_never_moves_a_guard_to_another_ledger(run: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("setup", "claude", "--yes")
    before = (tmp_path / ".claude/settings.json").read_bytes()
    accept(tmp_path / "empty" / "gw", tmp_path / "policy.toml")
    monkeypatch.setenv("GPUWARDEN_HOME", str(tmp_path / "empty" / "gw"))
    assert run("setup", "claude", "--yes")[1]["guards"]["claude"] == "stale"
    assert (tmp_path / ".claude/settings.json").read_bytes() == before


def test_setup_adds_nothing_if_a_plugin_starts_the_server(run: Cli, tmp_path: Path, wording: Wording) -> None:
    (tmp_path / ".claude/settings.json").write_text('{"enabledPlugins": {"gpuwarden@gpuwarden-marketplace": true}}')
    plugins = tmp_path / ".claude/plugins"
    plugins.mkdir()
    (tmp_path / "plugin/.claude-plugin").mkdir(parents=True)
    (tmp_path / "plugin/.claude-plugin/plugin.json").write_text("{}")
    installed = {"gpuwarden@gpuwarden-marketplace": [{"installPath": str(tmp_path / "plugin")}]}
    (plugins / "installed_plugins.json").write_text(json.dumps({"plugins": installed}))
    body = run("setup", "claude", "--yes")[1]
    assert set(body["clients"]) == set(body["guards"]) == {"claude"} and not body["changes"]
    wording(f"{body['clients']['claude']}\n{body['guards']['claude']}\n{body['message']}")
    assert not (tmp_path / ".claude.json").exists()


# ------------------------------------------------------------------------------------------- the user at a terminal

KEEP = [("USD", ""), ("USD", ""), ("USD", ""), ("teardown", ""), ("Platforms", "")]


@pytest.mark.slow
def test_setup_at_a_terminal_shows_the_lines_and_needs_yes(tmp_path: Path, env: dict[str, str]) -> None:
    more = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / ".config")}
    code, shown = at_terminal(tmp_path / "gw", "setup", "zed", says={"yes": "no"}, **more)
    assert code == 1 and "+ {" in shown and not (tmp_path / ".config/zed/settings.json").exists()
    says = [("yes", "yes"), *KEEP]
    before = (tmp_path / "policy.toml").read_bytes()
    code, shown = at_terminal(tmp_path / "gw", "setup", "zed", "--no-rehearsal", says=says, **more)
    assert code == 0 and "gpuwarden" in (tmp_path / ".config/zed/settings.json").read_text(), shown
    assert (tmp_path / "policy.toml").read_bytes() == before and not accepted(tmp_path / "gw")
    code, shown = at_terminal(tmp_path / "gw", "setup", "--undo", says={"yes": "yes"}, **more)
    assert code == 0 and "removed" in shown and not (tmp_path / ".config/zed/settings.json").exists()


def accepted(home: Path) -> list[Any]:
    ctx = open_context("test", env=environment(home))
    return list(ctx.ledger.events(kind="policy.accepted"))


@pytest.mark.prove
def test_first_setup_at_a_terminal_writes_the_policy_and_a_key(tmp_path: Path, env: dict[str, str]) -> None:
    more = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / ".config"), "XDG_STATE_HOME": str(tmp_path / "st")}
    more |= {"VAST_API_KEY": "key-of-vast-1234"}
    says = [
        ("yes", "yes"), ("USD", "5"), ("USD", "much"), ("USD", "20"), ("USD", ""), ("teardown", "stop"), ("yes", "yes"),
        ("Platforms", "runpod"), ("shown", KEY),
    ]  # fmt: skip
    code, shown = at_terminal(tmp_path / "gw", "setup", "gemini", says=says, timeout=120, **more)
    assert code == 0, shown
    policy = load_config(environment(tmp_path / "gw")).policy
    assert (policy.caps.per_job_usd, policy.caps.per_day_usd, policy.teardown.automatic) == (5, 20, "stop")
    assert len(accepted(tmp_path / "gw")) == 1
    assert "proven" in shown and f"export RUNPOD_API_KEY_FILE={tmp_path / 'keys/RUNPOD_API_KEY'}" in shown
    assert KEY not in shown and "key-of-vast" not in shown and "VAST_API_KEY is set" in shown
    assert KEY.encode() not in b"".join(files_below(tmp_path).values()).replace(KEY.encode(), b"", 1), "one file has it"
    ctx = open_context("test", env=environment(tmp_path / "gw"))
    assert not ctx.ledger.events(kind="job.accepted") and not ctx.ledger.events(kind="receipt.issued")
    assert not [f for f in (tmp_path / "st").rglob("*.json") if b"gpuwarden-setup-" in f.read_bytes()]


KEY = "runpod-key-8f2c91"
MINE_TOO = """# my policy
[caps]
per_job_usd = 1  # for tests
[teardown]
automatic = "stop"  # at night
"""


@pytest.fixture(name="ctx")
def ctx_fixture(env: dict[str, str], tmp_path: Path) -> Context:
    (tmp_path / "policy.toml").write_text(MINE_TOO)
    return open_context("test", env=env)


@pytest.mark.anyio
async def test_only_answers_that_differ_are_written(ctx: Context, tmp_path: Path) -> None:
    typed = Typed("", "$20", "0", "stop", "yes")
    await questions.ask_policy(ctx, typed)
    text = (tmp_path / "policy.toml").read_text()
    assert text == MINE_TOO.replace("tests\n", "tests\nper_day_usd = 20\n")
    assert "caps.per_day_usd: 0 -> 20" in typed.shown and "[stop]" in typed.shown and "per_job_usd:" not in typed.shown
    [event] = accepted(tmp_path / "gw")
    record = read_record(tmp_path / "gw")
    assert record is not None and record.chosen
    assert record.digest == event.data.digest == digest_of(text.encode()) != event.data.was_digest


@pytest.mark.anyio
@pytest.mark.parametrize(
    "entered", [[""] * 4, ["1", "0", "0", "stop"], ["2", "", "", "off", "no"], ["2", "", "", "", ""]]
)
async def test_policy_is_not_written_without_a_yes(
    ctx: Context, env: dict[str, str], tmp_path: Path, entered: list[str]
) -> None:
    typed = Typed(*entered, "")  # no key for any platform
    await questions.ask_all(env, typed)
    assert (tmp_path / "policy.toml").read_text() == MINE_TOO and not accepted(tmp_path / "gw") and not typed.answers


@pytest.mark.anyio
async def test_an_invalid_answer_is_asked_again(ctx: Context, env: dict[str, str]) -> None:
    bad = ["-1", "nan", "inf", "1e9", "x"]
    typed = Typed(*bad, "3", "", "", "never", "off", "yes")
    await questions.ask_policy(ctx, typed)
    policy = load_config(env).policy
    assert (policy.caps.per_job_usd, policy.teardown.automatic) == (3, "off") and not typed.answers


@pytest.mark.anyio
async def test_questions_show_the_values_of_the_policy_file(
    ctx: Context, env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx.env = env | {"GPUWARDEN_CAPS_PER_JOB_USD": "0.5"}  # a stricter variable isn't a value from the file
    typed = Typed("", "", "", "")
    await questions.ask_policy(ctx, typed)
    assert "[1]" in typed.shown and "[0.5]" not in typed.shown


@pytest.mark.attack("policy", "has the setup change a policy through another ledger, or a PIN that it does not know")
@pytest.mark.anyio
async def test_wrong_pin_or_another_policy_file_changes_nothing(
    ctx: Context, env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "policy.toml").write_text(f'{MINE_TOO}[approval]\npin_hash = "{hash_pin("2468")}"\n')
    with pytest.raises(Refused):
        await questions.ask_policy(ctx, Typed("9", "", "", "", "yes", "1111"))
    ctx.env = env | {"GPUWARDEN_POLICY": str(tmp_path / "other.toml")}
    with pytest.raises(Refused):
        await questions.ask_policy(ctx, Typed())
    assert load_config(env).policy.caps.per_job_usd == 1 and not accepted(tmp_path / "gw")
    await questions.ask_policy(open_context("test", env=env), Typed("9", "", "", "", "yes", "2468"))
    assert load_config(env).policy.caps.per_job_usd == 9


@pytest.mark.anyio
async def test_a_policy_that_changes_meanwhile_is_not_overwritten(ctx: Context, tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"

    class Editing(Typed):
        def ask(self, prompt: str) -> str:
            file.write_text("# edited\n")
            return super().ask(prompt)

    with pytest.raises(Conflict):
        await questions.ask_policy(ctx, Editing("2", "", "", "", "yes"))
    assert file.read_text() == "# edited\n"


def test_key_is_stored_only_in_a_private_file(tmp_path: Path) -> None:
    (tmp_path / "open").write_text("k" * 20)
    (tmp_path / "open").chmod(0o644)
    env = {"VAST_API_KEY_FILE": str(tmp_path / "open"), "LAMBDA_API_KEY": "lambda-secret-key"}
    typed = Typed("runpod vastai nowhere paperspace", KEY, "two words")
    questions.ask_keys(env, tmp_path / "keys", typed)
    file = tmp_path / "keys/RUNPOD_API_KEY"
    assert file.read_text() == KEY and file.stat().st_mode & 0o777 == 0o600 and not typed.answers
    assert [f.name for f in file.parent.iterdir()] == ["RUNPOD_API_KEY"], "the other key was not valid"
    assert read_key("RUNPOD_API_KEY", "runpod", {"RUNPOD_API_KEY_FILE": str(file)}) == KEY
    assert "chmod" in typed.shown or "0644" in typed.shown, "a key that others can read is reported"
    again = Typed("")
    questions.ask_keys(env, tmp_path / "keys", again)
    assert "export RUNPOD_API_KEY_FILE=" in again.shown
    for text in (KEY, "two words", "lambda-secret"):
        assert text not in typed.shown + again.shown


@pytest.mark.slow
@pytest.mark.attack("policy", "answers the questions of the setup through a pipe")
@pytest.mark.parametrize("words", [[], ["--yes"], ["--yes", "--json"], ["--json"]])
def test_setup_asks_nothing_without_a_terminal(tmp_path: Path, env: dict[str, str], words: list[str]) -> None:
    before = (tmp_path / "policy.toml").read_bytes()
    more = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / ".config"), "GPUWARDEN_CAPS_PER_JOB_USD": "5"}
    told = "yes\n5\n5\n5\nterminate\nyes\nrunpod\nkey-key-key\n"
    done = gpuwarden(tmp_path / "gw", "setup", "zed", "--no-rehearsal", *words, stdin=told, **more)
    assert done.returncode == 0 and "gpuwarden setup" in done.stdout and "docs/policy.md" in done.stdout
    assert (tmp_path / "policy.toml").read_bytes() == before and not (tmp_path / "keys").exists()


def test_yes_at_a_terminal_asks_nothing(run: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(approval, "has_terminal", lambda: True)
    monkeypatch.setattr(questions, "ask_all", None)
    code, shown = run.shown("setup", "zed", "--yes")
    assert code == 0 and "docs/policy.md" in shown


# ------------------------------------------------------------------------------------------------------- the rehearsal

REAL = trial.rehearse  # the fixture `env` replaces it


async def tried(run: dict[str, Any], **env: str) -> list[str]:
    steps: list[str] = []
    spec = demo_spec().model_copy(update={"args": ("40", "20")})
    await REAL("Codex", run, spec, {**os.environ, **env}, steps.append)
    return steps


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize("client", ["codex", pytest.param("zed", marks=pytest.mark.prove)])
async def test_a_job_is_rehearsed_through_an_entry(tmp_path: Path, client: str) -> None:
    run = entry(client, own_command(client, __version__), ["GPUWARDEN_HOME", "GPUWARDEN_POLICY", "RUNPOD_API_KEY"])
    steps = await tried(run, GPUWARDEN_PLATFORMS="none", GPUWARDEN_HOME=str(tmp_path / "mine"))
    assert "10" in steps[1] and "proven" in steps[-1] and not (tmp_path / "mine").exists()


SH = "/bin/sh"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("command", "args", "reason"),
    [
        ("/nowhere/gpuwarden", ["mcp"], ""),
        ("no-such-program", [], ""),
        (SH, ["-c", "echo a few words >&2; exit 3"], "a few words"),
        (SH, ["-c", "read a; echo '{not json}'; echo '{\"id\": 7}'; echo odd >&2"], "odd"),
        (SH, ["-c", 'read a; echo \'{"jsonrpc": "2.0", "id": 1, "result": 7}\'; echo odd >&2'], "odd"),
    ],
)
async def test_broken_entry_is_reported_with_its_command(command: str, args: list[str], reason: str) -> None:
    with pytest.raises(BadRequest) as caught:
        await tried({"command": command, "args": args})
    assert "Codex" in caught.value.message and command in caught.value.message and reason in caught.value.message


@pytest.mark.slow
@pytest.mark.anyio
async def test_unresponsive_server_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "FIRST_START_S", 0.5)
    pid = tmp_path / "pid"
    with pytest.raises(BadRequest) as caught:
        await tried({"command": SH, "args": ["-c", f"echo $$ > {pid}; echo waiting >&2; exec sleep 600"]})
    assert "waiting" in caught.value.message
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


@pytest.mark.anyio
@pytest.mark.parametrize("client", ["codex", "gemini", "cursor"])
async def test_rehearsed_server_gets_no_user_secret_or_ledger(tmp_path: Path, client: str) -> None:
    names = ["RUNPOD_API_KEY", "RUNPOD_API_KEY_FILE", "HF_TOKEN", "MY_OWN_TOKEN", "GPUWARDEN_HOME", "PLAIN"]
    script = {"command": SH, "args": ["-c", f"env > {tmp_path / 'env'}"]}
    mine = dict.fromkeys(names, "of-the-user") | {"PLAIN": "plain"}
    with pytest.raises(BadRequest):
        await tried(entry(client, script, names), **mine)
    text = (tmp_path / "env").read_text()
    assert "of-the-user" not in text and "GPUWARDEN_HOME=" in text and "PLAIN=plain" in text


@pytest.mark.parametrize("client", ["cursor", "codex"])
def test_setup_starts_the_entry_written_to_the_file(
    run: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: str
) -> None:
    started = []

    async def note(title: str, entry: dict[str, Any], *_: object) -> None:
        started.append((title, entry))

    monkeypatch.setattr(trial, "rehearse", note)
    run("setup", client, "--yes")
    there = client_files(os.environ)[client]
    assert [e for _, e in started] == [there.parsed(there.file.read_text())[there.key]["gpuwarden"]]
    started.clear()
    assert run("setup", client, "--yes", "--no-rehearsal")[1]["tried"] == {} and not started
    (tmp_path / ".gemini/settings.json").write_text(MINE)
    body = run("setup", "gemini", "--yes")[1]
    assert body["tried"].keys() == {"gemini"} and body["tried"]["gemini"] != "proven" and not started


# --------------------------------------------------------------------------------------------- files in odd conditions


@pytest.mark.parametrize("odd", ["dangling", "readonly", "store"])
def test_unwritable_file_does_not_stop_other_clients(run: Cli, env: dict[str, str], tmp_path: Path, odd: str) -> None:
    file = tmp_path / ".claude.json"
    if odd == "dangling":
        file.symlink_to(tmp_path / "dotfiles" / "claude.json")
    elif odd == "readonly":
        file.write_text("{}")
        file.chmod(0o444)
    else:  # a link into a read-only file system
        file.symlink_to("/proc/version_signature" if Path("/proc/version_signature").exists() else "/proc/version")
    before = file.read_bytes() if file.exists() else None
    code, body = run("setup", "--yes")
    assert body["clients"]["claude"] != "added" and body["clients"]["codex"] == "added"
    assert (file.read_bytes() if file.exists() else None) == before
    assert odd == "dangling" or not list(tmp_path.glob("*.new"))
    assert not body["ok"] and str(file) in body["paste"] and code == 1 - body["ok"]
    assert "claude" not in changes.read_note().clients or not changes.read_note().clients["claude"].file


def test_replaced_file_keeps_its_mode_throughout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.json"
    file.write_text('{"env": {"KEY": "x"}}')
    file.chmod(0o600)
    modes = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (modes.append(os.fstat(fd).st_mode & 0o777), fsync(fd))[1])
    replace_text(file, "{}")
    assert modes == [0o600] == [file.stat().st_mode & 0o777]
    file.chmod(0o644)
    replace_text(file, "[]")
    assert file.stat().st_mode & 0o777 == 0o644 and [p.name for p in tmp_path.iterdir()] == ["settings.json"]


class Killed(BaseException):
    """The process is killed."""


@pytest.mark.parametrize("at", ["note", "client"])
def test_setup_that_is_killed_can_be_run_again_and_undone(
    run: Cli, env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    before = files_below(tmp_path)

    def killed(*_: object) -> None:
        raise Killed

    where = (use_case, "write_note") if at == "note" else (changes, "replace_text")
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(*where, killed)
        use_case.carry_out(use_case.make_plan(("zed",), load_config(env), env, person=False), load_config(env), env)
    assert files_below(tmp_path) == before, "nothing is written that is not noted before"
    assert undo(env).clients.keys() <= {"zed"} and undo(env).clients == {}
    assert run("setup", "zed", "--yes")[1]["clients"] == {"zed": "added"} and undo(env).clients == {"zed": "removed"}


@pytest.mark.parametrize("text", ["{}", '{"mcpServers": []}', '{"mcpServers": null}', '{"mcpServers": {}}', None])
def test_entry_removed_by_a_user_is_forgotten(run: Cli, env: dict[str, str], tmp_path: Path, text: str | None) -> None:
    run("setup", "cursor", "zed", "--yes")
    file = tmp_path / ".cursor/mcp.json"
    file.unlink() if text is None else file.write_text(text)
    gone = undo(env).clients
    assert gone.keys() == {"cursor", "zed"} and gone["zed"] == "removed" != gone["cursor"]
    assert undo(env).clients == {} and (text is None or file.read_text() == text)


def test_undo_continues_past_a_guard_that_cannot_be_removed(run: Cli, env: dict[str, str], tmp_path: Path) -> None:
    run("setup", "--yes")
    file = tmp_path / ".claude/settings.json"
    good = file.read_text()
    file.write_text(good + "// mine")
    reply = undo(env)
    assert reply.guards["claude"] != "absent" and reply.guards["cursor"] == "absent"
    assert set(reply.clients.values()) == {"removed"}
    file.write_text(good)
    assert undo(env).guards == {"claude": "absent"} and undo(env).guards == {}


def test_failed_rehearsal_hides_nothing_and_stops_no_other_client(run: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(title: str, *_: object) -> None:
        if title == "Cursor":
            raise BadRequest("uv can't be started: FileNotFoundError", "Install uv, then run it again.")

    monkeypatch.setattr(trial, "rehearse", broken)
    code, body = run("setup", "cursor", "zed", "--yes")
    assert (code, body.get("clients")) == (1, {"cursor": "added", "zed": "added"}), body
    assert body["tried"] == {"cursor": "failed", "zed": "proven"}
    assert "can't be started" in body["message"]


def test_plugin_with_a_missing_folder_is_ignored(run: Cli, tmp_path: Path) -> None:
    (tmp_path / ".claude/settings.json").write_text('{"enabledPlugins": {"gpuwarden@gpuwarden-marketplace": true}}')
    (tmp_path / ".claude/plugins").mkdir()
    installed = {"gpuwarden@gpuwarden-marketplace": [{"installPath": str(tmp_path / "gone")}]}
    (tmp_path / ".claude/plugins/installed_plugins.json").write_text(json.dumps({"plugins": installed}))
    body = run("setup", "claude", "--yes")[1]
    assert (body["clients"], body["guards"]) == ({"claude": "added"}, {"claude": "installed"})
