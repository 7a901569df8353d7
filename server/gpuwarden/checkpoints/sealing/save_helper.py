"""Save checkpoints so that the previous one survives if the process is killed, and load the newest intact checkpoint.

This module is for training scripts. It is one file and needs only the standard library and Python 3.8 or later; `save`
and `load_latest` also need torch. Import it, or paste it into a script.

    latest = load_latest("outputs")                 # None on the first start
    if latest:
        model.load_state_dict(latest.state["model"]); optimizer.load_state_dict(latest.state["optimizer"])
        start = latest.step
    ...
    save("outputs", step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, keep=3)

    with saving("outputs", step) as folder:         # or write the files yourself
        model.save_pretrained(folder)

How it works: all files are written to the folder `.tmp-checkpoint-<step>-<pid>`, together with a manifest of their
digests, and flushed to the disk. Then the folder is renamed to `checkpoint-<step>`, so a folder with that name is
always complete. The manifest reveals later damage. In a run with several ranks, save on only one rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

MANIFEST = "gpuwarden-manifest.json"
STATE = "checkpoint.json"
_NAME = re.compile(r"checkpoint-(\d{1,15})")
# The folders that this process has found intact, with their files' sizes and times.
_intact_before: dict[str, list[tuple[str, int, int]]] = {}


class Loaded(NamedTuple):
    """The newest intact checkpoint. `state` is the dict passed to `save`, or None if you wrote the files yourself."""

    step: int
    path: Path
    state: Any


@contextlib.contextmanager
def saving(root: str | Path, step: int, *, keep: int | None = None, parts: tuple[str, ...] = ()) -> Iterator[Path]:
    """Yield a folder to write to, and rename it to `root/checkpoint-<step>` if the block ends without an error.

    Afterwards, if `keep` is given, delete all but the newest `keep` intact checkpoints. A checkpoint without a
    manifest is never deleted. A damaged checkpoint of the same step is replaced. Raises FileExistsError if this step
    has already been saved and is intact.
    """
    root = Path(root)
    final = root / f"checkpoint-{step}"
    replaced = _saved_at(final) > 0 and not _intact(final)
    if final.exists() and not replaced:
        raise FileExistsError(f"{final} already exists; a checkpoint is never overwritten")
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(".tmp-checkpoint-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    draft = root / f".tmp-checkpoint-{step}-{os.getpid()}"
    draft.mkdir()
    try:
        yield draft
        _write(draft / STATE, {"step": step, "parts": sorted(parts)})
        listed = []
        for path in sorted(p for p in draft.rglob("*") if p.is_file()):
            info, name = path.stat(), path.relative_to(draft).as_posix()
            listed.append({"path": name, "size": info.st_size, "mtime_ns": info.st_mtime_ns, "sha256": _digest(path)})
        # Keep the times of the saves in order, even if the clock was set back or a save is from another machine.
        taken_at = max(time.time(), *(at + 0.001 for at, _, _ in _folders(root)), 0.0)
        _write(draft / MANIFEST, {"taken_at": taken_at, "files": listed, "missing": []})
        for folder, _, files in os.walk(draft):
            for name in files:
                _sync(Path(folder) / name)
            _sync(Path(folder))
        if replaced:
            _remove(final)
        draft.rename(final)
        _sync(root)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    _intact_before[str(final)] = _stats(final)
    if keep:
        kept = 1  # the folder just saved
        for at, _, old in sorted(_folders(root), reverse=True):
            if old == final or not at:
                continue
            if kept < keep:
                kept += _intact(old)
            else:
                _remove(old)


def save(root: str | Path, step: int, state: dict[str, Any], *, keep: int | None = None) -> Path:
    """Save a dict of states (model, optimizer, scheduler, rng, ...) with torch.save. Return the checkpoint's folder."""
    import torch

    with saving(root, step, keep=keep, parts=tuple(map(str, state))) as folder:
        torch.save(state, folder / "state.pt")
    return Path(root) / f"checkpoint-{step}"


def load_latest(root: str | Path) -> Loaded | None:
    """Return the last saved checkpoint in which every file matches its recorded digest; skip damaged checkpoints."""
    for _, step, folder in sorted(_folders(Path(root)), reverse=True):
        why = damage(folder)
        if why:
            print(f"checkpoint-{step} is skipped: {why}")
            continue
        state = None
        if (folder / "state.pt").exists():
            import torch

            state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
        return Loaded(step, folder, state)
    return None


def damage(folder: Path) -> str:
    """Describe the damage to a saved folder; "" if every file matches its recorded digest."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        for entry in manifest["files"]:
            path = folder / entry["path"]
            if path.stat().st_size != entry["size"]:
                return f"{entry['path']} does not have its recorded size"
            if _digest(path) != entry["sha256"]:
                return f"{entry['path']} does not match its recorded digest"
    except (OSError, ValueError, LookupError, TypeError) as why:
        return f"{type(why).__name__}: {why}"
    return ""


def _folders(root: Path) -> list[tuple[float, int, Path]]:
    """Return the time of the save, the step and the path of each checkpoint."""
    if not root.is_dir():
        return []
    found = ((_NAME.fullmatch(p.name), p) for p in root.iterdir() if p.is_dir())
    return [(_saved_at(p), int(m.group(1)), p) for m, p in found if m]


def _saved_at(folder: Path) -> float:
    """Return the manifest's time. If the manifest is damaged, return the folder's modification time; if missing, 0."""
    try:
        at = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["taken_at"]
        if 0 < at < 1e11:
            return float(at)
    except FileNotFoundError:
        return 0.0
    except (OSError, ValueError, LookupError, TypeError):
        pass
    return folder.stat().st_mtime if folder.is_dir() else 0.0


def _intact(folder: Path) -> bool:
    """Return true if a folder is not damaged. Compute its digests only if a file has changed since the last check."""
    try:
        stats = _stats(folder)
    except OSError:
        return False
    if _intact_before.get(str(folder)) != stats:
        if damage(folder):
            return False
        _intact_before[str(folder)] = stats
    return True


def _stats(folder: Path) -> list[tuple[str, int, int]]:
    return sorted((str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file())


def _remove(folder: Path) -> None:
    """Rename a folder, then delete it, so that no incomplete checkpoint remains if the process is killed."""
    doomed = folder.with_name(f".tmp-{folder.name}-{os.getpid()}-old")
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _digest(path: Path) -> str:
    made = hashlib.sha256()
    with path.open("rb") as f:
        for piece in iter(lambda: f.read(1 << 20), b""):
            made.update(piece)
    return made.hexdigest()


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def _sync(path: Path) -> None:
    """Flush a file or folder to the disk. Windows does not support this for folders."""
    try:
        fd = os.open(str(path), os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(fd)
    except OSError:
        pass
    finally:
        os.close(fd)
