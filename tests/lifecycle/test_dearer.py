"""A machine that costs more than the checked price: used if within the caps; otherwise the user is asked first."""

from __future__ import annotations

import io

import pytest

from clouds_house import House
from gpuwarden.core.errors import Conflict
from gpuwarden.core.guidance import Action
from gpuwarden.core.policy import Caps, Policy
from gpuwarden.core.reasons import Code
from gpuwarden.core.states import LIVE_LEASES, Job, Lease
from gpuwarden.interfaces import results
from gpuwarden.interfaces.cli import approval
from gpuwarden.interfaces.cli.approval import Terminal, grant_spending
from gpuwarden.interfaces.mcp.wording import in_calls
from gpuwarden.ledger.events import JobFailed
from gpuwarden.lifecycle.monitoring.check import CheckedJob, cancel, check
from gpuwarden.lifecycle.monitoring.watch import Watcher
from gpuwarden.lifecycle.submission.submit import submit
from wording import Wording

pytestmark = pytest.mark.anyio
H100 = "NVIDIA H100 80GB HBM3"


def caps(job: float = 2.0, day: float = 1000.0) -> Policy:
    return Policy(caps=Caps(per_job_usd=job, per_day_usd=day, per_instance_usd=1000.0))


def asks(house: House, seen: CheckedJob) -> bool:
    """Return whether the user is asked about the price of the job's machine."""
    return bool(seen.note) and house.ctx.ledger.last(seen.job.subject, "price.ask") is not None


async def asked(house: House, policy: Policy) -> tuple[str, CheckedJob]:
    """Launch a job on an H100 that RunPod lists at $1 and bills at $2.99."""
    house.account.prices[H100] = 1.0
    house.ctx.policy = policy
    job = await house.launch(house.spec())
    return job, await house.until(job, lambda c: asks(house, c), jump_s=5)


def ticket(house: House, job: str) -> str:
    event = house.ctx.ledger.last(f"job/{job}", "price.ask")
    assert event is not None
    return str(event.body["ticket"])


@pytest.mark.slow
async def test_a_price_above_a_cap_blocks_the_launch_until_approved(cloud_house: House, wording: Wording) -> None:
    job, seen = await asked(cloud_house, caps())
    wording(seen.note, "$2.99/h", "$1.00/h", "per_job_usd", "$2.00", "$2.99")
    reply = results.worded(results.checked(seen), in_calls)
    assert "per_job_usd" in reply.message and f"gpuwarden approve {ticket(cloud_house, job)}" in reply.hint
    for _ in range(3):
        cloud_house.clock.time += 20
        assert (await check(cloud_house.ctx, job)).job.state is Job.PROVISIONING
    assert (
        cloud_house.ctx.ledger.events(kind="submit.intent") == []
        and cloud_house.ctx.ledger.events(kind="host.trusted") == []
    )
    assert not list(cloud_house.machines.disk(cloud_house.machine()).rglob("gw-*")), "nothing was sent to it"
    assert [a.kind for a in (await Watcher(cloud_house.ctx).round()).news] == ["dearer"]
    assert len(cloud_house.ctx.ledger.events(kind="price.ask")) == 1
    with pytest.raises(Conflict) as refused:
        await submit(cloud_house.ctx, cloud_house.spec(), receipt=ticket(cloud_house, job))
    wording(refused)

    screen = io.StringIO()
    said = await approval.ask(cloud_house.ctx, ticket(cloud_house, job), Terminal(io.StringIO("yes\n"), screen))
    assert "$2.99/h" in screen.getvalue() and "per_job_usd" in screen.getvalue()
    assert (said.next[0].action, said.next[0].parameters) == (Action.CHECK, {"job_id": job})
    seen = await cloud_house.ended(job)
    assert seen.job.state is Job.SUCCEEDED and len(cloud_house.account.own) == 1 and not seen.note
    assert "-dearer" in ["-" * (not a.raised) + a.kind for a in (await Watcher(cloud_house.ctx).round()).news]


@pytest.mark.slow
async def test_a_machine_at_an_unapproved_price_is_released_and_its_cost_reported(
    cloud_house: House, wording: Wording
) -> None:
    job, _ = await asked(cloud_house, caps())
    cloud_house.clock.time += cloud_house.ctx.profile("runpod").limits.boot_timeout_s + 1
    seen = await cloud_house.until(job, lambda c: c.job.state is Job.FAILED, jump_s=30)
    failed = cloud_house.ctx.ledger.last(f"job/{job}", JobFailed)
    assert failed and failed.data.reason and failed.data.reason.code == Code.GIVEN_BACK
    wording(seen.job.why, failed.data.reason.parameters["cost"])
    await cloud_house.until(job, lambda c: bool(c.lease and c.lease.state is Lease.STOPPED), jump_s=61)
    assert cloud_house.billing() == [] and cloud_house.ctx.ledger.events(kind="submit.intent") == []


async def test_the_daily_cap_applies_and_counts_the_job_once(cloud_house: House, wording: Wording) -> None:
    _, seen = await asked(cloud_house, caps(job=100.0, day=2.5))
    wording(seen.note, "$2.99/h", "$1.00/h", "per_day_usd", "$2.50", "$2.99")


@pytest.mark.slow
async def test_a_higher_price_within_the_caps_is_recorded_and_accepted(cloud_house: House, wording: Wording) -> None:
    cloud_house.account.prices[H100] = 1.0
    cloud_house.ctx.policy = caps(job=5.0, day=3.5)
    job = await cloud_house.launch(cloud_house.spec())
    await cloud_house.running(job)
    (event,) = cloud_house.ctx.ledger.events(kind="price.accepted")
    assert event.body["price"] == 2.99
    wording(event.body["why"], "$2.99/h", "$1.00/h")
    assert (await cloud_house.ended(job)).job.state is Job.SUCCEEDED
    assert cloud_house.ctx.ledger.events(kind="price.ask") == []


async def test_approval_of_a_price_does_not_cover_a_higher_price(cloud_house: House, wording: Wording) -> None:
    cloud_house.account.prices[H100] = 1.0
    cloud_house.ctx.policy = caps(job=0.5)
    first = await submit(cloud_house.ctx, cloud_house.spec())
    assert "per_job_usd" in first.ask
    issued = cloud_house.ctx.ledger.last(f"receipt/{first.receipt}", "receipt.issued")
    assert issued is not None
    grant_spending(cloud_house.ctx, issued, "terminal", "test")
    done = await submit(cloud_house.ctx, cloud_house.spec(), receipt=first.receipt)
    assert done.job is not None
    seen = await cloud_house.until(done.job.id, lambda c: asks(cloud_house, c), jump_s=5)
    wording(seen.note, "$2.99/h", "$1.00/h")


async def test_canceling_a_waiting_job_leaves_its_machine_to_the_gate(cloud_house: House) -> None:
    job, _ = await asked(cloud_house, caps())
    assert (await cancel(cloud_house.ctx, job)).job.state is Job.CANCELED
    seen = await check(cloud_house.ctx, job)
    assert not seen.note and seen.lease and seen.lease.state in LIVE_LEASES
    assert "teardown_request" in in_calls(seen.next_steps)
