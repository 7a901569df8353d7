"""The files by which clients and registries install this repository, written from pyproject.toml.

`python -m gpuwarden.interfaces.manifests` in a checkout writes them. Name, version, description and licence have their
one home in pyproject.toml; a test checks that the files are current.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
TITLE = "gpuwarden"
REGISTRY_NAME = re.compile(r"<!-- mcp-name: (\S+) -->")
ENVIRONMENT = {
    "HF_TOKEN": ("Token for the Hugging Face Hub", True),
    "GPUWARDEN_HOME": ("Folder of the ledger, the run records and pulled artifacts", False),
    "GPUWARDEN_POLICY": ("The policy file; a person is asked before another one than the recorded one counts", False),
}


def manifests(root: Path = ROOT) -> dict[str, str]:
    """Return the text of every manifest by its path below `root`, a checkout."""
    project: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    name, version = project["name"], project["version"]
    about = project["description"]
    short = about.partition(":")[0][:100]  # a registry shows 100 characters at most
    authors = [a["name"] for a in project.get("authors", ())]
    author = {"name": authors[0] if authors else f"the {name} authors"}
    package = {"name": name, "version": version, "description": about}
    licensed = {**package, "author": author, "license": project["license"]}
    run = {"command": "uvx", "args": [f"{name}@{version}", "mcp"]}
    stdio = {"mcpServers": {name: {"type": "stdio", **run}}}
    shown = {"displayName": TITLE, "shortDescription": short, "category": "Productivity"}
    parts = {"skills": "./skills/", "mcpServers": "./.mcp.json"}
    offer = {"name": name, "source": "./", "description": about}
    policy = {"installation": "AVAILABLE", "authentication": "ON_INSTALL"}
    local = {"source": {"source": "local", "path": "./"}, "policy": policy, "category": "Productivity"}
    schemas = "https://agent-plugins.org/schemas/1.0.0"
    bodies: dict[str, dict[str, Any]] = {
        ".claude-plugin/plugin.json": licensed,
        ".claude-plugin/marketplace.json": {
            "name": f"{name}-marketplace",
            "description": about,
            "owner": author,
            "plugins": [offer],
        },
        ".mcp.json": stdio,
        ".codex-plugin/plugin.json": {**licensed, **parts, "interface": shown},
        ".agents/plugins/marketplace.json": {
            "name": name,
            "interface": {"displayName": TITLE},
            "plugins": [{"name": name, **local}],
        },
        ".cursor-plugin/plugin.json": {**licensed, **parts},
        "gemini-extension.json": {**package, "mcpServers": {name: run}},
        "plugin.json": {"$schema": f"{schemas}/plugin.schema.json", **package, "license": project["license"]},
        "mcp.json": {"$schema": f"{schemas}/mcp.schema.json", **stdio},
        "server.json": _registry(root, name, version, short),
    }
    return {path: json.dumps(body, indent=2, ensure_ascii=False) + "\n" for path, body in bodies.items()}


def _registry(root: Path, name: str, version: str, short: str) -> dict[str, Any]:
    """Return the entry of the MCP registry; its name is the one that README.md proves."""
    proof = REGISTRY_NAME.search((root / "README.md").read_text("utf-8"))
    if proof is None:
        raise ValueError("README.md has no line <!-- mcp-name: ... -->")
    variables = [
        {"name": variable, "description": text, "isRequired": False, "isSecret": secret}
        for variable, (text, secret) in ENVIRONMENT.items()
    ]
    package = {
        "registryType": "pypi",
        "identifier": name,
        "version": version,
        "runtimeHint": "uvx",
        "packageArguments": [{"type": "positional", "value": "mcp"}],
        "transport": {"type": "stdio"},
        "environmentVariables": variables,
    }
    return {
        "$schema": "https://static.modelcontextprotocol.io/schemas/2025-12-11/server.schema.json",
        "name": proof[1],
        "title": TITLE,
        "description": short,
        "version": version,
        "packages": [package],
    }


def write_manifests(root: Path = ROOT) -> int:
    """Write every manifest; return how many files changed."""
    changed = 0
    for path, text in manifests(root).items():
        file = root / path
        if not file.exists() or file.read_text("utf-8") != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, "utf-8")
            changed += 1
    return changed


if __name__ == "__main__":
    print("changed:", write_manifests())
