"""Decide which files all threads read together and which a single thread reads, so that few threads are idle."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

# If threads share a file, the file is read again for its digests. An imbalance of up to 10 % costs less.
_SLACK = 1.1


def plan(sizes: Mapping[str, int], threads: int, least: int) -> tuple[list[str], list[str]]:
    """Return the files that all threads read together, and those that a single thread reads, both largest first.

    A shared file is read a second time. Therefore, only files of at least `least` bytes are shared, and only if threads
    would otherwise be idle for a long time.
    """
    together: list[str] = []
    rest = sorted(sizes, key=lambda name: -sizes[name])
    while threads > 1 and rest and sizes[rest[0]] >= least:
        busy = [0] * threads
        for name in rest:  # the next thread that is free reads the next largest file
            heapq.heapreplace(busy, busy[0] + sizes[name])
        if max(busy) <= _SLACK * sum(sizes[name] for name in rest) / threads:
            break
        together.append(rest.pop(0))
    return together, rest
