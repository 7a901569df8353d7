"""gpuwarden: the safety layer between coding agents and metered GPUs."""

from __future__ import annotations

__version__: str


def __getattr__(name: str) -> str:
    """Look the version up when it is asked for: the guard of a shell starts before every command."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("gpuwarden")
    except PackageNotFoundError:  # running from a checkout that was never installed
        return "0+unknown"
