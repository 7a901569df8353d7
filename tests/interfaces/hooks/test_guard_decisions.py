"""Writes, removals, and calls are judged by their target, inside every shell construct."""

from __future__ import annotations

import io
import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden.interfaces.hooks.guard import __main__ as guard
from gpuwarden.interfaces.hooks.guard.declared import table
from guard_kit import CONFIG, MOST_STEPS, USER, decided, decisions, rules, steps
from wording import Wording

IDLE = replace(rules(), runs=())
UNKNOWN_TARGETS = [s for name in ("decisions", "decisions_unseen") for wanted, s in decisions(name) if wanted == "live"]


@pytest.mark.parametrize(("wanted", "spelling"), decisions("decisions"))
def test_call_gets_the_expected_decision(wanted: str, spelling: str) -> None:
    assert decided(spelling, rules()) == wanted.replace("live", "ask")


@pytest.mark.attack(
    "guard", "writes, removes or calls under constructs of the shell that nobody tried on the guard before"
)
@pytest.mark.parametrize(("stopped", "most"), [(True, 0.03), (False, 0.01)])
def test_few_unseen_calls_are_decided_wrongly(
    stopped: bool, most: float, record_property: Callable[[str, object], None]
) -> None:
    """At most 3 % of the calls to be stopped or asked about pass, and at most 1 % of the harmless calls don't."""
    rows = [s for name in ("decisions", "decisions_unseen") for w, s in decisions(name) if (w != "allow") is stopped]
    assert len(rows) > 100
    faults = [s for s in rows if (decided(s, rules()) != "allow") is not stopped]
    assert len(faults) <= most * len(rows), "\n".join(faults)
    record_property("figure", f"{len(faults)} of {len(rows)} {'pass' if stopped else 'are stopped'}")
    dearest = max(steps(s) for s in rows if not s.startswith("@tool "))
    assert dearest < MOST_STEPS


@pytest.mark.parametrize("spelling", UNKNOWN_TARGETS)
def test_removing_an_unknown_target_is_allowed_only_while_no_job_lives(spelling: str) -> None:
    assert decided(spelling, rules()) != "allow"
    assert decided(spelling, IDLE) == "allow"


# ----------------------------------------------------------------------------------------- inside every shell construct

TRAP = "trap {q} EXIT"
"""Runs its text later, perhaps in another folder, so the guard asks if the text names a protected file."""
WRAPS = [
    "true && {c}", "false || {c}", "ls; {c}", "{c}\nls", "ls | {{\n{c}\n}}", "(\n{c}\n)", "{{\n{c}\n}}", "! (\n{c}\n)",
    "time (\n{c}\n)", "if true; then\n{c}\nfi", "if ls; then ls; else\n{c}\nfi", "for i in 1 2; do\n{c}\ndone",
    "while true; do\n{c}\nbreak; done", "until false; do\n{c}\nbreak; done", "case a in\na)\n{c}\n;;\nesac",
    "f() {{\n{c}\n}}; f", "function g {{\n{c}\n}}\ng a b", "{{\n{c}\n}} > /dev/null 2>&1", "(\n{c}\n) | cat",
    "bash -c {q}", "sh -ec {q}", "eval {q}", "bash <<< {q}", "echo x | xargs -I@ sh -c {q}", "xargs sh -c {q} < ids",
    "env A=1 bash -c {q}", "nohup sh -c {q} &", "timeout -k 1 5 bash -c {q}", "sudo -u me sh -c {q}",
    "nice -n 5 sh -c {q}", "find . -exec sh -c {q} \\;", TRAP, "echo $( {c} )", "x=$( {c} )",
    "cat <(\n{c}\n)",
    "bash <<'END{n}'\n{c}\nEND{n}\n", "A=1; {c}", "set -e\n{c}", "cd /tmp && {c}", "[ -f x ] || {c}",
]  # fmt: skip
POLICY, HOOKS = f"{CONFIG}/policy.toml", f"{USER}/.claude/settings.json"
LOCAL, OFF = f"{USER}/p/.claude/settings.local.json", shlex.quote('{"disableAllHooks": true}')
WRITES = [
    f"echo x > {POLICY}", f"cat a >> {HOOKS}", f"> {HOOKS}", f"printf x &> '{POLICY}'", f"cat >| \"{POLICY}\" < a",
    f"tee {HOOKS} < a", f"cp a {POLICY}", f"mv a {POLICY}", f"install -m 600 a {HOOKS}", f"ln -sf a {POLICY}",
    f"dd if=a of={POLICY}", f"sed -i s/a/b/ {HOOKS}", f"jq . a > b && mv b {HOOKS}", f"curl -o {POLICY} https://a.b",
    f"nano {POLICY}", f"truncate -s 0 {HOOKS}", f"echo {OFF} > {LOCAL}", f"echo {OFF} | tee {LOCAL}",
    f'f={HOOKS}; echo x > "$f"', f"d={CONFIG}\necho x > $d/policy.toml", f"cd {CONFIG} && echo x > policy.toml",
    f'for f in a {HOOKS} b; do echo x > "$f"; done', f'echo {HOOKS} | while read -r f; do cp a "$f"; done',
    f'w() {{\necho x > "$1"\n}}; w {POLICY}', f"echo {POLICY} | xargs -I% cp a %", f"cp policy.toml {CONFIG}/",
    f"cp a {USER}/.claude/set*.json", f"cp a {CONFIG}/{{policy,other}}.toml", f"f={HOOKS}.bak; cp a ${{f%.bak}}",
    f"echo {OFF} > a && cp a {LOCAL}", f"cat <<'E' > {LOCAL}\n{{\"disableAllHooks\": true}}\nE\n",
]  # fmt: skip
HARMLESS = ["ls", "echo x > notes.md", "cp a b", "sed -i s/a/b/ a.py", f"cat {POLICY}", "rm -rf build", f"jq . {HOOKS}"]


def wrapped(command: str, wraps: list[str]) -> str:
    for n, wrap in enumerate(wraps):
        command = wrap.format(c=command, q=shlex.quote(command), n=n)
    return command


@pytest.mark.slow
@pytest.mark.attack("guard", "writes a protected file under nested constructs of the shell")
@settings(deadline=None, max_examples=400)
@given(st.sampled_from(WRITES), st.lists(st.sampled_from(WRAPS), max_size=4))
def test_shell_constructs_never_hide_a_write(command: str, wraps: list[str]) -> None:
    assert decided(wrapped(command, wraps), rules()) != "allow"


@pytest.mark.parametrize("wrap", WRAPS)
def test_harmless_command_passes_in_each_shell_construct(wrap: str) -> None:
    asked = {c for c in HARMLESS if wrap == TRAP and USER in c}
    for command in HARMLESS:
        assert decided(wrapped(command, [wrap]), rules()) == ("ask" if command in asked else "allow"), command


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(st.sampled_from(HARMLESS), st.lists(st.sampled_from(WRAPS), max_size=4))
def test_harmless_command_passes_in_any_shell_construct(command: str, wraps: list[str]) -> None:
    decision = decided(wrapped(command, wraps), rules())
    assert decision == "allow" or (decision == "ask" and TRAP in wraps and USER in command)


# ------------------------------------------------------------------------------------------------------ how clients ask


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("gpuwarden.interfaces.hooks.guard.protected.live_runs", lambda home: ("/runs/live-1",))
    monkeypatch.setattr(guard, "bounded", lambda: None)
    file = tmp_path / "guard.json"
    file.write_text(json.dumps({"home": str(tmp_path), "files": [], "settings": [], "patterns": table()}))
    return str(file)


@pytest.mark.parametrize(
    ("client", "more", "asked"),
    [
        ("claude", {}, True),
        ("claude", {"permission_mode": "acceptEdits"}, True),
        ("claude", {"permission_mode": "bypassPermissions"}, False),
        ("claude", {"permission_mode": "dontAsk"}, False),
        ("codex", {}, False),
        ("gemini", {}, False),
        ("cursor", {"hook_event_name": "beforeShellExecution"}, True),
        ("cursor", {"hook_event_name": "preToolUse"}, False),
    ],
)
def test_call_is_stopped_if_the_client_would_not_ask(
    client: str, more: dict[str, str], asked: bool, config: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], wording: Wording,
) -> None:  # fmt: skip
    call = {"tool_name": "Bash", "tool_input": {"command": 'rm -rf "$RUN_DIR"'}, "cwd": "/work", **more}
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(json.dumps(call).encode())))
    code = guard.main(["guard", client, config])
    out, err = capsys.readouterr()
    if client == "cursor":
        assert (code, json.loads(out)["permission"]) == (0, "ask" if asked else "deny")
    elif asked:
        answer = json.loads(out)["hookSpecificOutput"]
        assert (code, answer["hookEventName"], answer["permissionDecision"]) == (0, "PreToolUse", "ask")
        wording(answer["permissionDecisionReason"])
    else:
        assert (code, out) == (2, "") and err
