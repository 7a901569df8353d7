"""A provider that lies about money and machines: the amount billed, the machine rented, the hourly price."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.core.errors import BadRequest, NoCapacity
from gpuwarden.core.guidance import Action
from gpuwarden.core.models import Answer, Instance, Known, Resources
from gpuwarden.core.policy import Caps, Policy
from gpuwarden.core.reasons import Code
from gpuwarden.core.states import LIVE_LEASES, Job, Lease
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.leases.budgets import spent_today
from gpuwarden.lifecycle.leases.meter import spent
from gpuwarden.lifecycle.monitoring.check import CheckedJob, check
from gpuwarden.lifecycle.records import read_job, read_lease
from gpuwarden.lifecycle.submission.submit import submit
from gpuwarden.rehearsal.model import Fault, Settings
from lifecycle_kit import (
    PLATFORM,
    WEALTHY,
    clock_of_today,
    launch,
    moves_on,
    open_house,
    records,
    rent_cloud,
    training,
    until,
)

pytestmark = pytest.mark.anyio
HOUR = 3600.0
Twist = Callable[[Instance], Instance]


class Liar:
    """A provider whose answers about machines go through `twist`; it still carries out every request."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.twist: Twist = lambda seen: seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    async def create(self, resources: Resources, token: str) -> Answer[Instance]:
        return self._told(await self.real.create(resources, token))

    async def get(self, id: str) -> Answer[Instance | None]:
        return self._told(await self.real.get(id))

    async def find(self, token: str) -> Answer[tuple[Instance, ...]]:
        return self._told(await self.real.find(token))

    async def list(self) -> Answer[tuple[Instance, ...]]:
        return self._told(await self.real.list())

    def _told(self, answer: Any) -> Any:
        match answer:
            case Known(tuple() as many):
                return Known(tuple(map(self.twist, many)))
            case Known(Instance() as one):
                return Known(self.twist(one))
        return answer


class House:
    """An installation, its emulated cloud, and the liar between them."""

    def __init__(self, folder: Path, policy: Policy = WEALTHY) -> None:
        self.folder, self.clock = folder, clock_of_today()
        self.ctx: Context = open_house(folder / "home", self.clock, policy=policy)
        self.cloud = rent_cloud(self.ctx)
        self.liar = Liar(self.ctx._providers[PLATFORM])
        self.ctx._providers[PLATFORM] = self.liar  # type: ignore[assignment]

    async def until(self, job: str, *states: Job) -> None:
        def there(seen: CheckedJob) -> bool:
            moves_on(self.cloud, 1)
            return seen.job.state in states

        await until(self.ctx, job, there)

    def spec(self, name: str, seconds: float = 0.1, **changes: object) -> Any:
        return training(self.folder / name, seconds, name=name, **changes)


def saying(**lies: object) -> Twist:
    return lambda seen: seen.model_copy(update=lies)


SLOW = Settings(boot_s=0, stop_s=0, settle_s=10)
STALE = Fault(kind="stale", call="find", count=9, seconds=5)


@pytest.mark.slow
@pytest.mark.attack("spending", "refuses a create that it carries out, while its list is older than the request")
async def test_a_machine_from_a_refused_create_is_adopted_at_the_second_look(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.cloud = rent_cloud(house.ctx, Fault(kind="false_refusal", call="create"), STALE, settings=SLOW)
    job = await launch(house.ctx, house.spec("refused"))
    seen = await check(house.ctx, job)
    assert seen.job.state is Job.PROVISIONING and seen.job.reason is Code.REFUSAL_UNSETTLED
    assert seen.lease is not None and seen.lease.state in LIVE_LEASES
    assert [s.action for s in seen.next_steps] == [Action.MANUAL, Action.CHECK]
    assert "10 s" in seen.next_steps[1].purpose
    assert len(records(house.cloud)) == 1, "and it bills"
    house.clock.time += 11
    await house.until(job, Job.SUCCEEDED)
    assert len(records(house.cloud)) == 1 and read_lease(house.ctx.ledger, f"{job}-i1").instance_id


async def test_a_true_refusal_fails_the_job_after_a_second_look(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.cloud = rent_cloud(house.ctx, Fault(kind="no_capacity", call="create"), settings=SLOW)
    spec = house.spec("refused")
    checked = await submit(house.ctx, spec)
    launched = await submit(house.ctx, spec, receipt=checked.receipt)
    assert launched.job is not None and launched.job.state is Job.PROVISIONING
    assert launched.job.reason is Code.REFUSAL_UNSETTLED
    assert launched.next_steps[-1].action is Action.CHECK
    elsewhere = await submit(house.ctx, spec.model_copy(update={"gpu": "A100", "name": "elsewhere"}))
    assert launched.job.id in elsewhere.ask, "a person may go elsewhere at once"
    house.clock.time += 11
    seen = await check(house.ctx, launched.job.id)
    assert seen.job.state is Job.FAILED and seen.job.reason is Code.REFUSED_RENT
    assert read_lease(house.ctx.ledger, f"{seen.job.id}-i1").state is Lease.NONE and not records(house.cloud)
    assert not (await submit(house.ctx, spec.model_copy(update={"gpu": "A100", "name": "elsewhere"}))).ask


async def test_a_refusal_before_anything_was_ordered_is_certain(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.cloud = rent_cloud(house.ctx, settings=SLOW.model_copy(update={"capacity": 0}))
    job = read_job(house.ctx.ledger, await launch(house.ctx, house.spec("none")))
    assert job.state is Job.FAILED and job.reason is Code.REFUSED_RENT
    assert read_lease(house.ctx.ledger, f"{job.id}-i1").state is Lease.NONE


@pytest.mark.parametrize("error", [NoCapacity("nothing is free"), BadRequest("that is too large")])
async def test_a_plug_in_providers_refusal_is_uncertain(tmp_path: Path, error: Exception) -> None:
    """A plug-in that does not mark its refusals as certain is asked twice."""
    house = House(tmp_path)

    async def refuses(resources: Resources, token: str) -> Answer[Instance]:
        raise error

    house.liar.create = refuses  # type: ignore[method-assign]
    job = await launch(house.ctx, house.spec("none"))
    assert read_job(house.ctx.ledger, job).state is Job.PROVISIONING
    await house.until(job, Job.FAILED)


@pytest.mark.slow
@pytest.mark.attack("spending", "bills nothing while the meter runs, to lift a cap")
@pytest.mark.parametrize("cost", [0.0, -3.0])
async def test_a_bill_that_stays_at_zero_lifts_no_cap(tmp_path: Path, cost: float) -> None:
    house = House(tmp_path)
    house.liar.twist = saying(cost_usd=cost)
    job = await launch(house.ctx, house.spec("free", 600, max_cost_usd=0.5))
    await house.until(job, Job.RUNNING)
    house.clock.time += 2 * HOUR
    await house.until(job, Job.CANCELED)
    capped = read_job(house.ctx.ledger, job)
    assert capped.reason is Code.COST_CAP and "$0.50" in capped.why
    (machine,) = records(house.cloud)
    hours = (house.clock.now() - machine.created_at) / HOUR
    assert hours > 2 and spent(house.ctx, f"{job}-i1") == pytest.approx(hours), "a dollar an hour"


@pytest.mark.slow
@pytest.mark.attack("spending", "stops reporting a price, to free the day's budget")
@pytest.mark.parametrize("price", [None, 0.0, -5.0])
async def test_a_price_that_is_no_longer_reported_frees_no_budget(tmp_path: Path, price: float | None) -> None:
    house = House(tmp_path)
    job = await launch(house.ctx, house.spec("old"))
    await house.until(job, Job.SUCCEEDED)
    house.liar.twist = saying(price_usd_per_hour=price, cost_usd=None)
    house.clock.time += 30 * HOUR
    await check(house.ctx, job)
    assert spent_today(house.ctx, pretend=True) == 24.0


async def test_an_expensive_machines_worst_cost_counts_toward_the_day(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.liar.twist = saying(price_usd_per_hour=7.0)
    await launch(house.ctx, house.spec("dear", 60, timeout_s=3600))
    assert spent_today(house.ctx, pretend=True) == 7.0


@pytest.mark.slow
@pytest.mark.attack("ending", "gives two jobs the same machine")
async def test_two_jobs_never_get_the_same_machine(tmp_path: Path) -> None:
    """Otherwise, the proven and approved teardown of one job would delete the other's unpulled files."""
    house = House(tmp_path)
    first = await launch(house.ctx, house.spec("first"))
    await house.until(first, Job.SUCCEEDED)
    (machine,) = records(house.cloud)
    house.liar.twist = lambda seen: seen.model_copy(update={"id": machine.id})
    second = await launch(house.ctx, house.spec("second"))
    for _ in range(3):
        house.clock.time += 10
        await check(house.ctx, second)
    lease = read_lease(house.ctx.ledger, f"{second}-i1")
    assert lease.instance_id is None and lease.state in LIVE_LEASES, "it may bill, and nobody rents another for it"
    assert read_job(house.ctx.ledger, second).state is Job.PROVISIONING and len(records(house.cloud)) == 2
    house.liar.twist = saying()
    await house.until(second, Job.SUCCEEDED)
    assert read_lease(house.ctx.ledger, lease.id).instance_id not in {None, machine.id}


@pytest.mark.slow
@pytest.mark.attack("spending", "rents a machine for each of many short jobs")
async def test_the_idle_machines_of_short_jobs_count_toward_the_daily_cap(tmp_path: Path) -> None:
    """Each job costs almost nothing until it ends, but its machine is billed until the user releases it."""
    house = House(tmp_path, Policy(rehearsal_caps=Caps(per_job_usd=1, per_day_usd=2, per_instance_usd=1)))
    for name in ("one", "two"):
        job = await launch(house.ctx, house.spec(name, timeout_s=60))
        await house.until(job, Job.SUCCEEDED)
    ask = (await submit(house.ctx, house.spec("three", timeout_s=60))).ask
    assert "per_day_usd" in ask and "$2.00" in ask
    assert len(records(house.cloud)) == 2
