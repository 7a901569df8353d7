"""Measure an operation's cost by counting work, which does not depend on the machine or its load as time does."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def counted_lines(*, threads: bool = True) -> Iterator[Callable[[], int]]:
    """Count the Python lines run by this thread, and by threads that start meanwhile if `threads` is true.

    Yields a function that returns the count so far. A call of a C function, such as a regular expression, counts as one
    line.
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
    """Return the number of Python lines that a function runs."""
    with counted_lines() as lines:
        work()
        return lines()
