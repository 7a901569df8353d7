"""Restrict the files that a request may read."""

from __future__ import annotations

import os

from gpuwarden.remote.runner.path_mapping import PathMapping, inside, printable
from gpuwarden.remote.runner.protocol import Json, Problem
from gpuwarden.remote.runner.safe_open import SafeOpener
from gpuwarden.remote.runner.status import read_status


class ReadableFiles:
    """The files that a request may read: the files in the working folder and in the declared outputs.

    The declared outputs are those in the status, which were declared at launch, and those in the request's `declared`.
    """

    def __init__(self, folder: str, request: Json) -> None:
        self.folder, self.mapping = folder, PathMapping(request)
        outputs = [*((read_status(folder) or {}).get("outputs") or []), *(request.get("declared") or [])]
        tops = [self.mapping.locate(folder, str(p))[0] for p in outputs if str(p).startswith("/")]
        self.declared = [os.path.realpath(top) for top in (folder + "/work", *tops)]
        self.opener = SafeOpener()
        self.known: dict[str, str] = {}  # folder -> real path; empty if its files are checked one by one

    def open(self, path: str) -> int:
        """Open one file in a manifest, and return its descriptor. A folder is checked only once."""
        above, _, name = path.rpartition("/")
        if above not in self.known:
            located, bound = self.mapping.locate(self.folder, path)
            real = os.path.realpath(os.path.dirname(located))
            self.known[above] = real if self._allows(real, bound) else ""
        folder = self.known[above]
        if folder and name not in ("", ".", ".."):
            try:
                return self.opener.open_in(folder, name)
            except OSError:
                pass  # for a link or a missing file, do the full check
        located, bound = self.mapping.locate(self.folder, path)
        real = os.path.realpath(located)
        if not os.path.lexists(real):
            raise Problem("not_found", f"no such file: {printable(path)}")
        if not self._allows(real, bound):
            raise Problem("bad_request", f"{printable(path)} is outside the working folder and the declared outputs")
        return self.opener.open(real)

    def _allows(self, real: str, bound: str) -> bool:
        return inside(real, bound) and any(inside(real, top) for top in self.declared)
