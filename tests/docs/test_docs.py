"""Tests for every promise of the README and docs/: commands, configurations, names."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from gpuwarden import __version__
from gpuwarden.core.policy import Policy
from gpuwarden.interfaces.cli.main import cli
from gpuwarden.interfaces.launch import SOURCE
from gpuwarden.interfaces.variables import variables
from paths import ROOT

README = (ROOT / "README.md").read_text("utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
GUIDE = "\n".join([README, *(p.read_text("utf-8") for p in PAGES if p.parent != ROOT)])
SCREENS = 3 * 50  # lines


def blocks(language: str) -> list[str]:
    """Return the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)


def test_make_commands_in_the_readme_are_existing_targets() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z]+)", README)) | set(re.findall(r"^make ([a-z]+)", README, re.MULTILINE))
    assert {"demo", "test"} <= named <= targets


def test_make_demo_does_not_echo_its_command() -> None:
    recipe = re.search(r"^demo:.*\n\t(.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert recipe is not None and recipe[1].startswith("@")


def test_client_configurations_start_the_server() -> None:
    found = [json.loads(text) for text in blocks("json")]
    servers = [next(iter(c.values()))["gpuwarden"] for c in found]
    servers += [t["mcp_servers"]["gpuwarden"] for t in map(tomllib.loads, blocks("toml")) if "mcp_servers" in t]
    assert len(servers) == 4
    assert all((s["command"], s["args"]) == ("gpuwarden", ["mcp"]) for s in servers)
    assert "claude mcp add gpuwarden -- gpuwarden mcp" in GUIDE
    assert {n for s in servers for n in s.get("env_vars", ())} <= {v.name for v in variables()}


def test_documented_sources_fetch_this_version() -> None:
    assert GUIDE.count("git+") == GUIDE.count(SOURCE.format(version=__version__)) == 4


def test_readme_plugin_names_match_the_manifests() -> None:
    for client, at in (("claude", ".claude-plugin"), ("codex", ".agents/plugins")):
        market = json.loads((ROOT / at / "marketplace.json").read_text("utf-8"))
        assert re.search(
            rf"^{client} (?:.|\\\n)* {market['plugins'][0]['name']}@{market['name']}$", README, re.MULTILINE
        ), client


def test_documented_policies_are_valid() -> None:
    shown = [t for t in map(tomllib.loads, blocks("toml")) if "caps" in t]
    assert len(shown) == 2
    for policy in shown:
        Policy.model_validate(policy)


def test_every_command_and_option_shown_exists() -> None:
    for line in re.findall(r"gpuwarden ([a-z][a-z-]*)((?: [^`\n#|&]*)?)", "\n".join(blocks("sh"))):
        command, rest = line
        assert command in cli.commands, command
        found = cli.commands[command]
        if isinstance(found, click.Group) and (sub := rest.split()[:1]) and not sub[0].startswith("-"):
            found = found.commands[sub[0]]
        known = {o for p in found.params for o in p.opts}
        ours = rest.partition(".py ")[0]  # arguments after a script belong to it
        assert set(re.findall(r"--[a-z-]+", ours)) <= known, rest


@pytest.mark.slow
def test_documented_tools_match_the_server(tmp_path: Path) -> None:
    named = set(re.findall(r"`([a-z]+_[a-z_]+)`", GUIDE.split("The tools are")[1].split(";")[0]))
    code = "import anyio\nfrom gpuwarden.app import open_context\n"
    code += "from gpuwarden.interfaces.mcp.server import make_server\n"
    code += "s = make_server(open_context('test'))\nprint(*[t.name for t in anyio.run(s.list_tools)])"
    listed = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"GPUWARDEN_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert named == set(listed.stdout.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_between_pages_resolve(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:|#)([^)#\s]+)(?:#([^)\s]+))?", page.read_text("utf-8")):
        there = page.parent / target
        assert there.exists(), target
        headings = re.findall(r"^#+ (.*)$", there.read_text("utf-8"), re.MULTILINE) if anchor else []
        assert not anchor or anchor in {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}, anchor


def test_the_readme_fits_three_screens_and_opens_with_the_picture() -> None:
    assert README.count("\n") <= SCREENS
    assert README.index("(docs/demo.svg)") < README.index("\n## ")


def test_readme_links_to_every_guide_page() -> None:
    assert {f"docs/{p.name}" for p in PAGES if p.parent != ROOT} <= set(re.findall(r"\]\(([^)#]+)", README))


def test_architecture_page_names_only_existing_files() -> None:
    package = ROOT / "server" / "gpuwarden"
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    named = set(re.findall(r"\b\w+(?:/\w+)*(?:/|\.py\b)", text)) - {"I/"}
    assert len(named) > 30
    assert [n for n in named if not any((base / n).exists() for base in (package, package / "lifecycle", ROOT))] == []
