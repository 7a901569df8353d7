"""Lines over standard input and output: read in a thread from the start, bounded, and written one at a time.

Only the standard library is imported here, so that the client is read while the protocol's SDK loads. While the
transport is open, descriptor 0 is the null device and descriptor 1 is standard error: the output of a tool or a child
process never reaches the client.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Final, NamedTuple, TypeAlias

MAX_LINE: Final = 16 << 20
"""Maximum bytes of one message. A script of the largest allowed size fits, even with every character escaped."""
KEPT: Final = 4_096
"""Bytes kept of each end of a longer message, to find its id."""
CHUNK: Final = 1 << 16


class Line(NamedTuple):
    """One line without its line break. If it is too long, `content` is both ends and `whole` is False."""

    content: bytes
    whole: bool = True


Early: TypeAlias = Callable[[bytes], tuple[bytes | None, bytes | None]]
"""Return the immediate reply to a line or None, and the line that the server still has to read or None."""


class _Pending:
    """The line being read; if it gets too long, only both ends are kept."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, piece: bytes) -> None:
        self._size += len(piece)
        self._parts.append(piece)
        if self._size > MAX_LINE:
            kept = b"".join(self._parts)
            self._parts = [kept[:KEPT], kept[KEPT:][-KEPT:]]

    def take(self) -> Line:
        line = Line(b"".join(self._parts), whole=self._size <= MAX_LINE)
        self._parts, self._size = [], 0
        return line


def read_lines(read: Callable[[], bytes]) -> Iterator[Line]:
    """Yield the non-blank lines that `read` returns in pieces, until it returns an empty piece."""
    pending = _Pending()
    while chunk := read():
        *ended, rest = chunk.split(b"\n")
        for piece in ended:
            pending.add(piece)
            line = pending.take()
            if line.content.strip():
                yield line
        pending.add(rest)
    line = pending.take()
    if line.content.strip():
        yield line


class StdioLines:
    """The standard streams of the process: a queue of input lines, and complete output lines."""

    def __init__(self, early: Early | None = None) -> None:
        self._early = early
        self._in, self._out = _claim(0), _claim(1)
        self._lines: SimpleQueue[Line | None] = SimpleQueue()
        self._again: deque[Line] = deque()
        self._writing = threading.Lock()
        self.answered = False
        threading.Thread(target=self._read, name="stdin", daemon=True).start()

    def _read(self) -> None:
        try:
            for line in read_lines(lambda: os.read(self._in, CHUNK)):
                # Some lines are answered before the server is ready; it still has to read `rest`.
                early = self._early
                reply, rest = early(line.content) if early is not None and line.whole else (None, line.content)
                if reply is not None:
                    self.write(reply)
                    self.answered = True
                if rest is not None:
                    self._lines.put(Line(rest, line.whole))
        except OSError:
            pass  # the client is gone, which is the end of its input
        finally:
            self._lines.put(None)

    def next(self) -> Line | None:
        """Wait for the next line; None at the end of the input."""
        return self._again.popleft() if self._again else self._lines.get()

    def unread(self, lines: Iterable[Line]) -> None:
        """Put lines back at the front of the queue."""
        self._again.extendleft(reversed([*lines]))

    def hand_over(self) -> None:
        """Stop early answers, as the server is ready."""
        self._early = None

    def close(self) -> None:
        """End the queue after the lines read so far."""
        self._lines.put(None)

    def write(self, line: bytes) -> None:
        """Write one complete line. Raises OSError if the client has disconnected."""
        rest = memoryview(line + b"\n")
        with self._writing:
            while rest:
                rest = rest[os.write(self._out, rest) :]


def _claim(number: int) -> int:
    """Return a private descriptor of a standard stream, and redirect the stream away from the client.

    Child processes do not inherit the descriptor, and it is not 0, 1 or 2.
    """
    if sys.platform != "win32":
        import fcntl

        private = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3)
    else:
        private = os.dup(number)
    other = os.open(os.devnull, os.O_RDONLY) if number == 0 else os.dup(2)
    os.dup2(other, number)
    os.close(other)
    return private
