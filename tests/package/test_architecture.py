"""The structure of the code: import contracts, no import cycles, and light modules that stay light."""

from __future__ import annotations

import json
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import grimp
import pytest
from grimp import ImportGraph

from paths import ROOT

PACKAGE = ROOT / "server" / "gpuwarden"
HEAVY = frozenset({"torch", "paramiko", "huggingface_hub", "numpy", "mcp", "rich"})
MAY_BRING_HEAVY = (
    "interfaces/mcp/*",
    "interfaces/http/*",
    "interfaces/cli/console.py",
    "interfaces/cli/demo.py",
    "interfaces/cli/overnight.py",
    "interfaces/cli/screen.py",
    "interfaces/cli/verify_report.py",
    "static_analysis/estimate/trace_model.py",  # used by the traced child alone
)

# Run in a fresh interpreter: import every module in turn, and name the first that imports a heavy library.
IMPORT_ALL = """
import importlib, json, sys
heavy, names = json.load(sys.stdin)
seen = set()
for name in names:
    importlib.import_module(name)
    for library in sorted((set(heavy) & sys.modules.keys()) - seen):
        seen.add(library)
        print(f"importing {name} brings {library}")
"""


def circles(graph: ImportGraph) -> list[set[str]]:
    """Return every group of modules that import each other, lazy and TYPE_CHECKING imports included."""
    users = {m: graph.find_downstream_modules(m) for m in graph.modules}
    groups = ({m, *(n for n in users[m] if m in users[n])} for m in graph.modules)
    return [group for group in groups if len(group) > 1]


@pytest.mark.parametrize("package", ["gpuwarden", "evals"])
def test_modules_have_no_circular_imports(package: str) -> None:
    assert not circles(grimp.build_graph(package, cache_dir=None))


def test_a_circular_import_is_detected() -> None:
    graph = ImportGraph()
    for importer, imported in (("a", "b"), ("b", "c"), ("c", "b")):
        graph.add_module(importer)
        graph.add_module(imported)
        graph.add_import(importer=importer, imported=imported)
    assert {frozenset(c) for c in circles(graph)} == {frozenset({"b", "c"})}


def test_the_import_contracts_are_kept() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_light_modules_never_import_a_heavy_library() -> None:
    names = light_modules()
    assert {"gpuwarden.core.models", "gpuwarden.profiles", "gpuwarden.backends.base", "gpuwarden.backends"} <= set(
        names
    )
    assert import_all(names) == []


def test_a_heavy_library_is_reported_with_its_importing_module() -> None:
    assert import_all(["gpuwarden.core.models", "safetensors.numpy"]) == ["importing safetensors.numpy brings numpy"]


def light_modules() -> list[str]:
    """Return every module of the package but those that may import a heavy library."""
    files = sorted(p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py") if "_data" not in p.parts)
    return [
        "gpuwarden." + f.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for f in files
        if f != "__init__.py" and not any(fnmatchcase(f, pattern) for pattern in MAY_BRING_HEAVY)
    ]


def import_all(names: list[str]) -> list[str]:
    """Import modules in a fresh interpreter; return a line for each heavy library that they import."""
    asked = json.dumps([sorted(HEAVY), names])
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], input=asked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
