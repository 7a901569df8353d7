"""Decide which files are read by all threads together and which by a single thread, to keep the threads busy."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

# A file that threads share is read again for its digests. An imbalance of up to 10 % costs less than that.
_SLACK = 1.1


def plan(sizes: Mapping[str, int], threads: int, least: int) -> tuple[list[str], list[str]]:
    """Return the files that all threads read together, and those that a single thread reads, both largest first.

    A shared file is read twice, so only files of at least `least` bytes are shared, and only if threads would otherwise
    be idle for a long time.
    """
    together: list[str] = []
    rest = sorted(sizes, key=lambda name: -sizes[name])
    while threads > 1 and rest and sizes[rest[0]] >= least:
        busy = [0] * threads
        for name in rest:  # the first free thread reads the next largest file
            heapq.heapreplace(busy, busy[0] + sizes[name])
        if max(busy) <= _SLACK * sum(sizes[name] for name in rest) / threads:
            break
        together.append(rest.pop(0))
    return together, rest
