"""The bytes of inputs, kept by content from a job's acceptance until no job needs them.

What was checked is what a machine gets, whatever becomes of the files meanwhile, at the first launch and at every
relaunch.
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
    """Copy the files of a manifest from below `root` into the store. Raises `Conflict` for one that has changed."""
    try:
        private_folder(store)
        for file in files:
            if not _is_whole(store / file.sha256, file):
                _copy(real_path(root, file.path), store / file.sha256, file)
        if hasattr(os, "O_DIRECTORY"):  # make the new names durable, where a folder can be opened
            fd = os.open(store, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
    except OSError as error:
        raise DiskError(f"the inputs can't be kept in {store}: {error.strerror}", "Free some space there.") from error


def staged(store: Path, files: Iterable[InputFile]) -> dict[str, Path]:
    """Return the stored copy of each file, by its path.

    Raises `BadRequest` where they are not the ones of the manifest.
    """
    found = {file.path: store / file.sha256 for file in files}
    for file in files:
        if not _is_whole(store / file.sha256, file):
            raise BadRequest(
                f"the kept copy of the input {line(file.path)} is not there any more, or was changed",
                f"Something wrote to {store}. Submit the job again.",
            )
    return found


def sweep(store: Path, needed: Iterable[InputFile]) -> None:
    """Drop what no job needs any more, and what a crash left half written."""
    keep = {file.sha256 for file in needed}
    if store.is_dir():
        for path in store.iterdir():
            if path.name not in keep:
                path.unlink(missing_ok=True)


def _is_whole(path: Path, file: InputFile) -> bool:
    if path.is_symlink() or not path.is_file() or path.stat().st_size != file.size:
        return False
    with path.open("rb") as kept:
        return hashlib.file_digest(kept, "sha256").hexdigest() == file.sha256


def _copy(source: Path, target: Path, file: InputFile) -> None:
    """Copy one file, which gets its name only once it is whole and on the disk."""
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
            f"the input {line(file.path)} changed while it was taken; nothing was launched",
            do(Action.SUBMIT, "to have it checked again", receipt=""),
        )
    part.chmod(0o400)
    part.replace(target)
