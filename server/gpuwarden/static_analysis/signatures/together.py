"""Find the releases of a package that are compatible with everything that a script definitely uses.

If the requirements do not specify a release, a removed argument is definitely rejected only if none of the possible
releases has it. A release is possible if it has all of the script's imports and other arguments, and if it is
compatible with a possible release of each other package that the script uses. Because the tables have only one release
for each minor version, a release also counts as possible if the next release in the table is possible.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from gpuwarden.static_analysis.signatures.history import places_with
from gpuwarden.static_analysis.signatures.resolve import Existence, Installed
from gpuwarden.static_analysis.signatures.tables import package_of, table

Passed = tuple[str, str]
"""The dotted name of a class or a function, and an argument that a script passes to it."""


def excludes_older_releases(package: str, gone_in: str, imports: Iterable[str], passed: Iterable[Passed]) -> bool:
    """Return true if imports and other calls exclude all releases before the release that removed an argument."""
    known = table(package)
    possible = possible_places(package, tuple(sorted(set(imports))), tuple(sorted(set(passed))))
    return known is not None and bool(possible) and possible[0] >= known.releases.index(gone_in)


@lru_cache(maxsize=64)
def possible_places(package: str, imports: tuple[str, ...], passed: tuple[Passed, ...]) -> tuple[int, ...]:
    """Return the indices of a package's releases that are compatible with all imports and calls."""
    names: dict[str, list[str]] = {package: []}
    for name in imports:
        if package_of(name) and not name.endswith(".*"):
            names.setdefault(package_of(name), []).append(name)
    limits: dict[str, list[frozenset[int]]] = {}
    for name, argument in passed:
        owner, places = places_with(name, argument)
        if owner:
            limits.setdefault(owner, []).append(places)
    having = {o: _having(o, names.get(o, ()), limits.get(o, ())) for o in names.keys() | limits.keys()}
    others = [(owner, places) for owner, places in having.items() if owner != package and places]
    return tuple(
        p
        for p in having[package]
        if all(
            any(_accepts(package, p, o, at) and _accepts(o, at, package, p) for at in places) for o, places in others
        )
    )


def _having(package: str, names: Sequence[str], limits: Sequence[frozenset[int]]) -> list[int]:
    """Return the indices of releases that have all names and are in all `limits`, and of the releases before them."""
    known = table(package)
    count = len(known.releases) if known else 0
    has = [
        all(p in places for places in limits)
        and all(Installed({package: p}).exists(n) is not Existence.ABSENT for n in names)
        for p in range(count)
    ]
    return [place for place in range(count) if any(has[place : place + 2])]


def _accepts(package: str, place: int, other: str, at: int) -> bool:
    """Return true if a release's requirements allow a given release of another package, or the release after it."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    source, target = table(package), table(other)
    assert source is not None and target is not None
    try:
        asked = SpecifierSet(source.requires(place).get(other, ""))
    except InvalidSpecifier:
        return True
    return any(asked.contains(v, prereleases=True) for v in target.versions[at : at + 2])
