"""Healthy files of the common training libraries, written by those libraries at test time.

Every function decorated with `@configuration` writes one configuration's files into an empty folder. The expected
verdict is part of the registration, so that it is decided before the verification: proven, except for files whose names
match `unknown`, which can't be read without running code.
"""

from __future__ import annotations

import fnmatch
import importlib
import importlib.util
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODULES = ("torch_files", "torch_training", "hub_models", "training_runs", "other_libraries")
CONFIGURATIONS: dict[str, Configuration] = {}


class Unreadable(Exception):
    """Raised if the library that wrote a file can't read it back, so the file is not a healthy one."""


@dataclass(frozen=True)
class Configuration:
    """One way to write files with real libraries, and the expected verdicts."""

    name: str
    write: Callable[[Path], object]
    needs: tuple[str, ...]
    # Name patterns of files that can't be read without running code.
    unknown: tuple[str, ...] = ()
    # The step from which a run resumes; None if the files are not meant for resuming.
    step: int | None = None

    @property
    def unseen(self) -> bool:
        """Return whether this is in the held-out third, which is not used while working on verdicts."""
        return zlib.crc32(self.name.encode()) % 3 == 0

    @property
    def lacks(self) -> list[str]:
        """Return the modules that are not installed."""
        return [m for m in self.needs if importlib.util.find_spec(m) is None]

    def expected(self, path: str) -> str:
        """Return the expected verdict of a file."""
        return "unknown" if any(fnmatch.fnmatch(path, p) for p in self.unknown) else "proven"


def configuration(
    name: str, *needs: str, unknown: tuple[str, ...] = (), step: int | None = None
) -> Callable[[Callable[[Path], object]], Callable[[Path], object]]:
    """Register a function that writes the files of a configuration."""

    def register(write: Callable[[Path], object]) -> Callable[[Path], object]:
        assert name not in CONFIGURATIONS, name
        CONFIGURATIONS[name] = Configuration(name, write, needs, unknown, step)
        return write

    return register


def family(
    prefix: str, values: Iterator[Any] | list[Any] | dict[str, Any] | tuple[Any, ...], *needs: str, **more: Any
) -> Callable[[Callable[[Path, Any], object]], Callable[[Path, Any], object]]:
    """Register a configuration for each value. A dict maps names to values."""
    named = values if isinstance(values, dict) else {str(v): v for v in values}

    def register(write: Callable[[Path, Any], object]) -> Callable[[Path, Any], object]:
        for label, value in named.items():
            configuration(f"{prefix}: {label}", *needs, **more)(lambda at, v=value: write(at, v))
        return write

    return register


def configurations() -> list[Configuration]:
    """Return all configurations, sorted by name."""
    for module in MODULES:
        importlib.import_module(f"healthy.{module}")
    return [CONFIGURATIONS[name] for name in sorted(CONFIGURATIONS)]
