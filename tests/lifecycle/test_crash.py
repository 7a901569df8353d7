"""SIGKILL at any point; the next process continues. Nothing is lost, duplicated, ended unasked or forgotten.

Each life is one job from quote to teardown. Every use case runs in its own process, most of which are killed: at a
random line of gpuwarden, or at a random moment (then also inside SQLite, fsync or a wait). After every kill the ledger
is compared with the cloud's own records. The callers know only the answers that they received.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from crash_kit import SEED, Driver, Life, Tally
from real_parts import amount

PHASES = ("quote", "submit", "check", "pull", "verify", "teardown", "approve", "list")


KINDS = ("plain", "faults", "preempted", "accounts", "hosts", "lies")


def kill_often(folder: Path, kills: int) -> Tally:
    """Run lives until this many processes have died."""
    tally, driver = Tally(), Driver(folder)
    print(f"GPUWARDEN_CRASH_SEED={SEED}")
    try:
        for n in range(1000):
            rng = random.Random(f"{SEED}-{n}")
            Life(driver, tally, folder / f"life{n}", rng, KINDS[n % len(KINDS)]).live()
            if sum(tally.kills.values()) >= kills:
                break
    finally:
        driver.close()
    print(f"{sum(tally.kills.values())} kills at {len(tally.points)} points in {n + 1} lives: {dict(tally.kills)}")
    return tally


@pytest.mark.long
@pytest.mark.prove
@pytest.mark.endurance
@pytest.mark.attack("ending", "kills gpuwarden at any line while the provider lies and the account changes")
def test_death_at_any_line_loses_and_duplicates_nothing(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    tally = kill_often(tmp_path, amount(60, 300))
    assert len(tally.points) >= amount(30, 200)
    assert len(tally.kills) >= amount(6, len(PHASES))
    record_property("figure", f"{sum(tally.kills.values())} kills at {len(tally.points)} lines")
