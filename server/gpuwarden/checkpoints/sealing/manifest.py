"""Read and write manifests. A manifest lists a checkpoint's files with their digests, to verify later copies.

Inside a folder, the manifest is `gpuwarden-manifest.json`; next to a single file, it is
`<file>.gpuwarden-manifest.json`. A manifest detects damage, but not an attacker who rewrites both the files and
the manifest. Standard library only.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from gpuwarden.checkpoints.file_model import Anatomy, Broken, Doubtful, Limits, short
from gpuwarden.checkpoints.findings import Expected
from gpuwarden.checkpoints.safe_file import Source
from gpuwarden.checkpoints.sealing.parts import PartsDigest, part_size
from gpuwarden.checkpoints.tree import walk
from gpuwarden.checkpoints.values.content_scan import sweep

FILE = "gpuwarden-manifest.json"
DIGESTS = ("sha256", "xxh3_128", "crc32")
PARTS = "parts_sha256"
"""The manifest key of a large file's multipart digest, which is computed over the digests of its upload parts and
compared with the headers of the uploaded object. A file that is uploaded in one part does not have one."""


def beside(path: Path) -> Path:
    """Return the path of a file's or folder's manifest."""
    return path / FILE if path.is_dir() else path.with_name(f"{path.name}.{FILE}")


def take(path: Path, *, digests: Iterable[str] = DIGESTS, now: float | None = None) -> dict[str, Any]:
    """Create a manifest of a file, or of all files in a folder, with the fields in `core.models.Manifest`.

    Digests that can't be computed here are omitted. Raises Doubtful if a file can't be read or changes while being
    read.
    """
    wanted = tuple(digests)
    if path.is_dir():
        tree = walk(path, Limits())
        if tree.doubts:
            raise Doubtful(tree.doubts[0])
        files = [_artifact(tree.root / n, n, wanted) for n in tree.files if not n.endswith(FILE)]
    else:
        files = [_artifact(path, path.name, wanted)]
    return {"taken_at": time.time() if now is None else now, "files": files, "missing": []}


def _artifact(path: Path, name: str, wanted: tuple[str, ...]) -> dict[str, Any]:
    with Source(path, name) as source:
        step = part_size(source.size)
        parts = {PARTS: PartsDigest(step)} if PARTS in wanted and source.size > step else {}
        seen = sweep(source, Anatomy("bytes"), wanted, extra=parts)
        if source.changed():
            raise Doubtful(f"{name} was written to while it was read")
        return {
            "path": name,
            "size": source.size,
            "mtime_ns": source.mtime_ns,
            "ctime_ns": source.ctime_ns,
            **seen.digests,
            **({"part_size": step} if parts else {}),
        }


def write(path: Path, manifest: dict[str, Any]) -> Path:
    """Write a file's or folder's manifest atomically, and flush it to the disk. Return the manifest's path."""
    target = beside(path)
    draft = target.with_name(f".tmp-{os.getpid()}-{target.name}")
    with draft.open("w", encoding="utf-8") as out:
        json.dump(manifest, out, indent=1, sort_keys=True)
        out.flush()
        os.fsync(out.fileno())
    draft.replace(target)
    return target


def read(place: Path, limits: Limits, opened: Callable[[Path, str], Source] = Source) -> dict[str, Expected]:
    """Read the sizes and digests from a manifest. Raises Broken if the manifest is invalid."""
    try:
        with opened(place, "") as source:
            if source.size > limits.json:
                raise Broken(f"the manifest {place.name} has {source.size:,} bytes, more than {limits.json:,}")
            data = source.at(0, source.size)
            if data.count(b"[") + data.count(b"{") > 2 * limits.files:  # parsing it would need too much memory
                raise Broken(f"the manifest {place.name} lists more than {limits.files:,} files")
            return expected(json.loads(data)["files"])
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError, Doubtful) as why:
        raise Broken(f"the manifest {place.name} can't be read: {short(why, 80)}") from why


def expected(files: Iterable[dict[str, Any]], under: str = "") -> dict[str, Expected]:
    """Return the sizes and digests of the files below `under`, by path relative to `under`.

    If a file's path equals `under`, its relative path is its name. Leading slashes are ignored.
    """
    base = under.strip("/")
    made: dict[str, Expected] = {}
    for f in files:
        name = str(f["path"]).lstrip("/")
        if base and name == base:
            name = name.rsplit("/", 1)[-1]
        elif base and not name.startswith(base + "/"):
            continue
        elif base:
            name = name[len(base) + 1 :]
        digests = {d: str(f[d]) for d in DIGESTS if f.get(d)}
        made[name] = Expected(int(f["size"]), digests)
    return made
