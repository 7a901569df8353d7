"""Choose the release of each package that a job will get, based on the conditions in its requirements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from gpuwarden.static_analysis.ecosystem_tables import canonical_name, read_requirement
from gpuwarden.static_analysis.signatures.tables import packages, table, version

_LIMITED = """
vllm sglang lmdeploy unsloth unsloth-zoo axolotl llamafactory ms-swift autotrain-advanced verl openrlhf torchtune
optimum optimum-intel optimum-neuron optimum-habana gptqmodel auto-gptq autoawq llmcompressor setfit nemo-toolkit
fairseq simpletransformers adapters coqui-tts paddlenlp
"""
_LIMITING = frozenset(_LIMITED.split())
"""Packages that have no table. Their unknown requirements limit the versions of packages that have one."""


@dataclass(frozen=True)
class ChosenRelease:
    """The package release that a job gets.

    `places` are indices into the table of releases: one release, or the first and last of a range of possible releases.
    `named` is true if the job lists requirements, and `newest` if no requirement pins the package, so that it is the
    newest release. Releases outside the table can't be represented.
    """

    package: str
    places: tuple[int, ...]
    named: bool
    newest: bool

    @property
    def releases(self) -> tuple[str, ...]:
        """Return the version numbers of the releases."""
        known = table(self.package)
        return tuple(known.releases[n] for n in self.places) if known else ()

    @property
    def text(self) -> str:
        """Describe the release."""
        if self.newest:
            return f"{self.package} {self.releases[-1]}, the newest known, because no requirement pins it"
        return f"{self.package} {' to '.join(self.releases)}"


def choose(requirements: Iterable[str] | None) -> dict[str, ChosenRelease]:
    """Return the release of each package that has a table, except packages whose release can't be determined.

    If the job has no requirements, `requirements` is None and every package gets its newest release. As with an
    installer, a package that is not pinned gets the newest release that is compatible with the pinned ones.
    """
    given = dict(_read(requirements or ()))
    limited = bool(given.keys() & _LIMITING)
    chosen: dict[str, ChosenRelease] = {}
    for package in sorted(packages(), key=lambda p: (not _pins(given.get(p)), p)):
        condition = given.get(package, SpecifierSet())
        if condition is None or (limited and not _pins(condition)):
            continue
        known = table(package)
        assert known is not None
        places = _places(package, condition, chosen)
        if places:
            newest = not _pins(condition) and places[-1] == len(known.releases) - 1
            chosen[package] = ChosenRelease(package, places, requirements is not None, newest)
    return chosen


@dataclass(frozen=True)
class Conflict:
    """Two required packages without compatible releases. `package` needs a version of `other` in `asked`, but the
    requirements allow only `given`.
    """

    package: str
    other: str
    asked: str
    given: str


def conflicts(requirements: Iterable[str]) -> Iterator[Conflict]:
    """Yield the pairs of required packages whose allowed releases are incompatible."""
    given = {name: condition for name, condition in _read(requirements) if condition and table(name)}
    for package, condition in given.items():
        source = table(package)
        assert source is not None
        for other, limit in given.items():
            allowed = [n for n, v in enumerate(source.versions) if condition.contains(v, prereleases=True)]
            asked = [source.requires(place).get(other, "") for place in allowed or _places(package, condition, {})]
            known = table(other)
            assert known is not None
            exact = [v for s in limit if s.operator in {"==", "==="} and (v := version(s.version))]
            candidates = exact or [v for v in known.versions if limit.contains(v, prereleases=True)]
            filters = (_specifiers(text) for text in asked if text)
            met = not all(asked) or any(one.contains(c, prereleases=True) for one in filters for c in candidates)
            if asked and candidates and not met:
                yield Conflict(package, other, asked[-1], str(limit))


def _read(requirements: Iterable[str]) -> Iterable[tuple[str, SpecifierSet | None]]:
    """Yield the required packages with their version conditions; None for a package that is installed from a URL."""
    for text in requirements:
        found = read_requirement(text)
        if found is None:
            continue
        if found.marker is None or found.marker.evaluate({"sys_platform": "linux", "platform_system": "Linux"}):
            yield canonical_name(found.name), None if found.url else found.specifier


def _pins(condition: SpecifierSet | None) -> bool:
    return condition is not None and any(s.operator in {"==", "===", "<", "<=", "~="} for s in condition)


def _places(package: str, condition: SpecifierSet, chosen: Mapping[str, ChosenRelease]) -> tuple[int, ...]:
    """Return the index of the newest release that a condition and the chosen releases allow.

    If the table lacks that release, return the indices of its two neighbors.
    """
    known = table(package)
    assert known is not None
    for other in chosen.values():
        source = table(other.package)
        asked = source.requires(other.places[-1]).get(package, "") if source else ""
        condition = condition & _specifiers(asked) if asked and not _pins(condition) else condition
    allowed = [n for n, release in enumerate(known.versions) if condition.contains(release, prereleases=True)]
    fitting = [n for n in allowed if _fits(known.requires(n), chosen)]
    if allowed:
        return ((fitting or allowed)[-1],)
    exact = [v for s in condition if s.operator in {"==", "<=", "~=", "<"} and (v := version(s.version.rstrip(".*")))]
    if not exact or not known.versions[0] < min(exact) < known.versions[-1]:
        return ()
    after = next(n for n, release in enumerate(known.versions) if release > min(exact))
    return (after - 1, after)


def _fits(requires: Mapping[str, str], chosen: Mapping[str, ChosenRelease]) -> bool:
    """Return true if a release is compatible with the releases chosen so far."""
    for name, text in requires.items():
        other, known = chosen.get(name), table(name)
        if (
            other
            and known
            and not any(_specifiers(text).contains(known.versions[n], prereleases=True) for n in other.places)
        ):
            return False
    return True


def _specifiers(text: str) -> SpecifierSet:
    try:
        return SpecifierSet(text)
    except InvalidSpecifier:
        return SpecifierSet()
