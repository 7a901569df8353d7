"""Pack the modules that need only the standard library into one archive, which runs on Python 3.8 and later.

    python3 gpuwarden-checkpoints.pyz examine PATH... [--structure] [--log FILE]    print a line of findings per path
    python3 gpuwarden-checkpoints.pyz manifest PATH...                              print a manifest line per path
    python3 gpuwarden-checkpoints.pyz seal PATH... [--log FILE] [--quiet 30] [--every 10] [--once|--attached] [--keyed]

The archive runs on the machine that stores the files, so large files need not be transferred. The output is JSON of
limited size, with the worst files first. With `--load` or `--resume`, undamaged files are also loaded, in a separate
process. With `--against`, each path is also compared with another path. The runner starts `seal` alongside a job, and
`examine` on request.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import select
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuwarden.checkpoints.budget import Budget
from gpuwarden.checkpoints.file_model import Broken, Doubtful, short
from gpuwarden.checkpoints.findings import ExamineOptions, Findings
from gpuwarden.checkpoints.plugins import FORMATS, LAYOUTS
from gpuwarden.checkpoints.safe_file import Source
from gpuwarden.checkpoints.sealing import manifest, seal_log

if TYPE_CHECKING:
    from gpuwarden.checkpoints.compare import Comparison
    from gpuwarden.checkpoints.sealing.seal import Sealer

# Not in the archive: modules that need other packages, or that never run on the machine that stores the files.
_HOME = {"verify.py", "save_helper.py", "build.py", "build_child.py"}
_CORE = ("__init__.py", "contract.py", "errors.py", "evidence.py", "guidance.py", "installing.py", "registry.py")
_ROWS = 1_000
_MAX_KEY = 256
_FILE = ("path", "format", "size", "proved", "unproved", "warnings", "doubts", "problems", "causes", "sealed", "unread")
_FOLDER = ("layout", "path", "step", "checkpoint", "proved", "warnings", "doubts", "problems", "causes", "resume")
_EPOCH = (1980, 1, 1, 0, 0, 0)


def build() -> bytes:
    """Return the bytes of the archive. They must be reproducible, because the file name contains their digest."""
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
    """Return the archive's file name. It contains a digest, so that a running archive is never overwritten."""
    return f"gpuwarden-checkpoints-{hashlib.sha256(data).hexdigest()[:16]}.pyz"


def main(argv: list[str] | None = None) -> int:
    """Run the archive's command-line interface. Return 0, or 2 if a path could not be examined."""
    ask = argparse.ArgumentParser(prog="gpuwarden-checkpoints")
    ask.add_argument("verb", choices=("examine", "manifest", "seal"))
    ask.add_argument("paths", type=Path, nargs="+")
    ask.add_argument("--structure", action="store_true", help="read only headers, not the data")
    ask.add_argument("--load", action="store_true", help="also load undamaged files")
    ask.add_argument("--resume", action="store_true", help="same as --load; resume requirements are always reported")
    ask.add_argument("--against", type=Path, help="compare with an earlier checkpoint, adapter base or GGUF source")
    ask.add_argument("--threads", type=int, default=2)
    ask.add_argument("--seconds", type=float, default=86_400.0, help="maximum total duration in seconds")
    ask.add_argument("--log", type=Path, help="the seal log: read by examine, written by seal")
    ask.add_argument("--quiet", type=float, default=30.0, help="seconds without a change before a file is sealed")
    ask.add_argument("--every", type=float, default=10.0, help="seconds between two passes over the files")
    ask.add_argument("--once", action="store_true", help="make two passes, --quiet seconds apart, then exit")
    ask.add_argument("--attached", action="store_true", help="when stdin ends, make a last pass and exit")
    ask.add_argument("--parts", action="store_true", help="also record the digests of the upload parts of large files")
    ask.add_argument("--keyed", action="store_true", help="sign the log lines with the key in the first line of stdin")
    args = ask.parse_args(argv)
    if args.verb == "seal":
        return _seal(args)
    _lowest_priority()
    budget = Budget(args.seconds, 1 << 60)
    status = 0
    for path in args.paths:
        answer: dict[str, Any]
        try:
            if not path.exists():
                answer = {"error": "this path does not exist"}
            else:
                answer = manifest.take(path) if args.verb == "manifest" else _examine(path, args, budget)
        except (Broken, Doubtful) as why:
            answer = {"error": str(why)}
        print(json.dumps(answer), flush=True)
        if "error" in answer:
            status = 2
    return status


def _examine(path: Path, args: argparse.Namespace, budget: Budget) -> dict[str, Any]:
    """Examine one path; load and compare it if requested. Return at most `_ROWS` files, the worst first."""
    # Imported here, because the modules are recompiled at each start, and the other commands do not need these.
    from gpuwarden.checkpoints.examine import examine

    sealed = seal_log.seals_below(args.log, path) if args.log else {}
    found = examine(path, ExamineOptions(not args.structure, args.threads, expected=sealed, budget=budget))
    if args.load or args.resume:
        from gpuwarden.checkpoints.load import child_with_torch, load

        good = [e for e in found.entries.values() if e.verdict == "proven"]
        environment = args.log.parent / "work/.venv/bin/python" if args.log else ""
        load(found, good, budget=budget, child=child_with_torch(str(environment)))
    compared = _compared(found, args.against, budget) if args.against else None
    worst_first = sorted(found.entries.values(), key=lambda e: (e.verdict == "proven", e.path))
    return {
        "files": [{**_bounded(vars(e), _FILE), "verdict": e.verdict} for e in worst_first[:_ROWS]],
        "more": max(0, len(worst_first) - _ROWS),
        "more_bad": sum(e.verdict != "proven" for e in worst_first[_ROWS:]),
        "bytes": sum(e.size for e in worst_first),
        "folders": [_bounded(vars(j), _FOLDER) for j in found.judgements[:_ROWS]],
        "doubts": [short(d, 300) for d in found.doubts[:20]],
        **({"compared": _bounded(vars(compared), tuple(vars(compared)))} if compared else {}),
    }


def _compared(found: Findings, against: Path, budget: Budget) -> Comparison | None:
    """Compare with another path. Return None for an output that contains no model, such as a log."""
    from gpuwarden.checkpoints.compare import Comparison, comparable, compare
    from gpuwarden.checkpoints.examine import GAVE_UP, examine

    if not comparable(found):
        return None
    if not against.exists():
        return Comparison(doubts=["the path to compare with does not exist on the machine"])
    try:
        other = examine(against, ExamineOptions(False, budget=budget, open=_counted(budget)))
        return compare(replace(found, open=_counted(budget)), other)
    except (Broken, Doubtful, *GAVE_UP) as why:
        return Comparison(doubts=[f"could not be compared: {short(why, 80)}"])


def _counted(budget: Budget) -> Callable[[Path, str], Source]:
    """Return a function that opens a file and counts the bytes that are read from it against the budget."""

    def opened(path: Path, name: str) -> Source:
        source = Source(path, name)
        source.took = budget.take
        return source

    return opened


def _bounded(fields: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """Return selected fields, with lists limited to 10 items of 300 characters."""
    values = {k: fields[k] for k in keys}
    return {k: [short(t, 300) for t in v[:10]] if isinstance(v, list) else v for k, v in values.items()}


def _seal(args: argparse.Namespace) -> int:
    """Seal the finished files under the paths.

    With `--once`, make two passes. With `--attached`, continue until stdin ends. Otherwise, never stop.
    """
    from gpuwarden.checkpoints.sealing.seal import Sealer, hide_memory

    _lowest_priority()
    # Import all plug-ins before reading the key: the job can overwrite the archive, and code imported later could sign
    # forged digests.
    for plugins in (FORMATS, LAYOUTS):
        plugins.usable()
    digests: tuple[str, ...] = ("sha256",) if args.log else manifest.DIGESTS
    digests += (manifest.PARTS,) if args.parts else ()
    key = bytearray()
    if args.keyed:
        hide_memory()
        # Read one byte at a time, so that the input after the key is not consumed.
        while len(key) < _MAX_KEY and (byte := os.read(0, 1)) not in (b"", b"\n"):
            key += byte
    sealers = [Sealer(path, args.quiet, digests, log=args.log, key=bytes(key)) for path in args.paths]
    _announce(sealers)
    while not args.once:
        if not args.attached:
            time.sleep(args.every)
        else:
            readable, _, _ = select.select([0], [], [], args.every)
            if readable and not os.read(0, 4096):  # The end of stdin means that the job has ended; its files are final.
                for sealer in sealers:
                    sealer.quiet_s = 0.0
                _announce(sealers)
                return 0
        _announce(sealers)
    if args.quiet > 0:
        time.sleep(args.quiet)
        _announce(sealers)
    return 0


def _lowest_priority() -> None:
    """Set the lowest CPU priority, so that this process does not slow down the training.

    The caller sets the disk priority, with `ionice -c3`.
    """
    if hasattr(os, "nice"):
        try:
            os.nice(19)
        except OSError:
            pass


def _announce(sealers: list[Sealer]) -> None:
    for sealer in sealers:
        for rel in sealer.look():
            print(json.dumps({"sealed": rel, "at": time.time()}), flush=True)
