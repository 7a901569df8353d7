"""Notice finished checkpoints and record their digests at once, while their bytes are still those that were saved.

A checkpoint counts as finished when nothing in it has changed for `quiet_s` seconds and its structure is whole;
an atomic rename makes that true at the first look. Standard library only: the runner ships it and runs it beside
the job (see `archive.py`), at the lowest priority that the machine offers.

With a log the digests go there and nothing is written among the outputs: an added file in a checkpoint would break
the `rmtree` of a trainer that rotates its checkpoints. Without one, a manifest is written beside each checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuwarden.checkpoints.examine import examine
from gpuwarden.checkpoints.file_model import Broken, Doubtful, Limits
from gpuwarden.checkpoints.findings import Ask, Entry, temporary
from gpuwarden.checkpoints.layouts.stepped import WEIGHTS, step_of
from gpuwarden.checkpoints.safe_file import Source
from gpuwarden.checkpoints.sealing import manifest, seal_log
from gpuwarden.checkpoints.tree import Folder, walk


@dataclass
class Sealer:
    """Examines a folder of outputs, or one file, repeatedly; `look` is one examination.

    `digests` are those to record; with a `key` each line of the log is signed. What was seen last is kept in memory
    only: after a restart everything that is not sealed is examined again.
    """

    root: Path
    quiet_s: float = 30.0
    digests: tuple[str, ...] = manifest.DIGESTS
    now: Callable[[], float] = time.time
    log: Path | None = None
    key: bytes = b""
    seen: dict[str, tuple[object, float]] = field(default_factory=dict)
    settled: dict[str, object] = field(default_factory=dict)
    """Relative path -> its state when it was sealed, or found to be nothing that can be sealed."""

    def look(self) -> list[str]:
        """Seal what is finished. Return the relative paths of what was sealed now."""
        sealed = []
        for rel, path, state in self._candidates():
            if self.settled.get(rel) != state and self._ready(rel, state):
                self.settled[rel] = state
                if self._seal(path):
                    sealed.append(rel)
        return sealed

    def _candidates(self) -> list[tuple[str, Path, object]]:
        """Yield checkpoint folders, and lone weight files outside of any, with their present state."""
        if not self.root.is_dir():
            fit = self.root.is_file() and self.root.name.endswith(WEIGHTS) and not temporary(self.root.name)
            return [(self.root.name, self.root, _state_of(self.root))] if fit else []
        tree = walk(self.root, Limits())
        out: list[tuple[str, Path, object]] = []
        taken: list[str] = []
        for folder in sorted(tree.folders, key=lambda f: f.rel):
            if temporary(folder.rel) or any(not t or folder.rel.startswith(t + "/") for t in taken):
                continue
            if (folder.rel or self.log) and (step_of(folder.path.name) is not None or _holds_model(folder)):
                taken.append(folder.rel)
                if self.log or manifest.FILE not in folder.files:
                    out.append((folder.rel, folder.path, _state(folder)))
            else:
                out += [
                    (folder.join(n), folder.path / n, _state_of(folder.path / n))
                    for n in folder.files
                    if n.endswith(WEIGHTS) and not temporary(n) and not self._beside(folder, n)
                ]
        return out

    def _beside(self, folder: Folder, name: str) -> bool:
        return self.log is None and f"{name}.{manifest.FILE}" in folder.files

    def _ready(self, rel: str, state: object) -> bool:
        """Return true if its state is old enough by this process's clock; a file's times can be set by anybody."""
        now = self.now()
        last = self.seen.get(rel)
        if last is None or last[0] != state:
            self.seen[rel] = (state, now)
            return self.quiet_s <= 0
        return now - last[1] >= self.quiet_s

    def _seal(self, path: Path) -> bool:
        if self.log and self._known(path):
            return False
        found = examine(path, Ask(content=False, threads=1))
        whole = found.entries and all(_whole(e) for e in found.entries.values()) and not found.doubts
        if not whole or any(j.problems or j.doubts for j in found.judgements):
            return False
        try:
            if self.log:
                for name in found.entries:
                    _to_disk(found.place(name))
            taken = manifest.take(path, digests=self.digests)
            if self.log:
                return self._enter(path, taken)
            manifest.write(path, taken)
        except (Broken, Doubtful, OSError):
            return False
        return True

    def _known(self, path: Path) -> bool:
        """Return true if the log has every file of it in its present state."""
        assert self.log
        rows = seal_log.read(self.log, self.key)
        files = [f.path / n for top in [walk(path, Limits())] for f in top.folders for n in f.files]
        places = [os.path.realpath(p) for p in (files if path.is_dir() else [path])]
        return all(p in rows and seal_log.stamp(rows[p]) == seal_log.stamp_of(p) for p in places)

    def _enter(self, path: Path, taken: dict[str, Any]) -> bool:
        assert self.log
        base, rows = path if path.is_dir() else path.parent, []
        for row in taken["files"]:
            place = os.path.realpath(base / row["path"])
            if seal_log.stamp_of(place) != seal_log.stamp(row):
                return False  # it was written to after all; the next look sees that
            line = {**row, "path": place, "sealed_at": taken["taken_at"]}
            rows.append({**line, "mac": seal_log.mac(self.key, line)} if self.key else line)
        seal_log.add(self.log, rows)
        return True


def _to_disk(path: Path) -> None:
    """Force a file to the disk: a process that mapped it could change an unwritten page without a new time stamp."""
    with Source(path) as source, contextlib.suppress(OSError):
        os.fsync(source.fd)


def _whole(entry: Entry) -> bool:
    """Return true if a file is proven, or is only of a format that can't be read here."""
    opaque = entry.anatomy is not None and entry.anatomy.opaque
    return not entry.problems and not entry.temporary and (not entry.doubts or entry.unread or opaque)


def _holds_model(folder: Folder) -> bool:
    return "config.json" in folder.files or "adapter_config.json" in folder.files or ".metadata" in folder.files


def _state(folder: Folder) -> object:
    files = [(f.join(n), _state_of(f.path / n)) for f in _below(folder) for n in sorted(f.files)]
    return tuple(files)


def _below(folder: Folder) -> list[Folder]:
    return [folder, *(f for child in folder.folders.values() for f in _below(child))]


def _state_of(path: Path) -> object:
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_size, info.st_mtime_ns, info.st_ino


def lowest_priority() -> None:
    """Take the lowest CPU priority, below the training. The disk's priority is set from outside, with `ionice -c3`."""
    if hasattr(os, "nice"):
        try:
            os.nice(19)
        except OSError:
            pass


def hide_memory() -> None:
    """Ask the kernel to let no process of the same user read this one's memory, as far as it can be asked."""
    with contextlib.suppress(ImportError, OSError, AttributeError, TypeError):
        import ctypes

        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
