"""Install a package with plug-ins for one test: files and an entry point in a folder on `sys.path`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest


class Packages:
    """Installed packages, each in a separate folder; a registry reads the folders again when `sys.path` changes."""

    def __init__(self, root: Path, onto_path: Callable[[str], object]) -> None:
        self.root = root
        self.onto_path = onto_path
        self.modules: set[str] = set()

    def add(
        self,
        package: str,
        entry_points: Mapping[str, Mapping[str, str]],
        files: Mapping[str, str],
        *,
        extras: Mapping[str, str] | None = None,
    ) -> None:
        """Install `package` 1.0. Entry points are keyed by group, sources by file name, and requirements by extra."""
        folder = self.root / package
        info = folder / f"{package.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        lines = ["Metadata-Version: 2.1", f"Name: {package}", "Version: 1.0"]
        for extra, requirement in (extras or {}).items():
            lines += [f"Provides-Extra: {extra}", f"Requires-Dist: {requirement}; extra == '{extra}'"]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        groups = [f"[{g}]\n" + "".join(f"{n} = {v}\n" for n, v in found.items()) for g, found in entry_points.items()]
        (info / "entry_points.txt").write_text("\n".join(groups))
        for name, source in files.items():
            (folder / name).write_text(source)
            self.modules.add(name.removesuffix(".py"))
        self.onto_path(str(folder))
        importlib.invalidate_caches()

    def one(self, group: str, name: str, source: str, *, package: str = "someones-plugins") -> None:
        """Install a package with one plug-in, in the module `their_<name>`."""
        self.add(package, {f"gpuwarden.{group}": {name: f"their_{name}"}}, {f"their_{name}.py": source})


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Packages]:
    """Yield an empty set of packages; modules that the test imports from them are unloaded afterwards."""
    found = Packages(tmp_path / "site", monkeypatch.syspath_prepend)
    yield found
    for name in found.modules:
        sys.modules.pop(name, None)
