"""Plan which files to read first, and which with all threads at once, so that no thread idles at the end."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

# Sharing one file costs a second reading for its digests, so up to 10 % of imbalance is cheaper.
_SLACK = 1.1


def plan(sizes: Mapping[str, int], threads: int, least: int) -> tuple[list[str], list[str]]:
    """Return (files for all threads together, one by one; files for one thread each, largest first).

    Sharing a file costs more than having it to oneself, so it is done only where whole files would leave threads
    without work for long, and only with files of at least `least` bytes.
    """
    together: list[str] = []
    rest = sorted(sizes, key=lambda name: -sizes[name])
    while threads > 1 and rest and sizes[rest[0]] >= least and _uneven([sizes[n] for n in rest], threads):
        together.append(rest.pop(0))
    return together, rest


def _uneven(sizes: Sequence[int], threads: int) -> bool:
    """Return true if the busiest thread had too much work when each free thread takes the next largest file."""
    busy = [0] * threads
    for size in sizes:
        heapq.heapreplace(busy, busy[0] + size)
    return max(busy) > _SLACK * sum(sizes) / threads
