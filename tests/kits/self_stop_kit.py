"""A machine that stops itself."""

from __future__ import annotations

from pathlib import Path

from gpuwarden.core.policy import TeardownPolicy
from gpuwarden.lifecycle.monitoring.watch import Watcher
from lifecycle_kit import records
from pretend_machines import Processes
from teardown_kit import House

HOUR = 3600.0


class SelfStopHouse(House):
    """A `House` whose policy allows self-stop after half an hour."""

    def __init__(self, home: Path, processes: Processes, order: str = "off", minutes: float = 30) -> None:
        super().__init__(home, processes)
        self.ctx.policy = self.ctx.policy.model_copy(
            update={"teardown": TeardownPolicy.model_validate({"automatic": order, "self_stop_minutes": minutes})}
        )
        self.watcher = Watcher(self.ctx)

    async def asleep(self, hours: float = 9.0, **changes: object) -> str:
        """Start a job and close the laptop; the job ends, the machine self-stops, and the laptop is opened again."""
        job = await self.started(**changes)
        self.backend.write(self.handle(job), "model", b"weights")
        self.backend.end(self.handle(job))
        self.self_stops()
        self.clock.advance(hours * HOUR)
        return job

    def self_stops(self) -> None:
        for record in records(self.cloud):
            self.cloud.self_stop(record.id)

    async def round(self, seconds: float = 31.0) -> list[str]:
        self.clock.advance(seconds)
        return [alert.kind for alert in (await self.watcher.round()).news if alert.raised]

    def state(self) -> str:
        return str(next(iter(self.cloud.truths().values())).state)

    def starts(self) -> int:
        return self.cloud.store.state().calls.get("start", 0)

    def stops(self) -> int:
        return self.cloud.store.state().calls.get("stop", 0)
