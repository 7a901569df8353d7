"""Map declared paths to real paths inside allowed folders, and real paths to declared paths."""

from __future__ import annotations

import os

from gpuwarden.remote.runner.protocol import Json


def inside(path: str, bound: str) -> bool:
    """Return whether a real path is `bound` or inside it."""
    return path == bound or path.startswith(bound.rstrip("/") + "/")


def printable(name: str) -> str:
    """Make a name safe for JSON: escape bytes that are not UTF-8, and truncate it to 4096 characters."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")[:4096]


class PathMapping:
    """Maps a machine's absolute paths to real paths.

    `root` is empty on a real machine. In a rehearsal, it is the folder of the simulated machine, and `mounts` (path ->
    folder) are volumes outside that folder. `within`, if given, lists the real folders that absolute paths may be in:
    those that a sandboxed job may write to.
    """

    def __init__(self, given: Json) -> None:
        self.root = str(given.get("root") or "")
        mounts = given.get("mounts") if isinstance(given.get("mounts"), dict) else {}
        pairs = [(str(at).rstrip("/"), os.path.realpath(str(real))) for at, real in (mounts or {}).items()]
        self.mounts = sorted(pairs, key=lambda pair: -len(pair[0]))
        within = given.get("within")
        self.within = [str(path) for path in within] if isinstance(within, list) else None

    def locate(self, folder: str, path: str) -> tuple[str, str]:
        """Return the real path of a declared path, and the real folder that must contain it."""
        if not path.startswith("/"):
            return os.path.join(folder, "work", path), folder + "/work"
        plain = os.path.normpath("/" + path.lstrip("/"))
        for at, real in self.mounts:
            if inside(plain, at):
                return real + plain[len(at) :], real
        found = os.path.join(self.root or "/", path.lstrip("/"))
        if self.within is None:
            return found, os.path.realpath(self.root or "/")
        real = os.path.realpath(found)
        return found, next((bound for bound in self.within if inside(real, bound)), folder + "/work")

    def shown(self, real: str) -> str:
        """Return the machine's absolute path for a real path."""
        for at, top in self.mounts:
            if inside(real, top):
                return at + real[len(top) :]
        return "/" + os.path.relpath(real, os.path.realpath(self.root or "/"))
