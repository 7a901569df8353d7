"""Machines that stop themselves: allowed only by the policy file, only if a stop keeps everything, read correctly."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import anyio
import pytest

from gpuwarden.config import load_config
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import Conflict, NotSupported, Refused, Unreachable, WardenError
from gpuwarden.core.models import InstanceState
from gpuwarden.core.policy import Caps, TeardownPolicy, policy_fields
from gpuwarden.core.reasons import Code
from gpuwarden.core.states import Job, Lease
from gpuwarden.interfaces import results
from gpuwarden.ledger.events import (
    LeaseCameBack,
    ResumeIntent,
    SelfStopOrdered,
    StartRefused,
)
from gpuwarden.lifecycle.artifacts.pull import pull
from gpuwarden.lifecycle.execution.advance import advance
from gpuwarden.lifecycle.leases.expirations import SET_BY_PLATFORM, clocks_of
from gpuwarden.lifecycle.leases.meter import lease_now
from gpuwarden.lifecycle.leases.self_stop import hold, self_stop_order, self_stopped, wake
from gpuwarden.lifecycle.monitoring.check import cancel, check
from gpuwarden.lifecycle.monitoring.inventory import list_instances
from gpuwarden.lifecycle.monitoring.overview import overview
from gpuwarden.lifecycle.records import read_job, read_lease
from gpuwarden.lifecycle.submission.submit import submit
from gpuwarden.lifecycle.teardown.orders import HoldOutcome, hold_machine
from gpuwarden.policy_record import Notice
from gpuwarden.rehearsal.model import Fault, Faults
from lifecycle_kit import TRAIN, WEALTHY, launch, launches, open_house, promises, prove, records, rent_cloud, training
from pretend_machines import Processes
from self_stop_kit import HOUR, SelfStopHouse
from wording import Wording

pytestmark = pytest.mark.anyio


@pytest.fixture
def house(tmp_path: Path, processes: Processes) -> SelfStopHouse:
    return SelfStopHouse(tmp_path / "home", processes)


@pytest.fixture
def ordered(tmp_path: Path, processes: Processes) -> SelfStopHouse:
    return SelfStopHouse(tmp_path / "home", processes, "terminate")


# --------------------------------------------------------------------------------------------------- who may decide


def test_only_the_policy_file_sets_self_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    field = next(f for f in policy_fields() if f.path == "teardown.self_stop_minutes")
    assert field.by_variable is None and TeardownPolicy().self_stop_minutes == 0
    monkeypatch.setenv("GPUWARDEN_TEARDOWN_SELF_STOP_MINUTES", "5")
    assert load_config().policy.teardown.self_stop_minutes == 0


async def test_self_stop_is_off_by_default(house: SelfStopHouse) -> None:
    house.ctx.policy = WEALTHY
    job = await house.started()
    assert (
        house.handle(job).place.self_stop_order is None and house.ctx.ledger.last(f"job/{job}", SelfStopOrdered) is None
    )


async def test_a_job_keeps_the_self_stop_policy_of_its_acceptance(house: SelfStopHouse) -> None:
    job, digest = await house.started(), house.ctx.active_policy.digest
    house.ctx.policy = WEALTHY
    assert house.handle(job).place.self_stop_order is not None
    said = house.ctx.ledger.last(f"job/{job}", SelfStopOrdered)
    assert said is not None and (said.data.after_s, said.data.policy) == (1800.0, digest)


async def test_self_stop_waits_for_the_automatic_teardown_grace(tmp_path: Path, processes: Processes) -> None:
    house = SelfStopHouse(tmp_path / "home", processes, "terminate", minutes=1)
    self_stop = house.handle(await house.started()).place.self_stop_order
    assert self_stop is not None and self_stop.after_s == 10 * 60 + 300


async def test_an_unrecorded_policy_allows_no_self_stop(house: SelfStopHouse) -> None:
    doubted = replace(house.ctx.active_policy, notices=(Notice("other_policy", "other.toml", "policy.toml"),))
    house.ctx.source = lambda: doubted
    from gpuwarden.lifecycle.leases.self_stop import self_stop_for

    assert self_stop_for(house.ctx, None) is None


# -------------------------------------------------------------------------------------------- the profile's facts


@pytest.mark.parametrize(
    ("platform", "allowed"),
    [("vastai", True), ("autodl", True), ("runpod", False), ("lambda", False), ("paperspace", False),
     ("prime-intellect", False)],
)  # fmt: skip
async def test_self_stop_is_used_only_on_platforms_that_support_it(
    house: SelfStopHouse, platform: str, allowed: bool
) -> None:
    house.opens(platform=f"rehearsal/{platform}")
    self_stop = house.handle(await house.started()).place.self_stop_order
    assert (self_stop is not None) == allowed
    if self_stop is not None:
        assert self_stop.by.command and not self_stop.by.url, "what stops a real machine is never run on this one"
        assert self_stop.deadline_s == 3600 + 600
    machine = records(house.cloud)[0].id
    with contextlib.nullcontext() if allowed else pytest.raises(NotSupported):  # the rehearsal follows the same fact
        house.cloud.self_stop(machine)


async def test_a_real_machine_uses_its_platforms_own_self_stop(house: SelfStopHouse) -> None:
    job = read_job(house.ctx.ledger, await house.started())
    assert job.place is not None
    real = job.place.model_copy(update={"root": "", "instance_id": "77"})
    self_stop = self_stop_order(house.ctx, job, real)
    assert self_stop is not None and not self_stop.by.command
    assert self_stop.by.url.endswith("/instances/77/") and self_stop.by.key == "CONTAINER_API_KEY"
    assert self_stop.order["outputs"] == ["out"], "the runner looks where they are before it stops anything"
    nowhere = job.place.model_copy(update={"self_stop_command": ()})
    assert self_stop_order(house.ctx, job, nowhere) is None


async def test_an_output_that_a_stop_loses_prevents_self_stop(house: SelfStopHouse) -> None:
    profile = house.ctx.profile(house.platform)
    dies = profile.storage[0].model_copy(
        update={
            "tier": "scratch",
            "path": "/scratch",
            "survives": profile.storage[0].survives.model_copy(update={"stop": False}),
        }
    )
    lossy = profile.model_copy(update={"storage": (*profile.storage, dies)})
    with patch.object(house.ctx, "profile", lambda _: lossy):
        assert house.handle(await house.started(outputs=("out", "/scratch/x"))).place.self_stop_order is None


@pytest.mark.parametrize("platform", ["vastai", "autodl"])
@pytest.mark.parametrize("output", ["/dev/shm/out", "/run/out", "/var/run/out"])
async def test_an_output_in_memory_prevents_self_stop(house: SelfStopHouse, platform: str, output: str) -> None:
    house.opens(platform=f"rehearsal/{platform}")
    assert house.handle(await house.started(outputs=("out", output))).place.self_stop_order is None


async def test_an_interruptible_machine_never_stops_itself(house: SelfStopHouse) -> None:
    assert house.handle(await house.started(interruptible=True)).place.self_stop_order is None


# ------------------------------------------------------------------------------------------- back after nine hours


async def test_a_self_stopped_machine_counts_as_stopped_and_its_job_is_not_relaunched(
    house: SelfStopHouse,
) -> None:
    job = await house.asleep()
    kinds = [*await house.round(), *await house.round(), *await house.round()]
    record = read_job(house.ctx.ledger, job)
    assert (record.state, record.reason) == (Job.UNKNOWN, Code.SELF_STOPPED) and self_stopped(house.ctx, record)
    assert record.lease is not None and read_lease(house.ctx.ledger, record.lease).state is Lease.STOPPED
    assert kinds.count("self_stopped") == 1 and not {"unknown", "preempted"} & set(kinds)
    assert house.starts() == 0, "without an order nobody starts it"
    assert house.backend.launched == [(job, 1)]
    rest = (await check(house.ctx, job)).next_steps
    assert [str(s.action) for s in rest if s.action != "manual"] == ["pull", "cancel"]
    house.holds()


async def test_status_shows_a_self_stopped_job(house: SelfStopHouse, wording: Wording) -> None:
    job = await house.asleep()
    await house.round()
    await house.round()
    seen = results.status_of(await overview(house.ctx))
    (alert,) = seen.alerts
    wording(alert, job)
    row = next(r for r in (await list_instances(house.ctx)).rows)
    assert row.billing is False
    wording(row.note)


async def test_a_pull_starts_a_self_stopped_machine_and_reads_the_jobs_end(house: SelfStopHouse) -> None:
    job = await house.asleep()
    await house.round()
    await pull(house.ctx, job)
    assert read_job(house.ctx.ledger, job).state is Job.SUCCEEDED and house.starts() == 1
    assert house.backend.armed == [job], "it may stop itself again"
    await prove(house.ctx, job)
    kinds = [*await house.round(), *await house.round()]
    assert "came_back" not in kinds, "its start was asked for"
    view = await house.until_off(await house.yes(await house.asks(job)))
    assert view.record.state == "verified_stopped"
    house.holds()


@pytest.mark.slow
async def test_automatic_teardown_starts_and_ends_a_self_stopped_machine(ordered: SelfStopHouse) -> None:
    job = await ordered.asleep()
    for _ in range(24):
        await ordered.round(60)
        await ordered.watcher.copier.round()
        await prove(ordered.ctx, job)
    assert ordered.state() == "gone" and ordered.starts() == 1 and ordered.stops() == 0, "and it is stopped once only"
    assert ordered.backend.launched == [(job, 1)]
    assert read_job(ordered.ctx.ledger, job).state is Job.SUCCEEDED
    assert next((ordered.ctx.home / "artifacts" / job).rglob("model")).read_bytes() == b"weights"
    ordered.holds()


@pytest.mark.slow
async def test_an_order_that_the_policy_withdraws_ends_nothing(ordered: SelfStopHouse) -> None:
    job = await ordered.asleep()
    before, ordered.ctx.policy = (
        ordered.ctx.policy,
        ordered.ctx.policy.model_copy(update={"teardown": TeardownPolicy()}),
    )
    for policy, state in ((ordered.ctx.policy, "stopped"), (before, "gone")):
        ordered.ctx.policy = policy
        for _ in range(24):
            await ordered.round(60)
            await ordered.watcher.copier.round()
            await prove(ordered.ctx, job)
        assert ordered.state() == state
    ordered.holds()


async def test_a_machine_gets_no_self_stop_order_once_the_policy_forbids_it(house: SelfStopHouse) -> None:
    checked = await submit(house.ctx, house.spec())
    kill = patch("gpuwarden.lifecycle.submission.submit.advance", side_effect=KeyboardInterrupt)
    with kill, pytest.raises(KeyboardInterrupt):
        await submit(house.ctx, house.spec(), receipt=checked.receipt)
    (accepted,) = house.ctx.ledger.events(kind=SelfStopOrdered)
    job = accepted.subject.removeprefix("job/")
    house.ctx.policy = house.ctx.policy.model_copy(update={"teardown": TeardownPolicy()})
    await house.after(1, job)
    assert (await house.after(11, job)).job.state is Job.RUNNING and house.handle(job).place.self_stop_order is None


async def test_two_processes_start_a_self_stopped_machine_once(ordered: SelfStopHouse) -> None:
    job = await ordered.asleep()
    other = open_house(ordered.ctx.home, ordered.clock, policy=ordered.ctx.policy)
    other._backends, other._providers = ordered.ctx._backends, ordered.ctx._providers
    await ordered.round()
    async with anyio.create_task_group() as both:
        for ctx in (ordered.ctx, other):
            both.start_soon(wake, ctx, job)
    assert ordered.starts() == 1 and len(ordered.ctx.ledger.events(kind=ResumeIntent)) == 1


@pytest.mark.slow
async def test_a_start_that_fails_is_tried_again_and_loses_nothing(ordered: SelfStopHouse) -> None:
    ordered.cloud.configure(faults=Faults(faults=(Fault(kind="lost_request", call="start", at=1, count=2),)))
    job = await ordered.asleep()
    for _ in range(32):
        await ordered.round(60)
        await ordered.watcher.copier.round()
        await prove(ordered.ctx, job)
    assert ordered.state() == "gone" and ordered.starts() == 3
    ordered.holds()


@pytest.mark.slow
async def test_a_copy_that_always_fails_does_not_start_the_machine_every_night(ordered: SelfStopHouse) -> None:
    ending = ordered.ctx.policy.teardown.model_copy(update={"background_gb": 1e-9})
    ordered.ctx.policy = ordered.ctx.policy.model_copy(update={"teardown": ending})
    await ordered.asleep()
    for _ in range(24):
        await ordered.round(1800)
        await ordered.watcher.copier.round()
        ordered.self_stops()
    assert ordered.starts() == 2 and ordered.state() == "stopped"


async def test_a_start_without_effect_is_an_error(house: SelfStopHouse, wording: Wording) -> None:
    job = await house.asleep()
    house.cloud.configure(faults=Faults(faults=(Fault(kind="lost_request", call="start", at=1, count=99),)))
    with pytest.raises(Unreachable) as refused:
        await pull(house.ctx, job)
    wording(refused, job)
    assert house.state() == "stopped"
    lease = read_job(house.ctx.ledger, job).lease
    assert house.ctx.ledger.last(f"lease/{lease}", StartRefused) is not None


async def test_a_start_above_the_approved_cost_is_refused(house: SelfStopHouse) -> None:
    job = await house.asleep(timeout_s=7200)
    await house.round()
    house.ctx.policy = house.ctx.policy.model_copy(update={"rehearsal_caps": Caps()})
    accepted = read_job(house.ctx.ledger, job)
    assert accepted.worst_cost is not None
    dear = replace(lease_now(house.ctx, str(accepted.lease)), cost=accepted.worst_cost)
    with (
        patch("gpuwarden.lifecycle.leases.self_stop.lease_now", lambda *_: dear),
        pytest.raises(Refused, match="per_job_usd"),
    ):
        await pull(house.ctx, job)
    assert house.starts() == 0
    await pull(house.ctx, job)
    assert house.starts() == 1, "inside what was approved for the job nobody is asked again"


@pytest.mark.parametrize("leap", [-30 * 86_400.0, 30 * 86_400.0])
async def test_a_local_clock_jump_starts_and_ends_nothing(ordered: SelfStopHouse, leap: float) -> None:
    job = await ordered.started()
    ordered.clock.advance(leap)
    for _ in range(5):
        await ordered.round(60)
        await ordered.watcher.copier.round()
    assert ordered.state() == "running" and ordered.starts() == ordered.stops() == 0
    assert ordered.backend.launched == [(job, 1)]


async def test_a_job_on_a_machine_stopped_midway_resumes(house: SelfStopHouse) -> None:
    """It looks like a self-stopped machine, so it is started for a poll; then the job resumes."""
    job = await house.started()
    house.self_stops()
    house.clock.advance(HOUR)
    await house.round()
    with pytest.raises((Unreachable, Conflict)):
        await pull(house.ctx, job)
        raise Conflict("it was copied while it goes on")
    for _ in range(4):
        await house.round()
    assert house.backend.launched == [(job, 1), (job, 2)]
    assert read_job(house.ctx.ledger, job).state is Job.RUNNING


async def test_canceling_a_self_stopped_job_keeps_its_disk(house: SelfStopHouse) -> None:
    job = await house.asleep()
    await house.round()
    rest = (await cancel(house.ctx, job)).next_steps
    assert read_job(house.ctx.ledger, job).state is Job.CANCELED and house.state() == "stopped"
    assert next(str(s.action) for s in rest if s.action != "manual") == "pull"
    await pull(house.ctx, job)
    assert house.starts() == 1


async def test_the_users_own_stop_is_not_a_self_stop(house: SelfStopHouse) -> None:
    job = await house.proven()
    await house.until_off(await house.yes(await house.asks(job, "stop")))
    assert house.state() == "stopped" and not self_stopped(house.ctx, read_job(house.ctx.ledger, job))
    with pytest.raises(Unreachable):
        await pull(house.ctx, job)
    assert house.starts() == 0


async def test_a_lost_start_does_not_undo_a_later_stop(house: SelfStopHouse) -> None:
    """The start request is lost once and no self-stop process starts; the machine comes up, and the user stops it."""
    job = await house.asleep()
    await house.round()
    house.cloud.configure(faults=Faults(faults=(Fault(kind="lost_request", call="start", at=1, count=1),)))
    with pytest.raises(Unreachable):
        await pull(house.ctx, job)
    house.cloud.configure(faults=Faults())
    house.cloud.start(records(house.cloud)[0].id)
    for _ in range(4):
        await house.round()
    assert house.state() == "running"
    view = await house.asks(job, "stop")
    await house.until_off(await house.yes(view, **({} if view.complete else {"loss": "train"})))
    assert house.state() == "stopped"
    starts = house.starts()
    with pytest.raises(Unreachable):
        await pull(house.ctx, job)
    assert house.starts() == starts and house.state() == "stopped"


async def test_an_objection_prevents_self_stop(house: SelfStopHouse) -> None:
    job = await house.started()
    assert hold_machine(house.ctx, job, "command line", "test") is HoldOutcome.HELD and await hold(house.ctx, job)
    assert house.backend.held == [job]
    assert self_stop_order(house.ctx, read_job(house.ctx.ledger, job), house.handle(job).place) is None, (
        "a relaunch too"
    )


async def test_a_failed_self_stop_is_an_alert(house: SelfStopHouse) -> None:
    job = await house.ended()
    real = house.backend._observe

    def failing(handle: object) -> object:
        from gpuwarden.core.models import RunnerAlert

        told = RunnerAlert(kind="self_stop_failed", text="this machine could not stop itself: exit code 1")
        return real(handle).model_copy(update={"alerts": (told,)})  # type: ignore[arg-type]

    house.backend._observe = failing  # type: ignore[method-assign, assignment]
    kinds = await house.round()
    assert "self_stop_failed" in kinds and house.state() == "running"
    assert read_job(house.ctx.ledger, job).state is Job.SUCCEEDED


# -------------------------------------------------------------------------------------- the platform's own end date


@pytest.mark.parametrize("keeps", [False, True])
async def test_the_platforms_end_date_is_later_than_every_grace(
    tmp_path: Path, processes: Processes, keeps: bool
) -> None:
    house = SelfStopHouse(tmp_path / "home", processes, "terminate", minutes=600)
    house.ctx.policy = house.ctx.policy.model_copy(
        update={"teardown": house.ctx.policy.teardown.model_copy(update={"grace_minutes": 1440})}
    )
    house.opens(platform="rehearsal/paperspace")
    house.cloud.configure(house.cloud.settings.model_copy(update={"keeps_end_dates": keeps}))
    began = house.clock.now()
    job = await house.started()
    rented = records(house.cloud)[0]
    boot = house.ctx.profile(house.platform).limits.boot_timeout_s
    assert rented.ends_at is not None and rented.ends_at >= began + boot + 3600 + 1440 * 60 + HOUR
    house.clock.advance(rented.ends_at - house.clock.now() + 60)
    house.cloud.tick()
    house.clock.advance(60)
    assert house.state() == ("stopped" if keeps else "running")
    record = read_job(house.ctx.ledger, job)
    clocks = clocks_of(house.ctx, lease_now(house.ctx, str(record.lease)), record)
    assert not [clock for clock in clocks if clock.trigger == SET_BY_PLATFORM]


async def test_a_platform_without_end_dates_gets_none(house: SelfStopHouse) -> None:
    await house.started()
    assert records(house.cloud)[0].ends_at is None


async def test_a_machine_that_comes_back_unrequested_raises_an_alert(house: SelfStopHouse) -> None:
    job = await house.proven()
    await house.until_off(await house.yes(await house.asks(job, "stop")))
    house.cloud.start(records(house.cloud)[0].id)
    kinds = [*await house.round(700), *await house.round(), *await house.round()]
    assert house.ctx.ledger.events(kind=LeaseCameBack) and "came_back" in kinds
    assert records(house.cloud)[0].state is InstanceState.RUNNING


# ----------------------------------------------------------------------------------------------- on a real runner


@pytest.mark.slow
async def test_a_real_machine_stops_itself_and_a_pull_starts_it(tmp_path: Path) -> None:
    """The bundled runner in its own process and the rehearsal's real processes: nothing is mocked."""
    clock = SystemClock()
    ending = TeardownPolicy(self_stop_minutes=0.8 / 60)
    ctx = open_house(tmp_path / "home", clock, policy=WEALTHY.model_copy(update={"teardown": ending}))
    cloud = rent_cloud(ctx, Fault(kind="false_refusal", call="self_stop", at=1))
    said, go = tmp_path / "said", tmp_path / "go"
    waits = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.02)\n"
    command = (sys.executable, "-I", "-S", "-c", waits + TRAIN, str(said), "0")
    job = await launch(ctx, training(said, command=command))
    while read_job(ctx.ledger, job).handle is None:
        await advance(ctx, job)
        await clock.sleep(0.05)
    go.touch()
    while next(iter(cloud.truths().values())).state is not InstanceState.STOPPED:  # nothing polls the job
        await clock.sleep(0.05)
    await list_instances(ctx)
    record = read_job(ctx.ledger, job)
    assert (record.state, record.reason) == (Job.UNKNOWN, Code.SELF_STOPPED)
    assert not next(iter(cloud.truths().values())).processes
    whole = False
    while not whole:  # a busy machine may stop itself again before or during the copy
        with contextlib.suppress(WardenError):
            pulled = await pull(ctx, job)
            whole = not (pulled.missing or pulled.received.problems)
    assert read_job(ctx.ledger, job).state is Job.SUCCEEDED
    assert launches(said) == [(job, 1)]
    assert list((ctx.home / "artifacts" / job).rglob("model.safetensors"))
    handle = read_job(ctx.ledger, job).handle
    assert handle is not None and cloud.store.state().calls["self_stop"] >= 1
    while (
        next(iter(cloud.truths().values())).state is not InstanceState.STOPPED
    ):  # it stops itself again, since nothing uses it any more
        await clock.sleep(0.05)
    assert not promises(ctx.ledger, cloud)
