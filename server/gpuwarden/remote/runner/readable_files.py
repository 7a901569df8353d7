"""Restrict which files may be read from outside."""

from __future__ import annotations

import os

from gpuwarden.remote.runner.path_mapping import PathMapping, inside, printable
from gpuwarden.remote.runner.protocol import Problem
from gpuwarden.remote.runner.safe_open import SafeOpener


class ReadableFiles:
    """The files that may be read from outside: relative paths in the working folder, absolute ones in their bounds.

    Which absolute paths are outputs is decided where they are declared, also after the launch.
    """

    def __init__(self, folder: str, mapping: PathMapping) -> None:
        self.folder, self.mapping = folder, mapping
        self.opener = SafeOpener()
        self.known: dict[str, str] = {}  # folders that were checked; empty where the full check decides

    def open(self, path: str) -> int:
        """Return the descriptor of one file of a roster. Its folder is checked once."""
        above, _, name = path.rpartition("/")
        if above not in self.known:
            located, bound = self.mapping.locate(self.folder, path)
            real = os.path.realpath(os.path.dirname(located))
            self.known[above] = real if inside(real, bound) else ""
        folder = self.known[above]
        if folder and name not in ("", ".", ".."):
            try:
                return self.opener.open_in(folder, name)
            except OSError:
                pass  # a link, or missing: the full check says which
        located, bound = self.mapping.locate(self.folder, path)
        real = os.path.realpath(located)
        if not os.path.lexists(real):
            raise Problem("not_found", f"no such file: {printable(path)}")
        if not inside(real, bound):
            raise Problem("bad_request", f"{printable(path)} is outside the working folder and the declared outputs")
        return self.opener.open(real)
