"""A rehearsal Hub, and the backend and the provider that use it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuwarden.backends.hf_jobs import HfJobsBackend
from gpuwarden.core.clock import SystemClock
from gpuwarden.profiles import load_profile
from gpuwarden.providers.hf_jobs import HfJobsProvider
from gpuwarden.rehearsal.hub.server import HubServer
from hubserver import config, hub_server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HubServer]:
    with hub_server(tmp_path / "hub") as running:
        yield running


@pytest.fixture
def backend(server: HubServer) -> HfJobsBackend:
    return HfJobsBackend(SystemClock(), config(server))


@pytest.fixture
def provider(server: HubServer, tmp_path: Path) -> HfJobsProvider:
    return HfJobsProvider(load_profile("hf-jobs"), tmp_path / "state", SystemClock(), config(server))
