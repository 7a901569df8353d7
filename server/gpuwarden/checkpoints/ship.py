"""The part that needs the standard library only, as one file that any Python from 3.8 on can run where the bytes are.

    python3 gpuwarden-checkpoints.pyz examine PATH [--structure]    findings as JSON, on stdout
    python3 gpuwarden-checkpoints.pyz manifest PATH                 a manifest as JSON, on stdout
    python3 gpuwarden-checkpoints.pyz seal PATH [--quiet 30] [--every 10] [--once]

A hundred gigabytes need not travel to be checked. Levels load and resume, and comparing, stay with `verify.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

from gpuwarden.checkpoints import manifest
from gpuwarden.checkpoints.anatomy import Broken, Doubtful
from gpuwarden.checkpoints.examine import examine
from gpuwarden.checkpoints.findings import Ask
from gpuwarden.checkpoints.seal import Sealer, lowest_priority

# What needs more than the standard library stays at home.
_HOME = {"verify.py", "render.py", "load.py", "load_child.py", "compare.py", "savelib.py"}
_CORE = ("__init__.py", "errors.py", "registry.py")
_EPOCH = (1980, 1, 1, 0, 0, 0)


def archive() -> bytes:
    """The zipapp. Equal sources give equal bytes, so its digest can name it."""
    package = Path(__file__).resolve().parent.parent
    files = [package / "__init__.py", *(package / "core" / n for n in _CORE)]
    files += [p for p in sorted((package / "checkpoints").rglob("*.py")) if p.name not in _HOME]
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as made:
        for path in files:
            name = f"gpuwarden/{path.relative_to(package).as_posix()}"
            made.writestr(zipfile.ZipInfo(name, _EPOCH), path.read_bytes(), zipfile.ZIP_DEFLATED)
        start = b"from gpuwarden.checkpoints.ship import main\nraise SystemExit(main())\n"
        made.writestr(zipfile.ZipInfo("__main__.py", _EPOCH), start)
    return out.getvalue()


def name(data: bytes) -> str:
    """The file name to ship it under: by content, so that a running one is never overwritten."""
    return f"gpuwarden-checkpoints-{hashlib.sha256(data).hexdigest()[:16]}.pyz"


def main(argv: list[str] | None = None) -> int:
    """Run on the machine. Returns 0, or 2 where the answer could not be given."""
    ask = argparse.ArgumentParser(prog="gpuwarden-checkpoints")
    ask.add_argument("verb", choices=("examine", "manifest", "seal"))
    ask.add_argument("path", type=Path)
    ask.add_argument("--structure", action="store_true", help="headers only, not the bytes")
    ask.add_argument("--threads", type=int, default=2)
    ask.add_argument("--quiet", type=float, default=30.0, help="seconds without a change before a seal")
    ask.add_argument("--every", type=float, default=10.0, help="seconds between two looks")
    ask.add_argument("--once", action="store_true", help="wait the quiet time once, then end")
    args = ask.parse_args(argv)
    if not args.path.exists():
        print(json.dumps({"error": "there is nothing at this path"}))
        return 2
    if args.verb == "seal":
        return _seal(args)
    try:
        answer = manifest.take(args.path) if args.verb == "manifest" else _examine(args)
    except (Broken, Doubtful) as why:
        answer = {"error": str(why)}
    json.dump(answer, sys.stdout)
    return 2 if "error" in answer else 0


def _examine(args: argparse.Namespace) -> dict[str, Any]:
    found = examine(args.path, Ask(content=not args.structure, threads=args.threads))
    keys = ("path", "format", "size", "verdict", "proved", "unproved", "warnings", "doubts", "problems", "sealed")
    folders = ("layout", "path", "step", "checkpoint", "proved", "warnings", "doubts", "problems", "resume")
    return {
        "files": [{k: getattr(e, k) for k in keys} for e in found.entries.values()],
        "folders": [{k: getattr(j, k) for k in folders} for j in found.judgements],
        "doubts": found.doubts,
    }


def _seal(args: argparse.Namespace) -> int:
    lowest_priority()
    sealer = Sealer(args.path, args.quiet)
    _announce(sealer)
    while not args.once:
        time.sleep(args.every)
        _announce(sealer)
    if args.quiet > 0:
        time.sleep(args.quiet)
        _announce(sealer)
    return 0


def _announce(sealer: Sealer) -> None:
    for rel in sealer.look():
        print(json.dumps({"sealed": rel, "at": time.time()}), flush=True)
