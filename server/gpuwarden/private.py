"""Create the folders and files of gpuwarden's state, which only their owner may read.

The first command to run creates the state folder, so all commands create it through this module. The umask stays
unchanged: it applies to the whole process, including jobs and copies that other users may read.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

STATE = "gpuwarden"
LEDGER = "ledger.db"


def private_folder(path: Path) -> Path:
    """Create a folder of mode 0700 with every missing parent, and return it. Raises OSError.

    A state folder that an older version made readable for all is set to 0700; a folder of another user stays as it is.
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
    """Set one of gpuwarden's files to mode 0600 if others have access; do nothing if it does not exist."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISREG(path.lstat().st_mode):
            _close(path, 0o600)


def write_private(path: Path, content: str | bytes) -> None:
    """Write a file of mode 0600 atomically, flushed to disk before it replaces the old one. Raises OSError."""
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
    """Remove all access of other users to a path. A path of another user stays unchanged."""
    if os.name != "posix":
        return
    info = path.stat()
    if info.st_uid == os.geteuid() and info.st_mode & 0o077:
        with contextlib.suppress(PermissionError):
            path.chmod(mode)
