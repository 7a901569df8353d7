"""Machines that could stay billed: before a launch, without a price, after a clock was set back, or listed late."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.core.errors import Unreachable
from gpuwarden.core.models import Answer, InstanceState, Known, Unknown
from gpuwarden.core.reasons import Code
from gpuwarden.core.states import Job, Lease
from gpuwarden.ledger.events import ApprovalGranted, VerbSent
from gpuwarden.lifecycle.leases.budgets import spent_today
from gpuwarden.lifecycle.leases.termination import ASK_AGAIN_S
from gpuwarden.lifecycle.monitoring.check import cancel
from gpuwarden.lifecycle.monitoring.watch import Watcher
from gpuwarden.lifecycle.records import read_job, read_lease
from gpuwarden.lifecycle.submission.submit import submit
from lifecycle_kit import launch
from pretend_machines import Processes
from teardown_kit import House

pytestmark = pytest.mark.anyio
HOUR = 3600.0
METERED = "rehearsal/runpod"


@pytest.fixture
def house(tmp_path: Path, processes: Processes) -> House:
    house = House(tmp_path / "home", processes)
    house.opens(platform=METERED)
    return house


async def rounds(house: House, hours: int) -> set[str]:
    """Run the watch once an hour; return the kinds of the open alerts after the last round."""
    watcher, standing = Watcher(house.ctx), set[str]()
    for _ in range(hours):
        house.clock.advance(HOUR)
        done = await watcher.round()
        assert done.trouble == {}
        standing = {alert.kind for alert in done.standing}
    return standing


def reports(house: House, **changes: Any) -> None:
    """Make the platform quote and report every machine with these fields."""
    provider = house.ctx.provider(house.platform)

    def changed(call: Callable[..., Awaitable[Answer[Any]]]) -> Callable[..., Awaitable[Answer[Any]]]:
        async def asked(*args: Any) -> Answer[Any]:
            answer = await call(*args)
            if isinstance(answer, Unknown) or answer.value is None:
                return answer
            fields = changes.keys() & type(answer.value).model_fields.keys()
            return Known(answer.value.model_copy(update={name: changes[name] for name in fields}))

        return asked

    for name in ("quote", "create", "get"):
        setattr(provider, name, changed(getattr(provider, name)))


def never_answers(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    async def lost(*_: object, **__: object) -> None:
        raise Unreachable("connection timed out")

    monkeypatch.setattr(house.backend, "submit", lost)


async def test_the_cost_cap_applies_before_the_launch(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    never_answers(house, monkeypatch)
    job = await launch(house.ctx, house.spec(max_cost_usd=2.0))
    for _ in range(3):
        await house.after(11, job)
    assert read_job(house.ctx.ledger, job).state is Job.SUBMITTING
    await rounds(house, 3)
    seen = read_job(house.ctx.ledger, job)
    assert (seen.state, seen.reason) == (Job.CANCELED, Code.COST_CAP_EARLY)


async def test_an_unconfirmed_launch_raises_an_alert(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    never_answers(house, monkeypatch)
    job = await launch(house.ctx, house.spec(max_cost_usd=None))
    assert await rounds(house, 4) == {"unknown"}
    assert read_job(house.ctx.ledger, job).state is Job.SUBMITTING
    monkeypatch.undo()
    assert "unknown" not in await rounds(house, 3)
    assert read_job(house.ctx.ledger, job).state is Job.RUNNING


async def test_a_canceled_job_whose_machine_is_gone_ends(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    never_answers(house, monkeypatch)
    monkeypatch.setattr(house.backend, "find", house.backend.submit)
    job = await launch(house.ctx, house.spec(max_cost_usd=2.0))
    for _ in range(3):
        await house.after(11, job)
    await cancel(house.ctx, job)
    assert read_job(house.ctx.ledger, job).state is Job.SUBMITTING
    house.cloud.terminate(read_lease(house.ctx.ledger, f"{job}-i1").instance_id or "")
    await rounds(house, 3)
    assert read_job(house.ctx.ledger, job).state is Job.FAILED


async def test_a_cap_without_a_price_raises_an_alert(house: House) -> None:
    reports(house, price_usd_per_hour=None, cost_usd=None, stopped_usd_per_hour=None)
    spec = house.spec(max_cost_usd=2.0, timeout_s=200_000)
    receipt = (await submit(house.ctx, spec)).receipt
    assert receipt is not None
    house.ctx.ledger.add(f"receipt/{receipt}", ApprovalGranted(expires_at=house.clock.now() + 60))
    launched = (await submit(house.ctx, spec, receipt=receipt)).job
    assert launched is not None
    for _ in range(3):
        await house.after(11, launched.id)
    assert "cap_unenforced" in await rounds(house, 2)
    assert read_job(house.ctx.ledger, launched.id).state is Job.RUNNING


async def test_a_days_cost_includes_machines_that_were_torn_down(house: House) -> None:
    job = await house.started(timeout_s=200_000)
    for _ in range(30):
        await house.after(HOUR, job)
    before = spent_today(house.ctx, pretend=True)
    house.backend.write(house.handle(job), "model", b"weights")
    house.backend.end(house.handle(job))
    await house.after(1, job)
    house.cloud.terminate(read_lease(house.ctx.ledger, f"{job}-i1").instance_id or "")
    await rounds(house, 2)
    assert read_lease(house.ctx.ledger, f"{job}-i1").state is Lease.STOPPED
    assert 0.8 * before < spent_today(house.ctx, pretend=True) <= before


async def test_a_call_without_effect_is_repeated_although_the_clock_was_set_back(house: House) -> None:
    job = await house.proven()
    view = await house.asks(job)
    provider, sent = house.ctx.provider(house.platform), []

    async def accepted(id: str) -> Answer[None]:
        sent.append(id)
        return Known(None)

    provider.terminate = accepted  # type: ignore[method-assign]
    view = await house.yes(view)
    assert len(sent) == 1
    house.clock.advance(-8 * HOUR)
    watcher = Watcher(house.ctx)
    for _ in range(4):
        house.clock.advance(ASK_AGAIN_S + 1)
        await watcher.round()
    assert len(sent) >= 3
    assert len(house.ctx.ledger.events(view.lease.subject, kind=VerbSent)) == len(sent)


async def test_a_machine_interrupted_before_first_contact_is_released(house: House) -> None:
    reports(house, state=InstanceState.INTERRUPTED, meter=None, place=None)
    job = await launch(house.ctx, house.spec(max_cost_usd=None))
    await rounds(house, 2)
    seen = read_job(house.ctx.ledger, job)
    assert (seen.state, seen.reason) == (Job.FAILED, Code.GIVEN_BACK)
