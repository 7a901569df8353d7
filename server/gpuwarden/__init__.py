"""gpuwarden: the safety layer between coding agents and metered GPUs."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("gpuwarden")
except PackageNotFoundError:  # running from a checkout that was never installed
    __version__ = "0+unknown"
