"""Resolve names and signatures in the releases that a job uses, through imports and in Python's method resolution
order.

An unknown name is never reported as missing: `None` means that a name or a signature can't be checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from gpuwarden.static_analysis.signatures.tables import Definition, Parameter, canonical, package_of, table

_HOPS = 12
_SERVED = ("TokenizerFast", "ImageProcessorFast")
PLAIN = frozenset({"object", "ABC", "Generic", "Protocol", "PushToHubMixin", "Enum", "ExplicitEnum"})
"""Base classes that add no arguments."""


class Existence(Enum):
    """Whether a name exists."""

    PRESENT = "present"
    ABSENT = "absent"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Signature:
    """The arguments of a class or a function. `renames` maps deprecated arguments to their new names, or "" if they
    have none.
    """

    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    open: bool = False
    renames: Mapping[str, str] = field(default_factory=dict)

    def lacks(self, name: str) -> bool:
        """Return true if passing an argument with this name is certainly an error."""
        return not self.open and name not in self.parameters and name not in self.renames


class Installed:
    """The releases installed in one environment, as indices into the tables, and the script's own classes."""

    def __init__(self, places: Mapping[str, int], own: Mapping[str, Definition] | None = None) -> None:
        self.places = places
        self.own = own or {}
        self._orders: dict[tuple[str, int], list[str] | None] = {}

    def exists(self, qualified: str) -> Existence:
        """Return whether a dotted name can be imported."""
        qualified = canonical(qualified)
        package = package_of(qualified)
        known = table(package) if package else None
        if known is None or package not in self.places:
            return Existence.UNKNOWN
        place = self.places[package]
        owner, _, name = qualified.rpartition(".")
        if known.module(qualified, place) is not None or name.startswith("__") or not owner:
            return Existence.PRESENT
        is_open = known.module(owner, place)
        if is_open is None:
            return self._missing_module(owner)
        # For a class name with one of these suffixes, transformers 5 returns the class without `Fast`.
        plain = name.removesuffix("Fast") if package == "transformers" and name.endswith(_SERVED) else name
        if any(known.target(owner, n, place) is not None for n in (name, plain)):
            return Existence.PRESENT
        return Existence.UNKNOWN if is_open or not known.lists(owner) or name.startswith("_") else Existence.ABSENT

    def _missing_module(self, module: str) -> Existence:
        """Return ABSENT for a missing module, or UNKNOWN if it may be an attribute or may be created at run time."""
        package = package_of(module)
        known = table(package)
        assert known is not None
        place, (parent, _, name) = self.places[package], module.rpartition(".")
        if not parent or name[:1].isupper() or known.target(parent, name, place) is not None:
            return Existence.UNKNOWN
        above = known.module(parent, place)
        if above is None:
            return self._missing_module(parent)
        return Existence.UNKNOWN if above else Existence.ABSENT

    def names_beside(self, qualified: str) -> list[str]:
        """Return all names in the module to which a dotted name belongs."""
        owner = canonical(qualified).rpartition(".")[0]
        known = table(package_of(owner))
        return known.names(owner, self.places[package_of(owner)]) if known and package_of(owner) in self.places else []

    def definition(self, qualified: str) -> tuple[str, Definition] | None:
        """Return the definition to which a dotted name refers, with the definition's own qualified name."""
        qualified = canonical(qualified)
        for _ in range(_HOPS):
            if qualified in self.own:
                return qualified, self.own[qualified]
            known, place = table(package_of(qualified)), self.places.get(package_of(qualified))
            if known is None or place is None:
                return None
            if found := known.definition(qualified, place):
                return qualified, found
            owner, _, name = qualified.rpartition(".")
            following = known.target(owner, name, place)
            if following is None or following == qualified:
                return None
            qualified = canonical(following)
        return None

    def signature(self, qualified: str) -> Signature | None:
        """Return the arguments that a call accepts, or None if they are unknown."""
        found = self.definition(qualified)
        if found is None or found[1].kind == "e":
            return None
        key, definition = found
        if definition.kind in "fi":
            return _signature([definition])
        order = self.order(key)
        if order is None:
            return None
        first = next((d for d in order if d.kind in "id"), None)
        if first is None:
            return None
        if first.kind == "i":
            return _signature([first])
        return _signature([d for d in reversed(order) if d.kind == "d"])

    def order(self, qualified: str, depth: int = 0) -> list[Definition] | None:
        """Return a class and its bases in Python's method resolution order; None if a base is unknown."""
        keys = self._linear(qualified, depth)
        if keys is None:
            return None
        resolved = [self.definition(key) for key in keys]
        return [found[1] for found in resolved if found is not None]

    def _linear(self, qualified: str, depth: int = 0) -> list[str] | None:
        asked = (qualified, depth)
        if asked not in self._orders:  # otherwise, many classes with many bases would take exponential time
            self._orders[asked] = self._linearized(qualified, depth)
        return self._orders[asked]

    def _linearized(self, qualified: str, depth: int) -> list[str] | None:
        found = self.definition(qualified)
        if found is None or depth > _HOPS:
            return None
        key, definition = found
        if definition.kind == "i":
            return [key]  # the class's own constructor passes the arguments to its bases
        bases = [base for base in definition.bases if base.rpartition(".")[2] not in PLAIN]
        lines = [self._linear(base, depth + 1) for base in bases]
        if any(line is None for line in lines):
            return None
        heads = [line[0] for line in lines if line]
        merged = _merge([*(list(line) for line in lines if line), heads])
        return None if merged is None else [key, *merged]

    def values(self, parameter: Parameter) -> tuple[str, ...]:
        """Return the strings that a parameter accepts, or an empty tuple if they are unknown."""
        if parameter.values or not parameter.enum:
            return parameter.values
        found = self.definition(parameter.enum)
        return tuple(p.name for p in found[1].parameters) if found and found[1].kind == "e" else ()


def _signature(definitions: Sequence[Definition]) -> Signature:
    """Return the arguments of one definition, or the fields of several dataclasses, bases first."""
    parameters = {p.name: p for definition in definitions for p in definition.parameters}
    renames = {old: new for definition in definitions for old, new in definition.renames}
    return Signature(parameters, any(d.open for d in definitions), renames)


def _merge(lines: list[list[str]]) -> list[str] | None:
    """Return the C3 linearization of several class orders, or None if none exists."""
    merged: list[str] = []
    while lines := [line for line in lines if line]:
        head = next((line[0] for line in lines if not any(line[0] in other[1:] for other in lines)), None)
        if head is None:
            return None
        merged.append(head)
        lines = [line[1:] if line[0] == head else line for line in lines]
    return merged
