"""Read JSON Lines files, such as metrics and logs, to which a job appends one object per line."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from gpuwarden.checkpoints.file_model import Anatomy, Broken, Doubtful, Limits
from gpuwarden.checkpoints.formats.json import modest, parse
from gpuwarden.checkpoints.safe_file import Source
from gpuwarden.core.evidence import Cause

NAME = "jsonl"
LOAD = "parsed"
_LINE = 16 << 20
_WARNINGS = 3


def claims(name: str, head: bytes) -> bool:
    """Return true for this format's file names."""
    return name.endswith((".jsonl", ".ndjson"))


def read(source: Source, limits: Limits) -> Anatomy:
    """Parse lines up to a limit. An incomplete last line, left by a killed writer, causes only a warning."""
    found = Anatomy(NAME)
    odd: list[str] = []

    def constant(name: str) -> float:
        odd.append(name)
        return 0.0

    scan = json.JSONDecoder(parse_constant=constant).scan_once  # type: ignore[attr-defined]
    lines, at, rest = 0, 0, b""
    while at < source.size and lines < limits.lines:
        piece = source.at(at, min(1 << 20, source.size - at))
        at += len(piece)
        *whole, rest = (rest + piece).split(b"\n")
        spare = len(whole) - (limits.lines - lines)
        if spare > 0:
            at -= sum(map(len, whole[-spare:])) + spare + len(rest)
            del whole[-spare:]
        if len(rest) > _LINE:
            raise Doubtful(f"line {lines + len(whole) + 1:,} is longer than {_LINE:,} bytes", Cause.LIMIT)
        if not _quickly(b"\n".join(whole), scan, limits):
            for number, line in enumerate(whole, lines + 1):
                _check(line, number, found, limits)
        lines += len(whole)
    if odd:
        found.warnings.append(f"contains {' or '.join(sorted(set(odd)))}, which is not valid JSON")
    if at < source.size:
        at = source.size - min(source.size - at, 1 << 16)
        rest = source.at(at, source.size - at).rpartition(b"\n")[2]
        found.unproved.append(f"the lines after line {lines:,}, which were not parsed")
    if b"\0" in rest:
        raise Broken("ends with NUL bytes: a crash left a hole in the file")
    if rest.strip():
        try:
            _check(rest, lines + 1, found, limits)
            lines += 1
        except Broken:
            found.warnings.append("its last line is incomplete, probably because the writer was killed")
    found.warnings = list(dict.fromkeys(found.warnings))
    found.proved.append(f"{lines:,} lines parse as JSON")
    return found


def _quickly(data: bytes, scan: Callable[[str, int], tuple[Any, int]], limits: Limits) -> bool:
    """Return true if all lines are valid JSON. Otherwise, the caller checks each line."""
    if not modest(data, limits):
        return False
    try:
        for line in data.decode("utf-8").split("\n"):  # noqa: SIM110  (a generator turns StopIteration into another error)
            if line and scan(line, 0)[1] != len(line):
                return False
        return True
    except (StopIteration, ValueError, RecursionError):
        return False


def _check(line: bytes, number: int, found: Anatomy, limits: Limits) -> None:
    """Parse one line. Raises Broken if it is not JSON."""
    if not line.strip():
        return
    if not modest(line, limits):
        raise Doubtful(f"line {number:,} has more than {limits.containers:,} lists and objects", Cause.LIMIT)
    try:
        parse(line, found)
    except Broken as why:
        raise Broken(f"line {number:,} {why}") from why
    del found.warnings[_WARNINGS:]  # Once a loss is NaN, every later line causes the same warning.
