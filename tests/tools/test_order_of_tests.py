"""Long tests start first, so that no worker is still running one after the others have finished."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import pytest

from long_first import long_first


@dataclass(frozen=True)
class Item:
    name: str

    def get_closest_marker(self, name: str) -> bool:
        return name == "long" and self.name.isupper()


def ordered(names: str, workers: int) -> str:
    items = cast("list[pytest.Item]", [Item(name) for name in names])
    return "".join(item.name for item in long_first(items, workers))


@pytest.mark.parametrize(
    ("names", "workers", "wanted"),
    [
        ("abcAdB", 2, "AabBcd"),
        ("abcAdB", 1, "ABabcd"),
        ("abAcBdeC", 3, "AaBbcCde"),
        ("abcd", 2, "abcd"),
        ("ABC", 2, "ACB"),
        ("", 2, ""),
        ("aA", 4, "Aa"),
    ],
)
def test_every_worker_starts_with_its_share_of_the_long_tests(names: str, workers: int, wanted: str) -> None:
    assert ordered(names, workers) == wanted
