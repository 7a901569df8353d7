"""Create gpuwarden's state folders and files so that only their owner can read them.

Any command may be the first to create the state folder, so all commands use this module. The umask is not changed,
because it applies to the whole process, including jobs and copies that other users may read.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

STATE = "gpuwarden"
LEDGER = "ledger.db"


def private_folder(path: Path) -> Path:
    """Create a folder with mode 0700 and any missing parent folders, and return it. Raises OSError.

    A state folder that an older version made readable by everyone is set to 0700. Another user's folder is not changed.
    """
    missing = []
    for folder in (path, *path.parents):
        if folder.is_dir():
            break
        missing.append(folder)
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another process has just created it
            folder.mkdir(mode=0o700)
    if not missing and (path.name == STATE or (path / LEDGER).exists()):
        _close(path, 0o700)
    return path


def private_file(path: Path) -> None:
    """Set one of gpuwarden's files to mode 0600 if other users have access. Do nothing if the file does not exist."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISREG(path.lstat().st_mode):
            _close(path, 0o600)


def write_private(path: Path, content: str | bytes) -> None:
    """Write a file with mode 0600 atomically. It is flushed to disk before it replaces the old file. Raises OSError."""
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
    """Remove other users' access to a path. Another user's path is not changed."""
    if os.name != "posix":
        return
    info = path.stat()
    if info.st_uid == os.geteuid() and info.st_mode & 0o077:
        with contextlib.suppress(PermissionError):
            path.chmod(mode)
