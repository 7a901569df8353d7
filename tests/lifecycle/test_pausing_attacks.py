"""Attacks on pause and resume: exceeding the allowed cost or time, undoing a user's stop, two processes at once."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from gpuwarden.core.errors import Conflict, Refused
from gpuwarden.core.models import Known, Unknown
from gpuwarden.core.policy import Caps
from gpuwarden.core.states import Job, Lease, Teardown
from gpuwarden.ledger.events import ApprovalGranted, ResumeIntent, ResumeRequested
from gpuwarden.ledger.trouble import Trouble
from gpuwarden.lifecycle.leases.budgets import spent_today
from gpuwarden.lifecycle.leases.meter import spent
from gpuwarden.lifecycle.monitoring.check import cancel, check, pause, resume
from gpuwarden.lifecycle.records import read_job, read_lease
from gpuwarden.lifecycle.submission.submit import submit
from gpuwarden.rehearsal.model import Fault
from lifecycle_kit import records
from pausing_kit import RUNPOD, Paused
from pretend_machines import Processes
from wording import Wording

pytestmark = pytest.mark.anyio
DAY_S = 86_400


@pytest.fixture
def house(tmp_path: Path, processes: Processes) -> Paused:
    return Paused(tmp_path / "home", processes)


def caps(house: Paused, usd: float, *, day: float | None = None) -> None:
    bounds = Caps(per_job_usd=usd, per_day_usd=usd if day is None else day, per_instance_usd=usd)
    house.ctx.policy = house.ctx.policy.model_copy(update={"rehearsal_caps": bounds})


# ----------------------------------------------------------------------------------------- the last request counts


async def test_the_last_of_many_pauses_and_resumes_counts(house: Paused) -> None:
    job = await house.paused()
    await house.stopped(job)
    house.opens(Fault(kind="lost_request", call="start", count=99), platform=RUNPOD)
    for _ in range(3):
        await resume(house.ctx, job)
        assert read_job(house.ctx.ledger, job).resume_requested
        await pause(house.ctx, job)
        assert not read_job(house.ctx.ledger, job).resume_requested
    house.opens(platform=RUNPOD)
    for _ in range(4):
        assert (await house.after(31, job)).job.state is Job.PAUSED
    assert house.backend.launched == [(job, 1)]


async def test_a_second_pause_during_a_save_withdraws_the_resume(house: Paused) -> None:
    house.opens(platform=RUNPOD)
    job = await house.started()
    house.backend.saving = True
    await pause(house.ctx, job)
    await resume(house.ctx, job)
    await pause(house.ctx, job)
    house.backend.end(house.handle(job), "canceled")
    for _ in range(3):
        assert (await house.after(20, job)).job.state is Job.PAUSED
    assert house.backend.launched == [(job, 1)]


@pytest.mark.parametrize("end", ["succeeded", "failed"])
async def test_a_job_that_ended_before_its_pause_is_not_resumed(house: Paused, end: str, wording: Wording) -> None:
    house.opens(platform=RUNPOD)
    job = await house.started()
    house.backend.saving = True
    await pause(house.ctx, job)
    house.backend.end(house.handle(job), end)
    assert (await house.after(20, job)).job.state == end
    with pytest.raises(Conflict) as refused:
        await resume(house.ctx, job)
    wording(refused, job)
    assert house.ctx.ledger.last(f"job/{job}", ResumeRequested) is None


# ---------------------------------------------------------------------------------------------- a stop by the user


async def unseen(_machine: str) -> Unknown:
    return Unknown("no answer")


async def test_a_stop_that_was_approved_after_a_resume_is_not_undone(house: Paused) -> None:
    job = await house.paused()
    view = await house.asks(job, "stop")
    assert view.record.state is Teardown.AWAITING_HUMAN
    provider = house.ctx.provider(house.platform)
    real, provider.get = provider.get, unseen  # type: ignore[method-assign]
    assert (await resume(house.ctx, job)).job.state is Job.PAUSED  # its state was unknown; the request stays
    provider.get = real  # type: ignore[method-assign]
    assert read_job(house.ctx.ledger, job).resume_requested
    await house.until_off(await house.yes(view))
    lease = read_job(house.ctx.ledger, job).lease
    assert lease is not None
    for _ in range(4):
        assert (await house.after(31, job)).job.state is Job.PAUSED
    assert read_lease(house.ctx.ledger, lease).state is Lease.STOPPED
    assert house.ctx.ledger.last(f"lease/{lease}", ResumeIntent) is None
    assert not house.cloud.truths()[records(house.cloud)[0].id].meter
    await resume(house.ctx, job)  # a new request starts it
    for _ in range(3):
        seen = await house.after(31, job)
    assert seen.job.state is Job.RUNNING


# ---------------------------------------------------------------------------------------------------------- money


async def test_an_interruption_after_a_resume_restores_no_time(house: Paused) -> None:
    house.opens()
    job = await house.started(interruptible=True, max_restarts=3, max_cost_usd=None)
    approved = read_job(house.ctx.ledger, job).worst_cost
    assert approved is not None
    await pause(house.ctx, job)
    caps(house, 0)
    lease = read_job(house.ctx.ledger, job).lease
    assert lease is not None
    house.clock.advance(1)
    while (spent(house.ctx, lease) or 0) < approved * 0.85:
        await house.after(1200, job)  # the machine is still billed
    await resume(house.ctx, job)
    limit = house.backend.timeouts[-1]
    assert limit is not None and limit < 3600
    house.cloud.inject(records(house.cloud)[0].id, Fault(kind="preempt"))
    for _ in range(12):
        seen = await house.after(60, job)
        if seen.job.attempt == 3:
            break
    assert (seen.job.state, seen.job.attempt) == (Job.RUNNING, 3)
    price = read_lease(house.ctx.ledger, lease).instance.price_usd_per_hour
    cost = spent(house.ctx, lease)
    assert cost is not None and house.backend.timeouts[-1] is not None
    assert cost + price * house.backend.timeouts[-1] / 3600 <= approved * 1.01


async def test_repeated_resumes_do_not_exceed_the_time_limit(house: Paused, wording: Wording) -> None:
    house.opens(platform=RUNPOD)
    job = await house.started(max_cost_usd=None)
    await house.after(3590, job)
    await pause(house.ctx, job)
    with pytest.raises(Refused) as refused:
        for _ in range(20):
            await resume(house.ctx, job)
            assert (house.backend.timeouts[-1] or 0) <= 60
            await house.after(59, job)
            await pause(house.ctx, job)
    wording(refused, job)
    assert len(house.backend.launched) <= 3


async def test_jobs_paused_on_different_days_share_one_days_cap_on_resume(house: Paused) -> None:
    """Each one fit into the caps on the day it was submitted, so the user was not asked about any."""
    house.opens(platform=RUNPOD)
    caps(house, 6)
    jobs = []
    for n in range(3):
        job = await house.started(name=f"job{n}", command=("train", str(n)), max_cost_usd=None)
        await pause(house.ctx, job)
        await house.stopped(job)
        jobs.append(job)
        house.clock.advance(DAY_S + 60)
    await resume(house.ctx, jobs[0])
    for job in jobs[1:2]:
        with pytest.raises(Refused, match="per_day_usd"):
            await resume(house.ctx, job)


async def test_the_worst_cost_of_a_resume_counts_toward_the_day(house: Paused) -> None:
    """An expensive pause and a resume after it cost more than the job was accepted with."""
    job = await house.paused(max_cost_usd=None)
    house.clock.advance(3600)
    await check(house.ctx, job)
    await resume(house.ctx, job)
    limit, lease = house.backend.timeouts[-1], read_job(house.ctx.ledger, job).lease
    assert limit is not None and limit > 3_500 and lease is not None
    assert spent_today(house.ctx, pretend=True) >= (spent(house.ctx, lease) or 0) + 3.6 * limit / 3600 - 0.05


async def test_an_approval_still_covers_a_resume_a_day_later(house: Paused) -> None:
    house.opens(platform=RUNPOD)
    caps(house, 0)
    first = await submit(house.ctx, house.spec(max_cost_usd=None))
    yes = ApprovalGranted(digest="f", channel="terminal", by="u", expires_at=house.clock.now() + 600)
    house.ctx.ledger.add(f"receipt/{first.receipt}", yes)
    done = await submit(house.ctx, house.spec(max_cost_usd=None), receipt=first.receipt)
    assert done.job is not None
    job = done.job.id
    await house.after(11, job)
    await pause(house.ctx, job)
    await house.stopped(job)
    house.clock.advance(DAY_S)
    await resume(house.ctx, job)
    assert read_job(house.ctx.ledger, job).resume_requested


async def test_a_truncated_ledger_refuses_a_costlier_resume(
    house: Paused, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    job = await house.paused(max_cost_usd=None)
    await house.after(3600, job)  # so that it costs more than was accepted
    lost = Trouble("truncated", {"recorded": "9", "found": "8"})
    monkeypatch.setattr(house.ctx.ledger, "trouble", lambda: lost)
    with pytest.raises(Refused) as refused:
        await resume(house.ctx, job)
    wording(refused, job)


async def test_a_machine_restarted_at_a_higher_price_launches_no_job(house: Paused, wording: Wording) -> None:
    job = await house.paused(max_cost_usd=None)
    await house.stopped(job)
    caps(house, 0)
    lease = read_job(house.ctx.ledger, job).lease
    assert lease is not None
    real = house.ctx.provider(house.platform).get

    async def dearer(machine: str):  # type: ignore[no-untyped-def]
        answer = await real(machine)
        return Known(answer.value.model_copy(update={"price_usd_per_hour": 3_600.0}))

    await resume(house.ctx, job)
    house.ctx.provider(house.platform).get = dearer  # type: ignore[method-assign]
    for _ in range(3):
        seen = await house.after(31, job)
    assert seen.job.state is Job.PAUSED
    wording(seen.note, job)
    assert len(house.backend.launched) == 1


# --------------------------------------------------------------------------------------------------- at the same time


async def test_concurrent_resumes_launch_once(house: Paused) -> None:
    job = await house.paused()
    ends: list[str] = []

    async def one() -> None:
        try:
            ends.append((await resume(house.ctx, job)).job.state)
        except Conflict:
            ends.append("conflict")

    async with anyio.create_task_group() as tasks:
        for _ in range(6):
            tasks.start_soon(one)
    assert ends.count(Job.RUNNING) == 1 and len(ends) == 6
    assert house.backend.launched == [(job, 1), (job, 2)]


async def test_a_cancel_while_its_machine_starts_launches_nothing(house: Paused) -> None:
    job = await house.paused()
    await house.stopped(job)
    await resume(house.ctx, job)
    assert (await cancel(house.ctx, job)).job.state is Job.CANCELED
    for _ in range(3):
        assert (await house.after(31, job)).job.state is Job.CANCELED
    assert house.backend.launched == [(job, 1)]


@pytest.mark.slow
async def test_a_refused_start_is_not_retried_at_every_poll(house: Paused) -> None:
    job = await house.paused()
    await house.stopped(job)
    house.opens(Fault(kind="no_capacity", call="start", count=999), platform=RUNPOD)
    await resume(house.ctx, job)
    for _ in range(100):
        await house.after(2, job)
    lease = read_job(house.ctx.ledger, job).lease
    assert len(house.ctx.ledger.events(f"lease/{lease}", kind=ResumeIntent)) < 12
