"""Install the guard as a hook in coding agents, alongside the user's other hooks.

In Claude Code's `settings.json`, Codex's `hooks.json` and Gemini's `settings.json`, each event has a list of matcher
groups. In Cursor's `hooks.json` (`version` 1), each event has a list of commands. The hook runs this installation's
guard. The protected paths and the patterns that providers declare are written to a file next to the ledger, so that the
guard does not have to import the providers on each call. A plugin installs the same hooks, but its guard runs from the
plugin's folder and writes that file itself.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import Field

from gpuwarden.config import Config, load_config
from gpuwarden.core.errors import BadRequest
from gpuwarden.interfaces.hooks.codex_trust import state_of
from gpuwarden.interfaces.hooks.guard.settings import MARK, OLD_MARK
from gpuwarden.interfaces.launch import FIRST_START_S, FROZEN, NAME, OWN_ENVIRONMENT
from gpuwarden.interfaces.results import Result
from gpuwarden.interfaces.setup.clients import BRINGS_GUARD, client_files, plugin_folder
from gpuwarden.policy_record import RECORD, WRONG_PINS
from gpuwarden.private import private_folder, write_private
from gpuwarden.running_servers import folder as servers_folder

LIMITS: Final = (
    "The guard checks shell commands, edits and calls to other MCP servers. It can't block script files, computed or "
    "encoded commands, input typed into a running program, or other programs that have the account's key. It does not "
    "restrict the user."
)
ANSWERING: Final = ("Elicitation", "ElicitationResult")
"""Claude Code events whose hooks can answer an MCP server's form, or change the user's answer."""
FORMS: Final = "a hook there answers forms for you; don't list elicitation in the policy's approval.channels."
NOT_TRUSTED: Final = frozenset({"untrusted", "unconfirmed"})
TRUST: Final = "Codex runs only trusted hooks: in Codex, type /hooks and trust this hook."
# Claude Code shows the command, with this text, whenever the guard blocks a call, so the text is short.
GONE: Final = "the guard failed, so every call is blocked; run gpuwarden hooks install"
NO_UV: Final = (
    "the plugin guard did not start, so every call is blocked: install uv, then restart the client while online"
)
TIMEOUT_S: Final = 60
"""The hook's timeout in seconds. The guard exits well before it, because clients allow a call if the hook times out."""
BACKUP: Final = ".before-gpuwarden"
GUARD: Final = "guard.json"


def or_deny(why: str) -> str:
    """Return a suffix for a hook's command that blocks the call if the guard itself fails.

    Every client allows the call on an exit code other than 2, such as 1 from a crash, 137 from a killed process, or 127
    if a command is not found.
    """
    return f" || {{ [ $? -eq 2 ] || echo {shlex.quote(why)} >&2; exit 2; }}"


@dataclass(frozen=True)
class Client:
    """A coding agent: its folder, its settings file, and the events to hook, with their matchers."""

    name: str
    folder: str
    variable: str
    file: str
    events: tuple[tuple[str, str | None], ...]

    @property
    def grouped(self) -> bool:
        """Return whether the client groups an event's hooks by matcher. Cursor instead lists plain commands."""
        return self.name != "cursor"

    def in_its_unit(self, seconds: int) -> int:
        """Return a hook's timeout in the client's unit: milliseconds for Gemini, seconds for the other clients."""
        return seconds * (1000 if self.name == "gemini" else 1)

    def entry(self, command: str, matcher: str | None) -> dict[str, Any]:
        """Return the settings entry that makes an event run the command."""
        if self.grouped:
            return {
                "matcher": matcher,
                "hooks": [{"type": "command", "command": command, "timeout": self.in_its_unit(TIMEOUT_S)}],
            }
        return {"command": command, "timeout": self.in_its_unit(TIMEOUT_S), "failClosed": True} | (
            {"matcher": matcher} if matcher else {}
        )


CLIENTS: Final = (
    Client(
        "claude",
        ".claude",
        "CLAUDE_CONFIG_DIR",
        "settings.json",
        (("PreToolUse", "Bash|Edit|Write|MultiEdit|NotebookEdit|mcp__.*"),),
    ),
    Client("codex", ".codex", "CODEX_HOME", "hooks.json", (("PreToolUse", "Bash|apply_patch|mcp__.*"),)),
    Client(
        "gemini",
        ".gemini",
        "",
        "settings.json",
        (("BeforeTool", "run_shell_command|write_file|replace|mcp_.*"),),
    ),
    Client(
        "cursor",
        ".cursor",
        "",
        "hooks.json",
        (("beforeShellExecution", None), ("beforeMCPExecution", None), ("preToolUse", "Write|Delete")),
    ),
)


class HooksReply(Result):
    """State by client: `installed`, `untrusted` (present, but the client does not run it until the user trusts it),
    `unconfirmed` (the client could not be asked whether it is trusted), `absent`, `stale` (outdated, or from another
    installation), `the plugin installs it` or `not found here`.
    """

    clients: dict[str, str] = Field(default_factory=dict)
    files: dict[str, str] = Field(default_factory=dict)
    answering: list[str] = Field(default_factory=list)
    """Settings files in which a hook answers forms."""


def hooks(action: str, names: tuple[str, ...], config: Config, env: Mapping[str, str]) -> HooksReply:
    """Install or uninstall the named clients' hooks, or only report their state.

    Without names, use every client whose folder exists. Raises BadRequest, before any client's file is changed, if one
    of the files has an unknown format or the guard can't start.
    """
    homes = _homes(env)
    chosen = [c for c in CLIENTS if (c.name in names if names else homes[c].is_dir())]
    files = {c: homes[c] / c.file for c in chosen}
    tables = {c: _read(c, file) for c, file in files.items()}
    settings = [homes[c] / c.file for c in CLIENTS]
    if action == "install":
        _place_guard(config, settings)
        for c in chosen:
            _install(c, files[c], tables[c], _command(c, config))
    elif action == "uninstall":
        for c in chosen:
            _uninstall(c, files[c], tables[c])
    states = {c.name: "not found here" for c in CLIENTS} | {
        c.name: _state(c, files[c], config, settings, env) for c in chosen
    }
    states |= {
        name: brought for name, state in states.items() if state == "absent" and (brought := by_plugin(name, env))
    }
    notes = f"{LIMITS} {TRUST}" if NOT_TRUSTED & set(states.values()) else LIMITS
    found = answering_hooks(homes, Path.cwd())
    notes = f"{notes} {', '.join(found)}: {FORMS}" if found else notes
    return HooksReply(message=notes, clients=states, files={c.name: str(f) for c, f in files.items()}, answering=found)


def answering_hooks(homes: Mapping[Client, Path], project: Path) -> list[str]:
    """Return the user, project and plugin settings files in which a hook answers forms."""
    folders = [*homes.values(), project / ".claude"]
    files = {
        f for folder in folders for name in ("settings", "settings.local", "hooks") for f in [folder / f"{name}.json"]
    }
    files |= {f for folder in homes.values() for f in folder.glob("plugins/cache/*/*/*/hooks/hooks.json")}
    found = []
    for file in sorted(files):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            events = json.loads(file.read_text("utf-8-sig")).get("hooks", {})
            found += [str(file)] if any(events.get(event) for event in ANSWERING) else []
    return found


def hook_lines(name: str, config: Config, env: Mapping[str, str]) -> tuple[Path, str]:
    """Return the client's file that `install` would write, and the text that it would add."""
    client = next(c for c in CLIENTS if c.name == name)
    command = _command(client, config)
    table = {"hooks": {event: [client.entry(command, matcher)] for event, matcher in client.events}}
    return _homes(env)[client] / client.file, json.dumps(table, indent=2)


def plugin_hooks(name: str) -> dict[str, Any]:
    """Return the content of a plugin's hooks file. The client replaces the variable with the plugin's folder.

    The plugin's packages are downloaded and the guard's file is written when a session starts. A hook call never
    downloads anything or waits for a download. Otherwise the hook could time out, and the client would allow the call.
    """
    client = next(c for c in CLIENTS if c.name == name)
    folder = "extensionPath" if name == "gemini" else "CLAUDE_PLUGIN_ROOT"
    own = " ".join(f"{variable}={value}" for variable, value in OWN_ENVIRONMENT.items())
    start = f'{own} uv run --quiet --project "${{{folder}}}" {" ".join(FROZEN)}'
    guard = f"python -E -P -m {MARK} {name}"
    first = {"type": "command", "command": f"{start} {guard} --place", "timeout": client.in_its_unit(FIRST_START_S)}
    call = f"{start} --no-sync {guard}{or_deny(NO_UV)}"
    calls = {event: [client.entry(call, matcher)] for event, matcher in client.events}
    return {"hooks": {"SessionStart": [{"hooks": [first]}], **calls}}


def place_guard(env: Mapping[str, str]) -> Path:
    """Write the guard's file for a plugin next to this environment's ledger, and return the file's path."""
    config = load_config(env)
    _place_guard(config, [home / c.file for c, home in _homes(env).items()])
    return _folder(config) / GUARD


def _homes(env: Mapping[str, str]) -> dict[Client, Path]:
    return {c: Path(env.get(c.variable) or Path.home() / c.folder).expanduser() for c in CLIENTS}


def _folder(config: Config) -> Path:
    return config.home / "hooks"


def _command(client: Client, config: Config) -> str:
    """Return the hook's command for the client's shell. `-E -P` keep variables from changing Python's import path."""
    words = (sys.executable, "-E", "-P", "-m", MARK, client.name, str(_folder(config) / "guard.json"))
    command = subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)
    return command if os.name == "nt" else command + or_deny(GONE)


def _place_guard(config: Config, settings: list[Path]) -> None:
    """Write the guard's file next to the ledger, then test the guard. Raises BadRequest if it can't start."""
    folder = _folder(config)
    private_folder(config.home)
    private_folder(folder).chmod(0o700)  # an older version made the folder world-readable
    (folder / OLD_MARK).unlink(missing_ok=True)
    write_private(folder / "guard.json", _guard_facts(config, settings).encode())
    argv = [sys.executable, "-E", "-P", "-m", MARK, "claude", str(folder / "guard.json")]
    call = json.dumps({"tool_name": "Bash", "tool_input": {"command": "true"}, "cwd": str(folder)})
    tried = subprocess.run(argv, input=call, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if tried.returncode:
        message = (tried.stderr.strip().splitlines() or ["no output"])[-1][:300]
        raise BadRequest(
            f"the guard can't start here and would block every call, so nothing was changed: {message}",
            "Install gpuwarden with its dependencies into one environment, then retry.",
        )


def _guard_facts(config: Config, settings: list[Path]) -> str:
    """Return the content of the file that the guard reads on each call."""
    from gpuwarden.interfaces.hooks.guard.declared import table  # imports every provider

    plugins = [  # the folders in which clients keep copies of the plugin
        folder / name
        for home in {file.parent for file in settings}
        for folder in (home / "plugins" / "cache", home / "plugins" / "marketplaces", home / "extensions")
        for name in (NAME, f"{NAME}-marketplace")
    ]
    kept = [
        *sorted(plugins),
        servers_folder().parent,
        config.home / "ledger.db",
        config.home / "ledger.head",
        config.home / RECORD,
        config.policy_file,
        config.policy_file.parent / "profiles",
        config.policy_file.with_name(WRONG_PINS),
        _folder(config),
    ]
    values = {
        "home": _plain(config.home),
        "files": [_plain(f) for f in kept],
        "settings": [_plain(f) for f in settings],
        "patterns": table(),
    }
    return json.dumps(values, indent=1, sort_keys=True) + "\n"


def _plain(file: Path) -> str:
    return os.path.normpath(file.absolute())


def _read(client: Client, file: Path) -> dict[str, Any]:
    """Return a client's settings. Raises BadRequest for a file in an unknown format, which must not be overwritten."""
    try:
        table = json.loads(file.read_text("utf-8-sig"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise BadRequest(f"{file} is not JSON, so nothing was changed", "Fix the file, then retry.") from error
    hooks_table = table.get("hooks", {}) if isinstance(table, dict) else None
    known = isinstance(hooks_table, dict) and all(isinstance(hooks_table.get(e, []), list) for e, _ in client.events)
    if not known:
        raise BadRequest(f"{file} has hooks in an unknown format, so nothing was changed", "Fix the file, then retry.")
    return dict(table)


def _is_guard_hook(entry: Any) -> bool:
    """Return whether an entry, or a hook in a matcher group, runs this guard or an older version of it."""
    return any((MARK in text or OLD_MARK in text) and "guard.json" in text for text in _texts(entry))


def _texts(entry: Any) -> list[str]:
    """Return the commands in an entry, or in the hooks of a matcher group."""
    inner = entry.get("hooks", [entry]) if isinstance(entry, dict) else []
    return [str(h.get("command", "")) for h in inner if isinstance(h, dict)] if isinstance(inner, list) else []


def _without(entries: list[Any]) -> list[Any]:
    """Return the entries without this guard's hook. Other hooks in the same group are kept."""
    kept: list[Any] = []
    for entry in entries:
        if not _is_guard_hook(entry):
            kept.append(entry)
        elif others := [h for h in entry.get("hooks", []) if not _is_guard_hook(h)]:
            kept.append({**entry, "hooks": others})
    return kept


def _install(client: Client, file: Path, table: dict[str, Any], command: str) -> None:
    """Add the hook after the other hooks of each event, and keep a backup of the original file in the same folder."""
    before = json.dumps(table)
    was_ours = _installed(client, table)
    if not client.grouped:
        table.setdefault("version", 1)
    events = table.setdefault("hooks", {})
    for event, matcher in client.events:
        events[event] = [*_without(events.get(event, [])), client.entry(command, matcher)]
    if json.dumps(table) == before:
        return
    if file.exists() and not was_ours:
        replace_text(file.with_name(file.name + BACKUP), file.read_bytes().decode("utf-8"))
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_text(file, json.dumps(table, indent=2, ensure_ascii=False) + "\n")


def _installed(client: Client, table: dict[str, Any]) -> list[Any]:
    """Return the entries that run this guard."""
    events = table.get("hooks", {})
    return [entry for event, _ in client.events for entry in events.get(event, []) if _is_guard_hook(entry)]


def _uninstall(client: Client, file: Path, table: dict[str, Any]) -> None:
    """Remove the guard's entries. If the file has no other changes, restore the original file byte for byte."""
    if not _installed(client, table):
        return
    events = table["hooks"]
    for event, _ in client.events:
        if event in events:
            events[event] = _without(events[event])
    backup = file.with_name(file.name + BACKUP)
    before = backup.read_bytes().decode("utf-8") if backup.exists() else ""
    if before and _same(client, json.loads(before.removeprefix("\ufeff")), table):
        replace_text(file, before)
    elif not before and _same(client, {}, table):
        file.unlink()
    else:
        replace_text(file, json.dumps(table, indent=2, ensure_ascii=False) + "\n")
    backup.unlink(missing_ok=True)


def _same(client: Client, before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Return whether two settings tables are equal, ignoring events without hooks and Cursor's `version`."""

    def bare(table: dict[str, Any]) -> dict[str, Any]:
        hooks_table = {k: v for k, v in table.get("hooks", {}).items() if v}
        rest = {k: v for k, v in table.items() if k != "hooks" and (client.grouped or k != "version")}
        return rest | ({"hooks": hooks_table} if hooks_table else {})

    return bare(before) == bare(after)


def _state(client: Client, file: Path, config: Config, settings: list[Path], env: Mapping[str, str]) -> str:
    """Return the state of a client's hook: installed, absent, stale, untrusted or unconfirmed."""
    table = _read(client, file)
    ours = _installed(client, table)
    if not ours:
        return "absent"
    facts = _folder(config) / "guard.json"
    fresh = facts.exists() and facts.read_text("utf-8") == _guard_facts(config, settings)
    here = all(_command(client, config) in _texts(entry) for entry in ours)
    if not (fresh and here and len(ours) == len(client.events)):
        return "stale"
    if client.name != "codex":
        return "installed"
    return state_of(env, lambda hook: hook.get("sourcePath") in {str(file), str(file.resolve())})


def by_plugin(name: str, env: Mapping[str, str]) -> str:
    """Return the state of the guard from a client's plugin; an empty string if no plugin installs a guard."""
    client = client_files(env)[name]
    if name not in BRINGS_GUARD or plugin_folder(client) is None:
        return ""
    state = "installed"
    if name == "codex":
        state = state_of(env, lambda hook: str(hook.get("pluginId")).startswith(f"{NAME}@"))
    return "the plugin installs it" if state == "installed" else state


def replace_text(file: Path, text: str) -> None:
    """Replace a file atomically, following links, and keep its mode and owner.

    A new file is readable only by its owner, because the user may later add a key to it. Raises OSError, for example
    for a read-only file.
    """
    target = file.resolve()
    fresh = target.with_name(f"{target.name}.{os.getpid()}.new")
    info = target.stat() if target.exists() else None
    if info is not None and not info.st_mode & 0o200:
        raise PermissionError(errno.EACCES, "the file is read-only", str(target))
    try:
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            stream.write(text.encode())
            stream.flush()
            os.fsync(stream.fileno())
        if info is not None:
            if hasattr(os, "chown"):
                with contextlib.suppress(PermissionError):
                    os.chown(fresh, info.st_uid, info.st_gid)
            fresh.chmod(info.st_mode & 0o777)
        fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)
