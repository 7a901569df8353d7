"""Preempted machines, and budgets for their replacements."""

from __future__ import annotations

from pathlib import Path

from gpuwarden.interfaces.cli.approval import grant_spending
from gpuwarden.ledger.events import ReceiptIssued
from gpuwarden.lifecycle.artifacts.pull import pull
from gpuwarden.lifecycle.monitoring.watch import Watcher
from gpuwarden.lifecycle.submission.submit import submit
from gpuwarden.rehearsal.model import Fault
from lifecycle_kit import prove, records
from pretend_machines import PretendBackend, Processes
from teardown_kit import House

BUDGET = 10.0


class Resuming(PretendBackend):
    """A backend that records each launch's inputs, and puts them into the working folder as a machine does."""

    def __init__(self, processes: Processes) -> None:
        super().__init__(processes)
        self.given: list[dict[str, bytes]] = []

    async def submit(self, spec, place, token, *, secrets, attempt=1, inputs=None):  # type: ignore[no-untyped-def]
        handle = await super().submit(spec, place, token, secrets=secrets, attempt=attempt, inputs=inputs)
        self.given.append({name: path.read_bytes() for name, path in (inputs or {}).items()})
        for name, content in self.given[-1].items():
            path = Path(handle.run_dir) / "work" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return handle


class Allowed(House):
    """A `House` whose user gives each job a relaunch budget when approving its spending."""

    def __init__(self, home: Path, processes: Processes, budget: float | None = BUDGET, **opens: object) -> None:
        super().__init__(home, processes)
        self.backend = Resuming(processes)
        self.ctx._backends["local"] = self.backend
        self.budget = budget
        self.watcher = Watcher(self.ctx)

    async def running(self, **changes: object) -> str:
        """Launch a job with the budget, and let it save a file."""
        spec = self.spec(**changes)
        receipt = (await submit(self.ctx, spec)).receipt
        issued = self.ctx.ledger.last(f"receipt/{receipt}", ReceiptIssued)
        assert issued is not None and receipt is not None
        grant_spending(self.ctx, issued, "terminal", "test", relaunch_usd=self.budget)
        done = await submit(self.ctx, spec, receipt=receipt)
        assert done.job is not None
        await self.after(11, done.job.id)
        self.backend.write(self.handle(done.job.id), "model", b"weights at step 100")
        return done.job.id

    async def copied(self, **changes: object) -> str:
        job = await self.running(**changes)
        await pull(self.ctx, job)
        await prove(self.ctx, job)
        return job

    def takes(self) -> None:
        """Let the platform preempt the newest machine for good."""
        newest = records(self.cloud)[-1]
        self.cloud.inject(newest.id, Fault(kind="vanish"))
        self.cloud.tick()

    async def rounds(self, times: int = 8, seconds: float = 31.0) -> list[str]:
        kinds: list[str] = []
        for _ in range(times):
            self.clock.advance(seconds)
            kinds += [alert.kind for alert in (await self.watcher.round()).news if alert.raised]
        return kinds

    def rented(self) -> int:
        return len(records(self.cloud))
