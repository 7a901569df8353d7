"""Many trainers at once: nothing is lost, and a post costs little of the server's processor time.

Latencies are for `bench/metrics.py` on an idle machine: here other work may share the cores.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from load_kit import bare_load, run_load

MOST_TIMES = 6
"""A post may cost so many times what it costs a bare Starlette, which neither checks, stores nor streams it."""


@pytest.mark.prove
def test_a_hundred_trainers_and_as_many_viewers_lose_nothing(tmp_path: Path) -> None:
    load = run_load(tmp_path / "home", clients=100, rate=10, seconds=10, streams=50)
    assert (load.posts, load.refused) == (10_000, 0)
    assert 50 <= load.events <= 50 * 4 * (load.wall_s + 5), load  # coalesced to four a second for each viewer
    peer = bare_load(tmp_path / "home", clients=100, rate=10, seconds=10)
    assert (peer.posts, peer.refused) == (10_000, 0)
    print(f"{load.cpu_ms_per_post:.3f} ms a post, {peer.cpu_ms_per_post:.3f} ms with nothing but Starlette")
    assert load.cpu_ms_per_post < MOST_TIMES * peer.cpu_ms_per_post, (str(load), str(peer))


@pytest.mark.slow
def test_a_few_trainers_lose_nothing(tmp_path: Path) -> None:
    load = run_load(tmp_path / "home", clients=20, rate=50, seconds=1)
    assert (load.posts, load.refused) == (1_000, 0)
