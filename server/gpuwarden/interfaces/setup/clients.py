"""The clients that `gpuwarden setup` supports, with their configuration files."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpuwarden.interfaces.launch import NAME
from gpuwarden.interfaces.setup import jsonc


@dataclass(frozen=True)
class ClientFile:
    """One client: its name and title, its configuration file, and the key in it under which servers are listed.

    `folder` exists if the client is installed; `program` is its command.
    """

    name: str
    title: str
    file: Path
    key: str
    folder: Path
    program: str

    @property
    def installed(self) -> bool:
        """Return whether the client is installed on this machine."""
        return self.folder.is_dir() or shutil.which(self.program) is not None

    @property
    def toml(self) -> bool:
        """Return whether the file is TOML rather than JSON."""
        return self.file.suffix == ".toml"

    def parsed(self, text: str) -> dict[str, Any]:
        """Parse the client file's text. Raises ValueError if the text is not an object."""
        table = tomllib.loads(text) if self.toml else jsonc.loads(text)
        if not isinstance(table, dict):
            raise ValueError("the file does not contain an object")
        return table


def client_files(env: Mapping[str, str]) -> dict[str, ClientFile]:
    """Return every supported client, by name."""
    home = Path(env.get("HOME") or Path.home())
    claude = Path(env.get("CLAUDE_CONFIG_DIR") or home / ".claude").expanduser()
    codex = Path(env.get("CODEX_HOME") or home / ".codex").expanduser()
    config = Path(env.get("XDG_CONFIG_HOME") or home / ".config")
    code = {"darwin": home / "Library" / "Application Support", "win32": Path(env.get("APPDATA") or home)}
    user = code.get(sys.platform, config) / "Code" / "User"
    zed = (home / ".config" if sys.platform == "darwin" else config) / "zed"
    state = claude / ".claude.json" if env.get("CLAUDE_CONFIG_DIR") else home / ".claude.json"
    found = (
        ClientFile("claude", "Claude Code", state, "mcpServers", claude, "claude"),
        ClientFile("codex", "Codex", codex / "config.toml", "mcp_servers", codex, "codex"),
        ClientFile("gemini", "Gemini", home / ".gemini" / "settings.json", "mcpServers", home / ".gemini", "gemini"),
        ClientFile("cursor", "Cursor", home / ".cursor" / "mcp.json", "mcpServers", home / ".cursor", "cursor"),
        ClientFile("vscode", "VS Code", user / "mcp.json", "servers", user, "code"),
        ClientFile("zed", "Zed", zed / "settings.json", "context_servers", zed, "zed"),
    )
    return {client.name: client for client in found}


BRINGS_GUARD: Final = frozenset({"claude", "codex", "gemini"})
"""Clients whose plugin contains the guard's hook."""


_ODD: Final = (OSError, ValueError, AttributeError, LookupError, TypeError, RecursionError, StopIteration)
"""Exceptions that reading another program's file can raise, because its format is not guaranteed."""


def plugin_folder(client: ClientFile) -> Path | None:
    """Return the folder of gpuwarden's plugin in a client, or None if the plugin is not installed.

    The plugin starts the server itself.
    """
    with contextlib.suppress(*_ODD):
        if client.name == "claude":
            enabled = jsonc.loads((client.folder / "settings.json").read_text("utf-8")).get("enabledPlugins", {})
            found = json.loads((client.folder / "plugins" / "installed_plugins.json").read_text("utf-8"))["plugins"]
            places = (Path(found[n][0]["installPath"]) for n, on in enabled.items() if on and n.startswith(f"{NAME}@"))
            return next(place for place in places if (place / ".claude-plugin" / "plugin.json").is_file())
        if client.name == "codex":
            plugins = tomllib.loads(client.file.read_text("utf-8")).get("plugins", {})
            name = str(next(n for n, p in plugins.items() if p.get("enabled") and n.startswith(f"{NAME}@")))
            versions = (client.folder / "plugins" / "cache" / name.partition("@")[2] / NAME).iterdir()
            return max(versions, key=lambda version: version.stat().st_mtime)
        folder = client.folder / "extensions" / NAME
        return folder if client.name == "gemini" and (folder / "gemini-extension.json").is_file() else None
    return None
