"""Put the package `gputrain` into a script that imports it, so that a job needs one file; and analyze such a script.

The package's code is added as comments after the script's last line. A loader before the script's first import of the
package imports the modules from these comments. The script itself is not changed, so `split` can restore it.
"""

from __future__ import annotations

import ast
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

from gpuwarden.data import data_dir
from gpuwarden.static_analysis.parsing import parse

FOLDER: Final = "gpu-training/scripts"
"""The folder with the shipped trainers, below the skills."""
PACKAGE: Final = "gputrain"
IMPORTS: Final = re.compile(rf"(?m)^[ \t]*(?:from|import)[ \t]+{PACKAGE}\b")
_CODE: Final = "# ---- gputrain: the code of the package, which the loader above imports ----"
_LOADER: Final = """\
# ---- gputrain: import the package from the comments at the end of this file ----
import importlib.abc
import importlib.util
import sys


class _Gputrain(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, file):
        self.file, self.modules, name = file, {}, None
        with open(file, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line == "# ---- gputrain: the code of the package, which the loader above imports ----\\n":
                    name = ""
                elif name is not None and line.startswith("#: "):
                    name = line[3:].strip()
                    self.modules[name] = ["\\n" * number]  # a traceback then has the line in this file
                elif name and line.startswith("#|"):
                    self.modules[name].append(line[3:] or "\\n")

    def find_spec(self, name, path=None, target=None):
        if name in self.modules:
            return importlib.util.spec_from_loader(name, self, origin=self.file, is_package=name == "gputrain")

    def exec_module(self, module):
        exec(compile("".join(self.modules[module.__name__]), self.file, "exec"), vars(module))


sys.meta_path.insert(0, _Gputrain(__file__))
# ---- end ----
"""


@dataclass(frozen=True)
class Bundle:
    """A script, and the sources of the package in it by module. `lines` are the lines at which the sources begin."""

    script: str
    sources: Mapping[str, str] = field(default_factory=dict)
    lines: Mapping[str, int] = field(default_factory=dict)


@cache
def shipped_files() -> Mapping[str, str]:
    """Return the files of the shipped package by name."""
    return {path.name: path.read_text("utf-8") for path in (data_dir("skills") / FOLDER / PACKAGE).glob("*.py")}


def shipped_package() -> Mapping[str, str]:
    """Return the sources of the shipped package by module."""
    return sources_of(shipped_files())


def sources_of(files: Mapping[str, str]) -> dict[str, str]:
    """Return the sources by module, for the files of a package by name."""
    modules = {PACKAGE if name == "__init__.py" else f"{PACKAGE}.{Path(name).stem}": name for name in sorted(files)}
    return {module: files[name] for module, name in modules.items()}


def bundled(text: str, tree: ast.Module, sources: Mapping[str, str]) -> str:
    """Return a script with the package, for the script's text and its syntax tree.

    A script that does not import the package, or that already contains it, is returned unchanged.
    """
    first = next((n for n in tree.body if any(map(_imported, ast.walk(n)))), None)
    if first is None or f"\n{_CODE}\n" in text:
        return text
    starts = (first, *getattr(first, "decorator_list", ()))
    lines = io.StringIO(text, newline="").readlines()  # the line ends of Python, unlike those of `splitlines`
    at = min(node.lineno for node in starts) - 1
    end = "" if text.endswith("\n") else "\n"
    tail = "".join(f"{line}\n" for module, source in sources.items() for line in (f"#: {module}", *_commented(source)))
    return "".join([*lines[:at], _LOADER, *lines[at:], end, f"{_CODE}\n", tail])


def _commented(source: str) -> Iterator[str]:
    text = io.StringIO(source, newline=None).read()
    return (f"#| {line}" if line else "#|" for line in text.removesuffix("\n").split("\n") if text)


def split(text: str) -> Bundle:
    """Return the script in a bundle and the package's sources; no sources if the text is not a bundle."""
    before, loader, rest = text.partition(_LOADER)
    after, code, tail = rest.partition(f"\n{_CODE}\n")
    sources: dict[str, list[str]] = {}
    starts: dict[str, int] = {}
    name, above = "", (before + after).count("\n")
    for number, line in enumerate(tail.removesuffix("\n").split("\n"), 1):
        if line.startswith("#: "):
            name = line[3:].strip()
            sources[name], starts[name] = [], above + number
        elif name:
            sources[name].append(line[3:])
    ours = all(module.partition(".")[0] == PACKAGE for module in sources)
    if not loader or not code or not ours:
        return Bundle(text)
    return Bundle(f"{before}{after}\n", {n: "".join(f"{line}\n" for line in s) for n, s in sources.items()}, starts)


def with_package(tree: ast.Module, bundle: Bundle) -> ast.Module:
    """Return a script's syntax tree with the code of the package's modules that it imports, before its first use.

    Nodes of the package have line numbers after the script's last line. Raises BadRequest for invalid sources.
    """
    if not bundle.sources:
        return tree
    order: dict[str, list[ast.stmt]] = {}
    aliases: list[ast.stmt] = []
    first = next((at for at, n in enumerate(tree.body) if any(map(_imported, ast.walk(n)))), 0)
    for node in ast.walk(tree):
        for module in _imported(node):
            _collect(module, bundle, order)
        if isinstance(node, ast.ImportFrom) and _imported(node):
            aliases += [_alias(a, node) for a in node.names if a.asname and a.asname != a.name]
    kept = [n for n in tree.body if not _imported(n)]
    parts = [part for module in order.values() for part in module]
    return ast.Module([*kept[:first], *parts, *aliases, *kept[first:]], tree.type_ignores)


def _imported(node: ast.AST) -> tuple[str, ...]:
    """Return the modules of the package that a statement imports."""
    match node:
        case ast.ImportFrom(module=str(module), level=0) if module.partition(".")[0] == PACKAGE:
            return (module, *(f"{module}.{alias.name}" for alias in node.names))
        case ast.Import():
            return tuple(a.name for a in node.names if a.name.partition(".")[0] == PACKAGE)
    return ()


def _alias(alias: ast.alias, node: ast.stmt) -> ast.stmt:
    name = ast.Name(str(alias.asname), ast.Store())
    return ast.fix_missing_locations(ast.copy_location(ast.Assign([name], ast.Name(alias.name, ast.Load())), node))


def _collect(module: str, bundle: Bundle, order: dict[str, list[ast.stmt]]) -> None:
    """Add a module's statements after those of the modules that it imports."""
    if module in order or module not in bundle.sources:
        return
    order[module] = []  # an import in a circle ends here
    tree, _ = parse(bundle.sources[module])
    for node in tree.body:
        for needed in _imported(node):
            _collect(needed, bundle, order)
    ast.increment_lineno(tree, bundle.lines.get(module, 0))
    own = order.pop(module)
    own += [n for n in tree.body if not _imported(n)][ast.get_docstring(tree) is not None :]
    order[module] = own
