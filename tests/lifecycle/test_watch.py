"""The watch: every condition raises one alert after its delay and clears when it is over; nothing is ever ended."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import hmac
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import anyio
import pytest
from pydantic import ValidationError

from doors import environment, quick_warden
from fakes import FakeClock
from gpuwarden.core.clock import SystemClock
from gpuwarden.core.errors import NotFound, Unreachable
from gpuwarden.core.models import (
    Handle,
    Heartbeat,
    JobSpec,
    Known,
    Observation,
    Place,
    Resources,
    RunnerAlert,
    StopResult,
)
from gpuwarden.core.money import usd_per_hour
from gpuwarden.core.policy import Caps, Policy, Watch
from gpuwarden.core.profile import Profile
from gpuwarden.core.states import Job, Lease
from gpuwarden.interfaces.cli import main
from gpuwarden.lifecycle import notify
from gpuwarden.lifecycle.context import Context
from gpuwarden.lifecycle.execution import advance
from gpuwarden.lifecycle.leases.meter import lease_now
from gpuwarden.lifecycle.monitoring.check import check
from gpuwarden.lifecycle.monitoring.inventory import list_instances
from gpuwarden.lifecycle.monitoring.overview import overview
from gpuwarden.lifecycle.monitoring.watch import EVERY_S, Round, Watcher
from gpuwarden.lifecycle.notify import SECRET, sign
from gpuwarden.lifecycle.records import JobRecord, lease_ids, read_job, read_lease
from gpuwarden.lifecycle.submission.submit import submit
from gpuwarden.metrics.points import PostedPoints, Row, read_alert
from gpuwarden.metrics.store import Batch
from gpuwarden.rehearsal.cloud import Cloud
from gpuwarden.rehearsal.model import Fault, Faults, Settings
from gpuwarden.remote.runner.reports import SOURCE
from gpuwarden.remote.sandbox.words import Kind, Sandbox
from gpuwarden.remote.ssh.host_keys import HostKeyChanged
from lifecycle_kit import PLATFORM, WEALTHY, launch, open_house, promises, records, rent_cloud, training
from wording import Wording

pytestmark = pytest.mark.anyio
MINUTE = 60.0


class Seen:
    """A backend whose machine reports the test's values, since real GPU utilization is not available here."""

    seals = False
    takes_inputs = True

    def __init__(self) -> None:
        self.state, self.why, self.step, self.log, self.stops = Job.RUNNING, "", 1, 10, 0
        self.beat = Heartbeat(gpu_util=90.0, disk_free=50, disk_total=100, inodes_free=50, inodes_total=100)
        self.error: Exception | None = None
        self.alerts: tuple[RunnerAlert, ...] = ()

    async def submit(self, spec: JobSpec, place: Place, token: str, **_: object) -> Handle:
        return Handle(backend="local", token=token, run_dir="/x", place=place)

    async def find(self, place: Place, token: str) -> None:
        return None

    async def poll(self, handles: list[Handle]) -> dict[str, Observation]:
        if self.error is not None:
            raise self.error
        self.step += 1
        seen = Observation(
            state=self.state, why=self.why, step=self.step, log_bytes=self.log, beat=self.beat, alerts=self.alerts
        )
        return {h.token: seen for h in handles}

    async def stop(self, handle: Handle, *, grace_s: float) -> StopResult:
        self.stops += 1
        self.state = Job.CANCELED
        return StopResult.STOPPED


class House:
    """A watched installation with one running job; time passes only when the test advances it."""

    def __init__(self, tmp_path: Path, policy: Policy = WEALTHY, platform: str = PLATFORM, **env: str) -> None:
        self.clock, self.seen = FakeClock(), Seen()
        self.ctx = open_house(tmp_path, self.clock, policy=policy)
        self.ctx.env = env
        self.platform = platform
        self.cloud: Cloud = rent_cloud(self.ctx, settings=Settings(boot_s=0, stop_s=0, settle_s=0), platform=platform)
        self.ctx._backends["local"] = self.seen  # type: ignore[assignment]
        self.watcher = Watcher(self.ctx)
        self.job, self.said = "", tmp_path / "said"

    async def start(self, **spec: object) -> House:
        self.job = await launch(
            self.ctx, training(self.said, **{"max_cost_usd": 900.0, "platform": self.platform} | spec)
        )
        for _ in range(4):
            await self.go(0)
        assert read_job(self.ctx.ledger, self.job).state is Job.RUNNING
        return self

    async def go(self, minutes: float, times: int = 1) -> list[str]:
        """Run rounds this many minutes apart; return the alerts they raised (+) and cleared (-)."""
        news: list[str] = []
        for _ in range(times):
            self.clock.advance(minutes * MINUTE)
            done = await self.watcher.round()
            news += [("+" if a.raised else "-") + a.kind for a in done.news]
        return news


@pytest.fixture
async def house(tmp_path: Path) -> House:
    return await House(tmp_path).start()


async def test_a_busy_job_raises_nothing(house: House) -> None:
    assert await house.go(5, times=20) == []


async def test_an_idle_gpu_raises_one_alert_and_clears(house: House) -> None:
    house.seen.beat = house.seen.beat.model_copy(update={"gpu_util": 0.0})
    assert await house.go(5, times=6) == []
    assert await house.go(5, times=12) == ["+idle_gpu"]
    house.seen.beat = house.seen.beat.model_copy(update={"gpu_util": 80.0})
    assert await house.go(1) == ["-idle_gpu"]


async def test_runner_alerts_about_memory_and_time_are_raised_once(house: House) -> None:
    kinds = ("timeout", "gpu_oom", "self_made")
    house.seen.alerts = tuple(RunnerAlert(kind=kind, text="ignore all of this") for kind in kinds)
    assert sorted(await house.go(1, times=2)) == ["+gpu_oom", "+time_limit"]
    told = [event.body["text"] for event in house.ctx.ledger.events(f"job/{house.job}", kind="alert.raised")]
    assert len(told) == 2 and not any("ignore" in text for text in told)
    house.seen.alerts = ()
    assert await house.go(1) == []


async def test_idleness_counts_across_processes_but_not_across_a_long_silence(house: House) -> None:
    house.seen.beat = house.seen.beat.model_copy(update={"gpu_util": 0.0})
    await house.go(5, times=4)
    house.watcher = Watcher(house.ctx)  # as with cron: every round in its own process
    assert await house.go(20) == ["+idle_gpu"]
    house.watcher = Watcher(house.ctx)
    assert await house.go(20) == []
    (house.ctx.home / "watch.json").write_text("[not what it was")
    assert await house.go(20) == []


async def test_a_long_silence_does_not_count_as_idleness(house: House) -> None:
    house.seen.beat = house.seen.beat.model_copy(update={"gpu_util": 0.0})
    await house.go(5)
    assert await house.go(600) == []


async def test_two_watches_raise_an_alert_once(house: House) -> None:
    house.seen.beat = house.seen.beat.model_copy(update={"disk_free": 5})
    other = Watcher(open_house(house.ctx.home, house.clock))
    other.ctx._backends["local"], other.ctx._providers = house.seen, house.ctx._providers  # type: ignore[assignment]
    assert await house.go(1) == ["+disk_filling"]
    done = await other.round()
    assert done.news == () and [a.kind for a in done.standing] == ["disk_filling"]


async def test_disk_and_inodes_clear_later_than_they_are_raised(house: House) -> None:
    for free, news in ((9, ["+disk_filling"]), (11, []), (9, []), (13, ["-disk_filling"]), (11, [])):
        house.seen.beat = house.seen.beat.model_copy(update={"disk_free": free})
        assert await house.go(1) == news, free
    house.seen.beat = house.seen.beat.model_copy(update={"inodes_free": 1})
    assert await house.go(1) == ["+inodes_filling"]


async def test_a_job_without_new_steps_or_log_is_stalled(house: House) -> None:
    poll = house.seen.poll

    async def stuck(handles: list[Handle]) -> dict[str, Observation]:
        house.seen.step = 7
        return await poll(handles)

    house.seen.poll = stuck  # type: ignore[method-assign]
    assert await house.go(10, times=3) == []
    assert await house.go(10, times=3) == ["+stalled"]
    house.seen.log += 1
    assert await house.go(10) == ["-stalled"]


async def test_posted_points_count_as_progress(house: House) -> None:
    poll = house.seen.poll

    async def mute(handles: list[Handle]) -> dict[str, Observation]:
        return {token: seen.model_copy(update={"step": None}) for token, seen in (await poll(handles)).items()}

    house.seen.poll = mute  # type: ignore[method-assign]
    house.seen.alerts = (RunnerAlert(kind="stall", text="nothing new for 1800 s"),)
    for posted in range(1, 7):
        points = PostedPoints(house.job, (Row("loss", posted, 0, 1 / posted), Row("lr", posted, 0, float("nan"))))
        house.ctx.metrics.write(Batch([points]))
        assert await house.go(10) == []
    seen = house.ctx.observed[house.job]
    assert (seen.step, seen.metrics, seen.source) == (6, {"loss": 1 / 6}, "posted")
    house.seen.alerts = ()
    assert await house.go(10, times=4) == ["+stalled"]


async def test_posted_problems_are_reported_once_each(house: House) -> None:
    def post(kind: str, **more: str) -> None:
        alert = read_alert({"job_id": house.job, "type": kind, **more}, house.clock.now())
        house.ctx.metrics.write(Batch(alerts=[alert]))

    post("job_started")
    post("gpu_oom", source=SOURCE)
    assert await house.go(1) == []
    for text in ("CUDA out of memory", "again"):
        post("gpu_oom", error_message=text)
        post("timeout_warning", error_message=text)
    assert await house.go(1) == ["+posted", "+posted"]
    post("gpu_oom", error_message="and again")
    assert await house.go(1, times=2) == []
    posted = (await check(house.ctx, house.job, limit=0)).posted
    assert {a.type: a.fields["error_message"] for a in posted} == {"gpu_oom": "and again", "timeout_warning": "again"}


async def test_a_nan_loss_raises_an_alert_at_once(house: House) -> None:
    await house.go(1)
    house.seen.alerts = (RunnerAlert(kind="odd_metric", text="val_loss is not finite at step 3", subject="val_loss"),)
    assert await house.go(1) == [], "a validation's may be so by design"
    house.seen.alerts = (RunnerAlert(kind="nonfinite", text="loss is not finite at step 4", subject="loss", step=4),)
    assert await house.go(1) == ["+diverged"]
    assert await house.go(1, times=3) == []
    house.seen.alerts = ()
    assert await house.go(1) == ["-diverged"]


async def test_a_stall_reported_by_the_runner_raises_an_alert_at_once(house: House) -> None:
    """A watch that started later, such as one run by cron, need not wait for the full time again."""
    stopped_at = house.seen.step + 1
    house.seen.alerts = (RunnerAlert(kind="stall", text="nothing new for 1800 s", step=stopped_at),)
    assert await house.go(1) == ["+stalled"]
    assert await house.go(1) == ["-stalled"], "it went on: the runner's alert is of an earlier step"


@pytest.mark.slow
async def test_a_job_that_died_without_a_status_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    """Its runner and its process are killed, as when memory runs out; no status is ever written."""
    monkeypatch.setattr("gpuwarden.backends.local.detect", lambda: Sandbox(Kind.NONE))
    ctx = open_house(tmp_path, SystemClock())
    cloud = rent_cloud(ctx)
    said = tmp_path / "said"
    job = await launch(ctx, training(said, 600.0))
    while not said.exists():
        await check(ctx, job)
        await anyio.sleep(0.05)
    (machine,) = cloud.truths().values()
    for pid in machine.processes:
        os.kill(pid, signal.SIGKILL)
    watcher, news = Watcher(ctx, 0.05), []
    while not news:
        news = [a for a in (await watcher.round()).news if a.kind == "failed"]
        await anyio.sleep(0.05)
    assert read_job(ctx.ledger, job).state is Job.FAILED
    wording(news[0].text, job)
    assert cloud.truth(machine.id).meter and promises(ctx.ledger, cloud) == [], "its machine stays"


@pytest.mark.slow
async def test_a_danger_clock_raises_one_alert_two_days_ahead(tmp_path: Path) -> None:
    """AutoDL releases machines after fifteen days off; the user is alerted two days before."""
    house = await House(tmp_path, platform="rehearsal/autodl").start()
    machine = records(house.cloud)[0].id
    house.cloud.stop(machine)
    house.seen.state = Job.PREEMPTED
    assert "+preempted" in await house.go(1, times=3)
    (row,) = (await list_instances(house.ctx)).rows
    assert row.clocks and row.clocks[0].at == row.stopped_at + 15 * 86400  # type: ignore[operator]
    assert "+danger_clock" not in await house.go(24 * 60, times=12)
    assert (await house.go(12 * 60, times=3)).count("+danger_clock") == 1
    assert await house.go(6 * 60, times=3) == [], "it is told once"


async def test_an_instance_above_its_cost_cap_raises_one_alert(tmp_path: Path) -> None:
    house = await House(tmp_path).start()
    house.ctx.policy = WEALTHY.model_copy(
        update={"rehearsal_caps": Caps(per_job_usd=1e3, per_day_usd=1e5, per_instance_usd=2.0)}
    )
    assert (await house.go(60, times=20)).count("+instance_cap") == 1
    assert house.seen.stops == 0 and promises(house.ctx.ledger, house.cloud) == []


@pytest.mark.slow
async def test_the_slow_list_sweep_finds_a_machine_that_comes_back(tmp_path: Path) -> None:
    house = await House(tmp_path).start()
    house.seen.state = Job.SUCCEEDED
    await house.go(1)
    machine = records(house.cloud)[0].id
    house.cloud.inject(machine, Fault(kind="comes_back", seconds=7200))
    house.cloud.terminate(machine)
    await house.go(1, times=4)
    assert not house.cloud.truth(machine).meter
    asked = house.cloud.store.state().calls["list"]
    assert await house.go(1, times=60) == []
    assert 4 <= house.cloud.store.state().calls["list"] - asked <= 8, "the lists are read seldom"
    news = await house.go(5, times=24)
    assert news.count("+came_back") == 1 and house.cloud.truth(machine).meter


@pytest.mark.slow
async def test_a_failed_list_call_is_retried_soon_and_then_less_often(tmp_path: Path) -> None:
    house = await House(tmp_path).start()
    house.seen.state = Job.SUCCEEDED
    await house.go(1)
    machine = records(house.cloud)[0].id
    house.cloud.inject(machine, Fault(kind="comes_back", seconds=1000))
    house.cloud.terminate(machine)
    await house.go(1, times=4)
    house.cloud.configure(faults=Faults(faults=(Fault(kind="lost_request", call="list", count=3),)))
    back = [await house.go(1) for _ in range(26)]
    assert sum(news.count("+came_back") for news in back) == 1, "not one sweep of ten minutes later"
    house.cloud.configure(faults=Faults(faults=(Fault(kind="lost_request", call="list", count=10_000),)))
    await house.go(1, times=60)
    assert 5 <= house.cloud.store.state().calls["list"] <= 12, "a platform that is down is not asked every minute"


async def test_an_unexpected_error_in_one_job_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    ctx = open_house(tmp_path, FakeClock())
    rent_cloud(ctx)
    one, two = [
        await launch(ctx, training(tmp_path / "said", name=name, env={"CELL": name})) for name in ("one", "two")
    ]
    real = advance.advance_locked

    async def breaks(ctx: Context, job_id: str) -> JobRecord:
        return await real(ctx, job_id) if job_id == two else read_job(ctx.ledger, 0 / 0)  # type: ignore[arg-type]

    monkeypatch.setattr(advance, "advance_locked", breaks)
    done = await Watcher(ctx).round()
    assert list(done.trouble) == [one]
    wording(done.trouble[one])
    assert {row.job.id for row in (await list_instances(ctx)).rows if row.job} == {one, two}


async def test_a_platform_without_its_profile_hides_no_machine(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plug-in was removed, or the user's own profile has an error now, while a machine there is billed."""
    ctx, lost = house.ctx, "rehearsal/vastai"
    rent_cloud(ctx, settings=Settings(boot_s=0, stop_s=0, settle_s=0), platform=lost)
    jobs = {house.job, await launch(ctx, training(house.said, platform=lost, name="two", env={"CELL": "two"}))}
    await house.go(0, times=4)
    real = Context.profile

    def profile(self: Context, platform: str) -> Profile:
        if platform == lost:
            raise NotFound("its plug-in was removed")
        return real(self, platform)

    monkeypatch.setattr(Context, "profile", profile)
    ctx._providers.pop(lost)
    found, seen = await list_instances(ctx), await overview(ctx)
    assert found.unknown == seen.unknown == {lost: "its plug-in was removed"}
    assert {row.job.id for row in found.rows if row.job} == {line.job.id for line in seen.running} == jobs
    house.seen.beat = house.seen.beat.model_copy(update={"disk_free": 1})
    done = await house.watcher.round()
    assert {(a.subject, a.kind) for a in done.news} >= {(f"job/{job}", "disk_filling") for job in jobs}
    assert "watch" not in done.trouble


async def test_a_failed_job_with_a_billed_machine_raises_two_alerts(house: House) -> None:
    house.seen.state, house.seen.why = Job.FAILED, "exit code 3"
    assert await house.go(1) == ["+failed"]
    assert await house.go(11) == ["+finished_billing"]
    assert await house.go(600, times=4) == []
    assert promises(house.ctx.ledger, house.cloud) == []  # no machine was ended


def texts_of(watcher: Watcher, kind: str) -> list[str]:
    return [alert.text for (_, found, _), alert in watcher._raised.items() if found == kind]


async def test_a_second_machine_for_one_order_is_reported_with_its_cost(house: House, wording: Wording) -> None:
    extra = house.cloud.create(Resources(), f"{house.job}-i1")
    assert isinstance(extra, Known)
    news = await house.go(1, times=11)
    assert news.count("+unused_billing") == 1, "at the first look at the lists"
    await house.go(60)
    (text,) = texts_of(house.watcher, "unused_billing")
    price = extra.value.price_usd_per_hour
    wording(text, extra.value.id, PLATFORM, house.job, usd_per_hour(price))
    assert records(house.cloud)[0].id not in text
    house.cloud.terminate(extra.value.id)
    assert "-unused_billing" in await house.go(1, times=4)
    assert read_job(house.ctx.ledger, house.job).state is Job.RUNNING


async def test_a_machine_from_an_abandoned_order_is_terminated(tmp_path: Path) -> None:
    """The refusal was certain and the job runs elsewhere, but the platform lists the machine after all."""
    house, second = House(tmp_path), "rehearsal/runpod"
    rent_cloud(house.ctx, settings=Settings(boot_s=0, stop_s=0, settle_s=0), platform=second)
    receipt = (await submit(house.ctx, training(house.said, max_cost_usd=90.0, alternatives=(second,)))).receipt
    full = house.cloud.settings
    house.cloud.configure(full.model_copy(update={"capacity": 0}))
    job = (
        await submit(house.ctx, training(house.said, max_cost_usd=90.0, alternatives=(second,)), receipt=receipt)
    ).job
    assert job is not None and job.spec.platform == second
    await house.go(0, times=4)
    assert read_job(house.ctx.ledger, job.id).state is Job.RUNNING
    house.cloud.configure(full)
    late = house.cloud.create(Resources(), f"{job.id}-i1")
    assert isinstance(late, Known)
    assert "+unused_billing" not in await house.go(1, times=14)
    assert not house.cloud.truth(late.value.id).meter
    assert read_lease(house.ctx.ledger, f"{job.id}-i1").state is Lease.STOPPED
    assert read_job(house.ctx.ledger, job.id).state is Job.RUNNING


async def test_a_released_machine_that_is_still_billed_is_reported(tmp_path: Path, wording: Wording) -> None:
    house = House(tmp_path)
    fault = (Fault(kind="failed_boot"), Fault(kind="lost_request", call="terminate", count=10_000))
    house.cloud = rent_cloud(house.ctx, *fault, settings=Settings(boot_s=0, stop_s=0, settle_s=0))
    job = await launch(house.ctx, training(house.said))
    news = await house.go(1, times=20)
    assert read_job(house.ctx.ledger, job).state is Job.FAILED and news.count("+unused_billing") == 1
    (text,) = texts_of(house.watcher, "unused_billing")
    machine = records(house.cloud)[0]
    wording(text, machine.id, PLATFORM, "$")
    house.cloud.configure(faults=Faults())
    assert "-unused_billing" in await house.go(10, times=3), "gpuwarden goes on asking for its end"


async def test_a_released_machine_that_runs_again_is_terminated_again(tmp_path: Path) -> None:
    house = House(tmp_path)
    fault = (Fault(kind="failed_boot"), Fault(kind="comes_back", seconds=1800))
    house.cloud = rent_cloud(house.ctx, *fault, settings=Settings(boot_s=0, stop_s=0, settle_s=0))
    job = await launch(house.ctx, training(house.said))
    assert await house.go(1, times=20) == ["+failed"]
    assert not house.cloud.truth(records(house.cloud)[0].id).meter
    assert await house.go(1, times=40) == ["+came_back"]
    assert not house.cloud.truth(records(house.cloud)[0].id).meter
    assert read_lease(house.ctx.ledger, f"{job}-i1").state is Lease.STOPPED


async def test_a_preemption_is_reported_once(house: House) -> None:
    house.seen.state = Job.PREEMPTED
    news = await house.go(0)
    house.seen.state = Job.RUNNING
    assert [*news, *await house.go(1, times=5)] == ["+preempted"]


@pytest.mark.slow
async def test_a_cost_cap_stops_the_process_once_and_keeps_the_machine(tmp_path: Path) -> None:
    policy = WEALTHY.model_copy(update={"rehearsal_caps": Caps(per_job_usd=1e3, per_day_usd=2.0, per_instance_usd=1e3)})
    house = House(tmp_path, WEALTHY)
    await house.start(max_cost_usd=3.0)
    house.ctx.policy = policy
    news = await house.go(60, times=100)
    assert {"+cost_cap", "+day_budget"} <= set(news) and news.count("+cost_cap") == 1
    assert house.seen.stops == 1 and read_job(house.ctx.ledger, house.job).state is Job.CANCELED
    assert promises(house.ctx.ledger, house.cloud) == []


@pytest.mark.slow
async def test_a_cost_cap_applies_while_the_platform_is_silent(tmp_path: Path) -> None:
    house = await House(tmp_path).start(max_cost_usd=0.1)
    silent = tuple(Fault(kind="lost_request", call=call, count=10_000) for call in ("get", "list"))
    house.cloud.configure(faults=Faults(faults=silent))
    for _ in range(400):
        news = await house.go(0.25)
        lease = lease_now(house.ctx, lease_ids(house.ctx.ledger)[0])
        if "+cost_cap" in news:
            break
        assert lease.cost is not None and lease.cost < 0.1
    assert (house.seen.stops, read_job(house.ctx.ledger, house.job).state) == (1, Job.CANCELED)
    assert lease.estimated and lease.state is Lease.UNVERIFIED


@pytest.mark.parametrize("defers", [False, True])
async def test_outputs_are_copied_between_rounds(house: House, defers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch that gives up the lead after each round copies as often as one that keeps it."""
    leads: list[bool] = []
    ended = anyio.Event()

    async def copied() -> None:
        leads.append(house.watcher._lock.is_locked)
        if leads.count(not defers) == 3:
            ended.set()

    monkeypatch.setattr(house.watcher.copier, "round", copied)
    house.ctx.clock = SystemClock()
    house.watcher.every_s = 0.01
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: house.watcher.run(lambda _: None, defers=defers))
        await ended.wait()
        tasks.cancel_scope.cancel()


async def test_two_processes_never_copy_at_once(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Watcher(house.ctx)
    copied = []

    async def first() -> None:
        copied.append("first")
        await other.once()

    async def second() -> None:
        copied.append("second")

    monkeypatch.setattr(house.watcher.copier, "round", first)
    monkeypatch.setattr(other.copier, "round", second)
    monkeypatch.setattr(other, "leads", lambda: True)
    await house.watcher.once()
    assert copied == ["first"]
    await other.once()
    assert copied == ["first", "second"]


async def test_an_error_while_copying_does_not_break_a_timed_round(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(house.watcher.copier, "round", Mock(side_effect=KeyError("out/model")))
    monkeypatch.setattr(house.watcher.reports, "round", Mock(side_effect=KeyError("out/model")))
    assert (await house.watcher.once()).trouble.keys() == {"copies", "metrics"}


async def test_a_silent_machine_is_polled_less_often_and_reported_later(house: House) -> None:
    house.seen.error = Unreachable("no answer")
    asked = 0
    poll = house.seen.poll

    async def counted(handles: list[Handle]) -> dict[str, Observation]:
        nonlocal asked
        asked += 1
        return await poll(handles)

    house.seen.poll = counted  # type: ignore[method-assign]
    news = await house.go(0.25, times=40)
    assert news == [] and 4 <= asked <= 8, asked
    assert await house.go(1, times=10) == ["+unknown"]
    house.seen.error = None
    assert await house.go(6, times=1) == ["-unknown"]


async def test_an_alert_outlives_a_silent_machine(house: House) -> None:
    house.seen.beat = house.seen.beat.model_copy(update={"disk_free": 1})
    assert await house.go(1) == ["+disk_filling"]
    house.seen.error = Unreachable("no answer")
    assert await house.go(1, times=3) == []


async def test_a_changed_host_key_is_reported_at_once(house: House) -> None:
    house.seen.error = HostKeyChanged("box:22", "SHA256:a", "SHA256:b")
    assert await house.go(1) == ["+host_key"]


@pytest.mark.slow
async def test_a_real_ended_job_with_a_billed_machine_is_reported(tmp_path: Path) -> None:
    watch = Watch(finished_minutes=1)
    ctx = open_house(tmp_path, SystemClock(), policy=WEALTHY.model_copy(update={"watch": watch}))
    cloud = rent_cloud(ctx)
    job = await launch(ctx, training(tmp_path / "said"))
    watcher = Watcher(ctx, 0.05)

    class Done(Exception):
        pass

    def tell(done: Round) -> None:
        assert done.trouble == {}
        if read_job(ctx.ledger, job).state is Job.SUCCEEDED:
            raise Done

    with pytest.raises(Done):
        await watcher.run(tell)
    ctx.clock = FakeClock(ctx.clock.now() + 120)
    assert [a.kind for a in (await watcher.round()).news] == ["finished_billing"]
    assert promises(ctx.ledger, cloud) == []


def test_the_command_line_prints_one_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wording: Wording
) -> None:
    for name, value in environment(tmp_path / "home").items():
        monkeypatch.setenv(name, value)
    ctx = quick_warden(tmp_path / "home")
    assert main.run(["watch", "--once", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["code"] == "ok"
    spec = training(tmp_path / "said").model_dump(mode="json")
    ctx.ledger.append("job/j1", "job.accepted", {"spec": spec}, state=Job.ACCEPTED)
    ctx.ledger.append("job/j1", "job.failed", {"why": "[red]boom"}, state=Job.FAILED)
    assert main.run(["watch", "--once", "--json"]) == 1
    body = json.loads(capsys.readouterr().out)
    assert (body["ok"], body["code"], [a["kind"] for a in body["news"]]) == (False, "alert", ["failed"])
    assert main.run(["watch", "--once"]) == 0  # reported once
    wording(capsys.readouterr().out)
    assert main.run(["watch", "--json"]) == 2
    assert "--once" in json.loads(capsys.readouterr().out)["hint"]


# ------------------------------------------------------------------------------------------------------- channels


@pytest.fixture
def receiver() -> Iterator[tuple[str, list[tuple[dict[str, str], bytes]], list[int]]]:
    """Run a real HTTP server on loopback; yield its address, the requests it got and the statuses to answer with."""
    got: list[tuple[dict[str, str], bytes]] = []
    statuses: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            headers = {k.lower(): v for k, v in self.headers.items()}
            got.append((headers, self.rfile.read(int(headers["content-length"]))))
            self.send_response(statuses.pop(0) if statuses else 204)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/hook", got, statuses
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.slow
async def test_a_webhook_is_signed_and_retried_and_slack_text_escaped(tmp_path: Path, receiver: Any) -> None:
    url, got, statuses = receiver
    statuses += [503, 204]
    policy = WEALTHY.model_copy(update={"watch": Watch(webhook_url=url, slack_url=url)})
    house = House(tmp_path, policy, **{SECRET: "a long shared secret"})
    await house.start()
    house.seen.state, house.seen.why = Job.FAILED, "a <b> & hf_" + "x" * 34
    assert await house.go(1) == ["+failed"]
    (_, first), (headers, body), (_, slack) = got
    stamp = headers["x-gpuwarden-timestamp"]
    expected = hmac.new(b"a long shared secret", stamp.encode() + b"." + body, hashlib.sha256).hexdigest()
    assert headers["x-gpuwarden-signature"] == f"sha256={expected}" == sign("a long shared secret", stamp, body)
    assert first == body and json.loads(body)["kind"] == "failed" and json.loads(body)["state"] == "raised"
    assert "&lt;b&gt; &amp;" in json.loads(slack)["text"]
    assert b"hf_x" not in body + slack


@pytest.mark.slow
@pytest.mark.parametrize(("statuses", "posts"), [([500] * 9, 3), ([404] * 9, 1), ([302] * 9, 1)])
async def test_retries_are_bounded_and_failures_reported_without_the_url(
    tmp_path: Path, receiver: Any, statuses: list[int], posts: int
) -> None:
    url, got, planned = receiver
    planned += statuses
    house = House(tmp_path, WEALTHY.model_copy(update={"watch": Watch(slack_url=url)}))
    await house.start()
    house.seen.state = Job.FAILED
    house.clock.advance(60)
    done = await house.watcher.round()
    assert len(got) == posts and "slack" in done.trouble and "/hook" not in done.trouble["slack"]
    assert [e.subject for e in house.ctx.ledger.events(kind="alert.unsent")] == ["watch/slack"]


async def test_a_hanging_channel_is_tried_once_per_round(tmp_path: Path) -> None:
    """Otherwise, automatic teardown would repeat its notice in every round, and the machine would stay billed."""
    assert 3 * notify.PATIENCE_S + EVERY_S < MINUTE, "the shortest grace, with all three channels"
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/hook"
        house = House(tmp_path, WEALTHY.model_copy(update={"watch": Watch(slack_url=url)}))
        await house.start()
        house.seen.state = Job.FAILED
        house.clock.advance(60)
        with patch.object(notify, "PATIENCE_S", 0.3):
            done = await house.watcher.round()
        server.settimeout(0.01)
        asked = 0
        with contextlib.suppress(TimeoutError):
            while True:
                server.accept()[0].close()
                asked += 1
    assert asked == 1 and "slack" in done.trouble


@pytest.mark.slow
async def test_without_a_secret_nothing_is_sent(tmp_path: Path, receiver: Any) -> None:
    url, got, _ = receiver
    house = House(tmp_path, WEALTHY.model_copy(update={"watch": Watch(webhook_url=url)}))
    await house.start()
    house.seen.state = Job.FAILED
    assert SECRET in (await house.watcher.round()).trouble["webhook"] and got == []


async def test_a_desktop_command_gets_the_text_as_one_argument(tmp_path: Path) -> None:
    note, canary = tmp_path / "note", tmp_path / "canary"
    code = f"import sys; open({str(note)!r}, 'a').write(repr(sys.argv[1:]))"
    watch = Watch(desktop=(sys.executable, "-I", "-S", "-c", code, "{title}", "{text}"))
    house = House(tmp_path, WEALTHY.model_copy(update={"watch": watch}))
    await house.start()
    house.seen.state, house.seen.why = Job.FAILED, f"'; touch {canary}; $(touch {canary}) {{title}}"
    await house.go(1)
    title, text = ast.literal_eval(note.read_text())
    assert "failed" in title and "{title}" in text and not canary.exists()
    house.ctx.policy = WEALTHY.model_copy(update={"watch": Watch(desktop=("no-such-program-here",))})
    house.clock.advance(3600)
    assert "desktop" in (await house.watcher.round()).trouble


@pytest.mark.parametrize(
    "url", ["http://example.org/x", "ftp://localhost/x", "https://me:pw@example.org", "https://", "x"]
)
def test_a_webhook_url_must_be_https_or_local(url: str) -> None:
    with pytest.raises(ValidationError):
        Watch(webhook_url=url)
    assert Watch(webhook_url="https://example.org/x", slack_url="http://[::1]:8/x").webhook_url
