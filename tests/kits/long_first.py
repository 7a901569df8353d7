"""Order the tests that several processes share."""

from __future__ import annotations

import pytest


def long_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Order tests so that every worker starts with its share of the long ones.

    `--dist worksteal` first splits the list into one equal stretch per worker. A long test at the end of a stretch
    would keep one worker busy while the others are idle.
    """
    long = [item for item in items if item.get_closest_marker("long")]
    rest = [item for item in items if not item.get_closest_marker("long")]
    ordered: list[pytest.Item] = []
    for worker in range(workers):
        share = long[worker::workers]
        more = max(0, (len(items) - len(ordered)) // (workers - worker) - len(share))
        ordered += share + rest[:more]
        del rest[:more]
    return ordered
