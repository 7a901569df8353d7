"""Read the names in a library's release from the sources in its wheel, without installing or running the library."""

from __future__ import annotations

import ast
import re
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from trainer_checks.uses import MODULES, Use

OPEN = "**"
"""Placeholder for parameters or members that can't be listed: any name matches."""
Parameters = frozenset[str]
Definition = tuple[str, ast.stmt]
"""A module, and the statement in that module that defines a name."""


@dataclass
class Release:
    """One release of a package, read from its wheel."""

    package: str
    version: str
    wheel: Path
    trees: dict[str, ast.Module] = field(default_factory=dict)

    @cached_property
    def modules(self) -> dict[str, str]:
        """Map each module's dotted name to its path in the wheel."""
        with zipfile.ZipFile(self.wheel) as wheel:
            paths = [name for name in wheel.namelist() if name.endswith(".py")]
        return {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in paths}

    def tree(self, module: str) -> ast.Module | None:
        """Return a module's syntax tree, or None if the wheel lacks the module."""
        if module not in self.trees:
            if module not in self.modules:
                return None
            with zipfile.ZipFile(self.wheel) as wheel:
                self.trees[module] = ast.parse(wheel.read(self.modules[module]))
        return self.trees[module]

    @cached_property
    def definitions(self) -> dict[str, list[str]]:
        """Map the name of each class and function to the modules that define it."""
        found: dict[str, list[str]] = {}
        pattern = re.compile(rb"^(?:class|(?:async )?def) (\w+)", re.MULTILINE)
        with zipfile.ZipFile(self.wheel) as wheel:
            for module, path in self.modules.items():
                for name in pattern.findall(wheel.read(path)):
                    found.setdefault(name.decode(), []).append(module)
        return found


class Library:
    """A set of releases, one for each package."""

    def __init__(self, releases: Iterable[Release]) -> None:
        self.releases = {release.package: release for release in releases}
        self._found: dict[tuple[str, str], Definition | None] = {}

    def release_of(self, module: str) -> Release | None:
        """Return the release that a module belongs to."""
        return self.releases.get(MODULES.get(module.partition(".")[0], ""))

    def find(self, module: str, name: str) -> Definition | None:
        """Return the module and the statement that define a name, which can be imported from `module`; None if not
        found.
        """
        if (module, name) not in self._found:
            self._found[module, name] = self._search(module, name, set())
        return self._found[module, name]

    def _search(self, module: str, name: str, seen: set[tuple[str, str]]) -> Definition | None:
        """Search the module itself, then its lazy imports, and finally the modules that it imports with `*`."""
        release = self.release_of(module)
        tree = release.tree(module) if release else None
        if tree is None or release is None or (module, name) in seen:
            return None
        seen.add((module, name))
        is_package = release.modules[module].endswith("__init__.py")
        open_imports = []
        for node in ast.walk(tree):
            match node:
                case ast.ClassDef(name=found) | ast.FunctionDef(name=found) if found == name and node in tree.body:
                    return module, node
                case ast.Assign(targets=[ast.Name(id=found)]) if found == name:
                    return module, node
                case ast.ImportFrom(names=[ast.alias(name="*")]):
                    open_imports.append(_absolute(module, node, is_package=is_package))
                case ast.ImportFrom() if any((a.asname or a.name) == name for a in node.names):
                    origin = next(a.name for a in node.names if (a.asname or a.name) == name)
                    where = _absolute(module, node, is_package=is_package)
                    if self.release_of(where) is release and where not in release.modules:
                        # A compiled module has no source, so its names are unknown.
                        return where, ast.Pass()
                    if (there := self._search(where, origin, seen)) is not None:
                        return there
        if is_package and (lazy := self._lazy(release, module, tree, name)) is not None:
            return lazy
        return next((there for where in open_imports if (there := self._search(where, name, seen))), None)

    def _lazy(self, release: Release, module: str, tree: ast.Module, name: str) -> Definition | None:
        """Return the definition of a name that a package imports lazily, using a table of strings."""
        text = ast.dump(tree)
        below = [m for m in release.definitions.get(name, ()) if m.startswith(f"{module}.")]
        named = f"value='{name}'" in text
        # transformers builds the list of names in `models` from the folders.
        walked = "define_import_structure" in text
        for where in below:
            inner = where.removeprefix(f"{module}.")
            found = release.tree(where)
            if (named or (walked and inner.startswith("models."))) and found is not None:
                node = next(n for n in found.body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == name)
                return where, node
        return None

    def has(self, use: Use) -> bool | None:
        """Return whether the releases contain the used name; None if unknown."""
        release, found = self.release_of(use.module), self.find(use.module, use.name)
        if release is None:
            return None
        if found is None and "." in use.module:
            return f"{use.module}.{use.name}" in release.modules  # the imported name may be a module
        if found is None or not (use.method or use.keyword):
            return found is not None
        module, node = found
        if use.method and not isinstance(node, ast.ClassDef):
            return None  # the type that a function returns is unknown
        if use.method:
            members = self.members(module, node)
            if use.method not in members:
                return not members.keys().isdisjoint({OPEN}) or use.method.startswith("__")
            module, inner = members[use.method]
            if not use.keyword:
                return True
            return not isinstance(inner, ast.FunctionDef) or _fits(_parameters(inner), use.keyword)
        return _fits(self.parameters(module, node), use.keyword)

    def members(self, module: str, node: ast.stmt) -> dict[str, tuple[str, ast.AST]]:
        """Return the methods and attributes of a class. OPEN stands for members of a base class that can't be read."""
        found: dict[str, tuple[str, ast.AST]] = {}
        for where, line in reversed(list(self.line(module, node))):
            if line is None:
                found[OPEN] = (where, ast.Pass())
                continue
            for part in ast.walk(line):
                match part:
                    case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                        found.setdefault(name, (where, part))
                    case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                        found.setdefault(name, (where, part))
            found |= {part.name: (where, part) for part in line.body if isinstance(part, ast.FunctionDef)}
        return found

    def line(self, module: str, node: ast.stmt) -> Iterator[tuple[str, ast.ClassDef | None]]:
        """Yield a class and its base classes, nearest first; None for a base class that can't be read."""
        if not isinstance(node, ast.ClassDef):
            return
        yield module, node
        for base in node.bases:
            match base:
                case ast.Name(id=name):
                    there = self.find(module, name)
                    if there is not None and isinstance(there[1], ast.ClassDef):
                        yield from self.line(*there)
                        continue
            if not (isinstance(base, ast.Name) and base.id in {"object", "Protocol", "ABC"}):
                yield module, None

    def parameters(self, module: str, node: ast.stmt) -> Parameters:
        """Return the parameters of a function or a class's constructor; OPEN means that any name is accepted."""
        if isinstance(node, ast.FunctionDef):
            return _parameters(node)
        if not isinstance(node, ast.ClassDef):
            return frozenset({OPEN})
        line = [one for _, one in self.line(module, node)]
        # Subclasses of a class with the decorator `dataclass_transform` are dataclasses too.
        marked = any(one is not None and _has_decorator(one, "dataclass_transform") for one in line)
        fields: set[str] = set()
        for one in line:
            if one is None:
                return frozenset(fields | {OPEN})
            init = next((n for n in one.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
            if init is not None:
                return frozenset(fields) | _parameters(init)
            if marked or _has_decorator(one, "dataclass"):
                fields |= {
                    n.target.id for n in one.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
                }
        return frozenset(fields) or frozenset({OPEN})


def _absolute(module: str, node: ast.ImportFrom, *, is_package: bool) -> str:
    """Return the absolute name of an imported module, with leading dots resolved."""
    parts = module.split(".") if is_package else module.split(".")[:-1]
    above = parts[: len(parts) - node.level + 1] if node.level else []
    return ".".join([*above, *([node.module] if node.module else [])])


def _parameters(function: ast.FunctionDef) -> Parameters:
    given = function.args
    names = {a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
    return frozenset(names | ({OPEN} if given.kwarg else set()))


def _has_decorator(node: ast.ClassDef, name: str) -> bool:
    return any(name in ast.dump(decorator) for decorator in node.decorator_list)


def _fits(parameters: Parameters, keyword: str) -> bool:
    return keyword in parameters or OPEN in parameters
