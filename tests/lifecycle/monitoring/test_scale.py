"""The watch's platform calls and ledger events do not depend on the number of machines.

`bench/scale.py` measures the same with 10,000 jobs; these tests check counts, which this machine's load can't change.
"""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from bench.ledger import LIVE, House, Runs
from bench.scale import Scale

from gpuwarden.core.models import Handle, Observation
from gpuwarden.core.states import LIVE_LEASES
from gpuwarden.ledger.events import LeaseUnverified
from gpuwarden.ledger.reading import KEPT_SUBJECTS
from gpuwarden.lifecycle.leases.meter import poll_lease
from gpuwarden.lifecycle.leases.shared_answers import sharing, sharing_nothing
from gpuwarden.lifecycle.monitoring.inventory import SUBJECTS_OF_A_JOB, reconcile
from gpuwarden.lifecycle.records import lease_ids, read_lease
from gpuwarden.rehearsal.model import Fault, Faults

SIZES = ((40, 8), (160, 32))


@pytest.fixture(scope="module", name="runs")
def runs_fixture(tmp_path_factory: pytest.TempPathFactory) -> list[Scale]:
    """Return one finished run of each size, with interruptions, an outage and a limit on calls per minute."""
    runs = [Scale(tmp_path_factory.mktemp(f"jobs{jobs}"), jobs, machines) for jobs, machines in SIZES]
    for run in runs:
        anyio.run(run.run)
    return runs


@pytest.mark.prove
def test_every_job_succeeds_and_no_attempt_is_launched_twice(runs: list[Scale]) -> None:
    for run in runs:
        assert run.waves > 0, "no machine was interrupted"
        assert run.states() == {"succeeded": run.jobs}
        assert set(run.backend.launched.values()) == {1}
        records = run.cloud.store.state().records.values()
        assert {str(record.state) for record in records} == {"gone"}


@pytest.mark.slow
def test_a_quiet_round_makes_one_list_call_for_any_number_of_machines(runs: list[Scale]) -> None:
    for run in runs:
        quiet = [look for look in run.rounds if look.machines == run.machines and not look.events]
        assert len(quiet) > 5
        calls = [look.calls for look in quiet if look.calls not in ({"list": 1}, {})]
        assert len(calls) <= len(run.rounds) / 10 + 1, "the sweep has its own list, every ten minutes"
        assert all(sum(each.values()) <= 2 for each in calls), calls


@pytest.mark.slow
def test_a_round_makes_at_most_two_list_calls(runs: list[Scale]) -> None:
    for run in runs:
        assert max(look.calls["list"] for look in run.rounds) <= 2


@pytest.mark.slow
def test_calls_events_and_bytes_per_job_do_not_grow(runs: list[Scale]) -> None:
    few, many = (run.figures() for run in runs)
    for what in ("calls per job", "events per job", "ledger, kB per job"):
        assert many[what] <= 1.15 * few[what], what


@pytest.mark.slow
def test_memory_scales_with_machines_not_with_ended_jobs(runs: list[Scale]) -> None:
    for run in runs:
        most = max(KEPT_SUBJECTS, SUBJECTS_OF_A_JOB * run.machines)
        assert max(look.cached for look in run.rounds) <= most


def test_an_outage_costs_two_calls_a_round(tmp_path: Path) -> None:
    """The watch asks for the list and one machine; if neither answers, it asks about no other machine."""
    run = Scale(tmp_path, 8, 8)

    async def go() -> None:
        for _ in range(4):
            await run.round()
        assert run.rounds[-1].machines == 8
        lost = tuple(Fault(kind="lost_request", call=call, probability=1.0) for call in ("get", "list"))
        run.cloud.configure(faults=Faults(faults=lost))
        await run.round()

    anyio.run(go)
    assert run.rounds[-1].calls == {"list": 1, "get": 1}


def test_machines_are_still_polled_if_only_the_list_fails(tmp_path: Path) -> None:
    run = Scale(tmp_path, 8, 8)

    async def go() -> None:
        for _ in range(4):
            await run.round()
        run.cloud.configure(faults=Faults(faults=(Fault(kind="bad_reply", call="list", probability=1.0),)))
        await run.round()

    anyio.run(go)
    assert not run.ctx.unseen
    assert run.rounds[-1].events == 0


@pytest.mark.slow
def test_a_rate_limited_order_fails_no_job(tmp_path: Path) -> None:
    """At three calls a minute, a refused order ends its round's orders, and every job gets its machine in time."""
    run = Scale(tmp_path, 6, 6, calls_a_minute=3)

    async def go() -> None:
        for _ in range(3):
            await run.round()
        assert run.rounds[-1].calls["create"] <= 3
        await run.run()

    anyio.run(go)
    assert run.states() == {"succeeded": 6}


def test_a_shared_answer_expires_on_a_new_event_or_with_sharing_off(tmp_path: Path) -> None:
    run = Scale(tmp_path, 4, 4)
    asked: list[dict[str, int]] = []

    async def look_at(lease_id: str) -> None:
        before = run.provider.calls.copy()
        await poll_lease(run.ctx, lease_id)
        asked.append(dict(run.provider.calls - before))

    async def go() -> None:
        for _ in range(4):
            await run.round()
        first, second, *_ = names = lease_ids(run.ledger, *LIVE_LEASES)
        with sharing(run.ctx, [], [read_lease(run.ledger, name) for name in names]):
            await look_at(first)
            await look_at(second)
            run.ledger.add(f"lease/{second}", LeaseUnverified(why="another process lost sight of it"))
            await look_at(second)
            await look_at(second)
            with sharing_nothing():
                await look_at(second)
        await look_at(first)

    anyio.run(go)
    assert asked == [{"list": 1}, {}, {"get": 1}, {}, {"get": 1}, {"get": 1}]


def test_jobs_in_one_place_are_polled_together(tmp_path: Path) -> None:
    house = House(tmp_path, "local")
    asked: list[int] = []

    class Polled(Runs):
        async def poll(self, handles: list[Handle]) -> dict[str, Observation]:
            asked.append(len(handles))
            return await super().poll(handles)

    house.ctx._backends["local"] = Polled()  # type: ignore[assignment]
    anyio.run(reconcile, house.ctx)
    anyio.run(reconcile, house.ctx)
    assert asked == [len(LIVE)] * 2
