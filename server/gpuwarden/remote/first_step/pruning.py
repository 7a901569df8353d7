"""Remove old rehearsal data: environments that exceed a limit (number, size, age), and folders of killed runs."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

MOST_ENVIRONMENTS: Final = 6
MOST_BYTES: Final = 24 << 30
MOST_DAYS: Final = 30.0
IN_USE_S: Final = 3_600.0
"""An environment is kept for this many seconds after its last use, because a rehearsal may still use it."""
RUN: Final = "gpuwarden-rehearsal-"
_READY: Final = "ready"
"""A file in every complete environment. It contains the environment's size in bytes; its mtime is the last use."""


def mark_ready(environment: Path) -> None:
    """Mark an environment as complete, and record its size."""
    sizes = ((Path(where) / name).lstat().st_size for where, _, names in os.walk(environment) for name in names)
    (environment / _READY).write_text(str(sum(sizes)), encoding="ascii")


def mark_used(environment: Path) -> bool:
    """Record that an environment has been used. Return False if it is incomplete."""
    try:
        os.utime(environment / _READY)
    except OSError:
        return False
    return True


def prune_environments(folder: Path, now: float) -> list[str]:
    """Remove the environments that exceed a limit, least recently used first, and return their names."""
    found = []
    for path in folder.iterdir():
        if path.is_dir():
            ready = path / _READY
            whole = ready.is_file()
            size = int(ready.read_text(encoding="ascii") or 0) if whole else 0
            found.append(((ready if whole else path).stat().st_mtime, path, size))
    left, removed = MOST_BYTES, []
    for number, (used, path, size) in enumerate(sorted(found, reverse=True)):
        left -= size
        over = number >= MOST_ENVIRONMENTS or left < 0 or now - used > MOST_DAYS * 86_400
        if over and now - used > IN_USE_S:
            remove(str(path))
            removed.append(path.name)
    return removed


def prune_runs(now: float, folder: str | None = None) -> list[str]:
    """Remove the folders of rehearsals that were killed more than a day ago, and return their names."""
    removed = []
    for entry in os.scandir(folder or tempfile.gettempdir()):
        if entry.name.startswith(RUN) and entry.is_dir(follow_symlinks=False):
            with suppress(FileNotFoundError):  # another rehearsal may have removed the folder
                about = entry.stat(follow_symlinks=False)
                if now - about.st_mtime > 86_400 and about.st_uid == os.getuid():
                    remove(entry.path)
                    removed.append(entry.name)
    return removed


def remove(top: str) -> None:
    """Remove a folder that contains a script's files, as far as possible.

    Only one folder is open at a time: deep nesting may exceed Python's recursion limit, the maximum path length and the
    limit on open files.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    above: list[str] = []
    with suppress(OSError):
        here = os.open(top, flags)
        try:
            while True:
                inner = ""
                with os.scandir(here) as entries:
                    for entry in entries:
                        if entry.is_dir(follow_symlinks=False):
                            inner = entry.name
                            break
                        os.unlink(entry.name, dir_fd=here)
                if inner:
                    if os.stat(inner, dir_fd=here, follow_symlinks=False).st_mode & 0o700 != 0o700:
                        os.chmod(inner, 0o700, dir_fd=here)
                    above.append(inner)
                    inside = os.open(inner, flags, dir_fd=here)
                elif above:
                    inside = os.open("..", flags, dir_fd=here)
                    os.rmdir(above.pop(), dir_fd=inside)
                else:
                    break
                os.close(here)
                here = inside
        finally:
            os.close(here)
        Path(top).rmdir()
