"""gpuwarden: the safety layer between coding agents and metered GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str


def __getattr__(name: str) -> str:
    """Look up the version lazily, because reading a package's metadata takes as long as starting the command line."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("gpuwarden")
    except PackageNotFoundError:  # running from a checkout that has not been installed
        return "0+unknown"
