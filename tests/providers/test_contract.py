"""The contract of providers over HTTP, on the emulator of every platform."""

from __future__ import annotations

import pytest

from clouds.platform import platforms
from clouds_kit import CloudContract


class TestClouds(CloudContract):
    @pytest.fixture(autouse=True, params=platforms(), ids=lambda platform: platform.name)
    def choose(self, request: pytest.FixtureRequest) -> None:
        """Run the test on one platform."""
        self.platform = request.param
