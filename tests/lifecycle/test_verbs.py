"""Stopped is not gone: the effect required of each verb, on platforms that differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes import FakeClock
from gpuwarden.core.errors import Conflict, RateLimited
from gpuwarden.core.models import JobSpec, Verb
from gpuwarden.core.states import Job, Lease, Teardown
from gpuwarden.lifecycle.artifacts.pull import pull
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.monitoring.check import cancel, check
from gpuwarden.lifecycle.monitoring.inventory import list_instances
from gpuwarden.lifecycle.records import read_lease
from gpuwarden.lifecycle.teardown.gate import TeardownView, approve, proceed, request
from gpuwarden.rehearsal.cloud import Cloud
from gpuwarden.rehearsal.model import Fault, Settings
from lifecycle_kit import launch, open_house, rent_cloud
from wording import Wording

pytestmark = pytest.mark.anyio
SLOW = Settings(boot_s=5, stop_s=5, resume_s=5, settle_s=3)


class House:
    """A canceled job on a platform whose machine is still billed, with a clock that is advanced by hand."""

    def __init__(self, home: Path, platform: str, *faults: Fault) -> None:
        self.clock = FakeClock()
        self.ctx: Context = open_house(home, self.clock)
        self.cloud: Cloud = rent_cloud(self.ctx, *faults, platform=platform, settings=SLOW)
        self.platform = platform

    async def canceled(self) -> str:
        spec = JobSpec(
            platform=self.platform, command=("sleep", "600"), outputs=("out",), timeout_s=900, max_cost_usd=5
        )
        job = await launch(self.ctx, spec)
        for _ in range(4):
            self.clock.advance(3)
            await check(self.ctx, job)
        assert (await cancel(self.ctx, job)).job.state is Job.CANCELED
        return job

    async def end(self, job: str, verb: Verb) -> TeardownView:
        """Request, approve and poll until the teardown is verified or a minute has passed on the clock."""
        view = await request(self.ctx, job, verb)
        assert view.record.state is Teardown.AWAITING_HUMAN, view.findings
        assert view.record.digest is not None
        view = await approve(self.ctx, view.record.id, view.record.digest, channel="rehearsal", by="test")
        for _ in range(20):
            if view.record.state is not Teardown.EXECUTING:
                break
            self.clock.advance(3)
            view = await proceed(self.ctx, view.record.id)
        return view

    @property
    def truth(self) -> str:
        return next(iter(self.cloud.truths().values())).state


@pytest.fixture
def policy_takes_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    import lifecycle_kit
    from gpuwarden.core.policy import Approval

    policy = lifecycle_kit.WEALTHY.model_copy(update={"approval": Approval(channels=("terminal", "rehearsal"))})
    monkeypatch.setattr(lifecycle_kit.open_house, "__kwdefaults__", {"policy": policy, "actor": "cli"})


@pytest.mark.usefixtures("policy_takes_flags")
class TestVerbs:
    """Each verb leaves the machine in the requested state."""

    @pytest.mark.slow
    async def test_a_retry_after_of_days_is_limited_to_an_hour(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        house = House(tmp_path, "rehearsal/runpod")
        job = await house.canceled()
        provider = house.ctx.provider(house.platform)

        async def limited(id: str) -> None:
            raise RateLimited("asked too often", "Wait.", 999_999.0)

        with monkeypatch.context() as patch:
            patch.setattr(provider, "terminate", limited)
            view = await house.end(job, "terminate")
        assert view.record.state is Teardown.EXECUTING
        house.clock.advance(3600)
        for _ in range(5):
            house.clock.advance(10)
            view = await proceed(house.ctx, view.record.id)
        assert view.record.state is Teardown.VERIFIED_STOPPED

    @pytest.mark.slow
    async def test_terminate_works_where_a_stop_has_to_come_first(self, tmp_path: Path) -> None:
        house = House(tmp_path, "rehearsal/autodl")
        view = await house.end(await house.canceled(), "terminate")
        assert view.record.state is Teardown.VERIFIED_STOPPED
        assert house.truth == "gone"

    @pytest.mark.slow
    async def test_stop_then_terminate_really_terminates(self, tmp_path: Path) -> None:
        house = House(tmp_path, "rehearsal/vastai")
        job = await house.canceled()
        await pull(house.ctx, job)
        view = await house.end(job, "stop")
        assert (view.record.state, house.truth) == (Teardown.VERIFIED_STOPPED, "stopped")
        listed = await list_instances(house.ctx)
        assert [(r.state, r.ours) for r in listed.rows] == [("stopped", True)], "its disk bills, so it stays in sight"
        view = await house.end(job, "terminate")
        assert (view.record.state, house.truth) == (Teardown.VERIFIED_STOPPED, "gone")
        assert (await list_instances(house.ctx)).rows == ()

    @pytest.mark.slow
    async def test_a_stop_that_still_bills_is_not_believed(self, tmp_path: Path) -> None:
        house = House(tmp_path, "rehearsal/vastai", Fault(kind="bills_when_stopped"))
        job = await house.canceled()
        view = await house.end(job, "stop")
        assert view.record.state is Teardown.EXECUTING
        assert read_lease(house.ctx.ledger, view.record.lease).state is not Lease.STOPPED
        house.clock.advance(600)
        view = await proceed(house.ctx, view.record.id)
        assert view.record.state is Teardown.NEEDS_HUMAN

    @pytest.mark.slow
    async def test_a_teardown_request_for_a_gone_machine_is_a_conflict(self, tmp_path: Path, wording: Wording) -> None:
        house = House(tmp_path, "rehearsal/lambda", Fault(kind="vanish", seconds=10))
        spec = JobSpec(
            platform=house.platform, command=("sleep", "600"), outputs=("out",), timeout_s=900, max_cost_usd=5
        )
        job = await launch(house.ctx, spec)
        for _ in range(12):
            house.clock.advance(3)
            await check(house.ctx, job)
        with pytest.raises(Conflict) as refused:
            await request(house.ctx, job, "terminate")
        wording(refused, job)
