"""Locate the data folders: next to `server/` in a checkout, inside the package in an installed wheel."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias

from gpuwarden.core.errors import NotFound

Folder: TypeAlias = Literal["skills", "references", "profiles"]

PACKAGE = Path(__file__).resolve().parent


@cache
def data_dir(name: Folder) -> Path:
    """Return the data folder `name`. Raises NotFound if this installation does not contain it."""
    for folder in (PACKAGE / "_data" / name, PACKAGE.parent.parent / name):
        if folder.is_dir():
            return folder
    raise NotFound(f"this installation of gpuwarden has no folder {name!r}", "Install gpuwarden again.")
