"""Many trainers at once lose no points. `bench/metrics.py` measures the cost to the server."""

from __future__ import annotations

from pathlib import Path

import pytest

from load_kit import Load, run_load


@pytest.mark.prove
def test_a_hundred_trainers_and_as_many_viewers_lose_nothing(tmp_path: Path) -> None:
    load = Load()
    run_load(tmp_path / "home", load, clients=100, rate=10, seconds=10, streams=50)
    assert (load.posts, load.refused) == (10_000, 0)
    assert 50 <= load.events <= 50 * 100, "every viewer is told, and of no point twice"


@pytest.mark.slow
def test_a_few_trainers_lose_nothing(tmp_path: Path) -> None:
    load = Load()
    run_load(tmp_path / "home", load, clients=20, rate=50, seconds=1)
    assert (load.posts, load.refused) == (1_000, 0)
