"""Fixtures for the checkpoint tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture(autouse=True)
def synced(no_wait_for_the_disk: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sync to the disk, as for a user: without a sync, a seal misses later writes to a mapped file."""
    monkeypatch.setattr("os.fsync", no_wait_for_the_disk)
