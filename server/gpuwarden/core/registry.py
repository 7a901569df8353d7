"""Find plug-ins by file name, or by an installed package's entry point. No list needs to be edited.

`gpuwarden/<package>/<name>.py` is the built-in plug-in `<name>`. An installed package adds a plug-in with an entry
point in the group `gpuwarden.<package>`, whose value is a module:

    [project.entry-points."gpuwarden.providers"]
    mycloud = "gpuwarden_mycloud"

Listing plug-ins does not import them. A plug-in is imported and checked against its contract on first use; the error
contains the name of the plug-in, its file, the problem, and the package to install. A built-in plug-in can't be
replaced. This module needs only the standard library and Python 3.8, because the `checkpoints` archive includes it. In
the archive, only built-in plug-ins are used, so that packages on a rented machine can't affect the verdict on that
machine's files.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet
from zipimport import zipimporter

from gpuwarden.core.contract import Contract, object_faults
from gpuwarden.core.errors import NotFound, NotSupported
from gpuwarden.core.guidance import manual_text

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_ARCHIVED = isinstance(globals().get("__loader__"), zipimporter)
_OURS = "gpuwarden"


@dataclass(frozen=True)
class Status:
    """One plug-in after an attempt to load it. `fault` is empty if it can be used."""

    what: str
    name: str
    origin: str
    """The installed package that provides the plug-in; empty for a built-in plug-in."""
    fault: str = ""
    hint: str = ""


class Registry:
    """The plug-ins of one kind: those in a gpuwarden package, and those in the entry-point group of the same name."""

    def __init__(
        self, what: str, package: ModuleType, contract: Contract, *, hidden: frozenset[str] = frozenset({"base"})
    ) -> None:
        self.what = what
        self.package = package
        self.contract = contract
        self.hidden = hidden
        self.group = f"{_OURS}.{package.__name__.rpartition('.')[2]}"
        self._sound: WeakSet[ModuleType] = WeakSet()
        self._kept: tuple[object, list[tuple[str, ModuleType]], list[Status]] | None = None

    def built_in(self) -> list[str]:
        """Return the names of the built-in plug-ins, sorted, without importing them."""
        return [n for n in _files(tuple(self.package.__path__)) if n not in self.hidden]

    def added(self) -> list[str]:
        """Return the names that installed packages add, sorted, without importing them."""
        return sorted({e.name for e in self._entry_points()} - set(self.built_in()))

    def names(self) -> list[str]:
        """Return the names of all plug-ins, sorted, without importing them."""
        return sorted((*self.built_in(), *self.added()))

    def load(self, name: str) -> ModuleType:
        """Import a plug-in and check it against its contract. Raises NotFound, or NotSupported with the violations."""
        if name in self.built_in():
            return self._sound_module(name, f"{self.package.__name__}.{name}", None)
        found = [e for e in self._entry_points() if e.name == name]
        if not found:
            there = ", ".join(self.names()) or "none"
            raise NotFound(f"unknown {self.what} {name!r}", f"Available: {there}.")
        if len(found) > 1:
            packages = ", ".join(sorted(_brought_by(e) for e in found))
            raise NotSupported(
                f"several packages provide the {self.what} {name!r}: {packages}", "Uninstall all but one of them."
            )
        return self._sound_module(name, found[0].value, found[0])

    def make(self, name: str, *args: object) -> Any:
        """Call the function `create` of one plug-in.

        Raises the same errors as `load`, and NotSupported if the object breaks the contract.
        """
        module: Any = self.load(name)
        made = module.create(*args)
        if self.contract.product is not None:
            self._refuse(object_faults(made, self.contract.product, name), name, module, self._entry_point(name))
        return made

    def usable(self) -> list[tuple[str, ModuleType]]:
        """Load every plug-in and return the usable ones, built-in plug-ins first.

        Unusable plug-ins from installed packages are omitted; see `broken`.
        """
        return self._loaded()[0]

    def broken(self) -> list[Status]:
        """Return the unusable plug-ins from installed packages, each with the reason."""
        return self._loaded()[1]

    def _loaded(self) -> tuple[list[tuple[str, ModuleType]], list[Status]]:
        key = (tuple(self.package.__path__), tuple(sys.path))
        if self._kept is None or self._kept[0] != key:  # cached, because it is called for each examined file
            added = self._added_statuses()
            names = (*self.built_in(), *(s.name for s in added if not s.fault))
            self._kept = key, [(n, self.load(n)) for n in names], [s for s in added if s.fault]
        return self._kept[1], self._kept[2]

    def statuses(self) -> list[Status]:
        """Load every plug-in and return the status of each."""
        return [self._status(n) for n in self.built_in()] + self._added_statuses()

    def _added_statuses(self) -> list[Status]:
        built_in = set(self.built_in())
        hidden = [e for e in self._entry_points() if e.name in built_in]
        shadows = []
        for entry in hidden:
            origin, fault = _brought_by(entry), f"has the same name as a built-in {self.what}"
            hint = f"The built-in plug-in is used. Rename the entry point of {origin}, or uninstall the package."
            shadows.append(Status(self.what, entry.name, origin, fault, hint))
        return shadows + [self._status(n) for n in self.added()]

    def _status(self, name: str) -> Status:
        entry = self._entry_point(name)
        origin = _brought_by(entry) if entry else ""
        try:
            self.load(name)
        except NotSupported as error:
            return Status(self.what, name, origin, error.message, manual_text(error.next_steps))
        return Status(self.what, name, origin)

    def _entry_points(self) -> tuple[EntryPoint, ...]:
        return () if _ARCHIVED else _installed(tuple(sys.path)).get(self.group, ())

    def _entry_point(self, name: str) -> EntryPoint | None:
        return None if name in self.built_in() else next((e for e in self._entry_points() if e.name == name), None)

    def _sound_module(self, name: str, path: str, entry: EntryPoint | None) -> ModuleType:
        try:
            module = importlib.import_module(path)
        except ModuleNotFoundError as missing:
            from gpuwarden.core.installing import install_command

            package = (missing.name or "").partition(".")[0]
            # A plug-in's requirements are listed in the extra of its distribution that has the plug-in's name.
            of = entry.dist.name if entry and entry.dist else _OURS
            raise NotSupported(
                f"{self._shown(name, path, entry)} needs the Python package {missing.name!r}, which is not installed",
                "Install it: " + install_command(package, name, of),
            ) from missing
        except (Exception, SystemExit) as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise NotSupported(
                f"{self._shown(name, path, entry)} can't be imported: {why}", _to_mend(self.contract, entry)
            ) from error
        if module not in self._sound:
            self._refuse(self.contract.faults(module, name), name, module, entry)
            self._sound.add(module)
        return module

    def _refuse(self, faults: list[str], name: str, module: ModuleType, entry: EntryPoint | None) -> None:
        if faults:
            shown = self._shown(name, getattr(module, "__file__", None) or module.__name__, entry)
            raise NotSupported(
                f"{shown} does not fulfill its contract: {'; '.join(faults)}", _to_mend(self.contract, entry)
            )

    def _shown(self, name: str, place: str, entry: EntryPoint | None) -> str:
        brought = f"{_brought_by(entry)}, " if entry else ""
        return f"the {self.what} {name!r} ({brought}{place})"


@lru_cache(maxsize=64)
def _files(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the public modules in a package's folders, sorted."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(path) if not m.name.startswith("_")))


@lru_cache(maxsize=64)
def _installed(path: tuple[str, ...]) -> dict[str, tuple[EntryPoint, ...]]:
    """Return gpuwarden's entry points by group. Cached, because it reads the metadata of every package."""
    from importlib.metadata import entry_points

    found = entry_points()
    return {group: tuple(found.select(group=group)) for group in found.groups if group.startswith(f"{_OURS}.")}


def _brought_by(entry: EntryPoint) -> str:
    package = entry.dist
    return f"{package.name} {package.version}" if package else entry.value


def _to_mend(contract: Contract, entry: EntryPoint | None) -> str:
    package = f" Fix or uninstall {entry.dist.name}." if entry and entry.dist else ""
    return f"{contract.home} describes the contract.{package}"
