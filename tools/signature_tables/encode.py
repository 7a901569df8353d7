"""Write the releases of one package as one table that lists each fact with the ranges of releases in which it is true.

The readers are in `gpuwarden.static_analysis.signatures.tables`, which describes the format.
"""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from signature_tables.modules import Definition, Parameter
from signature_tables.releases import PACKAGES, Release

T = TypeVar("T", bound=Hashable)
_KINDS = {"function": "f", "init": "i", "dataclass": "d", "enum": "e", "plain": "p"}


class _Interned(dict[Any, int]):
    """Maps values to numbers, which are assigned in the order in which the values are added."""

    def of(self, value: Hashable) -> int:
        return self.setdefault(value, len(self))


def table(package: str, releases: Sequence[Release]) -> dict[str, Any]:
    """Return the table for a package's releases, which are given oldest first."""
    parameters, variants = _Interned(), _Interned()

    def coded(found: Definition) -> int:
        numbers = tuple(parameters.of(_parameter(p, found)) for p in found.parameters)
        renames = tuple(sorted(found.renames.items()))
        return variants.of((_KINDS[found.kind], found.bases, numbers, int(found.open), renames))

    definitions = _history(
        [{key: coded(found) for key, found in sorted(release.definitions.items())} for release in releases]
    )
    modules = sorted({module for release in releases for module in release.names})
    return {
        "package": package,
        "releases": [release.version for release in releases],
        "requires": _history([_requirements(release.requires) for release in releases]),
        "modules": _history([{m: int(o) for m, o in release.modules.items()} for release in releases]),
        "names": {
            module: _history(
                [
                    {n: 0 if t == f"{module}.{n}" else t for n, t in release.names.get(module, {}).items()}
                    for release in releases
                ]
            )
            for module in modules
        },
        "definitions": definitions,
        "variants": list(variants),
        "parameters": list(parameters),
    }


def compressed(content: Mapping[str, Any]) -> bytes:
    """Return a table as bytes. Equal tables produce identical bytes."""
    text = json.dumps(content, separators=(",", ":"), sort_keys=True, ensure_ascii=False)
    return lzma.compress(text.encode(), format=lzma.FORMAT_XZ, preset=9 | lzma.PRESET_EXTREME)


def _parameter(parameter: Parameter, found: Definition) -> tuple[Any, ...]:
    """Return the name, the default, the accepted values or their enum, and whether the class itself rejects other
    values.
    """
    values: Any = parameter.choices or (parameter.kinds[0] if parameter.kinds else 0)
    return (parameter.name, parameter.default, values, int(parameter.name in found.checked and bool(parameter.kinds)))


def _history(by_release: Sequence[Mapping[str, T]]) -> dict[str, list[list[Any]]]:
    """Map each key to its values, as a list of [first release, last release, value]."""
    runs: dict[str, list[list[Any]]] = {}
    for number, values in enumerate(by_release):
        for key, value in values.items():
            known = runs.setdefault(key, [])
            if known and known[-1][1] == number - 1 and known[-1][2] == value:
                known[-1][1] = number
            else:
                known.append([number, number, value])
    return runs


def _requirements(lines: Iterable[str]) -> dict[str, str]:
    """Return the version requirements on other packages that have a table."""
    conditions: dict[str, list[str]] = {}
    for line in lines:
        found = re.match(r"([\w-]+)\s*(?:\[[^\]]*\])?\s*\(?([^;)]*)", line)
        if found and found[1].lower().replace("-", "_") in PACKAGES:
            conditions.setdefault(found[1].lower().replace("_", "-"), []).append(found[2].strip())
    return {name: ",".join(filter(None, texts)) for name, texts in sorted(conditions.items())}
