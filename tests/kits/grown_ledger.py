"""A ledger with many jobs that ended long ago."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from postgres_kit import Homes

if TYPE_CHECKING:
    from bench.ledger import House


def steps(house: House, work: Callable[[], object]) -> int:
    """How much a database has to do for some work, in figures that depend neither on the machine nor on its load.

    Of SQLite the instructions of its virtual machine, of PostgreSQL the rows that it went over.
    """
    house.ledger._known.clear()
    db: Any = house.ledger._db
    if house.server and house.server.host:
        # Planned for the table as it is now, as autovacuum sees to; what is counted is not flushed in a transaction.
        db.connection.execute("ANALYZE")
        sql = "SELECT sum(seq_tup_read + idx_tup_fetch)::bigint FROM pg_stat_xact_user_tables"
        with house.ledger.transaction():
            before = db.rows(sql)[0][0] or 0
            work()
            return int(db.rows(sql)[0][0] - before)
    count = 0

    def one() -> int:
        nonlocal count
        count += 1
        return 0

    db.connection.set_progress_handler(one, 1)
    try:
        work()
    finally:
        db.connection.set_progress_handler(None, 1)
    return count


@pytest.fixture
def grown(homes: Homes) -> Callable[[Path, str, int], House]:
    """Make houses where so many jobs have ended, all of them longer than a day ago."""
    from bench.ledger import House

    def grow(folder: Path, platform: str, jobs: int) -> House:
        house = House(folder, platform, homes.address(folder))
        homes.opened.append(house.ledger)
        house.grow(jobs)
        house.clock.time += 86_400
        return house

    return grow


Grown = Callable[[Path, str, int], "House"]
