"""Problems on every rented platform: boots, limits, error bodies, prices, storage, machines that come back."""

from __future__ import annotations

import json

import pytest

from clouds.base import Fault
from clouds.vastai import VastCloud
from clouds_house import PLATFORMS, House, bring_home, each_platform, every_platform, take_down
from gpuwarden.core.errors import Refused
from gpuwarden.core.reasons import Code
from gpuwarden.core.states import LIVE_LEASES, Job, Lease, Teardown
from gpuwarden.ledger.events import JobFailed, VerbSent
from gpuwarden.lifecycle.monitoring.check import cancel, check
from gpuwarden.lifecycle.monitoring.inventory import list_instances
from gpuwarden.lifecycle.monitoring.watch import Watcher
from gpuwarden.lifecycle.records import lease_ids, read_job, read_lease
from gpuwarden.lifecycle.submission.submit import submit
from gpuwarden.lifecycle.teardown.gate import approve, proceed, request
from gpuwarden.rehearsal.model import Fault as CloudFault

pytestmark = pytest.mark.anyio
NOT_DONE = json.dumps({"success": False, "error": "internal", "message": "try later", "detail": "no"}).encode()


async def finished(house: House, **spec: object) -> str:
    """Return a job that has succeeded."""
    job = await house.launch(house.spec(**spec))
    await house.running(job)
    seen = await house.ended(job)
    assert seen.job.state is Job.SUCCEEDED, (seen, house.story())
    return job


# ------------------------------------------------------------------------------------------------------------- boot


@pytest.mark.slow
@each_platform
@pytest.mark.parametrize("fault", [CloudFault(kind="slow_boot", seconds=10**6), CloudFault(kind="failed_boot")])
async def test_a_machine_that_never_boots_is_released_and_its_cost_reported(
    cloud_house: House, fault: CloudFault
) -> None:
    cloud_house.breaks(fault)
    cloud_house.account.faults = [Fault("lost_request", cloud_house.platform.ends)]
    job = await cloud_house.launch(cloud_house.spec())
    await cloud_house.until(job, lambda c: c.job.state is Job.FAILED, jump_s=120)
    failed = cloud_house.ctx.ledger.last(f"job/{job}", JobFailed)
    assert failed and failed.data.reason and failed.data.reason.code == Code.GIVEN_BACK
    assert "cost" in failed.data.reason.parameters
    await cloud_house.until(job, lambda c: bool(c.lease and c.lease.state is Lease.STOPPED), jump_s=61)
    assert cloud_house.billing() == [] and len(cloud_house.account.own) == 1
    assert cloud_house.account.faults[0].count == 0, "the request that was lost was sent again"
    assert cloud_house.ctx.ledger.events(kind="submit.intent") == [], "nothing was launched there"


# ----------------------------------------------------------------------------------------------------------- create


@pytest.mark.slow
@each_platform
async def test_a_create_with_an_error_body_under_200_is_checked_and_repeated(
    cloud_house: House,
) -> None:
    cloud_house.account.faults = [Fault("other", cloud_house.platform.creates, body=NOT_DONE)]
    job = await cloud_house.launch(cloud_house.spec())
    assert cloud_house.account.own == {} and read_lease(cloud_house.ctx.ledger, f"{job}-i1").state is Lease.UNVERIFIED
    seen = await cloud_house.until(job, lambda c: c.job.handle is not None, jump_s=20)
    assert seen.job.generation == 2 and len(cloud_house.account.own) == 1
    assert read_lease(cloud_house.ctx.ledger, f"{job}-i1").state is Lease.NONE


@pytest.mark.slow
@each_platform
async def test_a_machine_with_another_token_is_not_ours(cloud_house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The platform returns another user's machine; gpuwarden finds its own by the token."""
    provider = cloud_house.ctx.provider(cloud_house.platform.name)
    create = provider.create

    async def confused(*args: object) -> object:
        made = await create(*args)  # type: ignore[arg-type]
        return type(made)(made.value.model_copy(update={"id": "someone-elses", "token": "j0-i1"}))  # type: ignore[union-attr]

    monkeypatch.setattr(provider, "create", confused)
    job = await cloud_house.launch(cloud_house.spec())
    await cloud_house.running(job)
    lease = read_lease(cloud_house.ctx.ledger, f"{job}-i1")
    assert lease.instance_id != "someone-elses" and len(cloud_house.account.own) == 1
    unknown = cloud_house.ctx.ledger.last(lease.subject, "create.unknown")
    assert unknown and "someone-elses" in unknown.body["why"]


@pytest.mark.prove
@pytest.mark.parametrize(
    "cloud_house", [p for p in PLATFORMS if p.name in {"vastai", "paperspace", "runpod"}], indirect=True
)
async def test_an_end_date_that_the_platform_reports_is_listed(cloud_house: House) -> None:
    """Vast reports the contract's end in every answer; it endangers a running job and its files.

    The other platforms may be given an end date, but an event that nothing observed gets no date.
    """
    contract = isinstance(cloud_house.account, VastCloud)
    if isinstance(cloud_house.account, VastCloud):
        cloud_house.account.end_date = cloud_house.clock.now() + 3600
    job = await cloud_house.launch(cloud_house.spec("wait"))
    await cloud_house.running(job)
    (row,) = (await list_instances(cloud_house.ctx)).rows
    assert [round((c.at - cloud_house.clock.now()) / 3600) for c in row.clocks] == [1] * contract
    news = (await Watcher(cloud_house.ctx).round()).news
    assert ("danger_clock" in {a.kind for a in news}) is contract, news
    await cancel(cloud_house.ctx, job)
    await cloud_house.ended(job)
    news += (await Watcher(cloud_house.ctx).round()).news
    assert ("danger_clock" in {a.kind for a in news}) is contract


@every_platform
async def test_an_order_carries_the_price_or_time_limit_its_platform_supports(cloud_house: House) -> None:
    job = await cloud_house.launch(cloud_house.spec())
    order = json.dumps([a.body for a in cloud_house.account.requests if a.method in {"POST", "PUT"}], default=str)
    price = read_job(cloud_house.ctx.ledger, job).price
    assert (price is not None) == cloud_house.platform.priced
    assert ("maxPrice" in order) == (cloud_house.platform.name == "prime-intellect")
    assert ('"autoShutdownTimeout": 3' in order) == (cloud_house.platform.name == "paperspace")


@each_platform
@pytest.mark.parametrize("price", [0.0, -1.0])
async def test_a_price_of_zero_or_less_is_unknown_and_needs_approval(cloud_house: House, price: float) -> None:
    cloud_house.account.prices = dict.fromkeys(cloud_house.account.prices, price)
    first = await submit(cloud_house.ctx, cloud_house.spec())
    assert first.ask and first.worst_cost_usd is None
    with pytest.raises(Refused) as refused:
        await submit(cloud_house.ctx, cloud_house.spec(max_cost_usd=None))
    assert "PF-COST-001" in {f.rule for f in refused.value.findings}
    assert cloud_house.account.own == {}


@every_platform
async def test_interruptible_is_allowed_only_if_outputs_survive_an_interruption(cloud_house: House) -> None:
    """Vast keeps the disk; whether Prime Intellect's interruptible machines do is unknown; the others have none."""
    if cloud_house.platform.spot:
        assert (await submit(cloud_house.ctx, cloud_house.spec(interruptible=True))).receipt
        return
    with pytest.raises(Refused) as refused:
        await submit(cloud_house.ctx, cloud_house.spec(interruptible=True))
    rules = {f.rule for f in refused.value.findings if f.blocks}
    assert ("PF-OUT-002" if cloud_house.platform.name == "prime-intellect" else "PF-SPOT-001") in rules
    assert cloud_house.account.own == {}


# --------------------------------------------------------------------------------------------------------- teardown


@pytest.mark.prove
@each_platform
async def test_a_rate_limited_teardown_is_retried_with_backoff(cloud_house: House) -> None:
    job = await finished(cloud_house)
    await bring_home(cloud_house, job)
    cloud_house.account.faults = [
        Fault("limited", cloud_house.platform.ends, count=10**6, headers={"Retry-After": "3"})
    ]
    view = await request(cloud_house.ctx, job, "terminate")
    view = await approve(cloud_house.ctx, view.record.id, str(view.record.digest), channel="terminal", by="test")
    for _ in range(30):
        cloud_house.clock.time += 3
        view = await proceed(cloud_house.ctx, view.record.id)
        assert view.record.state is Teardown.EXECUTING
    assert (view.lease.state in LIVE_LEASES) == bool(cloud_house.billing()), "only a stop that was seen ends the bill"
    assert 2 <= 10**6 - cloud_house.account.faults[0].count <= 6
    assert [row.ours for row in (await list_instances(cloud_house.ctx)).rows] == [True]
    cloud_house.account.faults = []
    for _ in range(12):
        cloud_house.clock.time += 61
        view = await proceed(cloud_house.ctx, view.record.id)
    assert view.record.state is Teardown.VERIFIED_STOPPED and cloud_house.billing() == [], cloud_house.story()


@pytest.mark.slow
@each_platform
async def test_a_teardown_with_an_error_body_under_200_is_repeated(cloud_house: House) -> None:
    job = await finished(cloud_house)
    await bring_home(cloud_house, job)
    cloud_house.account.faults = [Fault("other", cloud_house.platform.ends, body=NOT_DONE)]
    await take_down(cloud_house, job)
    assert cloud_house.billing() == [] and cloud_house.account.faults[0].count == 0
    (lease,) = lease_ids(cloud_house.ctx.ledger)
    taken = [e.data.taken for e in cloud_house.ctx.ledger.events(f"lease/{lease}", kind=VerbSent)]
    assert not all(taken) and taken[-1]


@pytest.mark.prove
@each_platform
async def test_a_machine_that_comes_back_is_listed_and_can_be_ended_again(cloud_house: House) -> None:
    job = await finished(cloud_house)
    await bring_home(cloud_house, job)
    cloud_house.account.cloud.inject(cloud_house.machine(), CloudFault(kind="comes_back", seconds=5000))
    await take_down(cloud_house, job)
    assert cloud_house.billing() == [] and lease_ids(cloud_house.ctx.ledger, *LIVE_LEASES) == []
    cloud_house.clock.time += 5100
    (row,) = (await list_instances(cloud_house.ctx)).rows
    assert row.ours and row.billing is not False and cloud_house.billing() == [cloud_house.machine()]
    assert read_lease(cloud_house.ctx.ledger, f"{job}-i1").state is Lease.METERING
    assert (await check(cloud_house.ctx, job)).job.state is Job.SUCCEEDED
    await take_down(cloud_house, job, loss="train")  # its files are gone, which only the user can accept
    assert cloud_house.billing() == []


# ----------------------------------------------------------------------------------------------------------- storage


@pytest.mark.prove
@every_platform
async def test_durable_storage_is_created_and_outlives_the_machine(cloud_house: House) -> None:
    """Files on a volume need no copy before teardown; if the platform offers no volume, the gate reports it."""
    out = cloud_house.platform.durable
    if out is None:
        with pytest.raises(Refused) as refused:
            await submit(cloud_house.ctx, cloud_house.spec(durable_storage=True))
        assert "PF-PLT-004" in {f.rule for f in refused.value.findings if f.blocks}
        return
    job = await finished(cloud_house, durable_storage=True, outputs=(out,), env={"OUT": out})
    view = await request(cloud_house.ctx, job, "terminate")
    assert view.record.state is Teardown.AWAITING_HUMAN, view.findings
    assert not view.dying and [f.path.rpartition("/")[2] for f in view.kept] == ["model.safetensors"]
    await take_down(cloud_house, job)
    (kept,) = (cloud_house.account.cloud.root / "volumes").rglob("model.safetensors")
    assert kept.stat().st_size > 1024 and not cloud_house.machines.disk(cloud_house.machine()).exists()
