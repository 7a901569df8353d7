"""A ledger with many jobs that ended long ago."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bench.ledger import House


def steps(house: House, work: Callable[[], object]) -> int:
    """Return the number of SQLite instructions that a function executes, which is the same on any machine."""
    house.ledger._known.clear()
    connection = house.ledger._db.connection
    count = 0

    def one() -> int:
        nonlocal count
        count += 1
        return 0

    connection.set_progress_handler(one, 1)
    try:
        work()
    finally:
        connection.set_progress_handler(None, 1)
    return count


def grown(folder: Path, platform: str, jobs: int) -> House:
    """Create a `House` with `jobs` jobs, all of which ended more than a day ago."""
    house = House(folder, platform)
    house.grow(jobs)
    house.clock.time += 86_400
    return house
