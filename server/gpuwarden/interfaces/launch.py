"""Build the command line that starts the server, and the server's entry in a client's configuration.

A plugin starts the server from its own folder, with uv and the lock file in that folder. Without a plugin, the entry in
the client's configuration file starts this installation's server, or lets uvx download it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

NAME: Final = "gpuwarden"
CLIENT_NAMES: Final = ("claude", "codex", "gemini", "cursor", "vscode", "zed")
"""The clients that `gpuwarden setup` supports."""
SOURCE: Final = "git+https://github.com/gpuwarden/gpuwarden@v{version}"
"""The package source for uvx. Once the package is on PyPI, change only this line, to `gpuwarden=={version}`."""
FROZEN: Final = ("--frozen", "--no-dev")
OWN_ENVIRONMENT: Final = {"UV_PROJECT_ENVIRONMENT": ".venv"}
"""Makes uv use the environment in the plugin's folder. Without it, uv would install the plugin's packages into the
environment that one of the user's variables names.
"""
KEPT_BACK: Final = re.compile(
    r"TOKEN|SECRET|PASSWORD|PASSWD|KEY|AUTH|CREDENTIAL|CREDS|PRIVATE|CERT|PROXY|^AWS_|^GPUWARDEN_"
)
"""Matches gpuwarden's own variables, and variables that Gemini withholds by default or may consider secret."""
FIRST_START_S: Final = 300
"""Maximum duration in seconds of the first start, which downloads the packages in the lock file."""

Run = dict[str, Any]


def serve(client: str) -> list[str]:
    """Return the command line that starts the server for one client."""
    return [NAME, "mcp", "--client", client]


def from_folder(client: str, folder: str = "") -> Run:
    """Return the command that starts the server from a plugin's folder, by default the working directory."""
    where = ["--project", folder] if folder else []
    return {"command": "uv", "args": ["run", *where, *FROZEN, *serve(client)], "env": OWN_ENVIRONMENT}


def from_source(client: str, version: str) -> Run:
    """Return the command that downloads a version of the server and starts it."""
    return {"command": "uvx", "args": ["--from", SOURCE.format(version=version), *serve(client)]}


def in_cache() -> bool:
    """Return whether this installation is in uv's cache, which means that uvx started it.

    uv may delete such an installation at any time.
    """
    return "archive-v0" in Path(sys.prefix).parts


def own_command(client: str, version: str) -> Run:
    """Return the command that starts this server, or that downloads it again if it is in uv's cache."""
    if in_cache():
        return from_source(client, version)
    # Without -P, modules in the project folder where a client starts the server would replace the server's own.
    return {"command": sys.executable, "args": ["-P", "-m", *serve(client)]}


def entry(client: str, run: Run, names: Sequence[str]) -> dict[str, Any]:
    """Return a client's entry for the server. `names` are the variables to pass on; their values are not written.

    Claude Code, Cursor, VS Code and Zed start a server with their own environment. Codex passes only named variables.
    Gemini withholds variables that look secret unless the entry names them; `${NAME:-}` is empty if NAME is not set.
    """
    if client == "codex":
        return {**run, "env_vars": list(names), "startup_timeout_sec": FIRST_START_S}
    if client == "gemini":
        passed = {name: f"${{{name}:-}}" for name in names if KEPT_BACK.search(name)}
        return {**run, "env": run.get("env", {}) | passed, "timeout": FIRST_START_S * 1000}
    return run if client == "zed" else {"type": "stdio", **run}
