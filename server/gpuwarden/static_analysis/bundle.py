"""Bundle the package `gputrain` with a script that imports it, so that a job needs only one file; analyze bundles.

The package's code is added as comments after the script's last line. A loader before the script's first import of the
package imports the modules from these comments. The script itself is not changed, so `split` can restore it.
"""

from __future__ import annotations

import ast
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

from gpuwarden.data import data_dir
from gpuwarden.static_analysis.parsing import parse

FOLDER: Final = "gpu-training/scripts"
"""The folder of bundled trainers, relative to the skills folder."""
PACKAGE: Final = "gputrain"
IMPORTS: Final = re.compile(rf"(?m)^[ \t]*(?:from|import)[ \t]+{PACKAGE}\b")
_CODE: Final = "# ---- gputrain: the code of the package, which the loader above imports ----"
_LOADER: Final = """\
# ---- gputrain: import the package from the comments at the end of this file ----
import importlib.abc
import sys


class _Gputrain(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    import builtins  # names of the class, because the script may give these names other values
    import importlib.util as util
    import os

    def __init__(self, file):
        self.file, self.modules, self.name, number = self.os.path.abspath(file), {}, None, 0
        with self.builtins.open(file, encoding="utf-8") as lines:
            for line in lines:
                number += 1
                if line == "# ---- gputrain: the code of the package, which the loader above imports ----\\n":
                    self.name = ""
                elif self.name is not None and line.startswith("#: "):
                    self.name = line[3:].strip()
                    self.modules[self.name] = ["\\n" * number]  # a traceback then has the line in this file
                elif self.name and line.startswith("#|"):
                    self.modules[self.name].append(line[3:] or "\\n")

    def find_spec(self, name, path=None, target=None):
        if name in self.modules:
            return self.util.spec_from_loader(name, self, origin=self.file, is_package=name == "gputrain")

    def exec_module(self, module):
        code = "".join(self.modules[module.__name__])
        self.builtins.exec(self.builtins.compile(code, self.file, "exec", 0, True), module.__dict__)


sys.meta_path.insert(0, _Gputrain(sys._getframe().f_code.co_filename))
# ---- end ----
"""


@dataclass(frozen=True)
class Bundle:
    """A script and its package's sources, keyed by module. `lines` maps a module to the first line of its source."""

    script: str
    sources: Mapping[str, str] = field(default_factory=dict)
    lines: Mapping[str, int] = field(default_factory=dict)

    @property
    def shipped(self) -> bool:
        """Return true if the package is identical to the shipped package."""
        return self.sources == shipped_package()


@cache
def shipped_files() -> Mapping[str, str]:
    """Return the contents of the shipped package's files, keyed by file name."""
    return {path.name: path.read_text("utf-8") for path in (data_dir("skills") / FOLDER / PACKAGE).glob("*.py")}


def shipped_package() -> Mapping[str, str]:
    """Return the sources of the shipped package, keyed by module."""
    return sources_of(shipped_files())


def sources_of(files: Mapping[str, str]) -> dict[str, str]:
    """Return a package's sources, keyed by module. `files` maps its file names to their contents."""
    named = {PACKAGE if name == "__init__.py" else f"{PACKAGE}.{Path(name).stem}": name for name in sorted(files)}
    return {PACKAGE: "", **{module: files[name] for module, name in named.items()}}


def bundled(text: str, tree: ast.Module, sources: Mapping[str, str]) -> str:
    """Return a script's text with the package added. `tree` is the script's syntax tree.

    A script that does not import the package, or that already contains it, is returned unchanged.
    """
    body = tree.body
    first = next((at for at, n in enumerate(body) if any(map(_imported, ast.walk(n)))), None)
    if first is None or holds_package(text):
        return text
    # Statements may share a line; the loader is placed before the first of them.
    while first and (body[first - 1].end_lineno or 0) >= _start(body[first]):
        first -= 1
    lines = io.StringIO(text, newline="").readlines()  # splits lines like Python, unlike `splitlines`
    at = _start(body[first]) - 1
    end = "" if text.endswith("\n") else "\n"
    tail = [end, f"{_CODE}\n"]
    for module, source in sources.items():
        code = io.StringIO(source, newline=None).read()
        rows = code.removesuffix("\n").split("\n") if code else []
        tail += [f"#: {module}\n", *(f"#| {row}\n" if row else "#|\n" for row in rows)]
    return "".join([*lines[:at], _LOADER, *lines[at:], *tail])


def holds_package(text: str) -> bool:
    """Return true if a text contains the line that begins the package's code, with any kind of line break."""
    return _CODE in io.StringIO(text, newline=None).read().split("\n")


def _start(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(each.lineno for each in decorators)])


def split(text: str) -> Bundle:
    """Split a bundle into the script and the package's sources. Text that is not a bundle has no sources."""
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


_BY_NAME: Final = frozenset({"getattr", "vars", "globals", "eval", "exec", "__dict__", "modules"})


def with_package(tree: ast.Module, bundle: Bundle) -> ast.Module:
    """Return a script's syntax tree, with the package's code inserted before the first use of the package.

    If the package is the shipped one, only the functions and classes that the script reaches are added. The package's
    nodes have line numbers after the script's last line. Package names that the script also defines are renamed. Raises
    BadRequest if the sources are invalid.
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
            renamed = [(a.name, a.asname) for a in node.names if a.asname and a.asname != a.name]
            given = [ast.Assign([ast.Name(new, ast.Store())], ast.Name(old, ast.Load())) for old, new in renamed]
            aliases += [ast.fix_missing_locations(ast.copy_location(part, node)) for part in given]
    for module in bundle.sources if not bundle.shipped else ():
        _collect(module, bundle, order)
    parts = [part for module in order.values() for part in module]
    parts = _reached(parts, tree) if bundle.shipped and not _asks_by_name(tree, bundle) else parts
    kept = [_Rename(set()).whole(n) for n in tree.body if not _imported(n)]
    rename = _Rename(_defined(kept))
    parts = [rename.whole(part) for part in parts]
    return ast.Module([*kept[:first], *parts, *aliases, *kept[first:]], tree.type_ignores)


def _asks_by_name(script: ast.Module, bundle: Bundle) -> bool:
    """Return true if a script imports a module from the package and may look up names at run time."""
    nodes = list(ast.walk(script))
    modules = any(isinstance(node, ast.Import) and _imported(node) for node in nodes)
    modules |= any(name in bundle.sources for node in nodes for name in _imported(node)[1:])
    return modules and any(
        isinstance(node, ast.Name | ast.Attribute)
        and (node.id if isinstance(node, ast.Name) else node.attr) in _BY_NAME
        for node in nodes
    )


def _reached(package: list[ast.stmt], script: ast.Module) -> list[ast.stmt]:
    """Return the package's statements, without functions and classes that the script never uses."""
    defined: dict[str, list[ast.stmt]] = {}
    todo: list[ast.AST] = [script]
    for node in package:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.setdefault(node.name, []).append(node)
        else:
            todo.append(node)
    reached: set[str] = set()
    while todo:
        for inner in ast.walk(todo.pop()):
            match inner:
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name) if name not in reached:
                    reached.add(name)
                    todo += defined.get(name, [])
    return [n for n in package if not isinstance(n, ast.FunctionDef | ast.ClassDef) or n.name in reached]


def _defined(body: list[ast.stmt]) -> set[str]:
    """Return the names that a script defines at its top level."""
    found = {n.name for n in body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    targets = [t for n in body if isinstance(n, ast.Assign) for t in n.targets]
    targets += [n.target for n in body if isinstance(n, ast.AnnAssign | ast.AugAssign)]
    return found | {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}


class _Rename(ast.NodeTransformer):
    """Rename the package's names that a script also defines, except inside functions that bind these names."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def whole(self, node: ast.stmt) -> ast.stmt:
        """Rename the names in a top-level statement, and return the statement."""
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in self.names:
            node.name = f"{PACKAGE}_{node.name}"
        self.visit(node)
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self.names:
            node.id = f"{PACKAGE}_{node.id}"
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        # Names that are assigned in a class body are the class's attributes.
        node.bases = [self.visit(base) for base in node.bases]
        node.body = [self.visit(n) if isinstance(n, ast.FunctionDef) else n for n in node.body]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        own = {a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)}
        own |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        own |= {n.name for n in ast.walk(node) if isinstance(n, ast.FunctionDef) and n is not node}
        _Rename(self.names - own).generic_visit(node)
        return node

    def visit_Import(self, node: ast.Import) -> ast.AST:
        return _without_import(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        return _without_import(node)


def _without_import(node: ast.stmt) -> ast.stmt:
    """Return `pass` for an import of the package inside a function, because the package's code is in the tree."""
    return ast.copy_location(ast.Pass(), node) if _imported(node) else node


def _imported(node: ast.AST) -> tuple[str, ...]:
    """Return the package's modules that a statement imports."""
    match node:
        case ast.ImportFrom(module=str(module), level=0) if module.partition(".")[0] == PACKAGE:
            return (module, *(f"{module}.{alias.name}" for alias in node.names))
        case ast.Import():
            return tuple(a.name for a in node.names if a.name.partition(".")[0] == PACKAGE)
    return ()


def _collect(module: str, bundle: Bundle, order: dict[str, list[ast.stmt]]) -> None:
    """Add a module's statements to `order`, after those of its package and of the modules that it imports."""
    if module in order or module not in bundle.sources:
        return
    order[module] = []  # a circular import ends here
    if module != PACKAGE:
        _collect(PACKAGE, bundle, order)
    tree, _ = parse(bundle.sources[module])
    for node in ast.walk(tree):
        for needed in _imported(node):
            _collect(needed, bundle, order)
    ast.increment_lineno(tree, bundle.lines.get(module, 0))
    order.pop(module)
    order[module] = [n for n in tree.body if not _imported(n)][ast.get_docstring(tree) is not None :]


def missing_module(tree: ast.Module, bundle: Bundle) -> str:
    """Return the first module that a script imports but its package lacks; empty if all modules exist."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module)) if _imported(node) and module not in bundle.sources:
                return module
            case ast.Import(names=names) if _imported(node):
                lacking = [a.name for a in names if a.name.startswith(PACKAGE) and a.name not in bundle.sources]
                if lacking:
                    return lacking[0]
    return ""
