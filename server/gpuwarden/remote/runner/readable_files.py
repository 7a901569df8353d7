"""Restrict which files may be read from outside."""

from __future__ import annotations

import os

from gpuwarden.remote.runner.path_mapping import PathMapping, inside, printable
from gpuwarden.remote.runner.protocol import Problem
from gpuwarden.remote.runner.safe_open import SafeOpener
from gpuwarden.remote.runner.status import read_status


class ReadableFiles:
    """The files that may be read from outside: the working folder and the declared outputs."""

    def __init__(self, folder: str, mapping: PathMapping) -> None:
        self.folder, self.mapping = folder, mapping
        status = read_status(folder) or {}
        tops = [mapping.locate(folder, p)[0] for p in status.get("outputs") or [] if str(p).startswith("/")]
        self.allowed = [folder + "/work", *map(os.path.realpath, tops)]
        self.opener = SafeOpener()
        self.known: dict[str, str] = {}  # folders that were checked; empty where the full check decides

    def open(self, path: str) -> int:
        """Return the descriptor of one file of a roster. Its folder is checked once."""
        above, _, name = path.rpartition("/")
        if above not in self.known:
            real = os.path.realpath(os.path.dirname(self.mapping.locate(self.folder, path)[0]))
            self.known[above] = real if any(inside(real, bound) for bound in self.allowed) else ""
        folder = self.known[above]
        if folder and name not in ("", ".", ".."):
            try:
                return self.opener.open_in(folder, name)
            except OSError:
                pass  # a link, or missing: the full check says which
        real = os.path.realpath(self.mapping.locate(self.folder, path)[0])
        if not os.path.lexists(real):
            raise Problem("not_found", f"no such file: {printable(path)}")
        if not any(inside(real, bound) for bound in self.allowed):
            raise Problem("bad_request", f"{printable(path)} is outside the working folder and the declared outputs")
        return self.opener.open(real)
