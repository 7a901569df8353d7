"""Imports point one way, and light modules stay light.

The rooms and their order are the table `LAYERS`: a room may import its own layer and the ones above it in the table.
A new room of the package has to be put into the table before its first commit passes.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "server" / "gpuwarden"

LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"__init__", "core"}),
    frozenset({"data", "frontmatter", "private"}),
    frozenset(
        {"ledger", "profiles", "knowledge", "rules", "hub", "checkpoints", "remote", "config", "notes", "known_secrets"}
    ),
    frozenset({"backends", "providers", "rehearsal"}),
    frozenset({"app", "lifecycle"}),
    frozenset({"serve", "commands", "cli", "__main__"}),
)
CORE_MAY = {"pydantic"}
CORE_MAY_BY_FILE = {"core/clock.py": {"anyio"}}
ONLY_IN = {"mcp": ("serve/mcp_*.py", "serve/tools/*.py")}
HEAVY = frozenset({"torch", "paramiko", "huggingface_hub", "numpy", "mcp", "rich"})
HEAVY_AT_TOP = {
    "mcp": ONLY_IN["mcp"],
    "rich": ("interfaces/cli/console.py", "interfaces/cli/demo.py", "interfaces/cli/verify_report.py"),
}

# Run in a fresh interpreter: import every module, one after the other, and name the first that brings a heavy one.
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


@dataclass(frozen=True)
class Import:
    """One imported module: its dotted name, the line, and whether it runs when the file is imported."""

    name: str
    line: int
    at_top: bool


def imports_of(tree: ast.Module) -> Iterator[Import]:
    """Every import of a file, wherever it stands; `import_module("literal")` counts too."""
    yield from _walk(tree, at_top=True)


def _walk(node: ast.AST, *, at_top: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, node.lineno, at_top) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from _from(node, at_top)
    elif isinstance(node, ast.Call) and _is_dynamic(node.func) and node.args and isinstance(node.args[0], ast.Constant):
        yield Import(str(node.args[0].value), node.lineno, at_top)
    at_top = at_top and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    if isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
        for child in node.body:
            yield from _walk(child, at_top=False)
        for child in node.orelse:
            yield from _walk(child, at_top=at_top)
        return
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, at_top=at_top)


def _from(node: ast.ImportFrom, at_top: bool) -> Iterator[Import]:
    if node.level:
        yield Import("." * node.level + (node.module or ""), node.lineno, at_top)
    elif node.module == "gpuwarden":  # `from gpuwarden import core` names the room last
        yield from (Import(f"gpuwarden.{alias.name}", node.lineno, at_top) for alias in node.names)
    else:
        yield Import(node.module or "", node.lineno, at_top)


def _is_dynamic(func: ast.expr) -> bool:
    name = func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""
    return name in {"import_module", "__import__"}


def layer_of(room: str) -> int | None:
    """The place of a room in the table, or None."""
    return next((i for i, rooms in enumerate(LAYERS) if room in rooms), None)


def faults(file: str, source: str) -> list[str]:
    """What is wrong with the imports of `file`, a path inside the package."""
    room = file.partition("/")[0].removesuffix(".py")
    if layer_of(room) is None:
        return [f"{file}: the room {room!r} is not in the table LAYERS"]
    found = (fault for i in imports_of(ast.parse(source)) for fault in _faults_of(file, room, i))
    return list(found)


def _faults_of(file: str, room: str, i: Import) -> Iterator[str]:
    top, _, rest = i.name.partition(".")
    if i.name.startswith("."):
        yield f"{file}:{i.line}: relative import"
    elif top == "gpuwarden":
        yield from _direction(file, room, i, rest.partition(".")[0] or "__init__")
    elif room == "core" and top not in sys.stdlib_module_names | CORE_MAY | CORE_MAY_BY_FILE.get(file, set()):
        yield f"{file}:{i.line}: core imports {top}"
    if top in ONLY_IN and not _among(file, ONLY_IN[top]):
        yield f"{file}:{i.line}: only {', '.join(ONLY_IN[top])} imports {top}"
    if i.at_top and top in HEAVY and not _among(file, HEAVY_AT_TOP.get(top, ())):
        yield f"{file}:{i.line}: {top} is heavy; import it inside the function that needs it"


def _among(file: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(file, pattern) for pattern in patterns)


def _direction(file: str, room: str, i: Import, target: str) -> Iterator[str]:
    here, there = layer_of(room), layer_of(target)
    assert here is not None
    if target == "__version__":
        return
    if there is None:
        yield f"{file}:{i.line}: {i.name}: the room {target!r} is not in the table LAYERS"
    elif there > here:
        yield f"{file}:{i.line}: {room} imports {i.name}, which stands above it"


# ---------------------------------------------------------------------------------------------------- the real code


def package_files() -> list[str]:
    return sorted(p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py") if "_data" not in p.parts)


def test_imports_point_one_way():
    files = package_files()
    assert "core/models.py" in files
    found = [fault for f in files for fault in faults(f, (PACKAGE / f).read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


def test_evals_import_nothing_of_ours():
    for file in sorted((ROOT / "evals").rglob("*.py")):
        names = [i.name for i in imports_of(ast.parse(file.read_text(encoding="utf-8")))]
        assert not [n for n in names if n.partition(".")[0] == "gpuwarden"], file


def light_modules() -> list[str]:
    """Every module of the package but those that may import a heavy library: nothing to list, nothing to forget."""
    heavy = tuple(pattern for patterns in HEAVY_AT_TOP.values() for pattern in patterns)
    files = [f for f in package_files() if not _among(f, heavy)]
    return sorted(
        "gpuwarden." + f.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for f in files
        if f != "__init__.py"
    )


def test_no_module_brings_a_heavy_library_when_it_is_imported():
    names = light_modules()
    assert {"gpuwarden.core.models", "gpuwarden.profiles", "gpuwarden.backends.base", "gpuwarden.backends"} <= set(
        names
    )
    assert import_all(names) == []


def test_a_heavy_library_is_noticed_with_the_module_that_brought_it():
    assert import_all(["gpuwarden.core.models", "safetensors.numpy"]) == ["importing safetensors.numpy brings numpy"]


def import_all(names: list[str]) -> list[str]:
    asked = json.dumps([sorted(HEAVY), names])
    command = [sys.executable, "-c", IMPORT_ALL]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# ------------------------------------------------------------------------------------------------------ the checker


@pytest.mark.parametrize(
    ("file", "source", "fault"),
    [
        ("core/models.py", "import gpuwarden.ledger", "core imports gpuwarden.ledger, which stands above it"),
        ("core/models.py", "from gpuwarden import backends", "core imports gpuwarden.backends"),
        (
            "core/models.py",
            "def f():\n    from gpuwarden.interfaces.cli.main import main",
            "core/models.py:2: core imports gpuwarden.interfaces.cli.main",
        ),
        ("core/models.py", "if TYPE_CHECKING:\n    from gpuwarden.hub import x", "core imports gpuwarden.hub"),
        ("core/models.py", "import importlib\nimportlib.import_module('gpuwarden.serve')", "imports gpuwarden.serve"),
        ("core/models.py", "import yaml", "core imports yaml"),
        ("core/models.py", "import anyio", "core imports anyio"),
        ("core/models.py", "def f():\n    import numpy", "core imports numpy"),
        ("ledger/store.py", "from gpuwarden.lifecycle import submit", "which stands above it"),
        ("rules/pf.py", "from gpuwarden.providers.base import x", "which stands above it"),
        ("backends/ssh.py", "from gpuwarden.lifecycle.submission.submit import x", "which stands above it"),
        ("lifecycle/submission/submit.py", "from gpuwarden.interfaces.cli.main import main", "which stands above it"),
        ("lifecycle/submission/submit.py", "import mcp.types", "only serve/mcp_*.py, serve/tools/*.py imports mcp"),
        (
            "serve/http_server.py",
            "def f():\n    from mcp import x",
            "only serve/mcp_*.py, serve/tools/*.py imports mcp",
        ),
        ("hub/details.py", "import huggingface_hub", "huggingface_hub is heavy"),
        ("remote/ssh/session.py", "try:\n    import paramiko\nexcept ImportError:\n    pass", "paramiko is heavy"),
        ("checkpoints/torch.py", "class A:\n    import torch", "torch is heavy"),
        ("serve/web.py", "if not TYPE_CHECKING:\n    import numpy", "numpy is heavy"),
        ("serve/web.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import numpy", "numpy is heavy"),
        ("hub/details.py", "from . import x", "relative import"),
        ("hub/details.py", "from ..core import x", "relative import"),
        ("newroom/x.py", "", "the room 'newroom' is not in the table"),
        ("newfile.py", "", "the room 'newfile' is not in the table"),
        ("interfaces/cli/main.py", "import gpuwarden.nowhere", "the room 'nowhere' is not in the table"),
    ],
)
def test_the_checker_sees_a_wrong_import(file: str, source: str, fault: str):
    assert any(fault in found for found in faults(file, source)), faults(file, source)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("core/models.py", "import json\nfrom pydantic import BaseModel\nfrom gpuwarden.core import errors"),
        ("core/clock.py", "import anyio"),
        ("interfaces/cli/main.py", "from gpuwarden import __version__\nfrom gpuwarden.lifecycle import submit"),
        ("interfaces/mcp/server.py", "import mcp"),
        ("interfaces/mcp/tools/jobs.py", "import mcp"),
        ("remote/ssh/session.py", "def f():\n    import paramiko"),
        ("hub/details.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import huggingface_hub"),
        ("providers/rehearsal.py", "from gpuwarden.rehearsal import cloud"),
        ("backends/ssh.py", "from gpuwarden.remote import ssh\nfrom gpuwarden.core.models import Place"),
    ],
)
def test_the_checker_lets_a_right_import_pass(file: str, source: str):
    assert faults(file, source) == []


def test_every_room_stands_in_one_layer():
    rooms = [room for layer in LAYERS for room in layer]
    assert len(rooms) == len(set(rooms))
