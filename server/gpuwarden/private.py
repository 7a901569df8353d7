"""Folders and files of gpuwarden's own state, which only their owner may read.

Whichever command runs first makes the state folder, so that every one of them makes it here. An umask is not touched:
it belongs to the whole process, and to the jobs and copies that are made for others to read.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

STATE = "gpuwarden"
LEDGER = "ledger.db"


def private_folder(path: Path) -> Path:
    """Make a folder of mode 0700 with every missing folder above it, and return it. Raises OSError.

    A state folder that an older version made for all to read is closed; a folder of other people's is left as it is.
    """
    missing = []
    for folder in (path, *path.parents):
        if folder.is_dir():
            break
        missing.append(folder)
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another process was faster
            folder.mkdir(mode=0o700)
    if not missing and (path.name == STATE or (path / LEDGER).exists()):
        _close(path, 0o700)
    return path


def private_file(path: Path) -> None:
    """Give one of gpuwarden's files the mode 0600 where others may read it; nothing where there is none."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISREG(path.lstat().st_mode):
            _close(path, 0o600)


def write_private(path: Path, content: str | bytes) -> None:
    """Write a whole file of mode 0600 in one step, on disk before the old one is gone. Raises OSError."""
    part = path.with_name(f"{path.name}.{os.urandom(4).hex()}.part")
    raw = content.encode() if isinstance(content, str) else content
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _close(path: Path, mode: int) -> None:
    """Take from others what they may do with a path. What belongs to somebody else is theirs to close."""
    if os.name != "posix":
        return
    info = path.stat()
    if info.st_uid == os.geteuid() and info.st_mode & 0o077:
        with contextlib.suppress(PermissionError):
            path.chmod(mode)
