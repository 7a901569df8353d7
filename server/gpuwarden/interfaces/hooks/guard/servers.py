"""Check a call to another MCP server's tool: the server, the tool and its arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from gpuwarden.interfaces.hooks.guard.edits import edited
from gpuwarden.interfaces.hooks.guard.judge import Judge
from gpuwarden.interfaces.hooks.guard.limits import TooMuch
from gpuwarden.interfaces.hooks.guard.patterns import AMBIGUOUS

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
"""Words that mark a tool as harmless. They take precedence over the other words in the tool's name."""
SHELL_FIELDS: Final = frozenset({"command", "cmd", "cli_command", "commands", "shell", "bash", "script", "input"})
CODE_FIELDS: Final = frozenset({"code", "python", "source", "javascript"})
REQUEST_FIELDS: Final = frozenset({"query", "mutation", "body", "path", "url", "endpoint", "request", "data"})
ACTION_FIELDS: Final = frozenset({"operation", "action", "verb", "subcommand", "method", "op", "tool",
                                  "tool_name", "toolname", "function"})  # fmt: skip
COMMAND_FIELDS: Final = frozenset({"command", "cmd", "cli_command", "commands", "args", "arguments",
                                   "argv", "subcommand"})  # fmt: skip
"""Fields that a platform's tool passes to the platform's command-line program."""
STATE_FIELDS: Final = frozenset({"state", "status", "desired_state", "desiredstate", "desired_status",
                                 "desiredstatus", "target_state", "power_state"})  # fmt: skip
ENDED: Final = frozenset({"stopped", "stop", "terminated", "exited", "deleted", "destroyed", "off",
                          "paused", "suspended", "absent", "down", "hibernated"})  # fmt: skip
PLACE_FIELDS: Final = frozenset({"server", "server_name", "servername", "provider", "platform", "service",
                                 "cloud", "backend", "tool", "tool_name", "toolname", "app", "toolkit",
                                 "integration"})  # fmt: skip
"""Fields that name the platform in a tool that supports several platforms."""
PATH_FIELDS: Final = frozenset({"path", "file_path", "filepath", "file", "filename", "destination",
                                "dest", "target", "source", "uri", "relative_path", "new_path",
                                "old_path"})  # fmt: skip
LOOKS: Final = frozenset({"read", "get", "list", "view", "search", "stat", "info", "tree", "find",
                          "grep", "exists", "diff"})  # fmt: skip
SPEAKS: Final = frozenset({"exec", "execute", "run", "ssh", "shell", "bash", "terminal"})
"""Words in the names of tools that run a command in the machine's shell."""
MOST_TEXTS: Final = 500


def other_server(server: str, tool: str, given: Mapping[str, Any], judge: Judge) -> str | None:
    """Return the reason to block a call to another MCP server's tool."""
    if OWN in server:
        return None
    name = tool.rpartition("__")[2].removeprefix("MCP:").removeprefix(f"mcp_{server}_")
    words, texts = _split_name(name), list(_texts(given))
    platform = _is_platform(server, name, texts, judge)
    looks = bool(words & HARMLESS)
    for field_name, text in texts:
        if field_name in ACTION_FIELDS:
            words |= _split_name(text)
        elif platform and field_name in COMMAND_FIELDS and not words & SPEAKS:
            words |= _split_name(" ".join([w for w in text.split() if not w.startswith("-")][:2]))
    ended = {w for f, text in texts if f in STATE_FIELDS for w in _split_name(text)} & ENDED
    ends = words & VERBS or (platform and ended)
    if ends and not looks and (platform or words & MACHINES):
        return f"`{name}` from the MCP server `{server[:60]}` stops or deletes a resource"
    far = platform or bool(_split_name(server) & {"ssh", "remote", "sftp", "gpu", "host"})
    if not far and not words & LOOKS and (why := _file_tool(words, given, texts, judge)):
        return why
    for field_name, text in texts:
        why = None
        if field_name in SHELL_FIELDS:
            why = judge.shell(text, far=far)
        elif field_name in CODE_FIELDS:
            why = judge.spoken(text)
        elif platform and not looks and field_name in REQUEST_FIELDS and judge.patterns.request.search(text):
            why = "the request stops or deletes a resource"
        if why:
            return why
    return None


def _is_platform(server: str, tool: str, texts: Sequence[tuple[str, str]], judge: Judge) -> bool:
    """Return whether the server, the tool or an argument names a platform, or a request is sent to a platform."""
    names = [tool, *(text for field_name, text in texts if field_name in PLACE_FIELDS)]
    for word in judge.patterns.servers:
        if word in _split_name(server) or word in server.split("-"):
            return True
        if word in AMBIGUOUS:
            if any(re.match(rf"{word}(?![a-z])", name.lower()) for name in names):
                return True
        elif any(word in _split_name(n) or (len(word) > 5 and word in re.sub(r"[\W_]", "", n.lower())) for n in names):
            return True
    return any(f in REQUEST_FIELDS and judge.patterns.host.search(text) for f, text in texts)


def _file_tool(words: set[str], given: Mapping[str, Any], texts: Sequence[tuple[str, str]], judge: Judge) -> str | None:
    """Return the reason to block a tool that changes files on this machine."""
    for field_name, text in texts:
        if (field_name in PATH_FIELDS or "path" in field_name) and "\n" not in text:
            path = text.removeprefix("file://")
            gone = judge.files.removal(path) if words & {"delete", "remove", "move", "rename", "rm", "mv"} else None
            if why := gone or judge.files.change(path) or (edited(path, given, judge) if "content" in given else None):
                return why
    return None


def _texts(given: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield every string in a tool's input with its field name. Raises TooMuch if there are more than MOST_TEXTS
    values.
    """
    stack, seen = [(name, given)], 0
    while stack:
        name, value = stack.pop()
        seen += 1
        if seen > MOST_TEXTS:
            raise TooMuch("the call has too many parts to check")
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


def _split_name(name: str) -> set[str]:
    """Split a name at hyphens, underscores and capitals into lower-case words."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", name)}
