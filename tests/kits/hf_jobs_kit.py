"""Fixtures for jobs on a rehearsal Hub, with faults of its engine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from gpuwarden.backends.hf_jobs import HfJobsBackend
from gpuwarden.core.models import Handle, JobSpec, Observation, Place
from gpuwarden.core.states import Job
from gpuwarden.rehearsal.hub.server import Fault, HubServer
from waiting import soon

PLACE = Place(platform="hf-jobs", instance_id="lease-1", run_root="/job")


async def ended(backend: HfJobsBackend, handle: Handle) -> Observation:
    """Poll until the job has ended."""

    async def look() -> Observation:
        return (await backend.poll([handle]))[handle.token]

    return await soon(look, every=0.05, good=lambda seen: seen.state not in {Job.RUNNING, Job.QUEUED})


class HubEngine:
    """The rehearsal Hub as the backend contract's engine."""

    def __init__(self, server: HubServer) -> None:
        self.server = server

    def job(self, text: str, **fields: object) -> JobSpec:
        given = {"platform": "hf-jobs", "command": ["sh", "-c", text], "timeout_s": 60, "gpu": "t4-small"}
        return JobSpec.model_validate(given | fields)

    @contextmanager
    def _with(self, fault: Fault) -> Iterator[None]:
        self.server.conditions.faults.append(fault)
        try:
            yield
        finally:
            self.server.conditions.faults.remove(fault)

    def cut(self) -> object:
        return self._with(Fault("POST /api/jobs/", drop=True, times=1))

    def down(self) -> object:
        return self._with(Fault("", status=503))

    def odd(self) -> object:
        return self._with(Fault("", status=200, body=b'{"welcome": "to the Hub"}'))

    def questions(self) -> int:
        asked = re.compile(r"GET /api/jobs/[^/ ]+(/[0-9a-f]{24})?(\?|$)")
        return sum(bool(asked.match(line)) for line in self.server.conditions.requests)
