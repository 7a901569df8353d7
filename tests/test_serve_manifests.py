"""The files by which clients install this repository: current, one version, and accepted by a linter of them all."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import need
from gpuwarden import __version__
from gpuwarden.interfaces.manifests import ROOT, manifests, write_manifests

FILES = manifests()
COPIED = ("pyproject.toml", "README.md", "LICENSE", "AGENTS.md")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the manifests are made of and point to."""
    root = tmp_path / "gpuwarden"
    root.mkdir()
    for name in COPIED:
        shutil.copy(ROOT / name, root / name)
    shutil.copytree(ROOT / "skills", root / "skills", ignore=shutil.ignore_patterns("__pycache__"))
    return root


@pytest.mark.parametrize("path", FILES)
def test_it_is_current(path: str) -> None:
    assert (ROOT / path).read_text("utf-8") == FILES[path], "run `python -m gpuwarden.interfaces.manifests`"


def test_every_version_follows_the_project(checkout: Path) -> None:
    assert write_manifests(checkout) == len(FILES) and write_manifests(checkout) == 0
    file = checkout / "pyproject.toml"
    file.write_text(file.read_text("utf-8").replace(f'version = "{__version__}"', 'version = "9.8.7"'), "utf-8")
    assert write_manifests(checkout) > 5
    for path in FILES:
        text = (checkout / path).read_text("utf-8")
        assert __version__ not in text and ("9.8.7" in text or "marketplace" in path), path


def test_what_they_point_to_is_there() -> None:
    for path, text in FILES.items():
        for key, value in json.loads(text).items():
            if key in {"skills", "mcpServers"} and isinstance(value, str):
                assert (ROOT / value).exists(), (path, value)


def test_the_command_they_start_is_the_servers() -> None:
    entries = [json.loads(FILES[path])["mcpServers"]["gpuwarden"] for path in (".mcp.json", "mcp.json")]
    assert {json.dumps(e["args"]) for e in entries} == {json.dumps([f"gpuwarden@{__version__}", "mcp"])}
    done = subprocess.run([sys.executable, "-m", "gpuwarden", "mcp", "--help"], capture_output=True, timeout=60)
    assert done.returncode == 0


def test_the_registry_keeps_its_limits() -> None:
    entry = json.loads(FILES["server.json"])
    assert 1 <= len(entry["description"]) <= 100
    assert f"<!-- mcp-name: {entry['name']} -->" in (ROOT / "README.md").read_text("utf-8")


def test_a_readme_without_the_proof_is_refused(checkout: Path) -> None:
    (checkout / "README.md").write_text("# gpuwarden\n", "utf-8")
    with pytest.raises(ValueError, match="mcp-name"):
        manifests(checkout)


@pytest.mark.slow
def test_skillsaw_finds_nothing(checkout: Path) -> None:
    program = Path(sys.executable).parent / "skillsaw"
    need("skillsaw", program.exists())
    write_manifests(checkout)
    done = subprocess.run([program, "lint", "."], cwd=checkout, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "All checks passed" in done.stdout, done.stdout + done.stderr
    assert "cursor-plugin" in done.stdout and "mcp-registry" in done.stdout, "it saw what is here"
    (checkout / ".claude-plugin/plugin.json").write_text('{"name": 7}\n', "utf-8")
    broken = subprocess.run([program, "lint", "."], cwd=checkout, capture_output=True, text=True, timeout=60)
    assert "All checks passed" not in broken.stdout, "it would see a fault"
