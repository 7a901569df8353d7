"""Look up the first and last release that has a name or an argument, and its replacement."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from gpuwarden.static_analysis.signatures.resolve import PLAIN, Installed, Signature
from gpuwarden.static_analysis.signatures.tables import Definition, canonical, package_of, table

_NEAR = 0.75
_MISSPELT = 0.88  # one or two letters out of ten differ
_DEPTH = 8


@dataclass(frozen=True)
class History:
    """The releases in which a name existed. `until` is None if the name still exists; `since` is None if it never
    existed.

    A name in a table's first release may be older than that release.
    """

    package: str
    since: str | None = None
    until: str | None = None
    renamed_to: str = ""

    @property
    def gone_in(self) -> str:
        """Return the first release in the table that lacks the name, or an empty string if the name still exists."""
        known = table(self.package)
        if known is None or self.until is None:
            return ""
        return known.releases[known.releases.index(self.until) + 1]


def history(package: str, name: str, parameter: str | None = None) -> History:
    """Return the history of an exported name, or of one of its arguments.

    `name` is dotted (`trl.SFTConfig`, `transformers.trainer_utils.get_last_checkpoint`) or a name in the package's
    top module (`SFTConfig`). Inherited arguments are included if the base is in the same package.
    """
    known = table(package)
    if known is None:
        return History(package)
    dotted = canonical(name if "." in name else f"{package.replace('-', '_')}.{name}")
    if parameter is None:
        runs = known.presence(*dotted.rpartition(".")[::2])
        return _spanned(package, [n for start, end in runs for n in range(start, end + 1)])
    there, renamed = [], ""
    for place in range(len(known.releases)):
        installed = Installed({package: place})
        found = installed.signature(dotted)
        if found is None and (own := installed.definition(dotted)) and own[1].kind != "e":
            # The bases are in another package, so only the arguments that the class adds are considered.
            found = Signature({p.name: p for p in own[1].parameters}, True, dict(own[1].renames))
        if found is not None:
            renamed = found.renames.get(parameter) or renamed
            if parameter in found.parameters or parameter in found.renames:
                there.append(place)
    spanned = _spanned(package, there)
    return History(package, spanned.since, spanned.until, renamed)


def _spanned(package: str, places: list[int]) -> History:
    known = table(package)
    if not places or known is None:
        return History(package)
    until = None if places[-1] == len(known.releases) - 1 else known.releases[places[-1]]
    return History(package, known.releases[places[0]], until)


@dataclass(frozen=True)
class ArgumentHistory:
    """An argument's history across all releases: its first and last release, and its replacement.

    `gone_in` is the first release without the argument, or an empty string if the newest release still has it.
    """

    existed: bool
    open: bool = False
    package: str = ""
    since: str = ""
    gone_in: str = ""
    renamed_to: str = ""


def argument_history(qualified: str, parameter: str) -> ArgumentHistory:
    """Return the history of an argument in a class or function, and in its bases in any package."""
    forms = list(_forms(qualified, set(), 0))
    renamed = next((new for *_, d in reversed(forms) if (new := dict(d.renames).get(parameter))), "")
    is_open = any(d.open and d.kind in "fi" for *_, d in forms)
    runs: dict[str, tuple[int, int]] = {}
    for package, start, end in _runs(forms, parameter):
        first, last = runs.get(package, (start, end))
        runs[package] = (min(first, start), max(last, end))
    if not runs:
        return ArgumentHistory(False, is_open, renamed_to=renamed)
    # An argument that moved from one package to another still exists.
    package = max(runs, key=lambda name: runs[name][1] - len(_releases(name)))
    first, last = runs[package]
    releases = _releases(package)
    gone = releases[last + 1] if last + 1 < len(releases) else ""
    return ArgumentHistory(True, is_open, package, releases[first], gone, renamed)


def _runs(forms: Iterable[tuple[str, int, int, Definition]], parameter: str) -> Iterator[tuple[str, int, int]]:
    """Yield the package, first release and last release for each version of a definition that has an argument."""
    for package, start, end, definition in forms:
        if any(p.name == parameter for p in definition.parameters) or parameter in dict(definition.renames):
            yield package, start, end


def places_with(qualified: str, parameter: str) -> tuple[str, frozenset[int]]:
    """Return the only package that ever had an argument, and the indices of the releases with the argument.

    Both are empty if no package or several packages had it, or if one version of the definition accepts any argument.
    """
    forms = list(_forms(qualified, set(), 0))
    runs = list(_runs(forms, parameter))
    if any(d.open for *_, d in forms) or len({package for package, _, _ in runs}) != 1:
        return "", frozenset()
    return runs[0][0], frozenset(place for _, start, end in runs for place in range(start, end + 1))


@lru_cache(maxsize=256)
def accepted_in_any_release(qualified: str) -> frozenset[str] | None:
    """Return every argument that a class or function, or one of its bases, has in any release.

    Return None if one version of the definition accepts any argument, or if a base has no table.
    """
    names: set[str] = set()
    forms = 0
    for _, _, _, definition in _forms(qualified, set(), 0):
        if definition.open or any(not package_of(base) for base in _inherited(definition)):
            return None
        forms += 1
        names.update(p.name for p in definition.parameters)
        names.update(old for old, _ in definition.renames)
    return frozenset(names) if forms else None


def accepted_values_ever(qualified: str, parameter: str) -> frozenset[str]:
    """Return the strings that an argument accepts in any release of a class or function, and of its bases."""
    found: set[str] = set()
    for *_, definition in _forms(qualified, set(), 0):
        for p in (p for p in definition.parameters if p.name == parameter):
            found.update(p.values)
            if p.enum:
                found.update(member.name for *_, enum in _forms(p.enum, set(), 0) for member in enum.parameters)
    return frozenset(found)


def _inherited(definition: Definition) -> Iterator[str]:
    """Yield the bases whose arguments a class inherits."""
    if definition.kind in "dp":
        yield from (base for base in definition.bases if base.rpartition(".")[2] not in PLAIN)


def _releases(package: str) -> tuple[str, ...]:
    known = table(package)
    return known.releases if known else ()


def _forms(qualified: str, seen: set[str], depth: int) -> Iterator[tuple[str, int, int, Definition]]:
    """Yield every version of a class's or function's definition, and of its bases' definitions."""
    qualified = canonical(qualified)
    package = package_of(qualified)
    known = table(package)
    if known is None or qualified in seen or depth > _DEPTH:
        return
    seen.add(qualified)
    owner, _, name = qualified.rpartition(".")
    # A name may refer to different modules in different releases.
    places = (place for start, end in known.presence(owner, name) for place in range(start, end + 1))
    for target in sorted({t for place in places if (t := known.target(owner, name, place))}):
        yield from _forms(target, seen, depth + 1)
    for start, end, definition in known.definitions(qualified):
        yield package, start, end, definition
        # A class with its own constructor rejects its bases' arguments.
        for base in _inherited(definition):
            yield from _forms(base, seen, depth + 1)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that is closest to a misspelled name, or an empty string if none is close."""
    return next(iter(difflib.get_close_matches(name, list(known), 1, _NEAR)), "")


def misspelt(name: str, known: Iterable[str]) -> str:
    """Return the known name that a misspelled name almost certainly stands for, or an empty string if none is close
    enough.
    """
    return next(iter(difflib.get_close_matches(name, list(known), 1, _MISSPELT)), "")


def minor(release: str) -> str:
    """Return a release without its patch number, because the tables have one release per minor version."""
    return ".".join(release.split(".")[:2])
