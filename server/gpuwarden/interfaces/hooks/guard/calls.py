"""Judge one call of a tool, as a client's hook is told of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gpuwarden.interfaces.hooks.guard import settings
from gpuwarden.interfaces.hooks.guard.files import Files
from gpuwarden.interfaces.hooks.guard.judge import Judge
from gpuwarden.interfaces.hooks.guard.limits import TooMuch
from gpuwarden.interfaces.hooks.guard.patterns import Patterns

OWN: Final = "gpuwarden"
VERBS: Final = frozenset({"delete", "destroy", "terminate", "stop", "remove", "kill", "shutdown", "down", "release",
                          "deallocate", "suspend", "pause", "drain", "teardown", "cancel", "poweroff", "off", "reset",
                          "recycle", "purge", "wipe", "rm", "hibernate", "scancel", "evict", "eviction"})  # fmt: skip
MACHINES: Final = frozenset({"pod", "pods", "instance", "instances", "machine", "machines", "vm", "vms", "droplet",
                             "droplets", "cluster", "clusters", "gpu", "gpus", "rental", "node", "nodes", "compute",
                             "fleet"})  # fmt: skip
HARMLESS: Final = frozenset({"template", "templates", "key", "keys", "tag", "tags", "secret", "secrets", "label",
                             "labels", "registry", "comment", "env", "variable", "alert", "search", "list", "get",
                             "describe", "logs", "docs"})  # fmt: skip
"""Words of tools that end no machine, whatever else their names have."""
SHELL_FIELDS: Final = frozenset({"command", "cmd", "cli_command", "commands", "shell", "bash", "script", "input"})
CODE_FIELDS: Final = frozenset({"code", "python", "source", "javascript"})
REQUEST_FIELDS: Final = frozenset({"query", "mutation", "body", "path", "url", "endpoint", "request", "data"})
ACTION_FIELDS: Final = frozenset({"operation", "action", "verb", "subcommand", "method", "op"})
MOST_TEXTS: Final = 500


@dataclass(frozen=True)
class Rules:
    """Protected places, and the patterns that are looked for.

    `home` and live run folders against removal, `files` against any change; `settings` are the clients' files that
    name this guard: it stays in there, the rest is theirs. `typing`: see `Judge.typing`.
    """

    home: str = ""
    files: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    typing: bool = False
    patterns: Patterns = field(default_factory=Patterns)
    user: str = ""

    def judge(self, cwd: str) -> Judge:
        """Return a judge for one call, made in a folder."""
        user = self.user or str(Path.home())
        values = {"HOME": user, **({"GPUWARDEN_HOME": self.home} if self.home else {})}
        files = Files(self.home, self.files, self.runs, self.settings, cwd, user)
        return Judge(self.patterns, files, self.typing, values)


def judged(event: Mapping[str, Any], rules: Rules) -> str | None:
    """Return why a call is stopped; None lets it pass."""
    try:
        return _judged(event, rules)
    except TooMuch as error:
        return str(error)


def _judged(event: Mapping[str, Any], rules: Rules) -> str | None:
    given = event.get("tool_input")
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            given = {"input": given}
    given = given if isinstance(given, Mapping) else event
    judge = rules.judge(str(event.get("cwd") or given.get("workdir") or Path.cwd()))
    tool = str(event.get("tool_name") or "")
    if server := _server(event, tool):
        return _other_server(server, tool, given if given is not event else {}, judge)
    command = given.get("command")
    if isinstance(command, list):
        command = " ".join("'" + str(word).replace("'", "'\\''") + "'" for word in command)
    if isinstance(command, str) and tool == "apply_patch":
        return _patched(command, judge)
    if isinstance(command, str) and (why := judge.shell(command)):
        return why
    if tool == "Read":
        return None
    names = (given.get(name) for name in ("file_path", "notebook_path", "path", "target_file"))
    return next((w for path in names if isinstance(path, str) and (w := _edited(path, given, judge))), None)


# ---------------------------------------------------------------------------------------------------------- edits


def _edited(path: str, given: Mapping[str, Any], judge: Judge) -> str | None:
    """Return why an edit of a file is stopped."""
    full = judge.files.path(path.strip())
    listed = given.get("edits")
    candidates = (given, *listed) if isinstance(listed, list) else (given,)
    edits = [e for e in candidates if isinstance(e, Mapping) and "old_string" in e]
    whole = next((given[n] for n in ("content", "contents", "file_text") if isinstance(given.get(n), str)), None)
    if full not in judge.files.settings and (why := judge.files.change(full)):
        return why
    on_disk = settings.contents(full)
    if whole is not None:
        before = on_disk if on_disk is not None else settings.MARK if full in judge.files.settings else ""
        return settings.edited(full, before, str(whole))
    if edits:
        before = on_disk if on_disk is not None else "\n".join(str(e.get("old_string")) for e in edits)
        return settings.edited(full, before, settings.after_edits(before, [dict(e) for e in edits]))
    return judge.files.change(full)


def _patched(patch: str, judge: Judge) -> str | None:
    """Return why a patch is stopped: by the files that it names, and by what it takes out and puts in."""
    for section in re.split(r"^(?=\*\*\* (?:Update|Add|Delete) File: )", patch, flags=re.MULTILINE)[1:]:
        head, _, body = section.partition("\n")
        path = judge.files.path(head.partition(": ")[2].strip())
        moved = re.findall(r"^\*\*\* Move to: (.+)$", body, re.MULTILINE)
        if why := next((w for p in (path, *moved) if (w := judge.files.change(p.strip()))), None):
            return why
        rows = body.splitlines()
        before, after = ("\n".join(r[1:] for r in rows if r[:1] in {" ", mark}) for mark in "-+")
        if why := settings.edited(path, before, after):
            return why
    return None


# --------------------------------------------------------------------------------------------------- other servers


def _server(event: Mapping[str, Any], tool: str) -> str:
    """Return the name of the MCP server whose tool is called, or what it is started with; empty for other tools."""
    if isinstance(context := event.get("mcp_context"), Mapping):  # Gemini's
        return str(context.get("server_name") or context.get("url") or "unknown").lower()
    if tool.startswith("mcp__"):
        return tool.split("__")[1].lower()
    if event.get("hook_event_name") == "beforeMCPExecution":
        return str(event.get("server") or event.get("url") or event.get("command") or "unknown").lower()
    return "unknown" if tool.startswith("MCP:") else ""


def _other_server(server: str, tool: str, given: Mapping[str, Any], judge: Judge) -> str | None:
    """Return why a call of another MCP server's tool is stopped."""
    if OWN in server:
        return None
    name = tool.rpartition("__")[2].removeprefix("MCP:").removeprefix(f"mcp_{server}_")
    parts = _words(server)
    platform = any(word in parts or word in server.split("-") for word in judge.patterns.servers)
    words = _words(name)
    actions = {w for f, text in _texts(given) if f in ACTION_FIELDS for w in _words(text)}
    ends = (words | actions) & VERBS and not words & HARMLESS
    if ends and (platform or words & MACHINES):
        return f"`{name}` of the MCP server `{server[:60]}` ends or deletes something"
    far = platform or bool(parts & {"ssh", "remote", "sftp", "gpu", "host"})
    for name_of_field, text in _texts(given):
        why = None
        if name_of_field in SHELL_FIELDS:
            why = judge.shell(text, far=far)
        elif name_of_field in CODE_FIELDS:
            why = judge.spoken(text)
        elif platform and name_of_field in REQUEST_FIELDS and judge.patterns.request.search(text):
            why = "the request ends something"
        if why:
            return why
    return None


def _texts(given: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text in a tool's input with the name of its field, so many and no more."""
    stack, seen = [(name, given)], 0
    while stack:
        name, value = stack.pop()
        seen += 1
        if seen > MOST_TEXTS:
            raise TooMuch("the call has too many parts to be read")
        if isinstance(value, str):
            yield name, value
        elif isinstance(value, Mapping):
            stack += [(str(k).lower(), v) for k, v in value.items()]
        elif isinstance(value, list) and all(isinstance(v, str) for v in value) and name in SHELL_FIELDS:
            yield name, " ".join(value)
        elif isinstance(value, list):
            stack += [(name, v) for v in value]


def _words(name: str) -> set[str]:
    """Return the words of a name that are put together with hyphens, underlines or capitals."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", name)}
