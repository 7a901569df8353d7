"""JSON lines: metrics and logs, one object per line, appended while a job runs."""

from __future__ import annotations

from gpuwarden.checkpoints.file_model import Anatomy, Broken, Doubtful, Limits
from gpuwarden.checkpoints.formats.json import modest, parse
from gpuwarden.checkpoints.safe_file import Source

NAME = "jsonl"
LOAD = "parsed"
_LINE = 16 << 20
_WARNINGS = 3


def claims(name: str, head: bytes) -> bool:
    """Return true for the names of this format."""
    return name.endswith((".jsonl", ".ndjson"))


def read(source: Source, limits: Limits) -> Anatomy:
    """Parse every line. An incomplete last line is what a killed writer leaves, and a warning only."""
    found = Anatomy(NAME)
    lines, at, rest = 0, 0, b""
    while at < source.size:
        piece = source.at(at, min(1 << 20, source.size - at))
        at += len(piece)
        *whole, rest = (rest + piece).split(b"\n")
        if len(rest) > _LINE:
            raise Doubtful(f"line {lines + len(whole) + 1:,} is longer than {_LINE:,} bytes")
        for line in whole:
            lines += 1
            _check(line, lines, found, limits)
    if rest.strip():
        try:
            _check(rest, lines + 1, found, limits)
            lines += 1
        except Broken:
            found.warnings.append("its last line is incomplete, as a killed writer leaves it")
    found.warnings = list(dict.fromkeys(found.warnings))
    found.proved.append(f"{lines:,} lines parse as JSON")
    return found


def _check(line: bytes, number: int, found: Anatomy, limits: Limits) -> None:
    if not line.strip():
        return
    if not modest(line, limits):
        raise Doubtful(f"line {number:,} has more than {limits.containers:,} lists and objects; it is not parsed")
    try:
        parse(line, found)
    except Broken as why:
        raise Broken(f"line {number:,} {why}") from why
    del found.warnings[_WARNINGS:]  # a loss that became NaN is so on every line after
