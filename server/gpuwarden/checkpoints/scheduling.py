"""Plan which files to read with all threads at once, and which with one thread each, so that no thread idles."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

# Sharing one file costs a second read for its digests, so up to 10 % of imbalance is cheaper.
_SLACK = 1.1


def plan(sizes: Mapping[str, int], threads: int, least: int) -> tuple[list[str], list[str]]:
    """Return (files for all threads together, one by one; files for one thread each, largest first).

    Sharing a file has a cost, so only files of at least `least` bytes are shared, and only if whole files would leave
    threads idle for long.
    """
    together: list[str] = []
    rest = sorted(sizes, key=lambda name: -sizes[name])
    while threads > 1 and rest and sizes[rest[0]] >= least:
        busy = [0] * threads
        for name in rest:  # each free thread takes the next largest file
            heapq.heapreplace(busy, busy[0] + sizes[name])
        if max(busy) <= _SLACK * sum(sizes[name] for name in rest) / threads:
            break
        together.append(rest.pop(0))
    return together, rest
