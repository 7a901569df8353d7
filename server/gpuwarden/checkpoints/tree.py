"""A folder's files, listed without following links out of it. Standard library only."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from gpuwarden.checkpoints.budget import Budget
from gpuwarden.checkpoints.file_model import Limits, short
from gpuwarden.checkpoints.safe_file import kind


@dataclass
class Folder:
    """One folder of the tree: names of its files with their sizes, and of its folders."""

    path: Path
    rel: str
    files: dict[str, int] = field(default_factory=dict)
    folders: dict[str, Folder] = field(default_factory=dict)
    odd: dict[str, str] = field(default_factory=dict)

    def join(self, name: str) -> str:
        """Return the path of an entry, relative to the root of the walk."""
        return f"{self.rel}/{name}" if self.rel else name


@dataclass
class Tree:
    """The files and folders below one path. `doubts` say what could not be listed.

    `aliases` are links to something else in the tree. `blobs` are the files of a Hub cache: a snapshot consists of
    links into the `blobs` folder beside it, the one place outside of the tree to which links are followed.
    """

    root: Path
    top: Folder
    folders: list[Folder]
    doubts: list[str]
    aliases: dict[str, str]
    blobs: dict[str, Path]

    @property
    def files(self) -> dict[str, int]:
        """Return relative path -> size, sorted by path."""
        return dict(sorted((f.join(n), size) for f in self.folders for n, size in f.files.items()))

    def restrict(self, only: frozenset[str]) -> list[str]:
        """Keep the listed files and the folders with some of them. Return the files that are left out."""
        out = [n for n in self.files if n not in only]
        for folder in self.folders:
            folder.files = {n: size for n, size in folder.files.items() if folder.join(n) in only}
            folder.odd = {n: why for n, why in folder.odd.items() if folder.join(n) in only}
        needed = {parent for n in only for parent in _parents(n)}
        self.folders = [f for f in self.folders if f.rel in needed or not f.rel]
        for folder in self.folders:
            folder.folders = {n: f for n, f in folder.folders.items() if f.rel in needed}
        return out


def _parents(path: str) -> list[str]:
    parts = path.split("/")[:-1]
    return ["/".join(parts[: i + 1]) for i in range(len(parts))]


def walk(root: Path, limits: Limits, budget: Budget | None = None) -> Tree:
    """List the tree below `root`. Links that stay inside are noted as aliases; others are doubts."""
    real = Path(os.path.realpath(root))
    top = Folder(real, "")
    tree = Tree(real, top, [top], [], {}, {})
    stack = [(top, 0)]
    count, most = 0, min(limits.files, budget.entries) if budget else limits.files
    while stack:
        folder, depth = stack.pop()
        if budget and budget.spent:
            tree.doubts.append(f"not every folder was listed: {budget.spent}")
            return tree
        for entry in _entries(folder, tree):
            count += 1
            if count > most:
                tree.doubts.append(f"more than {most:,} entries; the rest was not looked at")
                return tree
            child = _place(entry, folder, tree)
            if child is None:
                continue
            if depth >= limits.depth:
                tree.doubts.append(f"{short(child.rel)}: nested deeper than {limits.depth} folders; not looked at")
                continue
            tree.folders.append(child)
            stack.append((child, depth + 1))
    return tree


def _entries(folder: Folder, tree: Tree) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder.path) as entries:
            return sorted(entries, key=lambda e: e.name)
    except OSError as why:
        tree.doubts.append(f"{short(folder.rel) or 'the folder'}: can't be listed: {why.strerror}")
        return []


def _place(entry: os.DirEntry[str], folder: Folder, tree: Tree) -> Folder | None:
    rel = folder.join(entry.name)
    try:
        info = entry.stat(follow_symlinks=False)
        if stat.S_ISLNK(info.st_mode):
            _link(entry, rel, folder, tree)
    except OSError as why:
        folder.odd[entry.name] = f"can't be looked at: {why.strerror}"
        return None
    if stat.S_ISREG(info.st_mode):
        folder.files[entry.name] = info.st_size
    elif stat.S_ISDIR(info.st_mode):
        child = Folder(Path(entry.path), rel)
        folder.folders[entry.name] = child
        return child
    elif not stat.S_ISLNK(info.st_mode):
        folder.odd[entry.name] = f"not a regular file but {kind(info.st_mode)}; not opened"
    return None


def _link(entry: os.DirEntry[str], rel: str, folder: Folder, tree: Tree) -> None:
    target = os.path.realpath(entry.path)
    root = str(tree.root).rstrip(os.sep) + os.sep
    if not os.path.exists(target):  # noqa: PTH110
        folder.odd[entry.name] = "a link to nothing"
    elif (target + os.sep).startswith(root):
        tree.aliases[rel] = target[len(root) :].replace(os.sep, "/") or "."
    elif _is_blob(Path(target), tree.root):
        folder.files[entry.name] = os.stat(target).st_size  # noqa: PTH116
        tree.blobs[rel] = Path(target)
    else:
        folder.odd[entry.name] = "a link that leads out of the folder; not followed"


def _is_blob(target: Path, root: Path) -> bool:
    """Return true if `root` is a models--x--y/snapshots/<revision> and `target` a file in models--x--y/blobs."""
    above = [root, *root.parents]
    snapshots = next((p for p in above if p.name == "snapshots"), None)
    return snapshots is not None and target.parent == snapshots.parent / "blobs" and target.is_file()
