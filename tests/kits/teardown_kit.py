"""A machine, its job, and a separate clock."""

from __future__ import annotations

from pathlib import Path

from fakes import FakeClock
from gpuwarden.core.models import Handle, JobSpec, Verb
from gpuwarden.core.states import Job, Teardown
from gpuwarden.lifecycle.artifacts.pull import pull
from gpuwarden.lifecycle.monitoring.check import CheckedJob, check
from gpuwarden.lifecycle.records import read_job
from gpuwarden.lifecycle.teardown.gate import TeardownView, approve, proceed, request
from gpuwarden.rehearsal.model import Fault, Settings
from lifecycle_kit import PLATFORM, launch, open_house, promises, prove, rent_cloud, story
from pretend_machines import PretendBackend, Processes

PACE = Settings(boot_s=10, stop_s=5, resume_s=20, settle_s=30, default_usd_per_hour=3.6, catalog={})


class House:
    """A context, a cloud, a clock that the test advances, and jobs that the test ends."""

    def __init__(self, home: Path, processes: Processes) -> None:
        self.clock = FakeClock()
        self.ctx = open_house(home, self.clock)
        self.backend = PretendBackend(processes)
        self.ctx._backends["local"] = self.backend
        self.opens()

    def opens(self, *faults: Fault, platform: str = PLATFORM) -> None:
        self.platform = platform
        self.cloud = rent_cloud(self.ctx, *faults, platform=platform, settings=PACE)

    def spec(self, **changes: object) -> JobSpec:
        values: dict[str, object] = {
            "name": "train", "platform": self.platform, "command": ("train",), "outputs": ("out",),
            "timeout_s": 3600, "max_cost_usd": 900.0,
        }  # fmt: skip
        return JobSpec.model_validate(values | changes)

    async def started(self, **changes: object) -> str:
        job = await launch(self.ctx, self.spec(**changes))
        assert (await self.after(11, job)).job.state is Job.RUNNING
        return job

    async def after(self, seconds: float, job: str) -> CheckedJob:
        self.clock.advance(seconds)
        return await check(self.ctx, job)

    def handle(self, job: str) -> Handle:
        handle = read_job(self.ctx.ledger, job).handle
        assert handle is not None
        return handle

    async def ended(self, state: str = "succeeded", *, saved: bool = True, **changes: object) -> str:
        job = await self.started(**changes)
        if saved:
            self.backend.write(self.handle(job), "model", b"weights")
        self.backend.end(self.handle(job), state)
        assert (await self.after(1, job)).job.state == state
        return job

    async def proven(self, **changes: object) -> str:
        job = await self.ended(**changes)  # type: ignore[arg-type]
        await pull(self.ctx, job)
        await prove(self.ctx, job)
        return job

    async def asks(self, job: str, verb: Verb = "terminate") -> TeardownView:
        return await request(self.ctx, job, verb)

    async def yes(self, view: TeardownView, **how: str) -> TeardownView:
        assert view.record.digest
        return await approve(self.ctx, view.record.id, view.record.digest, channel="terminal", by="test", **how)

    async def until_off(self, view: TeardownView) -> TeardownView:
        for _ in range(8):
            if view.record.state is Teardown.VERIFIED_STOPPED:
                break
            self.clock.advance(31)
            view = await proceed(self.ctx, view.record.id)
        return view

    def holds(self) -> None:
        assert not promises(self.ctx.ledger, self.cloud), story(self.ctx.ledger.events())
