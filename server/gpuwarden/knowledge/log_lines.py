"""Split a log into lines with their ranks, and read only the relevant parts of large log files.

Launchers prefix each line with a rank or a time (`[rank1]: `, `[default0]:`, `(RayTrainWorker pid=7) `, `3: ` from
srun), and interleave the ranks. `LogLine.body` is the line without its prefix, so that a traceback can be read per
rank.
"""

from __future__ import annotations

import re
from collections import deque
from typing import BinaryIO, NamedTuple

MAX_LOG = 1_000_000
HEAD = 200_000
MAX_LINE = 2_000
LINE_END = 500
CHUNK = 1 << 20
AROUND = 16 << 10
MAX_FOUND = 12
"""Maximum number of failure marks whose context is kept from the middle of a long file. Half of them are the first
marks, and half are the last ones.
"""
LEFT_OUT = "\x00"
"""Marks the start of a line that replaces omitted lines and states their number."""
TELLING = (
    b"Traceback (most recent call last)",
    b"CUDA error",
    b"out of memory",
    b"Out of memory",
    b"NVRM: Xid",
    b"ncclS",
)
"""Byte strings that indicate a failure in the middle of a long file."""
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]{0,20}[A-Za-z]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\))")
_TIME = r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[\d.,:+Z-]{0,16}\]?[ :]\s?"
_RANK = (
    r"\[(?:rank|default|Rank )(?P<rank>\d{1,5})\]:?\s?|rank(?P<bare>\d{1,5})\]:\s?"
    r"|\[\d{1,3},(?P<mpi>\d{1,5})\]<std\w{3}>:\s?|\((?:[\w.]{1,60} )?pid=(?P<pid>\d{1,9})(?:, ip=[\d.]{7,15})?\) ?"
    r"|(?P<srun>\d{1,4}): (?=\S| )"
)
_PREFIX = re.compile(rf"(?:{_TIME})?(?:{_RANK})?(?:{_TIME})?")

_BAR = re.compile(r"(?P<step>\d{1,9})/(?P<total>\d{1,9}) \[\d[\d:]*<")
_LOSS = re.compile(
    r"(?i)(?<![\w/])['\"]?(?:\w{1,20}[_/-])?(?:(?:log)?loss(?:_\w{1,8})?|perplexity|ppl|acc(?:uracy)?)['\"]?"
    r"\s?[:=\s]\s?['\"]?-?(?:\d|nan|inf)"
)
_STEP = re.compile(
    r"(?i)\b(?:global_?step|steps?|iter(?:ation)?s?|epoch|it)\b['\"]?\s?[:=\[#(]?\s{0,12}['\"\[]?"
    r"(?P<step>\d{1,9}(?:\.\d{1,9})?)(?:\s?[/|]\s{0,9}(?P<total>\d{1,9}))?"
)
_NOT_PROGRESS = re.compile(r"wandb:|.{0,80}\b(?:Error|Exception|Warning|WARN|E\d{4} )|\s{2,}File ")


class LogLine(NamedTuple):
    """A log line. `number` starts at 1. `text` is the line without indentation; `body` keeps the indentation, but not
    the prefix with the time and `rank`.
    """

    number: int
    text: str
    body: str
    rank: str


def read_lines(log: str) -> list[LogLine]:
    """Split a log into numbered lines. Each redraw of a progress bar counts as a separate line with the same number.

    If a log exceeds 1 MB, only its beginning and its end are read.
    """
    cut = len(log) - MAX_LOG
    parts = [(1, log)]
    if cut > 0:
        head, tail = log[:HEAD], log[HEAD + cut :]
        parts = [(1, head), (1 + head.count("\n") + log.count("\n", HEAD, HEAD + cut), tail)]
    found: list[LogLine] = []
    skipped = 0
    for first, text in parts:
        for number, line in enumerate(text.split("\n"), first):
            if line.startswith(LEFT_OUT) and len(line) < 12 and line[1:].isdecimal():
                skipped += int(line[1:])
                continue
            pieces = (piece for piece in line.split("\r") if piece and not piece.isspace())
            found.extend(_line(number + skipped, piece) for piece in pieces)
    return found


def _line(number: int, piece: str) -> LogLine:
    if len(piece) > MAX_LINE:
        piece = f"{piece[: MAX_LINE - LINE_END - 1]} {piece[-LINE_END:]}"
    clean = _ESCAPES.sub("", piece).rstrip() if "\x1b" in piece else piece.rstrip()
    prefix = _PREFIX.match(clean)
    rank, body = "", clean
    if prefix is not None and prefix.end():
        rank, body = next((value for value in prefix.groups() if value), ""), clean[prefix.end() :]
    return LogLine(number, clean.strip(), body, rank)


def step_of(line: LogLine) -> str:
    """Return text that identifies the training step in a line, or an empty string if the line reports no progress."""
    text = line.text
    if not any(char.isdigit() for char in text[:200]) or _NOT_PROGRESS.match(text):
        return ""
    if bar := _BAR.search(text):
        return f"{bar['step']}/{bar['total']}"
    step = _STEP.search(text)
    if _LOSS.search(text):
        return step["step"] if step else text[:120]
    return f"{step['step']}/{step['total']}" if step and step["total"] else ""


def read_log(file: BinaryIO) -> str:
    """Read a log of any size. Return at most about 1 MB: both ends, and the context of failure marks between them.

    Each omitted part is replaced by a line that begins with LEFT_OUT, so that line numbers stay correct.
    """
    head = file.read(HEAD)
    tail: deque[bytes] = deque()
    kept, middle = 0, _Middle()
    while chunk := file.read(CHUNK):
        tail.append(chunk)
        kept += len(chunk)
        while kept - len(tail[0]) >= MAX_LOG // 2:
            gone = tail.popleft()
            kept -= len(gone)
            middle.pass_over(gone)
    rest = b"".join(tail)
    spare = max(0, len(rest) - (MAX_LOG - HEAD - MAX_FOUND * 2 * AROUND))
    middle.pass_over(rest[:spare])
    text = b"".join((head, middle.text(), rest[spare:]))
    return text.decode("utf-8", "replace")


class _Middle:
    """Counts the skipped lines, and keeps the context of the first and the last failure marks."""

    def __init__(self) -> None:
        self.lines = 0
        self.first: list[tuple[int, bytes]] = []
        self.last: deque[tuple[int, bytes]] = deque(maxlen=MAX_FOUND // 2)

    def pass_over(self, chunk: bytes) -> None:
        """Record the failure marks in a skipped chunk, in order, with context that does not overlap."""
        places = sorted(at for telling in TELLING for at in (chunk.find(telling), chunk.rfind(telling)) if at >= 0)
        end = 0
        for at in places:
            start = max(end, at - AROUND // 2)
            stop = min(len(chunk), at + AROUND)
            if at >= end:
                found = (self.lines + chunk.count(b"\n", 0, start), chunk[start:stop])
                (self.first if len(self.first) < MAX_FOUND // 2 else self.last).append(found)
                end = stop
        self.lines += chunk.count(b"\n")

    def text(self) -> bytes:
        """Return the kept passages, with a line before, between and after them that counts the omitted lines."""
        parts: list[bytes] = []
        at = 0
        for line, found in (*self.first, *self.last):
            parts += [_omission_line(line - at), found]
            at = line + found.count(b"\n")
        return b"".join((*parts, _omission_line(self.lines - at)))


def _omission_line(lines: int) -> bytes:
    """Return a line that states how many lines were omitted, or empty lines if there are fewer than three."""
    return b"\n" * lines if lines < 3 else f"\n{LEFT_OUT}{lines - 2}\n".encode()
