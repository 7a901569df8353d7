"""Plug-ins are found by their file name; there is no list of them.

`gpuwarden/<package>/<name>.py` is the plug-in `<name>` and offers one factory. It is imported when it is requested. An
error for a missing optional dependency names the extra that brings it; a plug-in never vanishes silently.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from gpuwarden.core.errors import NotFound, NotSupported


def names(package: ModuleType, *, hidden: frozenset[str] = frozenset({"base"})) -> list[str]:
    """Return the plug-ins of a package, sorted, without importing them."""
    found = (m.name for m in pkgutil.iter_modules(package.__path__))
    return sorted(n for n in found if n not in hidden and not n.startswith("_"))


def load(package: ModuleType, name: str, *, what: str) -> ModuleType:
    """Import plug-in `name`. Raises NotFound, or NotSupported with the extra to install."""
    if name not in names(package):
        raise NotFound(f"there is no {what} called {name!r}", f"There are: {', '.join(names(package)) or 'none'}.")
    try:
        return importlib.import_module(f"{package.__name__}.{name}")
    except ModuleNotFoundError as missing:
        raise NotSupported(
            f"the {what} {name!r} needs the Python package {missing.name!r}, which is not installed",
            f"pip install 'gpuwarden[{name}]'",
        ) from missing
