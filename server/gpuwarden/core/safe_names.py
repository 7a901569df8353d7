"""Map file names from another machine to safe local paths.

A name from the remote side is untrusted data. It is mapped to a path in the destination or rejected. It is never
changed into another name, because the files in a checkpoint refer to each other by name.
"""

from __future__ import annotations

import os
import re
import stat
import unicodedata
from pathlib import Path

from gpuwarden.core.errors import BadReply

STAGING = ".gpuwarden"
LOG_NAME = "gpuwarden-job.log"
"""The name of the job's log in a pull's folder. If an output has this name, the log is in the subfolder `STAGING`,
which also contains partial files.
"""
ABSOLUTE = "machine"
MAX_NAME_BYTES = 255

_PLAIN = re.compile(r"/?[A-Za-z0-9_-][A-Za-z0-9_.-]{0,254}(?:/[A-Za-z0-9_-][A-Za-z0-9_.-]{0,254})*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_WINDOWS_CHARS = re.compile(r'[<>:"|?*\\]')
_WINDOWS_NAMES = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|com[0-9¹²³]|lpt[0-9¹²³])(\..*)?", re.IGNORECASE)


class UnsafeName(BadReply):
    """Raised for a file name from another machine that can't be used on this machine."""


def local_name(path: str, *, windows: bool = os.name == "nt") -> str:
    """Return the local path in the destination for a file in a manifest. Absolute paths are put under `machine/`.

    Raises `UnsafeName` as `check_name` does.
    """
    check_name(path, windows=windows)
    return ABSOLUTE + path if path.startswith("/") else path


def check_name(path: str, *, windows: bool = os.name == "nt") -> None:
    """Raise `UnsafeName` for `..`, parts that are empty or too long, control characters, the staging folder, and on
    Windows for reserved names.
    """
    absolute = path.startswith("/")
    parts = path.removeprefix("/").split("/")
    plain = not windows and _PLAIN.fullmatch(path)  # fast path for most names, because a manifest may list 200,000
    for part in () if plain else parts:
        why = ""
        if part in {"", ".", ".."}:
            why = "contains an empty part, '.' or '..'"
        elif _CONTROL.search(part):
            why = "contains a control character"
        elif len(os.fsencode(part)) > MAX_NAME_BYTES:
            why = f"has a part longer than {MAX_NAME_BYTES} bytes"
        elif windows and (_WINDOWS_CHARS.search(part) or part[-1] in " ." or _WINDOWS_NAMES.fullmatch(part)):
            why = "Windows can't store"
        if why:
            raise UnsafeName(
                f"the machine lists the file {path[:200]!r}, which {why}",
                "It was not copied; rename it on the machine.",
            )
    if parts[0].casefold() == STAGING or (not absolute and parts[0] == ABSOLUTE):
        raise UnsafeName(
            f"the machine lists the file {path[:200]!r}, which is in a folder that gpuwarden reserves",
            "Rename it on the machine.",
        )


def collision_key(name: str) -> str:
    """Return a key that is equal for names that a file system may treat as the same (case, Unicode form)."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def folds_names(folder: Path) -> bool:
    """Return whether the file system under `folder` treats `A` and `a` as the same name."""
    probe = folder / "Probe.Case"
    probe.touch()
    try:
        return (folder / "probe.case").exists()
    finally:
        probe.unlink(missing_ok=True)


def make_parents(dest: Path, name: str) -> Path:
    """Create the parent folders of `dest/name` without following symbolic links, and return `dest/name`."""
    folder = dest
    *parts, last = name.split("/")
    for part in parts:
        folder = folder / part
        try:
            folder.mkdir()
        except FileExistsError:
            if not stat.S_ISDIR(folder.lstat().st_mode):
                raise UnsafeName(
                    f"{folder} is a file or a symbolic link, so {name!r} can't be created in it",
                    "Move it elsewhere, or pull into an empty folder.",
                ) from None
    return folder / last
