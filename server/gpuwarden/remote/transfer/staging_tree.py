"""Write small files to a staging folder under their final names, then move them to the destination. All calls block.

A folder that is new in the destination is moved with one rename instead of one rename per file. If a process is killed
before the move, the staged files remain. The next call uses only those with the right digest.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from gpuwarden.core.errors import BadRequest
from gpuwarden.core.safe_names import UnsafeName, make_parents
from gpuwarden.remote.transfer.destination import Entry, size_of
from gpuwarden.remote.transfer.partial_file import sync_everything


class Tree:
    """The tree of small files in a staging folder."""

    def __init__(self, staging: Path) -> None:
        self.path = staging / "tree"
        self._root = str(self.path)
        self._made: set[str] = set()

    def adopt(self, entries: Sequence[Entry], target: Callable[[str], Path]) -> None:
        """Move the files in this manifest that a killed process left here to their targets. Delete all other files.

        Only the sizes are compared; the caller verifies the digests. Raises `BadRequest` if the tree is a symbolic
        link, because the link's target may contain unrelated files.
        """
        if self.path.is_symlink():
            raise BadRequest(f"{self.path} is a symbolic link; gpuwarden does not follow links", "Remove the link.")
        if not os.path.lexists(self._root):
            return
        for artifact, name in entries:
            left = self.path / name
            if size_of(left) == artifact.size and os.path.realpath(left) == str(left):  # the path contains no link
                try:
                    left.replace(target(name))
                except (UnsafeName, OSError):
                    continue  # the file is received again, and an error then reports the reason
        shutil.rmtree(self.path)

    def place(self, name: str) -> str:
        """Return a file's staging path and create its parent folders. Raises `UnsafeName` or `OSError`."""
        path = f"{self._root}/{name}"
        folder = path[: path.rindex("/")]
        if folder not in self._made:
            self.path.mkdir(exist_ok=True)
            make_parents(self.path, name)
            self._made.add(folder)
        return path

    def publish(self, dest: Path) -> tuple[set[Path], set[str]]:
        """Sync all staged files, then move them to `dest`.

        Returns the folders whose content changed, and the files or folders that could not be moved, relative to `dest`.
        """
        if not self._made:
            return set(), set()
        sync_everything(self.path)
        changed, kept = set[Path](), set[str]()
        for folder, failed in _merge(self._root, str(dest)):
            changed.add(Path(folder))
            if failed:
                kept.add(Path(failed).relative_to(dest).as_posix())
        shutil.rmtree(self.path)
        self._made.clear()
        return changed, kept


def _merge(source: str, dest: str) -> Iterator[tuple[str, str]]:
    """Move a folder's content into another. Yield each changed folder, and a path that could not be moved or ""."""
    yield dest, ""
    with os.scandir(source) as entries:
        for entry in entries:
            target = f"{dest}/{entry.name}"
            there = _kind(target)
            if there == stat.S_IFDIR and entry.is_dir(follow_symlinks=False):
                yield from _merge(entry.path, target)
            elif there and stat.S_IFDIR in {there, _kind(entry.path)}:
                yield dest, target
            else:
                try:
                    Path(entry.path).replace(target)
                except OSError:
                    yield dest, target


def _kind(path: str) -> int:
    """Return a path's file type bits, without following links; 0 if the path does not exist."""
    try:
        return stat.S_IFMT(os.lstat(path).st_mode)
    except OSError:
        return 0
