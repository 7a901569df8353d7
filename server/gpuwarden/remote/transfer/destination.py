"""Manage the folder that receives files: one writer, safe names, enough space, and a final sync. All calls block."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Final

from gpuwarden.core.errors import BadRequest, Conflict
from gpuwarden.core.models import Artifact
from gpuwarden.core.safe_names import (
    STAGING,
    UnsafeName,
    collision_key,
    folds_names,
    local_name,
    make_parents,
)
from gpuwarden.remote.transfer.partial_file import hash_file, part_name, sync_folder

SPARE_BYTES = 16 << 20
SPARE_INODES = 64
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers for a full disk or quota, after which no other file can be written either."""

OWNER = "owner"

Entry = tuple[Artifact, str]
"""A remote file and its name in the destination."""


def _refuse_others(dest: Path, owner: str) -> None:
    """Raise `BadRequest` if the folder or a parent belongs to another owner, or if the folder has unowned content."""
    holder = ""
    for folder in (dest, *dest.parents):
        mark = folder / STAGING / OWNER
        if not holder and mark.is_file() and not mark.is_symlink():
            holder = mark.read_text("utf-8", "replace")
    others = not holder and dest.is_dir() and any(entry.name != STAGING for entry in dest.iterdir())
    if others or holder not in {"", owner}:
        what = f"files that belong to {holder[:80]}" if holder else "files that do not belong to this job"
        raise BadRequest(
            f"{dest} contains {what}; existing files are not replaced", "Choose a new or empty folder for each job."
        )


class Destination:
    """A folder and its staging folder. Use it as `with Destination(path).only_writer() as dest`.

    If an `owner` (a job) is given, the folder belongs to it. A folder with other content is rejected, so that another
    owner's file with the same name is never replaced.
    """

    def __init__(self, path: Path, owner: str = "") -> None:
        self.owner = owner
        if owner:
            _refuse_others(path, owner)
        (path / STAGING).mkdir(parents=True, exist_ok=True)
        if (path / STAGING).is_symlink():
            raise BadRequest(
                f"{path / STAGING} is a symbolic link; gpuwarden does not write through links", "Remove the link."
            )
        self.path = path.resolve()
        self.staging = self.path / STAGING
        self._folds = folds_names(self.staging)
        self.fresh = False
        """True if the folder contained no files and no part files before this transfer."""
        self._made: set[str] = set()
        self._changed: set[Path] = set()

    @contextmanager
    def only_writer(self) -> Iterator[Destination]:
        """Lock the folder for this block. Raises `Conflict` if another process holds the lock."""
        from filelock import FileLock, Timeout

        lock = FileLock(self.staging / "lock")
        try:
            lock.acquire(blocking=False)
        except Timeout:
            raise Conflict(
                f"another process is receiving files into {self.path}",
                "Wait for it to finish, because both transfers would write the same files.",
            ) from None
        try:
            if self.owner:
                _refuse_others(self.path, self.owner)
                draft = self.staging / f"{OWNER}.draft"
                draft.write_text(self.owner, "utf-8")
                draft.replace(self.staging / OWNER)
            yield self
        finally:
            lock.release()

    def entries(self, artifacts: Sequence[Artifact]) -> tuple[list[Entry], dict[str, str]]:
        """Return each file with its local name, and the reason for each path that can't be received."""
        entries: list[Entry] = []
        refused: dict[str, str] = {}
        taken: dict[str, str] = {}
        for artifact in artifacts:
            try:
                name = local_name(artifact.path)
            except UnsafeName as unsafe:
                refused[artifact.path] = unsafe.message
                continue
            key = collision_key(name) if self._folds else name
            if key in taken:
                refused[artifact.path] = f"its name can't be distinguished from {taken[key]!r} on this disk"
                continue
            taken[key] = artifact.path
            entries.append((artifact, name))
        return entries, refused

    def check_room(self, entries: Sequence[Entry]) -> None:
        """Raise `BadRequest` if the disk has too few free bytes or inodes for the missing files."""
        need, files = sum(a.size for a, _ in entries), len(entries)
        self.fresh = [*islice(self.path.iterdir(), 2)] == [self.staging] and not any(self.staging.glob("*.part"))
        if not self.fresh:
            here = [size_of(self.path / name) == artifact.size for artifact, name in entries]
            lacking = [a for (a, _), there in zip(entries, here, strict=True) if not there]
            need = sum(a.size - min(a.size, size_of(self.part(a)) or 0) for a in lacking)
            files = len(lacking)
        free = shutil.disk_usage(self.path).free
        if need and free < need + SPARE_BYTES:
            raise BadRequest(
                f"{self.path} has {free:,} bytes free, but the transfer needs {need:,} plus a reserve",
                "Free space or choose another destination. Nothing was copied.",
            )
        if hasattr(os, "statvfs"):
            fs = os.statvfs(self.path)
            if fs.f_files and fs.f_favail < files + SPARE_INODES:
                raise BadRequest(
                    f"{self.path} has {fs.f_favail:,} free inodes, but the transfer needs {files:,}",
                    "Choose a destination on a file system with more free inodes.",
                )

    def part(self, artifact: Artifact) -> Path:
        """Return the path of an artifact's part file."""
        return self.staging / part_name(artifact)

    def target(self, name: str) -> Path:
        """Return a file's destination and create its parent folders; symbolic links are not followed."""
        parent = name.rpartition("/")[0]
        if parent not in self._made:
            make_parents(self.path, name)
            self._made.add(parent)
            self._changed.add(self.path / parent)
        return self.path / name

    def holds(self, artifact: Artifact, name: str) -> bool:
        """Return whether a file with this name and size existed before the transfer, possibly with other content."""
        return not self.fresh and size_of(self.path / name) == artifact.size

    def has(self, artifact: Artifact, name: str, sha256: str | None) -> bool:
        """Return whether this file existed before the transfer and has this digest."""
        try:
            return sha256 is not None and self.holds(artifact, name) and hash_file(self.target(name)) == sha256
        except (UnsafeName, OSError):
            return False

    def note(self, folders: set[Path]) -> None:
        """Record the folders in which files have been added or renamed, for `settle`."""
        self._changed |= folders

    def settle(self, *, complete: bool) -> None:
        """Sync the changed folders. If the transfer is complete, also delete remaining parts."""
        for folder in sorted(self._changed):
            sync_folder(folder)
        if complete:
            for stale in self.staging.glob("*.part"):
                stale.unlink(missing_ok=True)


def bare(sha256: str) -> str:
    """Return a digest without its `sha256:` prefix."""
    return sha256.removeprefix("sha256:")


def size_of(path: Path) -> int | None:
    """Return the size of a regular file; None for anything else."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None
