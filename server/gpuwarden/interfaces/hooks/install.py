"""Install the guard as a shell hook of coding agents, beside whatever other hooks the user has.

Formats: Claude Code `settings.json` and Codex `hooks.json` have `hooks.PreToolUse`, a list of matcher groups; Cursor
`hooks.json` has `version` 1 and `hooks.beforeShellExecution`, a list of commands.
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
from gpuwarden.interfaces.hooks import guard
from gpuwarden.interfaces.results import Result
from gpuwarden.policy_record import RECORD

LIMITS: Final = (
    "The guard reads shell commands. It can't stop a script file that is run, a computed or encoded command, what is "
    "typed into a program that runs already, another program that has the account's key, or a person."
)
TRUST: Final = "Codex runs no hook that nobody trusted: in Codex, a person types /hooks and trusts this one."
# Claude Code shows a model this text whenever the guard says no, as part of the command: so it is short.
GONE: Final = "the guard is missing, so nothing passes: gpuwarden hooks install"
# A shell answers 126 or 127 where the guard's Python is gone, which every client takes for a pass; 2 is a no to all.
OR_DENY: Final = (
    "" if os.name == "nt" else f" || {{ c=$?; [ $c -lt 126 ] && exit $c; echo {shlex.quote(GONE)} >&2; exit 2; }}"
)
BACKUP: Final = ".before-gpuwarden"


@dataclass(frozen=True)
class Client:
    """One agent: its folder, its file, the event and what the event is matched with."""

    name: str
    folder: str
    variable: str
    file: str
    event: str
    matcher: str | None


CLIENTS: Final = (
    Client(
        "claude",
        ".claude",
        "CLAUDE_CONFIG_DIR",
        "settings.json",
        "PreToolUse",
        "Bash|Edit|Write|MultiEdit|NotebookEdit",
    ),
    Client("codex", ".codex", "CODEX_HOME", "hooks.json", "PreToolUse", "Bash|apply_patch"),
    Client("cursor", ".cursor", "", "hooks.json", "beforeShellExecution", None),
)


class HooksReply(Result):
    """By client: `installed`, `untrusted` (there, but not run before a person trusts it), `absent`, `stale` (ours, but
    not of this installation) or `not found here`.
    """

    clients: dict[str, str] = Field(default_factory=dict)
    files: dict[str, str] = Field(default_factory=dict)


def hooks(action: str, names: tuple[str, ...], config: Config, env: Mapping[str, str]) -> HooksReply:
    """Install, uninstall or only look. Without names: the clients whose folder exists.

    Raises BadRequest, before anything is written, when a client's file is not a JSON object of the known form.
    """
    homes = {c: Path(env.get(c.variable) or Path.home() / c.folder).expanduser() for c in CLIENTS}
    chosen = [c for c in CLIENTS if (c.name in names if names else homes[c].is_dir())]
    files = {c: homes[c] / c.file for c in chosen}
    tables = {c: _read(c, file) for c, file in files.items()}
    if action == "install":
        _place_guard(config, [homes[c] / c.file for c in CLIENTS])
        for c in chosen:
            _install(c, files[c], tables[c], _command(c, config))
    elif action == "uninstall":
        for c in chosen:
            _uninstall(c, files[c], tables[c])
    states = {c.name: "not found here" for c in CLIENTS} | {c.name: _state(c, files[c], config) for c in chosen}
    said = f"{LIMITS} {TRUST}" if "untrusted" in states.values() else LIMITS
    return HooksReply(message=said, clients=states, files={c.name: str(f) for c, f in files.items()})


def _folder(config: Config) -> Path:
    return config.home / "hooks"


def _command(client: Client, config: Config) -> str:
    """Return the command that the client's shell runs."""
    guarded, told = _folder(config) / "guard.py", _folder(config) / "guard.json"
    return f"{_quoted(sys.executable, '-I', str(guarded), client.name, str(told))}{OR_DENY}"


def _place_guard(config: Config, settings: list[Path]) -> None:
    """Copy the guard beside the ledger."""
    folder = _folder(config)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _write(folder / "guard.py", Path(guard.__file__).read_text("utf-8"))
    kept = [
        config.home / "ledger.db",
        config.home / RECORD,
        config.policy_file,
        config.policy_file.parent / "profiles",
        folder,
    ]
    values = {
        "home": _plain(config.home),
        "files": [_plain(f) for f in kept],
        "settings": [_plain(f) for f in settings],
    }
    _write(folder / "guard.json", json.dumps(values))


def _plain(file: Path) -> str:
    return os.path.normpath(file.absolute())


def _quoted(*words: str) -> str:
    return subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)


def _read(client: Client, file: Path) -> dict[str, Any]:
    """Return a client's settings. Raises BadRequest for what is not understood; such a file is never written."""
    try:
        table = json.loads(file.read_text("utf-8-sig"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise BadRequest(f"{file} is not JSON, so nothing was changed", "Mend it, then call again.") from error
    hooks_table = table.get("hooks", {}) if isinstance(table, dict) else None
    if not isinstance(hooks_table, dict) or not isinstance(hooks_table.get(client.event, []), list):
        raise BadRequest(f"{file} has hooks of an unknown form, so nothing was changed", "Mend it, then call again.")
    return dict(table)


def _is_ours(entry: Any) -> bool:
    """Return whether an entry, or a hook in a matcher group, runs the guard."""
    return any("guard.py" in text and "guard.json" in text for text in _texts(entry))


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
    if client.matcher is None:
        entry: dict[str, Any] = {"command": command}
        table.setdefault("version", 1)
    else:
        entry = {"matcher": client.matcher, "hooks": [{"type": "command", "command": command, "timeout": 10}]}
    events = table.setdefault("hooks", {})
    others = _without(events.get(client.event, []))
    if events.get(client.event) == [*others, entry]:
        return
    backup = file.with_name(file.name + BACKUP)
    if file.exists() and not any(_is_ours(e) for e in events.get(client.event, [])):
        _write(backup, file.read_bytes().decode("utf-8"))
    events[client.event] = [*others, entry]
    file.parent.mkdir(parents=True, exist_ok=True)
    _write(file, json.dumps(table, indent=2, ensure_ascii=False) + "\n")


def _uninstall(client: Client, file: Path, table: dict[str, Any]) -> None:
    """Take our entry out. The file as it was comes back to the byte when nothing else changed since."""
    events = table.get("hooks", {})
    if not any(_is_ours(e) for e in events.get(client.event, [])):
        return
    events[client.event] = _without(events[client.event])
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
        rest = {k: v for k, v in table.items() if k != "hooks" and not (client.matcher is None and k == "version")}
        return rest | ({"hooks": hooks_table} if hooks_table else {})

    return bare(before) == bare(after)


def _state(client: Client, file: Path, config: Config) -> str:
    ours = [e for e in _read(client, file).get("hooks", {}).get(client.event, []) if _is_ours(e)]
    copy = _folder(config) / "guard.py"
    if not ours:
        return "absent"
    fresh = copy.exists() and copy.read_text("utf-8") == Path(guard.__file__).read_text("utf-8")
    here = any(_command(client, config) in _texts(entry) for entry in ours)
    if not (fresh and here and len(ours) == 1):
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
    for g, group in enumerate(_read(client, file)["hooks"][client.event]):
        for h, hook in enumerate(group.get("hooks", [])):
            if _is_ours(hook):
                alone = {"async": False, **hook}
                identity = {"event_name": "pre_tool_use", "matcher": group.get("matcher"), "hooks": [alone]}
                text = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
                digest = f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
                kept = [states.get(f"{path}:pre_tool_use:{g}:{h}") for path in {file, file.resolve()}]
                return any(isinstance(k, dict) and _holds(k, digest) for k in kept)
    return False


def _holds(kept: dict[str, Any], digest: str) -> bool:
    return kept.get("trusted_hash") == digest and kept.get("enabled") is not False


def _write(file: Path, text: str) -> None:
    """Replace a file at once, through a link if it is one, with the mode it had."""
    target = file.resolve()
    fresh = target.with_name(f"{target.name}.{os.getpid()}.new")
    fresh.write_bytes(text.encode())
    with contextlib.suppress(FileNotFoundError):
        fresh.chmod(target.stat().st_mode & 0o777)
    fresh.replace(target)
