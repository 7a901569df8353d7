"""Judge one call of a tool, as a client's hook is told of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gpuwarden.interfaces.hooks.guard import settings
from gpuwarden.interfaces.hooks.guard.files import Files
from gpuwarden.interfaces.hooks.guard.judge import Judge
from gpuwarden.interfaces.hooks.guard.limits import Budget, TooMuch
from gpuwarden.interfaces.hooks.guard.patterns import AMBIGUOUS, Patterns

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
ACTION_FIELDS: Final = frozenset({"operation", "action", "verb", "subcommand", "method", "op", "tool",
                                  "tool_name", "toolname", "function"})  # fmt: skip
COMMAND_FIELDS: Final = frozenset({"command", "cmd", "cli_command", "commands", "args", "arguments",
                                   "argv", "subcommand"})  # fmt: skip
"""Fields that a platform's tool reads as the words of the platform's own program."""
STATE_FIELDS: Final = frozenset({"state", "status", "desired_state", "desiredstate", "desired_status",
                                 "desiredstatus", "target_state", "power_state"})  # fmt: skip
ENDED: Final = frozenset({"stopped", "stop", "terminated", "exited", "deleted", "destroyed", "off",
                          "paused", "suspended", "absent", "down", "hibernated"})  # fmt: skip
PLACE_FIELDS: Final = frozenset({"server", "server_name", "servername", "provider", "platform", "service",
                                 "cloud", "backend", "tool", "tool_name", "toolname", "app", "toolkit",
                                 "integration"})  # fmt: skip
"""Fields that name a platform, where one tool is for several."""
PATH_FIELDS: Final = frozenset({"path", "file_path", "filepath", "file", "filename", "destination",
                                "dest", "target", "source", "uri", "relative_path", "new_path",
                                "old_path"})  # fmt: skip
LOOKS: Final = frozenset({"read", "get", "list", "view", "search", "stat", "info", "tree", "find",
                          "grep", "exists", "diff"})  # fmt: skip
SPEAKS: Final = frozenset({"exec", "execute", "run", "ssh", "shell", "bash", "terminal"})
"""Words of tools whose command is one of the machine's shell."""
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
        values = {"HOME": user, "PWD": cwd, "TMPDIR": "/tmp"}  # noqa: S108 - what the shell has
        values |= {"XDG_CONFIG_HOME": f"{user}/.config", "XDG_DATA_HOME": f"{user}/.local/share"}
        values |= {"GPUWARDEN_HOME": self.home} if self.home else {}
        budget = Budget()
        files = Files(self.home, self.files, self.runs, self.settings, cwd, user, budget)
        return Judge(self.patterns, files, self.typing, values, budget)


class Question(str):
    """Why the user has to be asked. A client that can't ask stops the call."""


def judged(event: Mapping[str, Any], rules: Rules) -> str | None:
    """Return why a call is stopped, a `Question` if the user decides it; None lets it pass."""
    given = _given(event)
    judge = rules.judge(str(event.get("cwd") or given.get("workdir") or Path.cwd()))
    try:
        why = _judged(event, given, judge)
    except TooMuch as error:
        return str(error)
    text = given.get("command")
    if not why and judge.files.blind and isinstance(text, str) and judge.names_kept(text):
        judge.files.ask("the command names what a person decides, and writes to a place that is not known before")
    return why or (Question(judge.files.question) if judge.files.question else None)


def _given(event: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool's input; some clients send it as a text, others instead of the event."""
    given = event.get("tool_input")
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            given = {"input": given}
    return given if isinstance(given, Mapping) else event


def _judged(event: Mapping[str, Any], given: Mapping[str, Any], judge: Judge) -> str | None:
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
    """Return why a call of another MCP server's tool is stopped: by the server, the tool and its arguments."""
    if OWN in server:
        return None
    name = tool.rpartition("__")[2].removeprefix("MCP:").removeprefix(f"mcp_{server}_")
    words, texts = _words(name), list(_texts(given))
    platform = _is_platform(server, name, texts, judge)
    looks = bool(words & HARMLESS)
    for field_name, text in texts:
        if field_name in ACTION_FIELDS:
            words |= _words(text)
        elif platform and field_name in COMMAND_FIELDS and not words & SPEAKS:
            words |= _words(" ".join([w for w in text.split() if not w.startswith("-")][:2]))
    ended = {w for f, text in texts if f in STATE_FIELDS for w in _words(text)} & ENDED
    ends = words & VERBS or (platform and ended)
    if ends and not looks and (platform or words & MACHINES):
        return f"`{name}` of the MCP server `{server[:60]}` ends or deletes something"
    far = platform or bool(_words(server) & {"ssh", "remote", "sftp", "gpu", "host"})
    if not far and not words & LOOKS and (why := _file_tool(words, given, texts, judge)):
        return why
    for field_name, text in texts:
        why = None
        if field_name in SHELL_FIELDS:
            why = judge.shell(text, far=far)
        elif field_name in CODE_FIELDS:
            why = judge.spoken(text)
        elif platform and not looks and field_name in REQUEST_FIELDS and judge.patterns.request.search(text):
            why = "the request ends something"
        if why:
            return why
    return None


def _is_platform(server: str, tool: str, texts: Sequence[tuple[str, str]], judge: Judge) -> bool:
    """Return whether a platform is named by the server, the tool or an argument, or is reached by an address."""
    names = [tool, *(text for field_name, text in texts if field_name in PLACE_FIELDS)]
    for word in judge.patterns.servers:
        if word in _words(server) or word in server.split("-"):
            return True
        if word in AMBIGUOUS:
            if any(re.match(rf"{word}(?![a-z])", name.lower()) for name in names):
                return True
        elif any(word in _words(n) or (len(word) > 5 and word in re.sub(r"[\W_]", "", n.lower())) for n in names):
            return True
    return any(f in REQUEST_FIELDS and judge.patterns.host.search(text) for f, text in texts)


def _file_tool(words: set[str], given: Mapping[str, Any], texts: Sequence[tuple[str, str]], judge: Judge) -> str | None:
    """Return why a tool is stopped that works on files of this machine."""
    for field_name, text in texts:
        if field_name in PATH_FIELDS and "\n" not in text:
            path = text.removeprefix("file://")
            gone = judge.files.removal(path) if words & {"delete", "remove", "move", "rename", "rm", "mv"} else None
            if why := gone or judge.files.change(path) or (_edited(path, given, judge) if "content" in given else None):
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
        elif (
            isinstance(value, list) and all(isinstance(v, str) for v in value) and name in SHELL_FIELDS | COMMAND_FIELDS
        ):
            yield name, " ".join(value)
        elif isinstance(value, list):
            stack += [(name, v) for v in value]


def _words(name: str) -> set[str]:
    """Return the words of a name that are put together with hyphens, underlines or capitals."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", name)}
