"""List the files in a folder without following links to files outside the folder. Standard library only."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from gpuwarden.checkpoints.budget import Budget
from gpuwarden.checkpoints.file_model import Limits, short
from gpuwarden.checkpoints.safe_file import kind


@dataclass
class Folder:
    """One folder in the tree: its files with their sizes, and its subfolders. `odd` describes all other entries.

    `links` contains the names of links to other entries in the tree.
    """

    path: Path
    rel: str
    files: dict[str, int] = field(default_factory=dict)
    folders: dict[str, Folder] = field(default_factory=dict)
    odd: dict[str, str] = field(default_factory=dict)
    links: set[str] = field(default_factory=set)

    def join(self, name: str) -> str:
        """Return the path of an entry, relative to the root of the tree."""
        return f"{self.rel}/{name}" if self.rel else name


@dataclass
class Tree:
    """The files and folders under one path. `doubts` reports folders that could not be listed.

    `aliases` contains links to other entries in the tree. `blobs` contains files in a Hub cache, where a snapshot
    consists of links into the `blobs` folder. Links to any other location outside the tree are not followed.
    """

    root: Path
    top: Folder
    folders: list[Folder]
    doubts: list[str]
    aliases: dict[str, str]
    blobs: dict[str, Path]

    @property
    def files(self) -> dict[str, int]:
        """Return the sizes of all files by relative path, sorted by path."""
        return dict(sorted((f.join(n), size) for f in self.folders for n, size in f.files.items()))

    @property
    def blob_folder(self) -> Path | None:
        """Return models--x--y/blobs for a root in models--x--y/snapshots/<revision>; None for any other root."""
        snapshots = next((p for p in (self.root, *self.root.parents) if p.name == "snapshots"), None)
        return snapshots.parent / "blobs" if snapshots else None

    def beside(self, folder: Folder) -> list[Folder]:
        """Return at most 1,000 siblings of a folder, because this method may be called for every folder."""
        above: Folder | None = self.top
        for part in folder.rel.split("/")[:-1]:
            above = above.folders.get(part) if above else None
        others = above.folders.values() if above and folder.rel else ()
        return [f for f in islice(others, 1_000) if f.rel != folder.rel]

    def restrict(self, only: frozenset[str]) -> list[str]:
        """Keep the listed files and the folders that contain them. Return the other files."""
        out = [n for n in self.files if n not in only]
        for folder in self.folders:
            folder.files = {n: size for n, size in folder.files.items() if folder.join(n) in only}
            folder.odd = {n: why for n, why in folder.odd.items() if folder.join(n) in only}
        # all parent folders of the files
        needed = {n[:at] for n in only for at, sign in enumerate(n) if sign == "/"}
        self.folders = [f for f in self.folders if f.rel in needed or not f.rel]
        for folder in self.folders:
            folder.folders = {n: f for n, f in folder.folders.items() if f.rel in needed}
        return out


def walk(root: Path, limits: Limits, budget: Budget | None = None) -> Tree:
    """List the tree under `root`. Links are followed only to other entries in the tree or to blobs in a Hub cache."""
    real = Path(os.path.realpath(root))
    top = Folder(real, "")
    tree = Tree(real, top, [top], [], {}, {})
    stack = [(top, 0)]
    count, most = 0, min(limits.files, budget.entries) if budget else limits.files
    while stack:
        folder, depth = stack.pop()
        if budget and budget.spent:
            tree.doubts.append(f"some folders were not listed: {budget.spent}")
            return tree
        try:
            with os.scandir(folder.path) as scan:
                entries = sorted(scan, key=lambda e: e.name)
        except OSError as why:
            tree.doubts.append(f"{short(folder.rel) or 'the folder'}: can't be listed: {why.strerror}")
            continue
        for entry in entries:
            count += 1
            if count > most:
                tree.doubts.append(f"more than {most:,} entries; the remaining ones were not examined")
                return tree
            child = _place(entry, folder, tree)
            if child is None:
                continue
            if depth >= limits.depth:
                tree.doubts.append(
                    f"{short(child.rel)}: was not examined, because it is nested more than {limits.depth} folders deep"
                )
                continue
            tree.folders.append(child)
            stack.append((child, depth + 1))
    return tree


def _place(entry: os.DirEntry[str], folder: Folder, tree: Tree) -> Folder | None:
    """Add an entry to its folder, or a link to the tree. Return the entry if it is a folder, otherwise None."""
    rel = folder.join(entry.name)
    try:
        info = entry.stat(follow_symlinks=False)
        if stat.S_ISLNK(info.st_mode):
            target = os.path.realpath(entry.path)
            root = str(tree.root).rstrip(os.sep) + os.sep
            if not os.path.exists(target):  # noqa: PTH110
                folder.odd[entry.name] = "is a broken link"
            elif (target + os.sep).startswith(root):
                tree.aliases[rel] = target[len(root) :].replace(os.sep, "/") or "."
                folder.links.add(entry.name)
            elif Path(target).parent == tree.blob_folder and Path(target).is_file():
                folder.files[entry.name] = os.stat(target).st_size  # noqa: PTH116
                tree.blobs[rel] = Path(target)
            else:
                folder.odd[entry.name] = "is a link to a location outside the folder, and was not followed"
    except OSError as why:
        folder.odd[entry.name] = f"can't be read: {why.strerror}"
        return None
    if stat.S_ISREG(info.st_mode):
        folder.files[entry.name] = info.st_size
    elif stat.S_ISDIR(info.st_mode):
        child = Folder(Path(entry.path), rel)
        folder.folders[entry.name] = child
        return child
    elif not stat.S_ISLNK(info.st_mode):
        folder.odd[entry.name] = f"is {kind(info.st_mode)}, not a regular file, and was not opened"
    return None
