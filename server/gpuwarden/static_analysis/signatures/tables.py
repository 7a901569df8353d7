"""Read the tables of released signatures that `tools/build_signatures.py` writes, one per package.

A table is JSON, compressed with xz, and is loaded on first use. A value that changes between releases is a list of
release ranges, `[first release, last release, value]`; a release is given by its index in `releases`, oldest first:

- `modules`: module -> 1 if it may have names that are not in its source, else 0
- `names`: module -> name -> the qualified name that it refers to, 0 if the module defines it
- `definitions`: qualified name -> the number of a variant `[kind, bases, parameters, open, renames]`
- `parameters`: `[name, default, accepted values or their enum, whether others are rejected]`
- `requires`: package -> the versions of that package that a release requires
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from gpuwarden.data import data_dir

if TYPE_CHECKING:
    from packaging.version import Version  # imported late: it adds 3 ms to every poll of the machines

_MODULES = {"sentence_transformers": "sentence-transformers"}
_ALIASES = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


@dataclass(frozen=True)
class Parameter:
    """One parameter: `default` is Python source, None if a value is required, or `...` for an expression.

    `values` lists the strings that it accepts, and is empty if they are unknown; `enum` is their class. `strict` is
    true if other strings are rejected.
    """

    name: str
    default: str | None = None
    values: tuple[str, ...] = ()
    enum: str = ""
    strict: bool = False


@dataclass(frozen=True)
class Definition:
    """A class or function as defined by its own source, without inherited parts.

    `kind` is `f` (function), `i` (class with its own `__init__`), `d` (dataclass), `e` (enum) or `p` (other class).
    `open` is true if it accepts arguments that its source does not name. `renames` maps deprecated arguments to the
    names to use instead.
    """

    kind: str
    bases: tuple[str, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    open: bool = False
    renames: tuple[tuple[str, str], ...] = ()


class Table:
    """One package's table."""

    def __init__(self, content: dict[str, Any]) -> None:
        self._content = content
        self.releases: tuple[str, ...] = tuple(content["releases"])

    @cached_property
    def versions(self) -> tuple[Version, ...]:
        """Return the releases in a comparable form."""
        from packaging.version import Version

        return tuple(map(Version, self.releases))

    def requires(self, release: int) -> dict[str, str]:
        """Return the versions of other packages that a release requires."""
        found = {name: _at(runs, release) for name, runs in self._content["requires"].items()}
        return {name: text for name, text in found.items() if text}

    def module(self, name: str, release: int) -> bool | None:
        """Return whether a module may bind names that are not listed; None if the release has no such module."""
        value = _at(self._content["modules"].get(name, ()), release)
        return None if value is None else bool(value)

    def target(self, module: str, name: str, release: int) -> str | None:
        """Return the qualified name that a name in a module refers to; None if the module does not bind it."""
        value = _at(self._content["names"].get(module, {}).get(name, ()), release)
        return f"{module}.{name}" if value == 0 else value

    def names(self, module: str, release: int) -> list[str]:
        """Return the names that a module binds."""
        return [n for n, runs in self._content["names"].get(module, {}).items() if _at(runs, release) is not None]

    def lists(self, module: str) -> bool:
        """Return true if the table lists a module's names in any release."""
        return module in self._content["names"]

    def homes(self, name: str, release: int) -> list[str]:
        """Return the modules that bind a name, shortest path first."""
        found = [m for m, bound in self._content["names"].items() if _at(bound.get(name, ()), release) is not None]
        return sorted(found, key=lambda m: (m.count("."), m))

    def presence(self, module: str, name: str) -> list[tuple[int, int]]:
        """Return the ranges of releases in which a module binds a name, oldest first."""
        merged: list[tuple[int, int]] = []
        for start, end, _ in self._content["names"].get(module, {}).get(name, ()):
            if merged and start <= merged[-1][1] + 1:
                start, _ = merged.pop()
            merged.append((start, end))
        return merged

    def defined_as(self, name: str) -> list[str]:
        """Return the qualified names of the classes and functions with this name, shortest path first."""
        found = [key for key in self._content["definitions"] if key.endswith(f".{name}")]
        return sorted(found, key=lambda key: (key.count("."), key))

    def definition(self, qualified: str, release: int) -> Definition | None:
        """Return a definition in one release."""
        number = _at(self._content["definitions"].get(qualified, ()), release)
        return None if number is None else self._variant(number)

    def definitions(self, qualified: str) -> Iterator[tuple[int, int, Definition]]:
        """Yield every version of a definition, with its first and last release."""
        for start, end, number in self._content["definitions"].get(qualified, ()):
            yield start, end, self._variant(number)

    def _variant(self, number: int) -> Definition:
        kind, bases, numbers, is_open, renames = self._content["variants"][number]
        parameters = []
        for name, default, values, strict in (self._content["parameters"][n] for n in numbers):
            listed = tuple(values) if isinstance(values, list) else ()
            enum = values if isinstance(values, str) else ""
            parameters.append(Parameter(name, default, listed, enum, bool(strict)))
        return Definition(kind, tuple(bases), tuple(parameters), bool(is_open), tuple((o, n) for o, n in renames))


def _at(runs: Any, release: int) -> Any:
    return next((value for start, end, value in runs if start <= release <= end), None)


@cache
def table(package: str) -> Table | None:
    """Return a package's table; None if it has none."""
    path = data_dir("references") / "signatures" / f"{package}.json.xz"
    return Table(json.loads(lzma.decompress(path.read_bytes()))) if package in packages() else None


@cache
def packages() -> frozenset[str]:
    """Return the packages that have a table."""
    folder = data_dir("references") / "signatures"
    return frozenset(path.name.removesuffix(".json.xz") for path in folder.glob("*.json.xz"))


def canonical(qualified: str) -> str:
    """Return a dotted name as the tables spell it; pytorch_lightning, for example, becomes lightning.pytorch."""
    root, dot, rest = qualified.partition(".")
    return _ALIASES.get(root, root) + dot + rest


def package_of(qualified: str) -> str:
    """Return the package to which a dotted name belongs, or an empty string if that package has no table."""
    root = canonical(qualified).partition(".")[0]
    package = _MODULES.get(root, root)
    return package if package in packages() else ""


def version(text: str) -> Version | None:
    """Return the parsed version; None if the text is not a valid version."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(text)
    except InvalidVersion:
        return None
