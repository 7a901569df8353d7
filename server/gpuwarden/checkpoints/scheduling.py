"""Which files to look at first, and which with all threads at once, so that no thread idles at the end."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

_SLACK = 1.1  # how much longer than a perfect division the work may take


def plan(sizes: Mapping[str, int], threads: int, least: int) -> tuple[list[str], list[str]]:
    """(Files for all threads together, one after the other; then files for one thread each, largest first).

    Sharing a file costs more than having it to oneself, so it is done only where whole files would leave threads
    without work for long, and only with files of at least `least` bytes.
    """
    together: list[str] = []
    rest = sorted(sizes, key=lambda name: -sizes[name])
    while threads > 1 and rest and sizes[rest[0]] >= least and _uneven([sizes[n] for n in rest], threads):
        together.append(rest.pop(0))
    return together, rest


def _uneven(sizes: Sequence[int], threads: int) -> bool:
    """Whether the busiest thread would have too much to do, each taking the next largest file when it is free."""
    busy = [0] * threads
    for size in sizes:
        heapq.heapreplace(busy, busy[0] + size)
    return max(busy) > _SLACK * sum(sizes) / threads
