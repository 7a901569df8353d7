"""Explain why an installed release lacks a name, using tables that were built from released code.

The exception names an attribute, an argument or an import; the tables list the releases of each package in which the
name exists. The explanation is *likely* only if a table has releases with the name and releases without it. If the log
contains the installed version, that version must also lack the name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from gpuwarden.core.models import Frozen
from gpuwarden.knowledge.diagnosis import Certainty
from gpuwarden.knowledge.failure import Failure, MissingName
from gpuwarden.static_analysis.signatures.advice import ARGUMENTS, LOADING, NAMES
from gpuwarden.static_analysis.signatures.history import argument_history, minor, nearest
from gpuwarden.static_analysis.signatures.members import members
from gpuwarden.static_analysis.signatures.resolve import Installed
from gpuwarden.static_analysis.signatures.tables import Table, canonical, package_of, packages, table, version

RAISED_BY_SKEW = frozenset({"AttributeError", "ImportError", "ModuleNotFoundError", "TypeError", "ValueError"})
WRAPPED = "Failed to import "
"""The start of the RuntimeError message that transformers and diffusers raise if an import failed."""
CONSTRUCTORS = frozenset({"__init__", "__new__", "wrapped_func", "inner_f", "wrapper"})
LOADERS = frozenset({"cls", "model_class", "from_pretrained", "__init__"})
MODEL = re.compile(r"(?:For[A-Z]\w+|Model|LMHeadModel)$")


class Change(StrEnum):
    """How the installed release relates to the releases that have a name."""

    REMOVED = "removed"
    ADDED = "added"
    OUTSIDE = "outside"
    """The name was added and later removed; the log does not show which release is installed."""
    REQUIRED = "required"
    PRESENT = "present"
    NEVER = "never"


class Skew(Frozen):
    """A missing name, and the releases that have it.

    `since` is the first known release with the name, empty if the name is older than the table. `until` is the last
    release with the name and `gone_in` the next release; both are empty while the name exists. `pin` is a requirement
    that selects releases with the name, empty if unknown.
    """

    package: str
    name: str
    kind: str
    change: Change
    certainty: Certainty
    since: str = ""
    until: str = ""
    gone_in: str = ""
    renamed_to: str = ""
    installed: str = ""
    pin: str = ""


@dataclass(frozen=True)
class _Fact:
    """The indices of a package's releases in which a name exists."""

    package: str
    name: str
    places: frozenset[int]
    renamed_to: str = ""
    required: bool = False

    @property
    def table(self) -> Table:
        known = table(self.package)
        assert known is not None
        return known

    @property
    def everywhere(self) -> bool:
        return len(self.places) == len(self.table.releases)


Finder: TypeAlias = Callable[[MissingName, frozenset[str]], Iterable[_Fact]]


def explain(failure: Failure) -> Skew | None:
    """Return the table entry for the name that a failure reports as missing, or None if none exists."""
    gone, raised = failure.gone, failure.exception
    if gone is None or raised is None:
        return None
    named = ((one.type.rpartition(".")[2], one.message) for one in (raised, *failure.chain))
    if not any(n in RAISED_BY_SKEW or (n == "RuntimeError" and text.startswith(WRAPPED)) for n, text in named):
        return None
    near = frozenset(one.package.replace("_", "-") for one in (raised, *failure.chain) if one.package)
    facts = list(dict.fromkeys(_FINDERS[gone.kind](gone, near)))
    differing = [fact for fact in facts if fact.places and not fact.everywhere]
    # If one class has releases with and without the argument, ignore classes with the same name in other packages.
    chosen = differing or facts
    chosen = [fact for fact in chosen if fact.package in near] or chosen
    if not chosen:
        return None
    ambiguous = len({fact.package for fact in chosen}) > 1
    known = dict(entry.rsplit(" ", 1) for entry in failure.versions)
    return _answer(chosen[0], gone.kind, known, ambiguous=ambiguous)


def _answer(fact: _Fact, kind: str, known: Mapping[str, str], *, ambiguous: bool) -> Skew:
    releases = fact.table.releases
    installed = known.get(fact.package) or (known.get("pytorch-lightning", "") if fact.package == "lightning" else "")
    if not fact.places or fact.everywhere:
        change = Change.PRESENT if fact.places else Change.NEVER
        found = Skew(package=fact.package, name=fact.name, kind=kind, change=change, certainty="possible")
        return found.model_copy(update={"installed": installed, "renamed_to": fact.renamed_to})
    first, last = min(fact.places), max(fact.places)
    since = releases[first] if first else ""
    until, gone_in = (releases[last], releases[last + 1]) if last + 1 < len(releases) else ("", "")
    change = _change(since, gone_in, until, installed)
    if fact.required and change in {Change.REMOVED, Change.OUTSIDE}:
        change = Change.REQUIRED
    limits = (f">={minor(since)}" if since else "", f"<={until}" if until else "")
    return Skew(
        package=fact.package,
        name=fact.name,
        kind=kind,
        change=change,
        certainty="possible" if ambiguous or change is Change.PRESENT else "likely",
        since=since,
        until=until,
        gone_in=gone_in,
        renamed_to=fact.renamed_to,
        installed=installed,
        pin=fact.package + ",".join(filter(None, limits)),
    )


def _change(since: str, gone_in: str, until: str, installed: str) -> Change:
    """Compare the installed release with the releases that have the name. If the installed release is unknown, the
    result only states whether the name was added, removed, or both.
    """
    if (found := version(installed)) is not None:
        if until and found > (version(until) or found):
            return Change.REMOVED
        if since and found < (version(minor(since)) or found):
            return Change.ADDED
        return Change.PRESENT
    if since and gone_in:
        return Change.OUTSIDE
    return Change.REMOVED if gone_in else Change.ADDED


# ------------------------------------------------------------------------------------------- names and modules


def _bound(gone: MissingName, near: frozenset[str]) -> Iterator[_Fact]:
    """Yield the releases in which a module defines or imports a name."""
    module = canonical(gone.owner)
    package = package_of(module)
    known = table(package)
    if known is None or gone.partial:
        return
    changed = members(package)
    places = {place for start, end in known.presence(module, gone.name) for place in range(start, end + 1)}
    places |= {
        place for place in range(len(known.releases)) if known.module(f"{module}.{gone.name}", place) is not None
    }
    places |= changed.of_module(module, gone.name) if changed else set()
    if not places and not known.lists(module):
        return  # the name is in every release or in none, because the table lists only differences
    dotted = f"{module}.{gone.name}"
    if len(places) == len(known.releases):
        yield _Fact(package, dotted, frozenset(places))
        return
    owner, _, name = dotted.rpartition(".")
    renamed = NAMES.get(dotted) or NAMES.get(f"{owner.partition('.')[0]}.{name}")
    if not renamed:  # then its dotted name in the newest release
        homes = [home for home in known.homes(name, len(known.releases) - 1) if home != owner]
        renamed = f"{homes[0]}.{name}" if homes else ""
    yield _Fact(package, dotted, frozenset(places), renamed)


def _module(gone: MissingName, near: frozenset[str]) -> Iterator[_Fact]:
    """Yield the releases that have a module. Yields nothing if the whole package is missing."""
    module = canonical(gone.name)
    known = table(package_of(module))
    if known is None or "." not in gone.name:
        return
    places = frozenset(place for place in range(len(known.releases)) if known.module(module, place) is not None)
    if places:
        yield _Fact(package_of(module), module, places)


# -------------------------------------------------------------------------------------- arguments and members


def _classes(gone: MissingName) -> Iterator[str]:
    """Yield the names of the classes and functions whose call may have failed."""
    owner, _, method = gone.owner.rpartition(".")
    if owner and method in CONSTRUCTORS:
        yield owner.rpartition(".")[2]
    elif gone.owner and not owner and gone.owner not in CONSTRUCTORS:
        yield gone.owner
    elif not owner:
        yield from (caller.rpartition(".")[2] for caller in gone.callers)


def _qualified(name: str) -> Iterator[tuple[str, str]]:
    """Yield (package, dotted name) for every class and every top-level function with this name."""
    for package in sorted(packages()):
        known = table(package)
        assert known is not None
        root = canonical(package.replace("-", "_"))
        roots = (root, "lightning.pytorch") if root == "lightning" else (root,)
        exported = [f"{module}.{name}" for module in roots if known.presence(module, name)]
        inner = known.defined_as(name) if name[:1].isupper() else []
        yield from ((package, dotted) for dotted in (exported or inner)[:1])


def _argument(gone: MissingName, near: frozenset[str]) -> Iterator[_Fact]:
    """Yield the releases in which a class or function accepts an argument."""
    for name in _classes(gone):
        facts = [fact for package, dotted in _qualified(name) if (fact := _accepted(package, dotted, gone.name))]
        if facts:
            yield from facts
            return
    called = (*_classes(gone), gone.owner.partition(".")[0])
    if gone.name in LOADING and any(name in LOADERS or MODEL.search(name) for name in called):
        # The releases in which from_pretrained itself uses the argument.
        removed, instead = LOADING[gone.name]
        limit = version(removed)
        places = [n for n, r in enumerate(_releases("transformers")) if limit and (version(r) or limit) < limit]
        yield _Fact("transformers", f"from_pretrained.{gone.name}", frozenset(places), instead)


def _accepted(package: str, dotted: str, argument: str) -> _Fact | None:
    known = argument_history(dotted, argument)
    name = f"{dotted}.{argument}"
    if not known.existed:
        signature = Installed({name: len(_releases(name)) - 1 for name in packages()}).signature(dotted)
        if known.open or signature is None or signature.open:
            return None
        return _Fact(package, name, frozenset(), nearest(argument, signature.parameters))
    releases = _releases(known.package)
    end = releases.index(known.gone_in) if known.gone_in else len(releases)
    places = frozenset(range(releases.index(known.since), end))
    renamed = known.renamed_to or (ARGUMENTS.get(argument, "") if known.gone_in else "")
    return _Fact(known.package, name, places, renamed)


def _releases(package: str) -> tuple[str, ...]:
    known = table(package)
    return known.releases if known else ()


def _required(gone: MissingName, near: frozenset[str]) -> Iterator[_Fact]:
    """Yield the releases in which an argument is optional."""
    for name in _classes(gone):
        for package, dotted in _qualified(name):
            places = []
            for place in range(len(_releases(package))):
                signature = Installed({package: place}).signature(dotted)
                parameter = signature.parameters.get(gone.name) if signature else None
                if signature is not None and (parameter is None or parameter.default is not None):
                    places.append(place)
            if places:
                yield _Fact(package, f"{dotted}.{gone.name}", frozenset(places), required=True)


def _attribute(gone: MissingName, near: frozenset[str]) -> Iterator[_Fact]:
    """Yield the releases in which a module or a class has an attribute."""
    if package_of(gone.owner):
        yield from _bound(gone, near)
        return
    for package in sorted(packages()):
        changed = members(package)
        if changed is not None and (places := changed.of_class(gone.owner, gone.name)):
            yield _Fact(package, f"{gone.owner}.{gone.name}", places)


_FINDERS: Mapping[str, Finder] = {
    "name": _bound,
    "module": _module,
    "keyword": _argument,
    "argument": _required,
    "attribute": _attribute,
}
