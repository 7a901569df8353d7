"""Machine cost: an upper bound that never falls while the machine may be billed, whatever the platform answers."""

from __future__ import annotations

from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.core.guidance import Action
from gpuwarden.core.models import Instance, InstanceState
from gpuwarden.core.reasons import Code
from gpuwarden.core.states import LIVE_LEASES, Job, Lease
from gpuwarden.ledger.events import LeaseObserved
from gpuwarden.ledger.fold import LeaseRecord
from gpuwarden.lifecycle.execution.situation import following
from gpuwarden.lifecycle.leases.meter import lease_now
from gpuwarden.lifecycle.monitoring.alert_conditions import conditions
from gpuwarden.lifecycle.monitoring.overview import line_of
from gpuwarden.lifecycle.records import read_job, read_lease
from gpuwarden.rehearsal.model import Call, CallFault, Fault, InstanceFault
from lifecycle_kit import launch
from orders_kit import Ordered
from pretend_machines import Processes

HOUR = 3600.0
amounts = st.floats(0, 1_000, allow_nan=False)
maybe = st.none() | amounts


@st.composite
def looks(draw: st.DrawFn) -> list[tuple[float, Instance]]:
    """Draw a platform's answers about a machine that may be billed, at increasing times."""
    gaps = draw(st.lists(st.floats(0, 50 * HOUR), max_size=6))
    return [
        (at, Instance(id="m", state=InstanceState.RUNNING, meter=draw(st.sampled_from([None, True])),
                      price_usd_per_hour=draw(maybe), cost_usd=draw(maybe)))
        for at in accumulate(gaps)
    ]  # fmt: skip


def lease(answers: list[tuple[float, Instance]]) -> LeaseRecord:
    """Return a live lease opened at time 0."""
    return LeaseRecord("j-i1", "j", "vastai", Lease.METERING, 0.0, 0.0, "m", tuple(answers))


@given(answers=looks(), rest=st.lists(st.floats(0, 50 * HOUR), max_size=3), price=maybe)
def test_neither_an_answer_nor_silence_lowers_the_cost(
    answers: list[tuple[float, Instance]], rest: list[float], price: float | None
) -> None:
    looks: list[float | None] = []
    for known in range(len(answers) + 1):
        begun = answers[known - 1][0] if known else 0.0
        end = answers[known][0] if known < len(answers) else begun + 50 * HOUR
        times = (begun, *sorted(begun + wait for wait in rest if begun + wait <= end), end)
        looks += [lease(answers[:known]).cost_by(at, price) for at in times]
    shown = [cost for cost in looks if cost is not None]
    assert all(later >= earlier - 1e-9 * (1 + earlier) for earlier, later in pairwise(shown))
    assert all(shown[-1] >= (seen.cost_usd or 0.0) for _, seen in answers) if shown else not price


def test_a_machine_found_late_bills_from_its_order() -> None:
    seen = Instance(id="m", state=InstanceState.RUNNING, price_usd_per_hour=2.0)
    assert lease([(3 * HOUR, seen)]).cost_by(4 * HOUR) == pytest.approx(8)


def test_the_bill_of_a_stopped_machine_replaces_the_estimate() -> None:
    runs = Instance(id="m", state=InstanceState.RUNNING, price_usd_per_hour=2.0)
    off = Instance(id="m", state=InstanceState.STOPPED, meter=False, cost_usd=1.5, stopped_usd_per_hour=0.01)
    assert lease([(0.0, runs), (10 * HOUR, off)]).cost_by(11 * HOUR) == pytest.approx(1.51)
    unbilled = off.model_copy(update={"cost_usd": None})
    assert lease([(0.0, runs), (10 * HOUR, unbilled)]).cost_by(11 * HOUR) == pytest.approx(20.01)


SILENT: tuple[CallFault, ...] = ("lost_request", "lost_reply", "bad_reply", "false_refusal")
ASKED: tuple[Call, ...] = ("get", "list", "find")
STRIKES: tuple[InstanceFault, ...] = ("slow_boot", "failed_boot", "preempt", "vanish", "comes_back")
LOST = [Fault(kind=kind, call=call, at=2, count=5_000) for kind in SILENT for call in ASKED]
STRUCK = [Fault(kind=kind, seconds=300) for kind in STRIKES]
FAULTS = [*LOST, Fault(kind="stale", call="get", seconds=600), *STRUCK, Fault(kind="bills_when_stopped")]


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.kind}-{f.call}")
async def test_under_every_fault_the_cost_keeps_rising_and_covers_the_bill(
    tmp_path: Path, processes: Processes, fault: Fault
) -> None:
    house = Ordered(tmp_path / "home", processes, "off")
    house.opens(fault)
    job = await launch(house.ctx, house.spec())
    shown = billed = 0.0
    for minute in range(20):
        await house.watched(2)
        if minute % 2:
            house.ctx.seen.clear()  # as in a new process
        line = line_of(house.ctx, read_job(house.ctx.ledger, job))
        billed = sum(truth.cost_usd for truth in house.cloud.truths().values())
        assert line.cost_usd is not None and line.cost_usd >= billed - 1e-6
        if line.billing:
            assert line.cost_usd >= shown
            shown = line.cost_usd
    assert billed > 0


@pytest.mark.anyio
async def test_meter_cap_and_alerts_work_while_the_platform_is_silent(tmp_path: Path, processes: Processes) -> None:
    house = Ordered(tmp_path / "home", processes, "off")
    house.opens(*(Fault(kind="lost_request", call=call, at=12, count=50_000) for call in ("get", "list", "find")))
    job = await house.started(max_cost_usd=1.0, timeout_s=20 * 3600)  # at $3.60 an hour
    raised = await house.watched(25)
    lease_id = str(read_job(house.ctx.ledger, job).lease)
    now = lease_now(house.ctx, lease_id)
    assert now.estimated and now.cost == pytest.approx(3.6 * 26 / 60, rel=0.1)
    assert read_job(house.ctx.ledger, job).state is Job.CANCELED
    assert {"unknown", "cost_cap"} <= set(raised)
    [silent] = [c for c in await conditions(house.ctx, set()) if c.kind == "unknown"]
    assert silent.since == now.answers[-1][0]


@pytest.mark.anyio
async def test_a_price_change_is_recorded_once(tmp_path: Path, processes: Processes) -> None:
    """A list that calls no platform shows the price that the watch observed."""
    house = Ordered(tmp_path / "home", processes, "off")
    job = await house.started()
    lease_id = str(read_job(house.ctx.ledger, job).lease)
    [record] = house.cloud.store.state().records.values()
    state = house.cloud.store.state()
    state.records[record.id] = record.but(usd_per_hour=record.usd_per_hour * 2)
    house.cloud.store.save(state)
    await house.watched(3)
    assert read_lease(house.ctx.ledger, lease_id).price == pytest.approx(7.2)
    seen = len(house.ctx.ledger.events(f"lease/{lease_id}", kind=LeaseObserved))
    await house.watched(30)
    assert len(house.ctx.ledger.events(f"lease/{lease_id}", kind=LeaseObserved)) == seen, "each price once"
    assert read_lease(house.ctx.ledger, lease_id).state in LIVE_LEASES


@pytest.mark.anyio
async def test_a_machine_that_stops_before_the_launch_is_released(tmp_path: Path, processes: Processes) -> None:
    """A platform stops the machines of an account without funds, but their disks are still billed."""
    house = Ordered(tmp_path / "home", processes, "off")
    job = await launch(house.ctx, house.spec())
    [machine] = house.cloud.truths()
    house.cloud.stop(machine)
    assert "failed" in await house.watched(30)
    assert read_job(house.ctx.ledger, job).reason is Code.GIVEN_BACK
    assert house.cloud.truths()[machine].state is InstanceState.GONE


@pytest.mark.anyio
async def test_a_machine_removed_during_boot_fails_the_job_and_stops_its_cost(
    tmp_path: Path, processes: Processes
) -> None:
    house = Ordered(tmp_path / "home", processes, "off")
    job = await launch(house.ctx, house.spec())
    [machine] = house.cloud.truths()
    house.cloud.terminate(machine)
    await house.watched(3)
    now = read_job(house.ctx.ledger, job)
    assert (now.state, now.reason) == (Job.FAILED, Code.GONE_EARLY)
    cost = lease_now(house.ctx, str(now.lease)).cost
    await house.watched(60)
    assert lease_now(house.ctx, str(now.lease)).cost == cost and len(house.cloud.truths()) == 1
    assert Action.SUBMIT in [step.action for step in following(house.ctx, now)]
