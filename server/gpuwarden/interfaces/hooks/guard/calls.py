"""Check one tool call, as a client passes it to the hook."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuwarden.interfaces.hooks.guard.edits import edited, patched
from gpuwarden.interfaces.hooks.guard.files import Files
from gpuwarden.interfaces.hooks.guard.judge import Judge
from gpuwarden.interfaces.hooks.guard.limits import TooMuch
from gpuwarden.interfaces.hooks.guard.patterns import Patterns
from gpuwarden.interfaces.hooks.guard.servers import other_server


@dataclass(frozen=True)
class Rules:
    """Protected paths, and the patterns to search for.

    `home` and the live run folders `runs` are protected against removal, `files` against any change. `settings`
    contains the clients' files that configure this guard; only the guard's entry in them is protected. `typing`: the
    client can type into a running program without calling a hook first.
    """

    home: str = ""
    files: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    typing: bool = False
    patterns: Patterns = field(default_factory=Patterns)
    user: str = ""

    def judge(self, cwd: str) -> Judge:
        """Return a judge for one call made in the folder `cwd`."""
        user = self.user or str(Path.home())
        values = {"HOME": user, "PWD": cwd, "TMPDIR": "/tmp"}  # noqa: S108 - the shell's default value
        values |= {"XDG_CONFIG_HOME": f"{user}/.config", "XDG_DATA_HOME": f"{user}/.local/share"}
        values |= {"GPUWARDEN_HOME": self.home} if self.home else {}
        files = Files(self.home, self.files, self.runs, self.settings, cwd, user)
        return Judge(self.patterns, files, values, typing=self.typing)


class Question(str):
    """The reason to ask the user about a call. A client that can't ask blocks the call."""


def judged(event: Mapping[str, Any], rules: Rules) -> str | None:
    """Return the reason to block a call, a `Question` if the user must decide, or None to allow the call."""
    given = event.get("tool_input")
    if isinstance(given, str):  # some clients send the input as text
        try:
            given = json.loads(given)
        except ValueError:
            given = {"input": given}
    if not isinstance(given, Mapping):  # others send only the input, without the enclosing event
        given = event
    judge = rules.judge(str(event.get("cwd") or given.get("workdir") or Path.cwd()))
    try:
        why = _judged(event, given, judge)
    except TooMuch as error:
        return str(error)
    if not why and judge.files.blind and judge.names_kept():
        judge.files.ask("the command contains a setting that is reserved for the user, and writes to an unknown path")
    return why or (Question(judge.files.question) if judge.files.question else None)


def _judged(event: Mapping[str, Any], given: Mapping[str, Any], judge: Judge) -> str | None:
    tool = str(event.get("tool_name") or "")
    patches = [text for text in given.values() if isinstance(text, str) and text.lstrip().startswith("*** Begin Patch")]
    if why := next((why for text in patches if (why := patched(text, judge))), None):
        return why
    if server := _server(event, tool):
        return other_server(server, tool, given if given is not event else {}, judge)
    command = given.get("command")
    if isinstance(command, list):
        command = " ".join("'" + str(word).replace("'", "'\\''") + "'" for word in command)
    if tool == "apply_patch" and isinstance(command, str):
        return patched(command, judge)
    if isinstance(command, str) and (why := judge.shell(command)):
        return why
    if tool == "Read":
        return None
    names = (given.get(name) for name in ("file_path", "filePath", "notebook_path", "path", "target_file"))
    return next((w for path in names if isinstance(path, str) and (w := edited(path, given, judge))), None)


def _server(event: Mapping[str, Any], tool: str) -> str:
    """Return the name, the URL or the start command of the tool's MCP server; empty for other tools."""
    if isinstance(context := event.get("mcp_context"), Mapping):  # only in Gemini's calls
        return str(context.get("server_name") or context.get("url") or "unknown").lower()
    if tool.startswith("mcp__"):
        return tool.split("__")[1].lower()
    if event.get("hook_event_name") == "beforeMCPExecution":
        return str(event.get("server") or event.get("url") or event.get("command") or "unknown").lower()
    return "unknown" if tool.startswith("MCP:") else ""
