"""Each command, and the server's first answer, import only what they need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = frozenset({"torch", "paramiko", "huggingface_hub", "numpy", "mcp", "rich"})

# Run in a fresh interpreter: do what a command does, then name everything that was imported for it.
RUN = """
import contextlib, io, json, sys
from gpuwarden.interfaces.cli.main import run
with contextlib.redirect_stdout(io.StringIO()):
    code = run(json.load(sys.stdin))
print(json.dumps([code, sorted(sys.modules)]))
"""
LISTEN = """
import json, sys
import gpuwarden.interfaces.cli.main
from gpuwarden.interfaces.mcp.stdio_start import FirstAnswers, load_answers
line = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {
    "protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}})
reply, _ = FirstAnswers(load_answers())(line.encode())
print(json.dumps([0 if reply else 1, sorted(sys.modules)]))
"""
LIBRARIES = HEAVY | {"httpx2", "starlette", "uvicorn", "tomlkit", "safetensors", "psutil", "packaging"}
BASICS = {"pydantic", "pydantic_core", "anyio", "asyncio", "yaml", "sqlite3", "platformdirs", "filelock", "email"}
PACKAGES = {"checkpoints", "hub", "knowledge", "ledger", "lifecycle", "providers", "rehearsal", "remote", "rules"}


def imported_for(script: str, tmp_path: Path, *words: str) -> set[str]:
    """Every module that a fresh interpreter has imported after doing that."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("GPUWARDEN_")} | {"GPUWARDEN_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], input=json.dumps(words), env=env, capture_output=True, text=True, timeout=60,
        check=True,
    )  # fmt: skip
    code, modules = json.loads(done.stdout)
    assert code == 0, done.stderr
    return set(modules)


@pytest.mark.parametrize("words", [["--help"], ["submit", "--help"], ["instances", "--help"], ["mcp", "--help"]])
def test_help_imports_the_command_line_and_nothing_else(tmp_path: Path, words: list[str]) -> None:
    found = imported_for(RUN, tmp_path, *words)
    assert found.isdisjoint(LIBRARIES | BASICS)
    assert found.isdisjoint(f"gpuwarden.{package}" for package in PACKAGES)


def test_a_look_at_the_machines_imports_what_it_needs(tmp_path: Path) -> None:
    found = imported_for(RUN, tmp_path, "instances", "--json")
    assert found.isdisjoint(LIBRARIES)
    packages = {
        "checkpoints",
        "knowledge",
        "rules",
        "lifecycle.execution",
        "lifecycle.submission",
        "lifecycle.ending",
        "remote.ssh.session",
    }
    assert found.isdisjoint(f"gpuwarden.{package}" for package in packages)


def test_the_server_answers_its_first_request_before_any_library_is_imported(tmp_path: Path) -> None:
    found = imported_for(LISTEN, tmp_path)
    assert found.isdisjoint(LIBRARIES | BASICS)
    assert found.isdisjoint(f"gpuwarden.{package}" for package in PACKAGES)
