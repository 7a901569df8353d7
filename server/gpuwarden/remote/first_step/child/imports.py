"""Patch modules right after their import."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Callable, Dict, Optional

Patch = Callable[[ModuleType], None]


class AfterImport(MetaPathFinder):
    """A finder that wraps the loaders for modules to patch. All other modules are found as usual."""

    def __init__(self, patches: Dict[str, Patch]) -> None:
        self._patches = patches

    def install(self) -> None:
        """Insert this finder before all other finders."""
        sys.meta_path.insert(0, self)

    def find_spec(self, fullname: str, path: Any = None, target: Optional[ModuleType] = None) -> Optional[ModuleSpec]:
        """Return a spec whose loader also patches the module; None for a module without a patch."""
        if fullname not in self._patches:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        loader, execute = spec.loader, spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            patch = self._patches.pop(fullname, None)  # removed only now, because not every module found is executed
            if patch is not None:
                patch(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
