"""Count work instead of time: the cost of an operation as a number that does not depend on the machine or its load."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def counted_lines(*, threads: bool = True) -> Iterator[Callable[[], int]]:
    """Count the Python lines that run in this thread, and in `threads` that start meanwhile; yield the count so far.

    A regular expression or another function in C counts as one line.
    """
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        if event == "line":
            count += 1
        return trace

    before, begun = sys.gettrace(), threading.gettrace()
    if threads:
        threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield lambda: count
    finally:
        sys.settrace(before)
        threading.settrace(begun)


def lines_run(work: Callable[[], object]) -> int:
    """Return how many lines of Python a piece of work runs."""
    with counted_lines() as lines:
        work()
        return lines()
