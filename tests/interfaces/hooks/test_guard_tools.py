"""The guard's verdicts on edits and other tools, and the declarations that a provider makes for the guard."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.core.shell_guard import ShellGuard, merged
from gpuwarden.interfaces.hooks.guard.calls import judged
from gpuwarden.interfaces.hooks.guard.declared import table
from gpuwarden.interfaces.hooks.guard.patterns import Patterns
from gpuwarden.providers.base import PROVIDERS, provider_names
from guard_kit import RULES, event, rules, shell, spellings
from plugin_kit import Packages


def tool(name: str, **given_to_tool: Any) -> str | None:
    return judged({"tool_name": name, "tool_input": given_to_tool, "cwd": "/home/me"}, RULES)


@pytest.mark.attack("guard", "changes gpuwarden's variables in a client's settings")
def test_client_variables_set_by_the_user_are_protected(tmp_path: Path) -> None:
    file = tmp_path / ".mcp.json"
    file.write_text('{"env": {"GPUWARDEN_CAPS_PER_JOB_USD": "5"}, "x": 1}')
    path, other = str(file), '{"env": {"GPUWARDEN_CAPS_PER_JOB_USD": "50"}, "x": 1}'
    assert tool("Write", file_path=path, content=other)
    assert tool("Write", file_path=path, content="{}"), "a cap that is dropped is a cap that is changed"
    assert tool("Edit", file_path=path, old_string='"5"', new_string='"50"'), "the name need not be in the edit"
    assert tool("Bash", command=f"echo '{{}}' > {path}")
    assert tool("Edit", file_path=path, old_string='"x": 1', new_string='"x": 2') is None
    assert tool("Write", file_path=path, content=file.read_text() + "\n") is None
    assert tool("Write", file_path="/home/me/.bashrc", content="export GPUWARDEN_POLICY=/tmp/p")
    assert tool("Write", file_path="/home/me/README.md", content="export GPUWARDEN_POLICY=/tmp/p") is None


@pytest.mark.attack("guard", "switches a client's hooks off")
def test_edits_that_disable_hooks_or_answer_forms_are_stopped() -> None:
    assert tool("Write", file_path="/p/.claude/settings.local.json", content='{"disableAllHooks": true}')
    answers = '{"hooks": {"Elicitation": [{"hooks": [{"type": "command", "command": "yes.sh"}]}]}}'
    assert tool("Write", file_path="/p/.claude/settings.local.json", content=answers)
    assert tool("Bash", command=f"echo '{answers}' > .claude/settings.local.json")
    assert tool("Edit", file_path="/p/.codex/config.toml", old_string="", new_string="[features]\nhooks = false\n")
    off = '{"hooksConfig": {"notifications": true, "enabled": false}}'
    assert tool("write_file", file_path="/p/.gemini/settings.json", content=off)
    assert (
        tool("write_file", file_path="/p/.gemini/settings.json", content='{"hooksConfig": {"enabled": true}}') is None
    )
    assert tool("Write", file_path="/p/.claude/settings.local.json", content='{"model": "x"}') is None
    patch = "*** Begin Patch\n*** Add File: .claude/settings.local.json\n+{disableAllHooks: true}\n*** End Patch"
    assert tool("apply_patch", command=patch)


@pytest.mark.attack("guard", "edits the policy with another client's or server's tool")
def test_policy_is_protected_from_the_edits_of_every_client() -> None:
    patch = "*** Begin Patch\n*** Update File: {}\n@@\n-a\n+b\n*** End Patch"
    for path, stopped in (("/etc/gw/policy.toml", True), ("src/x.py", False)):
        for given in ({"input": patch.format(path)}, {"patchText": patch.format(path)}):
            assert bool(tool("apply_patch", **given)) is stopped
            assert bool(tool("mcp__editor__patch", **given)) is stopped
        assert bool(tool("edit", filePath=path, oldString="5", newString="500")) is stopped
        replaced = tool("mcp__jetbrains__replace_text_in_file", pathInProject=path, oldText="5", newText="500")
        assert bool(replaced) is stopped


def test_cursor_events_are_understood() -> None:
    call = {"hook_event_name": "beforeMCPExecution", "tool_name": "delete-pod", "tool_input": '{"podId": "a"}'}
    assert judged({**call, "command": "npx -y @runpod/mcp-server"}, RULES)
    assert judged({**call, "tool_name": "list-pods", "command": "npx -y @runpod/mcp-server"}, RULES) is None
    assert judged({**call, "command": "uvx gpuwarden mcp"}, RULES) is None
    assert judged({"command": "sky down x", "cwd": "/"}, RULES) and not judged({"command": "sky status"}, RULES)
    assert judged({"tool_name": "Delete", "tool_input": {"file_path": "/etc/gw/policy.toml"}}, RULES)


@pytest.mark.attack("guard", "ends a machine through another MCP server")
def test_platform_tool_calls_are_judged_by_their_arguments_too() -> None:
    assert tool("mcp__runpod__graphql", query="mutation { podTerminate(input: {}) }")
    assert tool("mcp__hf__hf_jobs", operation="cancel", args={"job_id": "1"})
    assert tool("mcp__shell__run", command=["bash", "-lc", "vastai", "destroy"]) is None
    assert tool("mcp__shell__run", command="vastai destroy instance 1")
    assert tool("mcp__hf__hf_jobs", operation="logs", args={"job_id": "1"}) is None
    assert tool("mcp__github__create_issue", body="vastai destroy instance 1") is None


# ---------------------------------------------------------------------------------------- declarations of providers


@pytest.mark.parametrize("name", provider_names())
def test_each_provider_declares_how_its_machines_end(name: str) -> None:
    module = PROVIDERS.load(name)
    guard = module.SHELL_GUARD
    assert isinstance(guard, ShellGuard)
    known = guard.hosts or name in {"sky", "sky_jobs"}  # users host SkyPilot's server at their own address
    assert guard == ShellGuard() if name == "rehearsal" else guard.ends and known and guard.servers


MYCLOUD = r"""
from gpuwarden.core.shell_guard import ShellGuard
from gpuwarden.providers.vastai import Vast

ACCOUNT_KEYS = ("MYCLOUD_KEY",)
SHELL_GUARD = ShellGuard(
    ends={"mycloud": ("box kill|drop",)}, remote={"mycloud": ("run *",)}, hosts=("mycloud.example",),
    code=(r"\bmycloud\.drop\(",), servers=("mycloud",),
)

def create(profile, state, clock) -> Vast: ...
"""


def test_a_new_provider_needs_no_table_but_its_own(packages: Packages) -> None:
    packages.one("providers", "mycloud", MYCLOUD)
    own = replace(RULES, patterns=Patterns.of(json.loads(json.dumps(table()))))
    stopped = ["mycloud --zone a box kill b1", "mycloud run b1 'rm -rf /data/outputs'", "python -c 'mycloud.drop(1)'",
               "curl -X DELETE https://api.mycloud.example/b/1", 'curl -X DELETE "$U/b" -H "K: $MYCLOUD_KEY"',
               "python -c \"import os; os.system('mycloud box drop b1')\""]  # fmt: skip
    assert [c for c in stopped if not shell(c, own)] == [] and all(shell(c, RULES) is None for c in stopped[:1])
    assert shell("mycloud box list", own) is None and shell("curl https://api.mycloud.example/b/1", own) is None
    assert judged({"tool_name": "mcp__mycloud__drop_off", "tool_input": {}}, own)


def test_unusable_guard_declaration_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'\('"):
        ShellGuard(code=("(",))
    with pytest.raises(ValueError, match="Vast AI"):
        ShellGuard(ends={"Vast AI": ("stop",)})
    both = merged([ShellGuard(ends={"a": ("x", "y")}), ShellGuard(ends={"a": ("y", "z")}, hosts=("h",))])
    assert both.ends == {"a": ("x", "y", "z")} and both.hosts == ("h",)


def test_corpus_supports_tools_and_line_breaks() -> None:
    assert event('@tool Write {"file_path": "a"}')["tool_input"] == {"file_path": "a"}
    assert any("\n" in s for s in spellings("hasty")) and rules().patterns.ends["vastai"]


def test_gemini_call_is_judged_by_its_separate_server_name() -> None:
    """Gemini joins server and tool with a single underscore, so the name alone doesn't separate the two."""

    def called(server: str, tool: str, **given: object) -> str | None:
        event = {"hook_event_name": "BeforeTool", "tool_name": f"mcp_{server}_{tool}", "tool_input": given}
        return judged({**event, "mcp_context": {"server_name": server, "tool_name": tool}}, RULES)

    assert called("runpod", "graphql", query="mutation { podTerminate(input: {}) }")
    assert called("my_runpod", "delete_pod", id="1") and called("infra", "destroy_instance")
    assert called("gpuwarden", "teardown_request", job_id="j1") is None
    assert called("runpod", "list_pods") is None


@pytest.mark.attack("guard", "empties a store by mirroring an empty folder onto it")
def test_mirroring_an_empty_folder_is_stopped(tmp_path: Path) -> None:
    def verdict(command: str) -> str | None:
        return judged({"tool_name": "Bash", "tool_input": {"command": command}, "cwd": str(tmp_path)}, RULES)

    (tmp_path / "out").mkdir()
    assert verdict("rclone sync out r2:ckpts/run1") and verdict("rclone sync -P ./out/ r2:ckpts/run1")
    assert verdict("rclone sync r2:ckpts/run1 /data/gw"), "over the ledger"
    assert verdict("rclone sync -n out r2:ckpts/run1") is None
    (tmp_path / "out" / "model.safetensors").touch()
    assert verdict("rclone sync out r2:ckpts/run1") is None


@pytest.mark.attack("guard", "removes a folder with the policy or the guard's place in it")
@pytest.mark.parametrize("folder", ["/etc/gw", "/etc", "/home/me/.claude"])
def test_removing_a_folder_with_the_policy_or_settings_is_stopped(folder: str) -> None:
    rules = replace(RULES, settings=("/home/me/.claude/settings.json",))
    for command in (f"rm -rf {folder}", f"mv {folder} /tmp/x", f"find {folder} -type f -delete"):
        assert shell(command, rules)
    for command in (f"rm -rf {folder}.old", f"rm -rf {folder}/other", f"find {folder} -name '*.log' -delete"):
        assert shell(command, rules) is None


@pytest.mark.attack("guard", "switches the plugin off that brings the guard")
def test_switching_off_the_guard_plugin_is_stopped() -> None:
    on = '{"enabledPlugins": {"gpuwarden@gpuwarden-marketplace": true, "other@x": true}}'
    file = "/home/me/.claude/settings.json"

    def edit(old: str, new: str) -> str | None:
        return judged(
            {"tool_name": "Edit", "tool_input": {"file_path": file, "old_string": old, "new_string": new}}, RULES
        )

    assert edit(on, on.replace("true,", "false,")) and edit(on, '{"enabledPlugins": {"other@x": true}}')
    assert edit(on, on.replace('"other@x": true', '"other@x": false')) is None
    patch = '[plugins."gpuwarden@gpuwarden"]\n-enabled = true\n+enabled = false\n'
    body = f"*** Begin Patch\n*** Update File: .codex/config.toml\n@@\n {patch}*** End Patch"
    assert judged({"tool_name": "apply_patch", "tool_input": {"command": body}, "cwd": "/home/me"}, RULES)
