"""Another account's key: how the check, the list, the gate and the watch react, and what they leave alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuwarden.core.models import Unknown
from gpuwarden.core.states import Job, Lease, Teardown
from gpuwarden.interfaces.results import torn_down
from gpuwarden.lifecycle.artifacts.pull import pull
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.leases.accounts import WHY, Match
from gpuwarden.lifecycle.leases.meter import confirmed_end, poll_lease
from gpuwarden.lifecycle.monitoring.check import CheckedJob, check
from gpuwarden.lifecycle.monitoring.inventory import list_instances
from gpuwarden.lifecycle.monitoring.watch import Watcher
from gpuwarden.lifecycle.records import read_lease
from gpuwarden.lifecycle.teardown.gate import approve, proceed, request
from gpuwarden.providers.rehearsal import RehearsalProvider
from gpuwarden.rehearsal.cloud import Cloud
from lifecycle_kit import (
    FAST,
    PLATFORM,
    clock_of_today,
    launch,
    moves_on,
    open_house,
    prove,
    records,
    rent_cloud,
    training,
    until,
)
from wording import Wording

pytestmark = pytest.mark.anyio
UNPROVEN = WHY[Match.UNPROVEN].format(platform=PLATFORM)


class House:
    """An installation with two emulated accounts, the first of which is in use."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock = folder, clock_of_today()
        self.ctx: Context = open_house(folder / "home", self.clock)
        self.first = rent_cloud(self.ctx)
        profile = self.ctx.profile(PLATFORM)
        self.other = Cloud(folder / "other", profile, self.clock, settings=FAST, supervise=False)

    def use(self, cloud: Cloud) -> None:
        self.ctx._providers[PLATFORM] = RehearsalProvider(cloud)

    async def finished(self) -> str:
        job = await launch(self.ctx, training(self.folder / "said"))

        def ended(seen: CheckedJob) -> bool:
            moves_on(self.first, 1)
            return seen.job.state is Job.SUCCEEDED

        await until(self.ctx, job, ended)
        return job

    def lives(self) -> bool:
        (record,) = records(self.first)
        return self.first.truth(record.id).meter


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path)
    yield made
    made.ctx.ledger.close()


@pytest.mark.slow
async def test_an_unproven_account_is_reported_in_every_view(house: House, wording: Wording) -> None:
    job = await house.finished()
    house.use(house.other)
    seen = await check(house.ctx, job)
    wording(seen.note, UNPROVEN)
    assert "\n" not in seen.note
    (row,) = (await list_instances(house.ctx)).rows
    assert row.billing is None and UNPROVEN in row.note
    view = await request(house.ctx, job, "terminate")
    assert view.record.state is Teardown.BLOCKED
    assert any(f.rule == "TD-SEE-001" and UNPROVEN in f.message for f in view.findings)
    watcher = Watcher(house.ctx)
    await watcher.round()
    house.clock.time += house.ctx.policy.watch.unknown_minutes * 60 + 60
    news = (await watcher.round()).news
    assert any(a.kind == "unknown" and UNPROVEN in a.text for a in news)
    assert house.lives() and read_lease(house.ctx.ledger, f"{job}-i1").state is Lease.UNVERIFIED


@pytest.mark.slow
@pytest.mark.attack("ending", "swaps the account's key in the middle of an end")
async def test_a_key_swapped_during_a_teardown_does_not_complete_it(house: House) -> None:
    job = await house.finished()
    await pull(house.ctx, job)
    await prove(house.ctx, job)
    view = await request(house.ctx, job, "terminate")
    house.first.stop = house.first.terminate = lambda id: Unknown("no reply")  # type: ignore[method-assign]
    view = await approve(house.ctx, view.record.id, str(view.record.digest), channel="terminal", by="test")
    assert view.record.state is Teardown.EXECUTING
    house.use(house.other)
    for _ in range(4):
        house.clock.time += 60
        view = await proceed(house.ctx, view.record.id)
    assert view.record.state is Teardown.EXECUTING and confirmed_end(house.ctx, view.record.lease) is None
    assert UNPROVEN in torn_down(view).message and house.lives()
    house.clock.time += 600
    view = await proceed(house.ctx, view.record.id)
    assert view.record.state is Teardown.NEEDS_HUMAN
    del house.first.stop, house.first.terminate
    house.use(house.first)
    for _ in range(4):
        house.clock.time += 60
        view = await proceed(house.ctx, view.record.id)
    assert view.record.state is Teardown.VERIFIED_STOPPED and not house.lives()


@pytest.mark.slow
@pytest.mark.attack("ending", "bills a machine that is gone")
async def test_a_bill_for_a_gone_instance_does_not_count_as_a_sighting(house: House) -> None:
    """A lease in an older ledger stays unknown if only a bill could identify its account."""
    job = await house.finished()
    lease = read_lease(house.ctx.ledger, f"{job}-i1")
    assert lease.instance_id
    fresh = open_house(house.folder / "old", house.clock)
    fresh._providers[PLATFORM] = RehearsalProvider(house.first)
    intent = {"job": job, "platform": PLATFORM, "generation": 1}
    fresh.ledger.append(lease.subject, "create.intent", intent, state=Lease.UNVERIFIED)
    body = {"instance": lease.instance.model_dump(mode="json")} if lease.instance else {}
    fresh.ledger.append(lease.subject, "lease.created", body, state=Lease.METERING)
    house.first.terminate(lease.instance_id)
    house.clock.time += 60
    for _ in range(3):
        assert isinstance(await poll_lease(fresh, lease.id), Unknown)
        house.clock.time += 60
    assert read_lease(fresh.ledger, lease.id).state is Lease.UNVERIFIED
    fresh.ledger.close()
