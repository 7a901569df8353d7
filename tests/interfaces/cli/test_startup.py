"""Each command, and the server's first answer, import only the modules that they need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HEAVY = frozenset({"torch", "paramiko", "huggingface_hub", "numpy", "mcp", "rich"})

# Runs in a fresh interpreter: does the same as a command, then lists all modules that were imported for it.
RUN = """
import contextlib, io, json, sys
from gpuwarden.interfaces.cli.main import run
with contextlib.redirect_stdout(io.StringIO()):
    code = run(json.load(sys.stdin))
print(json.dumps([code, sorted(sys.modules)]))
"""
LISTEN = """
import json, sys
from gpuwarden.interfaces.mcp.stdio import LateContext, make_server
make_server(LateContext(None))
print(json.dumps([0, sorted(sys.modules)]))
"""
LIBRARIES = HEAVY | {"httpx2", "starlette", "uvicorn", "tomlkit", "safetensors", "psutil", "packaging", "filelock"}
BASICS = {"pydantic", "pydantic_core", "anyio", "asyncio", "yaml", "sqlite3", "platformdirs", "filelock", "email"}
PACKAGES = {"checkpoints", "hub", "knowledge", "ledger", "lifecycle", "providers", "rehearsal", "remote", "rules"}


def imported_for(script: str, tmp_path: Path, *words: str) -> set[str]:
    """Return the modules that a fresh interpreter has imported after running the script."""
    return set(done_by(script, tmp_path, *words))


def done_by(script: str, tmp_path: Path, *words: str) -> list[Any]:
    """Run the script in a fresh interpreter, and return the list that it prints about itself."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("GPUWARDEN_")}
    env |= {"GPUWARDEN_HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}  # servers register themselves there
    done = subprocess.run(
        [sys.executable, "-c", script], input=json.dumps(words), env=env, capture_output=True, text=True, timeout=300,
        check=True,
    )  # fmt: skip
    code, found = json.loads(done.stdout)
    assert code == 0, done.stderr
    return list(found)


@pytest.mark.parametrize("words", [["--help"], ["submit", "--help"], ["instances", "--help"], ["mcp", "--help"]])
def test_help_imports_the_command_line_and_nothing_else(tmp_path: Path, words: list[str]) -> None:
    found = imported_for(RUN, tmp_path, *words)
    assert found.isdisjoint(LIBRARIES | BASICS)
    assert found.isdisjoint(f"gpuwarden.{package}" for package in PACKAGES)


@pytest.mark.slow
@pytest.mark.parametrize("word", ["status", "jobs", "costs"])
def test_overview_imports_no_reader_of_scripts_files_or_references(tmp_path: Path, word: str) -> None:
    found = imported_for(RUN, tmp_path, word, "--json")
    assert found.isdisjoint(LIBRARIES)
    packages = {"checkpoints", "knowledge", "rules", "static_analysis", "rehearsal", "remote.ssh.session"}
    assert found.isdisjoint(f"gpuwarden.{package}" for package in packages)


@pytest.mark.slow
def test_instances_command_skips_unneeded_imports(tmp_path: Path) -> None:
    found = imported_for(RUN, tmp_path, "instances", "--json")
    assert found.isdisjoint(LIBRARIES)
    packages = {
        "checkpoints",
        "knowledge",
        "rules",
        "static_analysis",
        "lifecycle.execution",
        "lifecycle.submission",
        "lifecycle.teardown",
        "remote.ssh.session",
    }
    assert found.isdisjoint(f"gpuwarden.{package}" for package in packages)


SCRIPT = """
with open("outputs/result.txt", "w") as file:
    file.write("done")
"""
USED = """
import contextlib, io, json, sys
from pydantic import BaseModel
from gpuwarden.interfaces.cli.main import run
from gpuwarden.profiles import _load
from gpuwarden.static_analysis.signatures.tables import table

def below(model):
    return {model}.union(*map(below, model.__subclasses__()))

with contextlib.redirect_stdout(io.StringIO()):
    code = run(json.load(sys.stdin))
models = [m for m in below(BaseModel) if m.__module__.startswith("gpuwarden.")]
built = sum(m.__pydantic_complete__ for m in models)
print(json.dumps([code, [len(models), built, _load.cache_info().misses, table.cache_info().misses]]))
"""


@pytest.mark.slow
def test_dry_run_skips_unneeded_imports(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, "utf-8")
    words = ("--platform", "local", "--output", "outputs", "--timeout", "60", str(tmp_path / "train.py"))
    found = imported_for(RUN, tmp_path, "submit", "--dry-run", "--json", *words)
    assert found.isdisjoint(LIBRARIES)
    packages = {
        "checkpoints.archive",
        "checkpoints.formats",
        "interfaces.http",
        "interfaces.mcp",
        "interfaces.results.overview",
        "knowledge",
        "lifecycle.artifacts.store_copy",
        "lifecycle.fan_out",
        "rehearsal",
        "remote.first_step",
        "remote.s3_store",
        "remote.ssh.session",
        "static_analysis.signatures.releases",
    }
    assert found.isdisjoint(f"gpuwarden.{package}" for package in packages)


@pytest.mark.slow
def test_dry_run_reads_one_profile_and_no_table_and_builds_few_models(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, "utf-8")
    words = ("--platform", "local", "--output", "outputs", "--timeout", "60", str(tmp_path / "train.py"))
    models, built, profiles, tables = done_by(USED, tmp_path, "submit", "--dry-run", "--json", *words)
    assert (profiles, tables) == (1, 0)
    assert built < models / 4


ENTRY = """
import contextlib, gc, io, json, sys
from gpuwarden.__main__ import main

def collections():
    return sum(generation["collections"] for generation in gc.get_stats())

before = collections()
sys.argv = ["gpuwarden", *json.load(sys.stdin)]
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main()
print(json.dumps([0, [collections() - before, gc.get_freeze_count()]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--version"], ["status"], ["submit", "--dry-run", "--platform", "local", __file__]])
def test_commands_trigger_no_garbage_collection(tmp_path: Path, words: list[str]) -> None:
    collections, frozen = done_by(ENTRY, tmp_path, *words)
    assert collections == 0
    assert frozen > 10_000  # objects that the interpreter's last collections would otherwise scan


@pytest.mark.slow
def test_server_lists_its_tools_without_importing_use_cases(tmp_path: Path) -> None:
    found = imported_for(LISTEN, tmp_path)
    assert found.isdisjoint({"torch", "paramiko", "huggingface_hub", "numpy", "safetensors"})
    assert found.isdisjoint(f"gpuwarden.{package}" for package in {*PACKAGES, "backends", "static_analysis"})
