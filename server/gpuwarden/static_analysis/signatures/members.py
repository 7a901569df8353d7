"""Look up the releases in which a class has a member, or a module has a name that the signatures don't list.

`tools/build_members.py` writes one table per package. A table contains only differences: members that a class has in
all releases are omitted, and so are members that it has in none.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from functools import cache
from typing import Any

from gpuwarden.data import data_dir
from gpuwarden.static_analysis.signatures.tables import packages

_DEPTH = 12


class Members:
    """The differences between all releases of one package."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.releases: tuple[str, ...] = tuple(content["releases"])
        self._classes: dict[str, Any] = content["classes"]
        self._names: dict[str, Any] = content["names"]

    def knows(self, owner: str) -> bool:
        """Return true if a class differs between releases. `owner` is its name without the module."""
        return owner in self._classes

    def of_class(self, owner: str, member: str) -> frozenset[int]:
        """Return the releases in which a class or one of its bases has a member; empty if all releases are the same."""
        return frozenset(place for one in self._line(owner, 0) for place in _places(one[2].get(member, ())))

    def of_module(self, module: str, name: str) -> frozenset[int]:
        """Return the releases in which a module binds a name; empty if all releases are the same."""
        return frozenset(_places(self._names.get(module, {}).get(name, ())))

    def _line(self, owner: str, depth: int) -> Iterator[Any]:
        """Yield a class and its bases within the package."""
        if owner in self._classes and depth < _DEPTH:
            yield self._classes[owner]
            for base in self._classes[owner][1]:
                yield from self._line(base, depth + 1)


def _places(runs: Any) -> Iterator[int]:
    return (place for start, end in runs for place in range(start, end + 1))


@cache
def members(package: str) -> Members | None:
    """Return a package's table; None if it has none."""
    path = data_dir("references") / "signatures" / "members" / f"{package}.json.xz"
    if package not in packages() or not path.is_file():
        return None
    return Members(json.loads(lzma.decompress(path.read_bytes())))
