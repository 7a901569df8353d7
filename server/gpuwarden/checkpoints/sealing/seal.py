"""Detect finished checkpoints and record their digests immediately, before their bytes can change.

A checkpoint is finished if it has not changed for `quiet_s` seconds and its structure is complete. A checkpoint that is
saved by an atomic rename is complete from the start. Standard library only, because the runner runs this module on the
machine alongside the job (see `archive.py`), at the lowest CPU priority.

If a log is given, the digests are written to the log, and no file is added to the outputs, because an additional file
could cause an error when a trainer deletes old checkpoints with `rmtree`. Without a log, each checkpoint gets a
manifest.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gpuwarden.checkpoints.examine import examine
from gpuwarden.checkpoints.file_model import Broken, Doubtful, Limits
from gpuwarden.checkpoints.findings import ExamineOptions, temporary
from gpuwarden.checkpoints.layouts.stepped import WEIGHTS, step_of
from gpuwarden.checkpoints.safe_file import Source
from gpuwarden.checkpoints.sealing import manifest, seal_log
from gpuwarden.checkpoints.tree import Folder, walk


@dataclass
class Sealer:
    """Examine an output folder, or one file, repeatedly. Each call to `look` is one examination.

    `digests` lists the names of the digests to record. If a `key` is given, each log line is signed. File states are
    kept only in memory, so all unsealed files are examined again after a restart.
    """

    root: Path
    quiet_s: float = 30.0
    digests: tuple[str, ...] = manifest.DIGESTS
    now: Callable[[], float] = time.time
    log: Path | None = None
    key: bytes = b""
    seen: dict[str, tuple[object, float]] = field(default_factory=dict)
    settled: dict[str, object] = field(default_factory=dict)
    """Maps each relative path to its state when it was sealed or when sealing failed."""

    def look(self) -> list[str]:
        """Seal finished checkpoints and files. Return the relative paths of the newly sealed ones."""
        sealed = []
        for rel, path, state in self._candidates():
            if self.settled.get(rel) == state:
                continue
            # A state's age is measured with this process's clock, because any process can set a file's times.
            now = self.now()
            if rel not in self.seen or self.seen[rel][0] != state:
                self.seen[rel] = (state, now)
            if now - self.seen[rel][1] >= self.quiet_s:
                self.settled[rel] = state
                if self._seal(path):
                    sealed.append(rel)
        return sealed

    def _candidates(self) -> list[tuple[str, Path, object]]:
        """Return the checkpoint folders, and the weight files outside these folders, with their current states."""
        if not self.root.is_dir():
            fit = self.root.is_file() and self.root.name.endswith(WEIGHTS) and not temporary(self.root.name)
            return [(self.root.name, self.root, _state_of(self.root))] if fit else []
        tree = walk(self.root, Limits())
        out: list[tuple[str, Path, object]] = []
        taken: list[str] = []
        for folder in sorted(tree.folders, key=lambda f: f.rel):
            if temporary(folder.rel) or any(not t or folder.rel.startswith(t + "/") for t in taken):
                continue
            has_model = any(n in folder.files for n in ("config.json", "adapter_config.json", ".metadata"))
            if (folder.rel or self.log) and (has_model or step_of(folder.path.name) is not None):
                taken.append(folder.rel)
                if self.log or manifest.FILE not in folder.files:
                    files = ((f.join(n), f.path / n) for f in _below(folder) for n in sorted(f.files))
                    state = tuple((rel, _state_of(path)) for rel, path in files)
                    out.append((folder.rel, folder.path, state))
            else:
                out += [
                    (folder.join(n), folder.path / n, _state_of(folder.path / n))
                    for n in folder.files
                    if n.endswith(WEIGHTS)
                    and not temporary(n)
                    and (self.log is not None or f"{n}.{manifest.FILE}" not in folder.files)
                ]
        return out

    def _seal(self, path: Path) -> bool:
        """Record the digests of a checkpoint or a file if it is complete. Return true if this call recorded them."""
        if self.log:
            files = [path]
            if path.is_dir():
                files = [f.path / n for f in walk(path, Limits()).folders for n in f.files]
            if seal_log.covers(self.log, files, self.key):
                return False
        found = examine(path, ExamineOptions(content=False, threads=1))
        if not found.entries or found.doubts or any(j.problems or j.doubts for j in found.judgements):
            return False
        for entry in found.entries.values():
            # A file in an unsupported format is also sealed, unless there is another doubt about it.
            unreadable = entry.unread or (entry.anatomy is not None and entry.anatomy.opaque)
            if entry.problems or entry.temporary or (entry.doubts and not unreadable):
                return False
        try:
            if self.log:
                for name in found.entries:
                    # Flush first: a dirty page of a memory mapping could later change the file but not its timestamps.
                    with Source(found.place(name)) as source, contextlib.suppress(OSError):
                        os.fsync(source.fd)
            taken = manifest.take(path, digests=self.digests)
            if self.log:
                base = path if path.is_dir() else path.parent
                return seal_log.enter(self.log, base, taken, self.key)
            manifest.write(path, taken)
        except (Broken, Doubtful, OSError):
            return False
        return True


def _below(folder: Folder) -> list[Folder]:
    return [folder, *(f for child in folder.folders.values() for f in _below(child))]


def _state_of(path: Path) -> object:
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_size, info.st_mtime_ns, info.st_ino


def hide_memory() -> None:
    """Prevent other processes of the same user from reading this process's memory, if the kernel supports this."""
    with contextlib.suppress(ImportError, OSError, AttributeError, TypeError):
        import ctypes

        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
