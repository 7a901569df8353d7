"""Content-addressed store of input files. Files are kept from a job's acceptance until no job needs them.

A machine gets the checked bytes at the first launch and at every relaunch, even if the local files change later.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from gpuwarden.core.errors import BadRequest, Conflict, DiskError
from gpuwarden.core.guidance import Action, do
from gpuwarden.core.models import InputFile
from gpuwarden.core.sanitize import line
from gpuwarden.lifecycle.submission.inputs import BLOCK, real_path
from gpuwarden.private import private_folder
from gpuwarden.remote.transfer.safe_open import open_regular


def stage(store: Path, root: Path, files: Sequence[InputFile]) -> None:
    """Copy a manifest's files from `root` into the store.

    Files that are already stored are not copied again. Raises `Conflict` if a file has changed, and `DiskError` if a
    file can't be stored.
    """
    try:
        private_folder(store)
        for file in files:
            if not _is_complete(store / file.sha256, file):
                _copy(real_path(root, file.path), store / file.sha256, file)
        if hasattr(os, "O_DIRECTORY"):  # sync the new names to disk
            fd = os.open(store, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
    except OSError as error:
        raise DiskError(f"the inputs can't be stored in {store}: {error.strerror}", "Free some disk space.") from error


def staged(store: Path, files: Iterable[InputFile]) -> dict[str, Path]:
    """Return the stored copy of each file, by path.

    Raises `BadRequest` if a copy is missing or differs from the manifest.
    """
    found = {file.path: store / file.sha256 for file in files}
    for file in files:
        if not _is_complete(store / file.sha256, file):
            raise BadRequest(
                f"the stored copy of the input {line(file.path)} is missing or was changed",
                f"Another program wrote to {store}. Submit the job again.",
            )
    return found


def sweep(store: Path, needed: Iterable[InputFile]) -> None:
    """Delete the files that no job needs, and partial files left by a crash."""
    keep = {file.sha256 for file in needed}
    if store.is_dir():
        for path in store.iterdir():
            if path.name not in keep:
                path.unlink(missing_ok=True)


def _is_complete(path: Path, file: InputFile) -> bool:
    if path.is_symlink() or not path.is_file() or path.stat().st_size != file.size:
        return False
    with path.open("rb") as kept:
        return hashlib.file_digest(kept, "sha256").hexdigest() == file.sha256


def _copy(source: Path, target: Path, file: InputFile) -> None:
    """Copy one file. The copy gets its final name only after it is complete and synced to disk."""
    part = target.with_suffix(".part")
    part.unlink(missing_ok=True)
    seen, size = hashlib.sha256(), 0
    with open_regular(source) as near, part.open("xb") as kept:
        while (block := near.read(BLOCK)) and size <= file.size:
            size += len(block)
            seen.update(block)
            kept.write(block)
        kept.flush()
        os.fsync(kept.fileno())
    if seen.hexdigest() != file.sha256:
        part.unlink()
        raise Conflict(
            f"the input {line(file.path)} changed while being copied; nothing was launched",
            do(Action.SUBMIT, "to check it again", receipt=""),
        )
    part.chmod(0o400)
    part.replace(target)
