"""Fixtures of HF Jobs: a rehearsal Hub, the backend and the provider that speak with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from gpuwarden.backends.hf_jobs import HfJobsBackend
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.models import Handle, Observation, Place
from gpuwarden.core.states import Job
from gpuwarden.profiles import load_profile
from gpuwarden.providers.hf_jobs import HfJobsProvider
from gpuwarden.rehearsal.hub.server import HubServer
from hubserver import config, hub_server

PLACE = Place(platform="hf-jobs", instance_id="lease-1", run_root="/job")


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


async def ended(backend: HfJobsBackend, handle: Handle) -> Observation:
    """Poll until the job has ended."""
    with anyio.fail_after(30):
        while True:
            seen = (await backend.poll([handle]))[handle.token]
            if seen.state not in {Job.RUNNING, Job.QUEUED}:
                return seen
            await anyio.sleep(0.05)
