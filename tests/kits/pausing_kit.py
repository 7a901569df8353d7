"""A job that a user or an agent pauses."""

from __future__ import annotations

from pathlib import Path

from gpuwarden.core.models import StopResult
from gpuwarden.core.states import Job, Teardown
from gpuwarden.lifecycle.monitoring.check import pause
from gpuwarden.lifecycle.records import read_job
from pretend_machines import PretendBackend, Processes
from teardown_kit import House

RUNPOD = "rehearsal/runpod"


class Slow(PretendBackend):
    """A backend that saves slowly, and records each grace period and time limit."""

    def __init__(self, processes: Processes) -> None:
        super().__init__(processes)
        self.saving = False
        self.graces: list[float] = []
        self.timeouts: list[int | None] = []

    async def stop(self, handle, *, grace_s=10.0):  # type: ignore[no-untyped-def]
        self.graces.append(grace_s)
        return StopResult.PENDING if self.saving else await super().stop(handle, grace_s=grace_s)

    async def submit(self, spec, place, token, **how):  # type: ignore[no-untyped-def]
        self.timeouts.append(spec.timeout_s)
        return await super().submit(spec, place, token, **how)


class Paused(House):
    def __init__(self, home: Path, processes: Processes) -> None:
        super().__init__(home, processes)
        self.backend: Slow = Slow(processes)
        self.ctx._backends["local"] = self.backend

    async def paused(self, platform: str = RUNPOD, **changes: object) -> str:
        self.opens(platform=platform)
        job = await self.started(**changes)
        self.backend.write(self.handle(job), "model", b"weights at step 100")
        assert (await pause(self.ctx, job)).job.state is Job.PAUSED
        return job

    def state(self, job: str) -> Job:
        return read_job(self.ctx.ledger, job).state

    async def stopped(self, job: str) -> None:
        view = await self.until_off(await self.yes(await self.asks(job, "stop")))
        assert view.record.state is Teardown.VERIFIED_STOPPED
