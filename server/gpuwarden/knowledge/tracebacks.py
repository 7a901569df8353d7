"""Read the exceptions in a log: the rank, type, message, frames and chain of each.

The formats of CPython, IPython and rich are supported, as is an exception line that was pasted without its traceback.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from gpuwarden.knowledge.log_lines import LogLine, step_of

MAX_MESSAGE = 40
"""Maximum number of lines to read from an exception's message. Later lines only list tensor shapes or names."""
MAX_MESSAGE_TEXT = 4_000
_HEADER = re.compile(r"(?:.{0,200}\s)?Traceback \(most recent call last\)")
_IGNORED = re.compile(
    r"Exception ignored (?:in|from)|Error in (?:atexit|sys\.excepthook)|Exception in thread (?!MainThread)"
)
_CHAINED = re.compile(r"\s*(?:During handling of the above exception|The above exception was the direct cause)")
_FRAMES = (
    re.compile(r'\s*File "(?P<path>[^"]{1,400})", line (?P<line>\d{1,7})(?:, in (?P<function>\S{1,100}))?'),
    re.compile(
        r"\s*(?:│ )?(?:File )?(?P<path>[\w~/<][^\s:]{0,300}\.py):(?P<line>\d{1,7}),? in (?P<function>[\w<>.]{1,100})"
    ),
    re.compile(r"(?P<path>[~/<][^\s:]{0,300}(?:\.py|>)) in (?P<function>[\w<>.]{1,100})\("),
)
_RAISED = re.compile(
    r"(?:E  +)?(?P<type>(?:[A-Za-z_]\w{0,60}\.){0,8}_?[A-Z]\w{0,80}(?:Error|Exception|Interrupt|Exit|Failure|Expired"
    r"|Timeout|Warning|NotFound|Refused|OutOfMemory|Empty|Mismatch))(?::\s?(?P<message>.{0,2000}))?$"
)
_ANY_RAISED = re.compile(r"(?P<type>(?:[A-Za-z_]\w{0,60}\.){0,8}[A-Za-z_]\w{0,80})(?::\s(?P<message>.{0,2000}))?$")
_NEXT = re.compile(
    r"\[?\w{0,20}(?:INFO|WARN|ERROR|DEBUG|runner)|wandb:|\s{0,4}\d{1,3}%\||[╭╰│]|\{['\"](?:loss|eval|train|grad|epoch|step)"
    r"|={20}|\d{4}-\d\d-\d\d|W\d{4} |E\d{4} |Traceback |Exception ignored "
)
_PACKAGE = re.compile(r"(?:site|dist)-packages/(?P<package>[A-Za-z_]\w{0,60})(?:/|\.py)")
_STDLIB = re.compile(r"(?:lib/python3?\.?\d*/(?!site-packages|dist-packages)|<frozen |^<)")


@dataclass(frozen=True)
class Frame:
    """One call in a traceback. `package` is empty for the user's own code and for Python's standard library."""

    path: str
    line: int
    function: str

    @property
    def package(self) -> str:
        """Return the package that the file belongs to; empty outside site-packages."""
        found = _PACKAGE.search(self.path.replace("\\", "/"))
        return found.group("package") if found else ""


@dataclass(eq=False)
class RaisedException:
    """One printed exception. `first` and `last` are its first and last line numbers; its type is in line `at`.

    `cause` is the previous exception in the chain. `ignored` is true if Python printed the exception and continued.
    """

    type: str
    message: str
    rank: str
    first: int
    at: int
    last: int
    frames: tuple[Frame, ...] = ()
    cause: RaisedException | None = None
    ignored: bool = False
    lines: list[LogLine] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Return the exception as one line."""
        return f"{self.type}: {self.message}" if self.message else self.type

    @property
    def name(self) -> str:
        """Return the type without its module."""
        return self.type.rpartition(".")[2]

    @property
    def chain(self) -> tuple[RaisedException, ...]:
        """Return the exceptions in the chain, earliest first."""
        found, cause = [self], self.cause
        while cause is not None:
            found.append(cause)
            cause = cause.cause
        return tuple(reversed(found))

    @property
    def innermost(self) -> Frame | None:
        """Return the innermost frame outside Python's standard library."""
        outside = (frame for frame in reversed(self.frames) if frame.package or not _STDLIB.search(frame.path))
        return next(outside, None)


def exceptions(lines: Iterable[LogLine]) -> list[RaisedException]:
    """Return the exceptions from all ranks in log order. A chain is represented by its last exception."""
    streams: dict[str, list[LogLine]] = {}
    for line in lines:
        streams.setdefault(line.rank, []).append(line)
    found = [raised for stream in streams.values() for raised in _of_stream(stream)]
    return sorted(found, key=lambda raised: raised.at)


def _of_stream(lines: list[LogLine]) -> Iterator[RaisedException]:
    """Yield the exceptions in one rank's lines. A chain is represented by its last exception."""
    pending: RaisedException | None = None
    chained = False
    for raised in _single(lines):
        if isinstance(raised, LogLine):
            chained = True
            continue
        if pending is not None and chained:
            raised.cause = pending
        elif pending is not None:
            yield pending
        pending, chained = raised, False
    if pending is not None:
        yield pending


def _single(lines: list[LogLine]) -> Iterator[RaisedException | LogLine]:
    """Yield each exception, and each line that states that the next exception belongs to the same chain."""
    frames: list[Frame] = []
    start: int | None = None
    inside = ignored = False
    at = 0
    while at < len(lines):
        line = lines[at]
        body = line.body
        at += 1
        if _IGNORED.match(body):
            ignored, frames, start = True, [], line.number
        elif "Traceback (" in body and _HEADER.match(body):
            inside, frames, start = True, [], start if ignored else line.number
        elif _CHAINED.match(body):
            yield line
        elif frame := _frame(body):
            frames.append(frame)
            start = line.number if start is None else start
        elif raised := _raised(body, inside=inside and bool(frames)):
            message, last = _message(raised.group("message") or "", lines, at, gaps=bool(frames))
            yield RaisedException(
                raised.group("type"), message, line.rank, line.number if start is None else start, line.number,
                lines[last - 1].number, tuple(frames), ignored=ignored, lines=lines[at - 1 : last],
            )  # fmt: skip
            at, frames, start, inside, ignored = last, [], None, False, False


def _frame(body: str) -> Frame | None:
    if ".py" not in body and 'File "' not in body and " in " not in body:
        return None
    for shape in _FRAMES:
        if found := shape.match(body):
            return Frame(found["path"], int(found.groupdict().get("line") or 0), found["function"] or "")
    return None


def _raised(body: str, *, inside: bool) -> re.Match[str] | None:
    """Match a line that starts with an exception's type. After a frame, any dotted name counts as a type."""
    text = body.strip() if not inside else body
    found = _RAISED.match(text)
    if found and found["type"].endswith("Warning") and not inside:
        return None
    if found is None and inside and text[:1].isalpha():
        found = _ANY_RAISED.match(text)
    return found


def _message(first: str, lines: list[LogLine], at: int, *, gaps: bool) -> tuple[str, int]:
    """Return the message with its continuation lines joined, and the index of the line after it.

    After a traceback, a message may contain an empty line.
    """
    parts = [first]
    end = at
    while end < len(lines) and end - at < MAX_MESSAGE and sum(map(len, parts)) < MAX_MESSAGE_TEXT:
        body = lines[end].body
        gap = lines[end].number - lines[end - 1].number > (2 if gaps else 1)
        if (
            gap
            or step_of(lines[end])
            or _NEXT.match(body)
            or _CHAINED.match(body)
            or _frame(body)
            or _raised(body, inside=False)
        ):
            break
        parts.append(body.strip())
        end += 1
    return " ".join(part for part in parts if part)[:MAX_MESSAGE_TEXT], end
