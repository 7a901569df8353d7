"""The part that needs the standard library only, as one file that any Python from 3.8 on can run where the bytes are.

    python3 gpuwarden-checkpoints.pyz examine PATH... [--structure] [--book FILE]    a line of findings for each
    python3 gpuwarden-checkpoints.pyz manifest PATH...                               a line of manifest for each
    python3 gpuwarden-checkpoints.pyz seal PATH... [--book FILE] [--quiet 30] [--every 10] [--once|--attached] [--keyed]

A hundred gigabytes need not travel to be checked. Answers are JSON, bounded; what is wrong comes first. With `--load`
or `--resume` what is whole is loaded too, in a process of its own; with `--against` it is compared. The runner starts
`seal` beside a job, and `examine` when asked.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import select
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpuwarden.checkpoints.budget import Budget
from gpuwarden.checkpoints.compare import Compared, comparable, compare
from gpuwarden.checkpoints.examine import GAVE_UP, examine
from gpuwarden.checkpoints.file_model import Broken, Doubtful, short
from gpuwarden.checkpoints.findings import Ask, Expected, Findings
from gpuwarden.checkpoints.load import load
from gpuwarden.checkpoints.safe_file import Source
from gpuwarden.checkpoints.sealing import manifest, seal_log
from gpuwarden.checkpoints.sealing.seal import Sealer, hide_memory, lowest_priority

# What needs more than the standard library stays at home.
_HOME = {"verify.py", "save_helper.py"}
_CORE = ("__init__.py", "errors.py", "guidance.py", "registry.py")
_ROWS = 1_000
_MAX_KEY = 256
_FILE = ("path", "format", "size", "proved", "unproved", "warnings", "doubts", "problems", "sealed", "unread")
_FOLDER = ("layout", "path", "step", "checkpoint", "proved", "warnings", "doubts", "problems", "resume")
_EPOCH = (1980, 1, 1, 0, 0, 0)


def build() -> bytes:
    """The zipapp. Equal sources give equal bytes, so its digest can name it."""
    package = Path(__file__).resolve().parent.parent
    files = [package / "__init__.py", *(package / "core" / n for n in _CORE)]
    files += [p for p in sorted((package / "checkpoints").rglob("*.py")) if p.name not in _HOME]
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as made:
        for path in files:
            name = f"gpuwarden/{path.relative_to(package).as_posix()}"
            made.writestr(zipfile.ZipInfo(name, _EPOCH), path.read_bytes(), zipfile.ZIP_DEFLATED)
        start = b"from gpuwarden.checkpoints.archive import main\nraise SystemExit(main())\n"
        made.writestr(zipfile.ZipInfo("__main__.py", _EPOCH), start)
    return out.getvalue()


def name(data: bytes) -> str:
    """The file name to ship it under: by content, so that a running one is never overwritten."""
    return f"gpuwarden-checkpoints-{hashlib.sha256(data).hexdigest()[:16]}.pyz"


def main(argv: list[str] | None = None) -> int:
    """Run on the machine. Returns 0, or 2 where the answer could not be given."""
    ask = argparse.ArgumentParser(prog="gpuwarden-checkpoints")
    ask.add_argument("verb", choices=("examine", "manifest", "seal"))
    ask.add_argument("paths", type=Path, nargs="+")
    ask.add_argument("--structure", action="store_true", help="headers only, not the bytes")
    ask.add_argument("--load", action="store_true", help="really load what is whole, too")
    ask.add_argument("--resume", action="store_true", help="the same; what a resume needs is told in any case")
    ask.add_argument("--against", type=Path, help="an earlier checkpoint, an adapter's base or a GGUF file's source")
    ask.add_argument("--threads", type=int, default=2)
    ask.add_argument("--seconds", type=float, default=86_400.0, help="how long an examination may take")
    ask.add_argument("--book", type=Path, help="the book of seals: read by examine, written by seal")
    ask.add_argument("--quiet", type=float, default=30.0, help="seconds without a change before a seal")
    ask.add_argument("--every", type=float, default=10.0, help="seconds between two looks")
    ask.add_argument("--once", action="store_true", help="wait the quiet time once, then end")
    ask.add_argument("--attached", action="store_true", help="at the end of stdin look a last time, then end")
    ask.add_argument("--keyed", action="store_true", help="the first line of stdin is the key that lines are made with")
    args = ask.parse_args(argv)
    if args.verb == "seal":
        return _seal(args)
    lowest_priority()
    budget = Budget(args.seconds, 1 << 60)
    return max(_answer(path, args, budget) for path in args.paths)


def _answer(path: Path, args: argparse.Namespace, budget: Budget) -> int:
    """One line of JSON for one path."""
    answer: dict[str, Any]
    if not path.exists():
        answer = {"error": "there is nothing at this path"}
    else:
        try:
            answer = manifest.take(path) if args.verb == "manifest" else _examine(path, args, budget)
        except (Broken, Doubtful) as why:
            answer = {"error": str(why)}
    print(json.dumps(answer), flush=True)
    return 2 if "error" in answer else 0


def _examine(path: Path, args: argparse.Namespace, budget: Budget) -> dict[str, Any]:
    sealed = _sealed(path, args.book) if args.book else {}
    found = examine(path, Ask(not args.structure, args.threads, expected=sealed, budget=budget))
    if args.load or args.resume:
        good = [e for e in found.entries.values() if e.verdict == "proven"]
        load(found, good, budget=budget, child=_loader(args.book))
    compared = _compared(found, args.against, budget) if args.against else None
    worst_first = sorted(found.entries.values(), key=lambda e: (e.verdict == "proven", e.path))
    return {
        "files": [_bounded(vars(e), _FILE) | {"verdict": e.verdict} for e in worst_first[:_ROWS]],
        "more": max(0, len(worst_first) - _ROWS),
        "more_bad": sum(e.verdict != "proven" for e in worst_first[_ROWS:]),
        "bytes": sum(e.size for e in worst_first),
        "folders": [_bounded(vars(j), _FOLDER) for j in found.judgements[:_ROWS]],
        "doubts": [short(d, 300) for d in found.doubts[:20]],
        **({"compared": _bounded(vars(compared), tuple(vars(compared)))} if compared else {}),
    }


def _compared(found: Findings, place: Path, budget: Budget) -> Compared | None:
    """What came of comparing; None for an output that holds no model, such as a log."""
    if not comparable(found):
        return None
    if not place.exists():
        return Compared(doubts=["there is nothing at that path on the machine"])
    found = replace(found, open=_counted(budget))
    try:
        return compare(found, examine(place, Ask(False, budget=budget, open=_counted(budget))))
    except (Broken, Doubtful, *GAVE_UP) as why:
        return Compared(doubts=[f"could not be compared: {short(why, 80)}"])


def _counted(budget: Budget) -> Callable[[Path, str], Source]:
    """Opens files whose bytes count."""

    def opened(path: Path, name: str) -> Source:
        source = Source(path, name)
        source.took = budget.take
        return source

    return opened


def _loader(beside: Path | None) -> list[str]:
    """The command that loads: with the first Python here that has torch, else with this one.

    It begins without the working folder and the user's variables, and takes our modules from this archive.
    """
    start = "import sys; sys.path.insert(0, sys.argv[1]); from gpuwarden.checkpoints.load_child import main; main()"
    own = str(beside.parent / "work/.venv/bin/python") if beside else ""
    found = [sys.executable, own, shutil.which("python3") or "", shutil.which("python") or ""]
    pythons = [p for p in dict.fromkeys(found) if os.access(p, os.X_OK)]
    chosen = next((p for p in pythons if _has_torch(p)), sys.executable)
    return [chosen, "-I", "-c", start, str(Path(__file__).parents[2])]


def _has_torch(python: str) -> bool:
    """Whether a Python has torch, and is none of those too old for what we ship."""
    ask = "import sys, importlib.util as u; raise SystemExit(sys.version_info < (3, 8) or u.find_spec('torch') is None)"
    try:
        done = subprocess.run([python, "-I", "-c", ask], stdin=subprocess.DEVNULL, capture_output=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0


def _sealed(path: Path, place: Path) -> dict[str, Expected]:
    """What the book says of the files below a path, where its lines still hold."""
    base = os.path.realpath(path if path.is_dir() else path.parent) + "/"
    lines = {
        p: row
        for p, row in seal_log.read(place).items()
        if p.startswith(base) and seal_log.stamp_of(p) == seal_log.stamp(row)
    }
    return {p[len(base) :]: Expected(row["size"], {"sha256": row["sha256"]}) for p, row in lines.items()}


def _bounded(fields: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """Some fields, with lists of lines cut to what fits into an answer."""
    values = {k: fields[k] for k in keys}
    return {k: [short(t, 300) for t in v[:10]] if isinstance(v, list) else v for k, v in values.items()}


def _seal(args: argparse.Namespace) -> int:
    lowest_priority()
    digests = ("sha256",) if args.book else manifest.DIGESTS
    key = _key() if args.keyed else b""
    sealers = [Sealer(path, args.quiet, digests, book=args.book, key=key) for path in args.paths]
    _announce(sealers)
    while not args.once:
        over = _wait(args.every, args.attached)
        if over:
            for sealer in sealers:
                sealer.quiet_s = 0.0  # nobody writes any more
        _announce(sealers)
        if over:
            return 0
    if args.quiet > 0:
        time.sleep(args.quiet)
        _announce(sealers)
    return 0


def _key() -> bytes:
    """The first line of stdin, byte by byte: what comes after it is not ours to take."""
    hide_memory()
    line = bytearray()
    while len(line) < _MAX_KEY and (byte := os.read(0, 1)) not in (b"", b"\n"):
        line += byte
    return bytes(line)


def _wait(seconds: float, attached: bool) -> bool:
    """Sleep; true when whoever holds the other end of stdin has let go of it."""
    if not attached:
        time.sleep(seconds)
        return False
    readable, _, _ = select.select([0], [], [], seconds)
    return bool(readable) and not os.read(0, 4096)


def _announce(sealers: list[Sealer]) -> None:
    for sealer in sealers:
        for rel in sealer.look():
            print(json.dumps({"sealed": rel, "at": time.time()}), flush=True)
