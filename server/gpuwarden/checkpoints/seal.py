"""Notice finished checkpoints and write their manifests at once, while their bytes are still those that were saved.

A checkpoint counts as finished when nothing in it has changed for `quiet_s` seconds and its structure is whole;
an atomic rename makes that true at the first look. Standard library only: the runner ships it and runs it beside
the job (see `ship.py`), at the lowest priority that the machine offers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gpuwarden.checkpoints import manifest
from gpuwarden.checkpoints.anatomy import Broken, Doubtful, Limits
from gpuwarden.checkpoints.examine import examine
from gpuwarden.checkpoints.findings import Ask, temporary
from gpuwarden.checkpoints.layouts.stepped import WEIGHTS, step_of
from gpuwarden.checkpoints.walk import Folder, walk


@dataclass
class Sealer:
    """Looks at a folder of outputs again and again; `look` is one look.

    `digests` are those to record. What was seen last is kept in memory only: after a restart everything that has no
    manifest is looked at afresh.
    """

    root: Path
    quiet_s: float = 30.0
    digests: tuple[str, ...] = manifest.DIGESTS
    now: Callable[[], float] = time.time
    seen: dict[str, tuple[object, float]] = field(default_factory=dict)

    def look(self) -> list[str]:
        """Seal what is finished. Returns the relative paths of what was sealed now."""
        return [rel for rel, path, state in self._candidates() if self._ready(rel, state) and self._seal(path)]

    def _candidates(self) -> list[tuple[str, Path, object]]:
        """Checkpoint folders without a manifest, and lone weight files outside of any, with what they look like now."""
        tree = walk(self.root, Limits())
        out: list[tuple[str, Path, object]] = []
        taken: list[str] = []
        for folder in sorted(tree.folders, key=lambda f: f.rel):
            if temporary(folder.rel) or any(folder.rel.startswith(t + "/") for t in taken):
                continue
            if folder.rel and (step_of(folder.path.name) is not None or _holds_model(folder)):
                taken.append(folder.rel)
                if manifest.FILE not in folder.files:
                    out.append((folder.rel, folder.path, _state(folder)))
            else:
                out += [
                    (folder.join(n), folder.path / n, _state_of(folder.path / n))
                    for n in folder.files
                    if n.endswith(WEIGHTS) and not temporary(n) and f"{n}.{manifest.FILE}" not in folder.files
                ]
        return out

    def _ready(self, rel: str, state: object) -> bool:
        """Whether it has looked the same for long enough, by our own clock, for files may lie about theirs."""
        now = self.now()
        last = self.seen.get(rel)
        if last is None or last[0] != state:
            self.seen[rel] = (state, now)
            return self.quiet_s <= 0
        return now - last[1] >= self.quiet_s

    def _seal(self, path: Path) -> bool:
        found = examine(path, Ask(content=False, threads=1))
        whole = found.entries and all(e.verdict == "proven" for e in found.entries.values())
        if not whole or any(j.problems or j.doubts for j in found.judgements):
            return False
        try:
            manifest.write(path, manifest.take(path, digests=self.digests))
        except (Broken, Doubtful, OSError):
            return False
        return True


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
    """Give way to the training. The disk's share is set from outside, with `ionice -c3`."""
    if hasattr(os, "nice"):
        try:
            os.nice(19)
        except OSError:
            pass
