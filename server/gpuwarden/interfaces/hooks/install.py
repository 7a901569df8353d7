"""Install the guard as a hook of coding agents, beside whatever other hooks the user has.

Formats: Claude Code `settings.json` and Codex `hooks.json` have `hooks.PreToolUse`, a list of matcher groups; Cursor
`hooks.json` has `version` 1 and a list of commands by event. The hook runs this installation's guard; what it protects
and the patterns that providers declare are written into a file beside the ledger, so that a call imports no provider.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import Field

from gpuwarden.config import Config
from gpuwarden.core.errors import BadRequest
from gpuwarden.interfaces.hooks.guard.settings import MARK, OLD_MARK
from gpuwarden.interfaces.results import Result
from gpuwarden.policy_record import RECORD
from gpuwarden.private import private_folder, write_private

LIMITS: Final = (
    "The guard reads shell commands, edits and calls of other MCP servers. It can't stop a script file that is run, a "
    "computed or encoded command, what is typed into a program that runs already, another program that has the "
    "account's key, or a person."
)
TRUST: Final = "Codex runs no hook that nobody trusted: in Codex, a person types /hooks and trusts this one."
# Claude Code shows a model this text whenever the guard says no, as part of the command: so it is short.
GONE: Final = "the guard failed, so nothing passes: gpuwarden hooks install"
# Every client takes an exit code that is not 2 for a pass: a crash's 1, a killed process's 137, a shell's 127.
OR_DENY: Final = "" if os.name == "nt" else f" || {{ [ $? -eq 2 ] || echo {shlex.quote(GONE)} >&2; exit 2; }}"
TIMEOUT_S: Final = 60
"""The guard ends itself long before; a client lets a call pass whose hook is late."""
BACKUP: Final = ".before-gpuwarden"


@dataclass(frozen=True)
class Client:
    """One agent: its folder, its file, and the events with what each is matched with."""

    name: str
    folder: str
    variable: str
    file: str
    events: tuple[tuple[str, str | None], ...]

    @property
    def grouped(self) -> bool:
        """Return whether an event has groups of hooks, as in Claude Code, or plain commands, as in Cursor."""
        return self.name != "cursor"


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
        "cursor",
        ".cursor",
        "",
        "hooks.json",
        (("beforeShellExecution", None), ("beforeMCPExecution", None), ("preToolUse", "Write|Delete")),
    ),
)


class HooksReply(Result):
    """By client: `installed`, `untrusted` (there, but not run before a person trusts it), `absent`, `stale` (ours, but
    not of this installation) or `not found here`.
    """

    clients: dict[str, str] = Field(default_factory=dict)
    files: dict[str, str] = Field(default_factory=dict)


def hooks(action: str, names: tuple[str, ...], config: Config, env: Mapping[str, str]) -> HooksReply:
    """Install, uninstall or only look. Without names: the clients whose folder exists.

    Raises BadRequest, before a client's file is written, when one is not a JSON object of the known form or the guard
    can't start.
    """
    homes = {c: Path(env.get(c.variable) or Path.home() / c.folder).expanduser() for c in CLIENTS}
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
        c.name: _state(c, files[c], config, settings) for c in chosen
    }
    said = f"{LIMITS} {TRUST}" if "untrusted" in states.values() else LIMITS
    return HooksReply(message=said, clients=states, files={c.name: str(f) for c, f in files.items()})


def _folder(config: Config) -> Path:
    return config.home / "hooks"


def _command(client: Client, config: Config) -> str:
    """Return what the client's shell runs. The environment can't give Python another place to import from."""
    words = (sys.executable, "-E", "-P", "-m", MARK, client.name, str(_folder(config) / "guard.json"))
    command = subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)
    return f"{command}{OR_DENY}"


def _place_guard(config: Config, settings: list[Path]) -> None:
    """Write what the guard protects beside the ledger, and try the guard. Raises BadRequest when it can't start."""
    folder = _folder(config)
    private_folder(config.home)
    private_folder(folder).chmod(0o700)  # an older version made it for all to read
    (folder / OLD_MARK).unlink(missing_ok=True)
    write_private(folder / "guard.json", _told(config, settings).encode())
    argv = [sys.executable, "-E", "-P", "-m", MARK, "claude", str(folder / "guard.json")]
    call = json.dumps({"tool_name": "Bash", "tool_input": {"command": "true"}, "cwd": str(folder)})
    tried = subprocess.run(argv, input=call, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if tried.returncode:
        said = (tried.stderr.strip().splitlines() or ["no word"])[-1][:300]
        raise BadRequest(
            f"the guard can't start here and would stop every call, so nothing was changed: {said}",
            "Install gpuwarden with its dependencies into one environment, then call again.",
        )


def _told(config: Config, settings: list[Path]) -> str:
    """Return what the guard reads at each call."""
    from gpuwarden.interfaces.hooks.guard.declared import table  # imports every provider

    kept = [
        config.home / "ledger.db",
        config.home / "ledger.head",
        config.home / RECORD,
        config.policy_file,
        config.policy_file.parent / "profiles",
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
    """Return a client's settings. Raises BadRequest for what is not understood; such a file is never written."""
    try:
        table = json.loads(file.read_text("utf-8-sig"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise BadRequest(f"{file} is not JSON, so nothing was changed", "Fix it, then call again.") from error
    hooks_table = table.get("hooks", {}) if isinstance(table, dict) else None
    known = isinstance(hooks_table, dict) and all(isinstance(hooks_table.get(e, []), list) for e, _ in client.events)
    if not known:
        raise BadRequest(f"{file} has hooks of an unknown form, so nothing was changed", "Fix it, then call again.")
    return dict(table)


def _is_ours(entry: Any) -> bool:
    """Return whether an entry, or a hook in a matcher group, runs this guard, or an older install's."""
    return any((MARK in text or OLD_MARK in text) and "guard.json" in text for text in _texts(entry))


def _texts(entry: Any) -> list[str]:
    """Return the commands of an entry, or of the hooks in a matcher group."""
    inner = entry.get("hooks", [entry]) if isinstance(entry, dict) else []
    return [str(h.get("command", "")) for h in inner if isinstance(h, dict)] if isinstance(inner, list) else []


def _without(entries: list[Any]) -> list[Any]:
    """Return the entries without our hook; what somebody put into its group stays."""
    kept: list[Any] = []
    for entry in entries:
        if not _is_ours(entry):
            kept.append(entry)
        elif others := [h for h in entry.get("hooks", []) if not _is_ours(h)]:
            kept.append({**entry, "hooks": others})
    return kept


def _install(client: Client, file: Path, table: dict[str, Any], command: str) -> None:
    """Put the hook behind the others of each event; a copy of the file as it was is kept beside it."""
    before = json.dumps(table)
    was_ours = _installed(client, table)
    if not client.grouped:
        table.setdefault("version", 1)
    events = table.setdefault("hooks", {})
    for event, matcher in client.events:
        if client.grouped:
            hook = {"type": "command", "command": command, "timeout": TIMEOUT_S}
            entry: dict[str, Any] = {"matcher": matcher, "hooks": [hook]}
        else:
            entry = {"command": command, "timeout": TIMEOUT_S, "failClosed": True}
            entry |= {"matcher": matcher} if matcher else {}
        events[event] = [*_without(events.get(event, [])), entry]
    if json.dumps(table) == before:
        return
    if file.exists() and not was_ours:
        _write(file.with_name(file.name + BACKUP), file.read_bytes().decode("utf-8"))
    file.parent.mkdir(parents=True, exist_ok=True)
    _write(file, json.dumps(table, indent=2, ensure_ascii=False) + "\n")


def _installed(client: Client, table: dict[str, Any]) -> list[Any]:
    """Return the entries that run this guard."""
    events = table.get("hooks", {})
    return [entry for event, _ in client.events for entry in events.get(event, []) if _is_ours(entry)]


def _uninstall(client: Client, file: Path, table: dict[str, Any]) -> None:
    """Take our entries out. The file as it was comes back to the byte when nothing else changed since."""
    if not _installed(client, table):
        return
    events = table["hooks"]
    for event, _ in client.events:
        if event in events:
            events[event] = _without(events[event])
    backup = file.with_name(file.name + BACKUP)
    before = backup.read_bytes().decode("utf-8") if backup.exists() else ""
    if before and _same(client, json.loads(before.removeprefix("\ufeff")), table):
        _write(file, before)
    elif not before and _same(client, {}, table):
        file.unlink()
    else:
        _write(file, json.dumps(table, indent=2, ensure_ascii=False) + "\n")
    backup.unlink(missing_ok=True)


def _same(client: Client, before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Return whether two settings are equal, ignoring empty tables and Cursor's version."""

    def bare(table: dict[str, Any]) -> dict[str, Any]:
        hooks_table = {k: v for k, v in table.get("hooks", {}).items() if v}
        rest = {k: v for k, v in table.items() if k != "hooks" and (client.grouped or k != "version")}
        return rest | ({"hooks": hooks_table} if hooks_table else {})

    return bare(before) == bare(after)


def _state(client: Client, file: Path, config: Config, settings: list[Path]) -> str:
    """Return how a client's hook is: installed, absent, stale or untrusted."""
    table = _read(client, file)
    ours = _installed(client, table)
    if not ours:
        return "absent"
    told = _folder(config) / "guard.json"
    fresh = told.exists() and told.read_text("utf-8") == _told(config, settings)
    here = all(_command(client, config) in _texts(entry) for entry in ours)
    if not (fresh and here and len(ours) == len(client.events)):
        return "stale"
    return "installed" if client.name != "codex" or _trusted(client, file) else "untrusted"


def _trusted(client: Client, file: Path) -> bool:
    """Return whether Codex would run the hook: a person trusted it, as it is now, and nobody switched it off since.

    Codex keeps a digest of each hook that was trusted in its `config.toml`, under the hook's file and place.
    """
    try:
        states = tomllib.loads((file.parent / "config.toml").read_text("utf-8"))["hooks"]["state"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    for g, group in enumerate(_read(client, file)["hooks"][client.events[0][0]]):
        for h, hook in enumerate(group.get("hooks", [])):
            if _is_ours(hook):
                alone = {"async": False, **hook}
                identity = {"event_name": "pre_tool_use", "matcher": group.get("matcher"), "hooks": [alone]}
                text = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
                digest = f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
                kept = [states.get(f"{path}:pre_tool_use:{g}:{h}") for path in {file, file.resolve()}]
                return any(
                    isinstance(k, dict) and k.get("trusted_hash") == digest and k.get("enabled") is not False
                    for k in kept
                )
    return False


def _write(file: Path, text: str) -> None:
    """Replace a file at once, through a link if it is one, with the mode it had."""
    target = file.resolve()
    fresh = target.with_name(f"{target.name}.{os.getpid()}.new")
    fresh.write_bytes(text.encode())
    with contextlib.suppress(FileNotFoundError):
        fresh.chmod(target.stat().st_mode & 0o777)
    fresh.replace(target)
