"""Generate the manifests that clients and registries read to install gpuwarden, and the table in docs/platforms.md.

Run `python -m gpuwarden.interfaces.manifests` in a checkout to write them. The name, version, description and license
come from pyproject.toml, the command from `launch`, and the variables from docstring tables in the modules that read
them. A test checks that the files are up to date.

Claude Code, Codex and Gemini start the server from the plugin's folder. Each needs its own file: only Claude Code
expands `${CLAUDE_PLUGIN_ROOT}` in arguments, only Gemini expands `${extensionPath}`, and Codex accepts `"cwd": "."`.
Claude Code's plugin is the folder `plugin`, whose links it replaces with copies of the files. Codex ignores links and
Gemini reads only the root, so their plugin is the root; `.gitattributes` and Codex's `--sparse` leave the tests out.
The plugin in the portable format (Agent Plugins) is in a separate folder, because Codex would otherwise read it instead
of its own file.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any, Final

from gpuwarden.interfaces.hooks.install import plugin_hooks
from gpuwarden.interfaces.launch import SOURCE, Run, entry, from_folder, from_source, serve
from gpuwarden.interfaces.variables import ROW, Variable, variables
from gpuwarden.profiles import BLOCK, load_profile, markdown_table, profile_names
from gpuwarden.providers.base import PROVIDERS

ROOT = Path(__file__).resolve().parents[3]
TITLE = "gpuwarden"
RUNTIME: Final = ("LICENSE", "README.md", "profiles", "pyproject.toml", "references", "server", "skills", "uv.lock")
"""The files and folders that the server needs at run time."""
ICON: Final = "docs/icon.svg"
PLATFORMS: Final = "docs/platforms.md"
REGISTRY_NAME = re.compile(r"<!-- mcp-name: (\S+) -->")


def manifests(root: Path = ROOT) -> dict[str, str]:
    """Return every manifest's text, keyed by its path relative to the checkout `root`."""
    project: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    name, version = project["name"], project["version"]
    about = project["description"]
    short = about.partition(":")[0][:100]  # a registry shows at most 100 characters
    authors = [a["name"] for a in project.get("authors", ())]
    author = {"name": authors[0] if authors else f"the {name} authors"}
    package = {"name": name, "version": version, "description": about}
    licensed = {**package, "author": author, "license": project["license"]}
    shown = {"displayName": TITLE, "shortDescription": short, "category": "Productivity"}
    shown |= {"composerIcon": f"./{ICON}", "logo": f"./{ICON}"}
    offer = {"name": name, "source": "./plugin", "description": about}
    policy = {"installation": "AVAILABLE", "authentication": "ON_INSTALL"}
    local = {"source": {"source": "local", "path": "./"}, "policy": policy, "category": "Productivity"}
    schemas = "https://agent-plugins.org/schemas/1.0.0"
    read = variables()

    def servers(client: str, run: Run, **more: str) -> dict[str, Any]:
        return {"mcpServers": {name: {**entry(client, run, [v.name for v in read]), **more}}}

    bodies: dict[str, dict[str, Any]] = {
        "plugin/.claude-plugin/plugin.json": {
            **licensed,
            **servers("claude", from_folder("claude", "${CLAUDE_PLUGIN_ROOT}")),
        },
        ".claude-plugin/marketplace.json": {
            "name": f"{name}-marketplace",
            "description": about,
            "owner": author,
            "plugins": [offer],
        },
        ".codex-plugin/plugin.json": {
            **licensed,
            "skills": "./skills/",
            "mcpServers": "./clients/codex.json",
            "hooks": "./clients/codex-hooks.json",
            "interface": shown,
        },
        "clients/codex.json": servers("codex", from_folder("codex"), cwd="."),
        ".agents/plugins/marketplace.json": {
            "name": name,
            "interface": {"displayName": TITLE},
            "plugins": [{"name": name, **local}],
        },
        "plugin/hooks/hooks.json": plugin_hooks("claude"),
        "clients/codex-hooks.json": plugin_hooks("codex"),
        "hooks/hooks.json": plugin_hooks("gemini"),
        "gemini-extension.json": {**package, **servers("gemini", from_folder("gemini", "${extensionPath}"))},
        ".cursor-plugin/plugin.json": {
            **licensed,
            "logo": ICON,
            "skills": "./skills/",
            "mcpServers": "./clients/cursor.json",
            "hooks": {"hooks": {}},  # without it, Cursor would read Gemini's hooks
        },
        "clients/cursor.json": servers("cursor", from_source("cursor", version)),
        "agent-plugin/plugin.json": {
            "$schema": f"{schemas}/plugin.schema.json",
            **package,
            "license": project["license"],
        },
        "agent-plugin/mcp.json": {
            "$schema": f"{schemas}/mcp.schema.json",
            **servers("agent-plugin", from_source("agent-plugin", version)),
        },
        "server.json": _registry(root, project, short, read),
    }
    return {path: json.dumps(body, indent=2, ensure_ascii=False) + "\n" for path, body in bodies.items()}


def platforms_page(root: Path = ROOT) -> str:
    """Return docs/platforms.md, with the table of the variables that each platform's provider reads."""
    modules = dict(PROVIDERS.usable())
    rows = [
        (f"`{profile.id}`", names, meaning)
        for profile in map(load_profile, profile_names())
        for names, meaning in ROW.findall((profile.provider and modules[profile.provider].__doc__) or "")
    ]
    table = "\n".join(markdown_table(("platform", "variable", "meaning"), rows))
    page = (root / PLATFORMS).read_text("utf-8")
    return BLOCK.sub(lambda block: f"<!-- generated:{block[1]} -->\n{table}\n<!-- /generated -->", page)


def _registry(root: Path, project: dict[str, Any], short: str, read: list[Variable]) -> dict[str, Any]:
    """Return the entry for the MCP registry, with the name from README.md. Raises ValueError if README.md contains no
    name.
    """
    proof = REGISTRY_NAME.search((root / "README.md").read_text("utf-8"))
    if proof is None:
        raise ValueError("README.md has no line <!-- mcp-name: ... -->")
    source = SOURCE.format(version=project["version"])
    package = {
        "registryType": "pypi",
        "identifier": project["name"],
        "version": project["version"],
        "runtimeHint": "uvx",
        "runtimeArguments": [{"type": "named", "name": "--from", "value": source}],
        "packageArguments": [{"type": "positional", "value": word} for word in serve("registry")[1:]],
        "transport": {"type": "stdio"},
        "environmentVariables": [
            {"name": v.name, "description": v.meaning, "isRequired": False, "isSecret": v.secret} for v in read
        ],
    }
    return {
        "$schema": "https://static.modelcontextprotocol.io/schemas/2025-12-11/server.schema.json",
        "name": proof[1],
        "title": TITLE,
        "description": short,
        "version": project["version"],
        "icons": [
            {"src": f"{project['urls']['Documentation']}icon.svg", "mimeType": "image/svg+xml", "sizes": ["any"]}
        ],
        "repository": {"url": project["urls"]["Source"], "source": "github"},
        "packages": [package],
    }


def write_manifests(root: Path = ROOT) -> int:
    """Write the manifests, the page and the links in `plugin`; return the number of files whose text changed."""
    changed = 0
    (root / "plugin").mkdir(exist_ok=True)
    for name in RUNTIME:
        if not (root / "plugin" / name).is_symlink():
            (root / "plugin" / name).symlink_to(Path("..", name))
    for path, text in {**manifests(root), PLATFORMS: platforms_page(root)}.items():
        file = root / path
        if not file.exists() or file.read_text("utf-8") != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, "utf-8")
            changed += 1
    return changed


if __name__ == "__main__":
    print("changed:", write_manifests())
